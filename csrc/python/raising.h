// Turns a status of the core into an exception of horoclone.errors. Thread: any that holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "horoclone.h"

namespace hc_python {

// Frees the status; nothing happens when it is NULL.
void raise_if(hc_status* status);
[[noreturn]] void raise(int code, int culprit, const std::string& text);
// Binds set_error_classes; module.cc calls it once.
void add_raising(pybind11::module_& m);

}  // namespace hc_python
