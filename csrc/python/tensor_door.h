// Allreduces straight from tensors, the case that loops make: one crossing, no tuples, no keywords (tensor_door.cc).
#pragma once

#include <pybind11/pybind11.h>

namespace hc_python {

void add_tensor_door(pybind11::module_& m);

}  // namespace hc_python
