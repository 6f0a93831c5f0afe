// Levelled messages to stderr, one write(2) per line, so that lines of several ranks or threads never mix. A
// Logger belongs to one engine; there is no global one. Thread: any, once set_rank was called (or before
// other threads exist).
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/log_level.h"
#include "base/status.h"

namespace hc {

class Logger {
 public:
  // fd stays the caller's.
  explicit Logger(LogLevel level = LogLevel::kWarning, bool hide_time = false, int fd = 2)
      : level_(level), hide_time_(hide_time), fd_(fd) {}
  void set_rank(int rank) { rank_.store(rank, std::memory_order_relaxed); }  // -1: not known yet, not printed
  bool wants(LogLevel level) const { return level >= level_; }

  // Parts are turned into text only when the level is wanted.
  template <class... Parts>
  void log(LogLevel level, const Parts&... parts) const {
    if (wants(level)) write_line(level, text_of(parts...));
  }
  template <class... Parts>
  void trace(const Parts&... parts) const {
    log(LogLevel::kTrace, parts...);
  }
  template <class... Parts>
  void debug(const Parts&... parts) const {
    log(LogLevel::kDebug, parts...);
  }
  template <class... Parts>
  void info(const Parts&... parts) const {
    log(LogLevel::kInfo, parts...);
  }
  template <class... Parts>
  void warning(const Parts&... parts) const {
    log(LogLevel::kWarning, parts...);
  }
  template <class... Parts>
  void error(const Parts&... parts) const {
    log(LogLevel::kError, parts...);
  }

 private:
  void write_line(LogLevel level, std::string_view text) const;

  const LogLevel level_;
  const bool hide_time_;
  const int fd_;
  std::atomic<int> rank_{-1};
};

}  // namespace hc
