// A wait without the GIL, in slices after which it takes the lock and runs Python's signal handlers
// (PyErr_CheckSignals). Such waits are in module.cc (hc_wait), fast_path.cc and connect.cc. When a handler raises, as
// Ctrl-C does, the wait ends and the other ranks are told (interruption.h).
#pragma once

#include <Python.h>

#include <algorithm>
#include <chrono>

#include "horoclone.h"
#include "without_gil.h"

namespace hc_python {

inline constexpr double kWaitSliceS = 0.05;

enum class Waited { kSucceeded, kFailed, kLate, kRaised };

// limit_s 0: none. between: called after each slice, with the GIL. kRaised: a signal's exception is set, and the
// operation goes on.
template <class Between>
Waited wait_in_slices(hc_runtime* rt, hc_handle number, double limit_s, Between&& between) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point began = limit_s > 0 ? Clock::now() : Clock::time_point();
  while (true) {
    const double left_s =
        limit_s > 0 ? limit_s - std::chrono::duration<double>(Clock::now() - began).count() : kWaitSliceS;
    if (left_s <= 0) return Waited::kLate;
    int32_t done = 0;
    hc_status* status;
    {
      WithoutGil released;
      status = hc_wait(rt, number, std::min(left_s, kWaitSliceS), &done);
    }
    const bool failed = status != nullptr;
    hc_status_destroy(status);
    if (done) return failed ? Waited::kFailed : Waited::kSucceeded;
    if (PyErr_CheckSignals() != 0) return Waited::kRaised;
    between();
  }
}
inline Waited wait_in_slices(hc_runtime* rt, hc_handle number, double limit_s) {
  return wait_in_slices(rt, number, limit_s, [] {});
}

}  // namespace hc_python
