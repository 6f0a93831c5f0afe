// The log's lines on their way to somebody who prints them better than stderr does: Python's logging. One for the whole
// process, as that is; while nobody takes lines, loggers write to stderr. Never waits for the taker: lines that it
// leaves for kTakenWithin (its interpreter is stuck) go to stderr together with the next one. Thread: any.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/log_level.h"
#include "base/mutex.h"

namespace hc {

struct LogLine {
  LogLevel level = LogLevel::kWarning;
  int rank = -1;  // of the logger, -1: not known yet
  int64_t unix_ns = 0;
  std::string text;
};

class LogLines {
 public:
  static constexpr std::chrono::seconds kTakenWithin{5};

  static LogLines& of_process();
  void begin();  // from now on lines are for take()
  void end();    // no more are; take() returns those that are left, then nothing
  // Waits for lines. None: nobody takes lines any more.
  std::vector<LogLine> take();
  // False: nobody takes lines, so the caller writes it, and before it `left`, which was not taken in time.
  bool give(LogLine line, std::vector<LogLine>* left);

 private:
  std::atomic<bool> taken_{false};
  Mutex mu_;
  CondVar changed_;
  std::vector<LogLine> lines_ HC_GUARDED_BY(mu_);
};

}  // namespace hc
