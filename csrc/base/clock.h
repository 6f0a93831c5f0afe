// Monotonic time and deadlines; wall-clock jumps never matter.
#pragma once

#include <chrono>

namespace hc {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

inline double seconds_between(TimePoint from, TimePoint to) { return std::chrono::duration<double>(to - from).count(); }

class Deadline {
 public:
  static Deadline in(double timeout_s) {
    return Deadline(Clock::now() +
                    std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s)));
  }
  bool passed() const { return Clock::now() >= at_; }
  double remaining_s() const { return seconds_between(Clock::now(), at_); }
  int remaining_ms() const {  // for poll(): never negative, rounded up
    double s = remaining_s();
    return s <= 0 ? 0 : static_cast<int>(s * 1000.0) + 1;
  }

 private:
  explicit Deadline(TimePoint at) : at_(at) {}
  TimePoint at_;
};

}  // namespace hc
