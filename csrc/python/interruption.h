// What the other ranks are told of an exception that a signal handler raised in a thread that waits in the core.
// Thread: one that has Python's lock.
#pragma once

#include <Python.h>

#include <string>

namespace hc_python {

// "raised TimeoutError: too slow (in a signal handler)", "was interrupted (Ctrl-C)". One line. Leaves no exception set.
std::string interruption_by(PyObject* type, PyObject* value);
// Of the exception that is set, which stays set.
std::string interruption_by_what_is_set();

}  // namespace hc_python
