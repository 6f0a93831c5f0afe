#include "raising.h"

#include <pybind11/stl.h>

#include <map>

#include "text.h"

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
    py::object exception = at->second(shown(text), culprit);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
    throw py::error_already_set();
  }
  PyErr_SetObject(code == HC_INVALID_ARGUMENT ? PyExc_ValueError : PyExc_RuntimeError, shown(text).ptr());
  throw py::error_already_set();
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
