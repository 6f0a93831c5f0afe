// How long a wait without the GIL lasts before it takes the lock and runs Python's signal handlers
// (PyErr_CheckSignals). Such waits are in module.cc (hc_wait), fast_path.cc and connect.cc. When a handler raises, as
// Ctrl-C does, the wait ends and the other ranks are told (interruption.h).
#pragma once

namespace hc_python {

inline constexpr double kWaitSliceS = 0.05;

}  // namespace hc_python
