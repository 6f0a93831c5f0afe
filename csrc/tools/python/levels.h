// Binds the place of CPUs and what crosses the links between sockets to Python; module.cc calls it once. Thread: any.
#pragma once

#include <pybind11/pybind11.h>

namespace hc_python {

void add_levels(pybind11::module_& m);

}  // namespace hc_python
