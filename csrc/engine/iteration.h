// What one iteration of the engine's loop found. It decides whether the thread goes on, waits or sleeps.
#pragma once

#include "base/clock.h"

namespace hc {

struct Iteration {
  bool moved = false;                           // something was done: iterate again at once
  bool may_coalesce = false;                    // input: no thread waits, so requests may be held back
  bool coalesces = false;                       // some requests are held back
  bool looks_soon = false;                      // something waits for the backend, which rings no doorbell
  TimePoint next_batch_due = TimePoint::max();  // when the first batching delay ends
};

}  // namespace hc
