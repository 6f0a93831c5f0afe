// Asks late ranks what they are doing when a stall is reported, and collects their answers. Each is asked once per
// report, and the report says who has not answered in time. Values only: the engine sends the frames. Thread: the
// thread that makes progress.
#pragma once

#include <map>
#include <set>
#include <string>

#include "base/clock.h"
#include "base/status.h"

namespace hc {

class StackRequest {
 public:
  static constexpr size_t kAsked = 8;  // stacks in one report
  static constexpr double kPatienceS = 1.0;

  bool is_open() const { return open_; }
  void open(TimePoint now) {
    open_ = true;
    asked_at_ = now;
    answers_.clear();
  }
  void close() { open_ = false; }
  size_t asked() const { return answers_.size(); }
  void ask(int rank) { answers_.try_emplace(rank); }
  void answer(int rank, std::string text) {
    if (auto at = answers_.find(rank); open_ && at != answers_.end()) at->second = std::move(text);
  }
  bool complete(TimePoint now) const {
    if (seconds_between(asked_at_, now) >= kPatienceS) return true;
    for (const auto& [rank, text] : answers_)
      if (text.empty()) return false;
    return true;
  }
  // "\n  rank 2 ..." for each, further lines indented.
  std::string text() const {
    std::string out;
    for (const auto& [rank, text] : answers_) {
      out += text_of("\n  rank ", rank, " ");
      for (const char c : text.empty() ? "has not answered (stopped? very busy?)" : text)
        out += c == '\n' ? std::string("\n    ") : std::string(1, c);
    }
    return out;
  }

 private:
  bool open_ = false;
  TimePoint asked_at_{};
  std::map<int, std::string> answers_;  // by world rank; empty until it answers
};

}  // namespace hc
