// What one iteration of the engine's loop has found, for who decides whether to go on, to wait or to sleep.
#pragma once

#include "base/clock.h"

namespace hc {

struct Iteration {
  bool moved = false;                          // something was done: look again at once
  bool may_fill = false;                       // in: nobody waits, so requests may wait for company
  bool fills = false;                          // some do
  bool looks_soon = false;                     // something waits for a device, which rings no doorbell
  TimePoint next_gathered = TimePoint::max();  // when the first gathering window closes
};

}  // namespace hc
