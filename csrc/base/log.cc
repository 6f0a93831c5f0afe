#include "base/log.h"

#include <unistd.h>
#include <cerrno>
#include <cstdio>
#include <ctime>

namespace hc {

// "[2026-01-31 12:34:56.789012] [horoclone] [rank 3] warning: text". A text of several lines is written as it
// is.
void Logger::write_line(LogLevel level, std::string_view text) const {
  std::string line;
  line.reserve(text.size() + 64);
  if (!hide_time_) {
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    tm local{};
    localtime_r(&now.tv_sec, &local);
    char stamp[32], micros[32];
    strftime(stamp, sizeof stamp, "[%Y-%m-%d %H:%M:%S.", &local);
    snprintf(micros, sizeof micros, "%06ld] ", now.tv_nsec / 1000);
    line.append(stamp).append(micros);
  }
  line.append("[horoclone] ");
  if (int rank = rank_.load(std::memory_order_relaxed); rank >= 0) line.append(text_of("[rank ", rank, "] "));
  line.append(name_of(level)).append(": ").append(text).push_back('\n');

  // A reader that has gone away, or a full pipe made non-blocking by the program, must not hold up
  // training: what cannot be written is dropped.
  const char* from = line.data();
  size_t rest = line.size();
  while (rest > 0) {
    ssize_t done = ::write(fd_, from, rest);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return;
    from += done;
    rest -= static_cast<size_t>(done);
  }
}

}  // namespace hc
