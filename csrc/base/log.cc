#include "base/log.h"

#include <unistd.h>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <utility>
#include <vector>

#include "base/log_lines.h"

namespace hc {

namespace {

constexpr size_t kMostLines = 10'000;  // that wait for their taker

// "[2026-01-31 12:34:56.789012] [horoclone] [rank 3] warning: text". A text of several lines is written as it
// is.
std::string shown(const LogLine& of, bool hide_time) {
  std::string line;
  line.reserve(of.text.size() + 64);
  if (!hide_time) {
    const time_t seconds = of.unix_ns / 1'000'000'000;
    tm local{};
    localtime_r(&seconds, &local);
    char stamp[32], micros[32];
    strftime(stamp, sizeof stamp, "[%Y-%m-%d %H:%M:%S.", &local);
    snprintf(micros, sizeof micros, "%06ld] ", static_cast<long>(of.unix_ns % 1'000'000'000 / 1000));
    line.append(stamp).append(micros);
  }
  line.append("[horoclone] ");
  if (of.rank >= 0) line.append(text_of("[rank ", of.rank, "] "));
  line.append(name_of(of.level)).append(": ").append(of.text).push_back('\n');
  return line;
}

// A reader that has gone away, or a full pipe made non-blocking by the program, must not hold up
// training: what cannot be written is dropped.
void write_to(int fd, const std::string& line) {
  const char* from = line.data();
  size_t rest = line.size();
  while (rest > 0) {
    ssize_t done = ::write(fd, from, rest);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return;
    from += done;
    rest -= static_cast<size_t>(done);
  }
}

}  // namespace

LogLines& LogLines::of_process() {
  // Lives for ever: threads write until the end of the process. A forked child gets its own: the parent's
  // lock may be held, and threads that the child does not have may wait for its lines.
  static std::atomic<LogLines*> lines{new LogLines};
  [[maybe_unused]] static const int forks = pthread_atfork(nullptr, nullptr, [] { lines.store(new LogLines); });
  return *lines.load();
}

void LogLines::begin() {
  MutexLock lock(mu_);
  taken_.store(true, std::memory_order_relaxed);
}

void LogLines::end() {
  MutexLock lock(mu_);
  taken_.store(false, std::memory_order_relaxed);
  changed_.notify_all();
}

std::vector<LogLine> LogLines::take() {
  MutexLock lock(mu_);
  changed_.wait(mu_, [&] {
    mu_.assume_held();
    return !lines_.empty() || !taken_.load(std::memory_order_relaxed);
  });
  return std::exchange(lines_, {});
}

bool LogLines::give(LogLine line, std::vector<LogLine>* left) {
  if (!taken_.load(std::memory_order_relaxed)) return false;
  MutexLock lock(mu_);
  if (!taken_.load(std::memory_order_relaxed)) return false;
  if (!lines_.empty()) {
    const std::chrono::nanoseconds waits{line.unix_ns - lines_.front().unix_ns};
    if (waits > kTakenWithin || lines_.size() >= kMostLines) {
      *left = std::exchange(lines_, {});
      return false;
    }
  }
  lines_.push_back(std::move(line));
  changed_.notify_one();
  return true;
}

void Logger::write_line(LogLevel level, std::string_view text) const {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  const int64_t unix_ns = int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  const LogLine line{level, rank_.load(std::memory_order_relaxed), unix_ns, std::string(text)};
  std::vector<LogLine> left;
  if (fd_ == STDERR_FILENO && LogLines::of_process().give(line, &left)) return;
  for (const LogLine& earlier : left) write_to(fd_, shown(earlier, hide_time_));
  write_to(fd_, shown(line, hide_time_));
}

}  // namespace hc
