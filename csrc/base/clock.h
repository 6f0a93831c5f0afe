// Monotonic time and deadlines; wall-clock jumps never matter.
#pragma once

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include <chrono>
#include <cstdint>

namespace hc {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

// The processor's counter of time, of a rate that who uses it finds out. A reading costs half as much as Clock::now().
inline uint64_t processor_ticks() {
#if defined(__x86_64__)
  return __rdtsc();
#elif defined(__aarch64__)
  uint64_t ticks;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  return static_cast<uint64_t>(Clock::now().time_since_epoch().count());
#endif
}

inline double seconds_between(TimePoint from, TimePoint to) { return std::chrono::duration<double>(to - from).count(); }

class Deadline {
 public:
  static Deadline in(double timeout_s) { return after(Clock::now(), timeout_s); }
  static Deadline after(TimePoint from, double timeout_s) {
    return Deadline(from + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s)));
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
