// Numbers among the arguments of operations, which Python would cast without a word: 1.7, True or a NumPy float32 to an
// integer; a complex number, NaN or a bool to a factor. What does not fit is a TypeError, which arguments.py explains.
#pragma once

#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace hc_python {

// Of Python's or NumPy's integers.
template <class T>
struct Whole {
  T value = 0;
  operator T() const { return value; }  // NOLINT: it stands for one
};

// A real number; infinity is one.
struct Factor {
  double value = 1;
  operator double() const { return value; }  // NOLINT: it stands for one
};

inline bool is_bool(PyObject* given) {
  return PyBool_Check(given) || std::strncmp(Py_TYPE(given)->tp_name, "numpy.bool", 10) == 0;
}

// A complex number of NumPy's has a __float__, which loses a part.
inline bool is_complex(PyObject* given) {
  return PyComplex_Check(given) || std::strncmp(Py_TYPE(given)->tp_name, "numpy.complex", 13) == 0;
}

inline bool read_whole(PyObject* given, int64_t low, int64_t high, int64_t* out) {
  if (is_bool(given) || !PyIndex_Check(given)) return false;
  PyObject* number = PyNumber_Index(given);
  int overflow = 1;
  *out = number ? PyLong_AsLongLongAndOverflow(number, &overflow) : 0;
  Py_XDECREF(number);
  PyErr_Clear();
  return overflow == 0 && *out >= low && *out <= high;
}

inline bool read_factor(PyObject* given, double* out) {
  if (PyFloat_CheckExact(given)) {
    *out = PyFloat_AS_DOUBLE(given);
    return !std::isnan(*out);
  }
  if (is_bool(given) || is_complex(given) || PyUnicode_Check(given) || PyBytes_Check(given)) return false;
  PyObject* number = PyNumber_Float(given);
  *out = number ? PyFloat_AS_DOUBLE(number) : 0;
  const bool is_number = number && !std::isnan(*out);
  Py_XDECREF(number);
  PyErr_Clear();
  return is_number;
}

}  // namespace hc_python

namespace pybind11::detail {

template <class T>
struct type_caster<hc_python::Whole<T>> {
  PYBIND11_TYPE_CASTER(hc_python::Whole<T>, const_name("int"));
  bool load(handle given, bool) {
    int64_t read = 0;
    if (!hc_python::read_whole(given.ptr(), std::numeric_limits<T>::min(), std::numeric_limits<T>::max(), &read))
      return false;
    value.value = static_cast<T>(read);
    return true;
  }
  static handle cast(hc_python::Whole<T> given, return_value_policy, handle) {
    return PyLong_FromLongLong(given.value);
  }
};

template <>
struct type_caster<hc_python::Factor> {
  PYBIND11_TYPE_CASTER(hc_python::Factor, const_name("float"));
  bool load(handle given, bool) { return hc_python::read_factor(given.ptr(), &value.value); }
  static handle cast(hc_python::Factor given, return_value_policy, handle) { return PyFloat_FromDouble(given.value); }
};

}  // namespace pybind11::detail
