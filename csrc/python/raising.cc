#include "raising.h"

#include <pybind11/stl.h>

#include <map>
#include <stdexcept>

namespace py = pybind11;

namespace hc_python {
namespace {

// code -> callable(text, culprit) that makes the exception; kept alive for the interpreter's life on purpose.
std::map<int, py::object>& error_classes() {
  static auto* classes = new std::map<int, py::object>;
  return *classes;
}

}  // namespace

void raise(int code, int culprit, const std::string& text) {
  auto at = error_classes().find(code);
  if (at != error_classes().end()) {
    py::object exception = at->second(text, culprit);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
    throw py::error_already_set();
  }
  if (code == HC_INVALID_ARGUMENT) throw py::value_error(text);
  throw std::runtime_error(text);
}

void raise_if(hc_status* status) {
  if (!status) return;
  const int code = hc_status_code(status), culprit = hc_status_culprit(status);
  const std::string text = hc_status_text(status);
  hc_status_destroy(status);
  raise(code, culprit, text);
}

void add_raising(py::module_& m) {
  using namespace py::literals;
  m.def("set_error_classes", [](const std::map<int, py::object>& classes) { error_classes() = classes; }, "classes"_a);
}

}  // namespace hc_python
