// How long a wait without Python's lock lasts between two looks at Python's signals.
#pragma once

namespace hc_python {

inline constexpr double kWaitSliceS = 0.05;

}  // namespace hc_python
