// Words the text that the other ranks get when a signal handler has raised an exception (Ctrl-C, for instance) in a
// thread that waits in the core. wait_slice.h says where such a wait looks for signals. Thread: one that holds Python's
// lock.
#pragma once

#include <Python.h>

#include <string>

namespace hc_python {

// "raised TimeoutError: too slow (in a signal handler)", "was interrupted (Ctrl-C)". One line. Leaves no exception set.
std::string interruption_by(PyObject* type, PyObject* value);
// The same for the exception that is set; it stays set.
std::string interruption_by_what_is_set();

}  // namespace hc_python
