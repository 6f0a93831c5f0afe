// How a thread waits before it sleeps: a few pauses, then it yields the core to whatever is runnable, then it should
// sleep. It never spins without limit: with more ranks than cores that would cost whole scheduler slices. Thread: the
// thread that makes progress.
#pragma once

#include <sched.h>

#include "base/clock.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hc {

inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Idle {
 public:
  Idle(int pauses, double yield_us) : pauses_(pauses), yield_us_(yield_us) {}
  void reset() { looks_ = 0; }
  // False when it is time to sleep.
  bool pause() {
    if (looks_++ < pauses_) {
      pause_cpu();
      return true;
    }
    if (looks_ == pauses_ + 1) started_ = Clock::now();
    if (seconds_between(started_, Clock::now()) * 1e6 > yield_us_) return false;
    ::sched_yield();
    return true;
  }

 private:
  const int pauses_;
  const double yield_us_;
  int looks_ = 0;
  TimePoint started_{};
};

}  // namespace hc
