#include "engine/intake/flight_records.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace hc {

namespace {

constexpr double kMismatchSaveS = 1.0;

// Complete or not there: a reader may come at any moment.
Status write_whole(const std::string& path, const std::string& text) {
  const std::string unfinished = text_of(path, ".", ::getpid(), ".part");
  const int file = ::open(unfinished.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  bool good = file >= 0;
  for (size_t at = 0; good && at < text.size();) {
    const ssize_t n = ::write(file, text.data() + at, text.size() - at);
    if (n > 0) at += static_cast<size_t>(n);
    good = n > 0 || (n < 0 && errno == EINTR);
  }
  if (file >= 0) good = ::close(file) == 0 && good;
  if (good && std::rename(unfinished.c_str(), path.c_str()) == 0) return Status::ok();
  const int why = errno;
  if (file >= 0) ::unlink(unfinished.c_str());
  return error(Code::kInvalidArgument, "'", path, "' cannot be written: ", std::strerror(why));
}

}  // namespace

void FlightRecords::save(const std::string& reason) {
  if (!are_wanted()) return;
  notifier_.push([this, reason] {
    const std::string& folder = context_.config.recorder_dir;
    (void)::mkdir(folder.c_str(), 0755);  // it may be there
    const std::string path = text_of(folder, "/horoclone-rank", context_.rank(), ".json");
    if (Status saved = write_whole(path, intake_.flight_record(reason)); !saved.is_ok())
      context_.log.warning("HOROCLONE_RECORDER_DIR: ", saved.text());
  });
}

void FlightRecords::save_mismatch(const Status& status) {
  if (!are_wanted()) return;
  const TimePoint now = Clock::now();
  if (seconds_between(last_mismatch_, now) < kMismatchSaveS) return;
  last_mismatch_ = now;
  save(status.text());
}

}  // namespace hc
