// Binds the simulation of an agreement to Python; module.cc calls it once. Thread: any.
#pragma once

#include <pybind11/pybind11.h>

namespace hc_python {

void add_simulate(pybind11::module_& m);

}  // namespace hc_python
