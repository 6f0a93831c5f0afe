// Releases the GIL while it lives, as pybind11's gil_scoped_release does. The difference: a thread that asks for
// the lock while the interpreter ends is stopped for good, as Python 3.14 does. Older versions end such a thread with
// pthread_exit, which unwinds through the destructor here and ends the whole process ("terminate called without an
// active exception", exit code 134) after a run that went well. Thread: any that holds the lock.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace hc_python {

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      while (true) pause();  // the end of the process ends this thread
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace hc_python
