// Allreduces straight from tensors, the case that loops make: one crossing, no tuples, no keywords (fast_path.cc).
#pragma once

#include <pybind11/pybind11.h>

namespace hc_python {

void add_fast_path(pybind11::module_& m);

}  // namespace hc_python
