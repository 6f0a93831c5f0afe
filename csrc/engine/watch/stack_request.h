// Asks late ranks what they are doing when a stall is reported, and collects their answers. Each is asked once per
// report, and the report says who has not answered in time; a stack that several have stands there once. Values only:
// the engine sends the frames. Thread: the thread that makes progress.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "agreement/deadlock.h"
#include "base/clock.h"
#include "base/status.h"

namespace hc {

class StackRequest {
 public:
  static constexpr size_t kAsked = 8;  // stacks in one report
  static constexpr double kTimeoutS = 1.0;

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
    if (seconds_between(asked_at_, now) >= kTimeoutS) return true;
    for (const auto& [rank, text] : answers_)
      if (text.empty()) return false;
    return true;
  }
  // "\n  rank 2 ..." for each, the stack indented behind the last of those that have it.
  std::string text() const {
    std::map<std::string, std::vector<int>> ranks_at;
    for (const auto& [rank, text] : answers_) ranks_at[stack_in(text)].push_back(rank);
    std::string out;
    for (const auto& [first, any] : answers_) {
      const std::string stack = stack_in(any);
      const std::vector<int>& ranks = ranks_at[stack];
      if (!stack.empty() && ranks[0] != first) continue;
      for (const int rank : stack.empty() ? std::vector<int>{first} : ranks) {
        const std::string& text = answers_.at(rank);
        out += text_of("\n  rank ", rank, " ",
                       text.empty() ? "has not answered (stopped? very busy?)" : text.substr(0, text.find('\n')));
      }
      if (ranks.size() > 1 && !stack.empty()) out += text_of("\n    ", ranks_text(ranks), ":");
      for (const char c : stack) out += c == '\n' ? std::string("\n    ") : std::string(1, c);
    }
    return out;
  }

 private:
  // From the end of the first line on.
  static std::string stack_in(const std::string& text) {
    const size_t end = text.find('\n');
    return end == std::string::npos ? "" : text.substr(end);
  }

  bool open_ = false;
  TimePoint asked_at_{};
  std::map<int, std::string> answers_;  // by world rank; empty until it answers
};

}  // namespace hc
