// Text of the core, which may have bytes of paths or arguments that are not UTF-8. Thread: any that holds Python's
// lock.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace hc_python {

// As Python may print it: such bytes are shown as \xNN.
inline pybind11::str shown(const std::string& bytes) {
  PyObject* made = PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "backslashreplace");
  if (!made) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::str>(made);
}

}  // namespace hc_python
