// The fast path for allreduces of plain tensors, which training loops make most: one call into the core, no tuples, no
// keywords.
#pragma once

#include <pybind11/pybind11.h>

namespace hc_python {

void add_fast_path(pybind11::module_& m);

}  // namespace hc_python
