// Binds tables, servers and clients of a parameter server to Python; module.cc calls it once. Thread: any.
#pragma once

#include <pybind11/pybind11.h>

namespace hc_python {

void add_servers(pybind11::module_& m);

}  // namespace hc_python
