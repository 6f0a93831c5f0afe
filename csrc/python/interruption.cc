#include "interruption.h"

namespace hc_python {
namespace {

constexpr Py_ssize_t kMaxCharacters = 400;

// The first line of str(value); empty where it has none.
std::string first_line(PyObject* value) {
  std::string line;
  PyObject* text = value && value != Py_None ? PyObject_Str(value) : nullptr;
  PyObject* start = text ? PyUnicode_Substring(text, 0, kMaxCharacters) : nullptr;
  Py_ssize_t bytes = 0;
  if (const char* data = start ? PyUnicode_AsUTF8AndSize(start, &bytes) : nullptr)
    line.assign(data, static_cast<size_t>(bytes));
  PyErr_Clear();  // an exception that cannot say what it is has its type
  Py_XDECREF(start);
  Py_XDECREF(text);
  return line.substr(0, line.find_first_of("\r\n"));
}

}  // namespace

std::string interruption_by(PyObject* type, PyObject* value) {
  if (PyErr_GivenExceptionMatches(type, PyExc_KeyboardInterrupt)) return "was interrupted (Ctrl-C)";
  std::string name = PyType_Check(type) ? reinterpret_cast<PyTypeObject*>(type)->tp_name : "an exception";
  if (const size_t dot = name.rfind('.'); dot != std::string::npos) name.erase(0, dot + 1);
  const std::string line = first_line(value);
  return "raised " + name + (line.empty() ? "" : ": " + line) + " (in a signal handler)";
}

std::string interruption_by_what_is_set() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  if (!type) return "was interrupted";
  PyErr_NormalizeException(&type, &value, &trace);
  std::string text = interruption_by(type, value);
  PyErr_Restore(type, value, trace);
  return text;
}

}  // namespace hc_python
