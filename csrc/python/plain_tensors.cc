#include "plain_tensors.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace hc_python {

namespace {

constexpr int32_t kDlCpu = 1;
constexpr int kMaxDimensions = 64;

// hc_dtype of what DLPack calls a kind and a number of bits; -1: the core does not reduce such numbers.
int32_t dtype_of(const DlTensor& t) {
  if (t.dtype_lanes != 1) return -1;
#define HC_CASE(name, enumerator, text, bytes, kind, element, dlpack, ...) \
  case dlpack << 8 | bytes * 8:                                            \
    return HC_##name;
  switch (t.dtype_code << 8 | t.dtype_bits) {
    HC_REDUCED_DTYPES(HC_CASE)
    default:
      return -1;
  }
#undef HC_CASE
}

// [format of Python's module struct][bytes of an element]
using FormatTable = std::array<std::array<int8_t, 9>, 128>;
constexpr FormatTable kDTypeOfFormat = [] {
  FormatTable table{};
  for (auto& row : table) row.fill(-1);
  const auto add = [&](int dtype, size_t bytes, const char* formats) {
    for (; *formats; ++formats) table[static_cast<size_t>(*formats)][bytes] = static_cast<int8_t>(dtype);
  };
#define HC_ADD(name, enumerator, text, bytes, kind, element, dlpack, formats) add(HC_##name, bytes, formats);
  HC_REDUCED_DTYPES(HC_ADD)
#undef HC_ADD
  return table;
}();

// The same of a buffer, in native byte order.
int32_t dtype_of(const Py_buffer& b) {
  if (!b.format || b.format[0] <= 0 || b.format[1] || b.itemsize < 0 || b.itemsize > 8) return -1;
  return kDTypeOfFormat[static_cast<size_t>(b.format[0])][static_cast<size_t>(b.itemsize)];
}

// Row after row, without gaps, and not empty: what is empty has no address.
bool is_dense(const DlTensor& t) {
  int64_t stride = 1;
  for (int32_t d = t.dimensions - 1; d >= 0; --d) {
    if (t.shape[d] == 0 || (t.shape[d] != 1 && t.strides && t.strides[d] != stride)) return false;
    stride *= t.shape[d];
  }
  return true;
}

// Whether memory holds the numbers with the other sign, as under torch's imaginary part of a conjugated tensor: DLPack
// does not tell. Among dense tensors only those of one element can be such a part, whose elements lie two apart.
bool may_be_negated(const DlTensor& t) {
  int64_t n = 1;
  for (int32_t d = 0; d < t.dimensions; ++d) n *= t.shape[d];
  return n == 1;
}
bool is_negated(PyObject* object) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  PyObject* answer = PyObject_CallMethodNoArgs(object, name);
  if (!answer) PyErr_Clear();  // another framework's, which has no such tensors
  const bool negated = answer == Py_True;
  Py_XDECREF(answer);
  return negated;
}

bool alike(const hc_tensor& a, const hc_tensor& b) {
  return a.dtype == b.dtype && a.rank == b.rank &&
         (a.rank == 0 || std::memcmp(a.shape, b.shape, static_cast<size_t>(a.rank) * sizeof(int64_t)) == 0);
}

}  // namespace

PlainTensors::~PlainTensors() {
  for (size_t i = 0; i < std::min(buffer_count_, first_buffers_.size()); ++i) PyBuffer_Release(&first_buffers_[i]);
  for (Py_buffer& buffer : more_buffers_) PyBuffer_Release(&buffer);
}

bool PlainTensors::read_exchanged(PyObject* object, hc_tensor* out) const {
  DlTensor t{};
  if (exchange_->read(object, &t) != 0) {
    PyErr_Clear();  // the slow path finds out what it is, and says so
    return false;
  }
  out->dtype = dtype_of(t);
  if (out->dtype < 0 || t.device_type != kDlCpu || t.dimensions > kMaxDimensions || !t.data || !is_dense(t))
    return false;
  if (may_be_negated(t) && is_negated(object)) return false;
  out->in = out->out = static_cast<char*>(t.data) + t.byte_offset;
  out->shape = t.shape;
  out->rank = t.dimensions;
  return true;
}

bool PlainTensors::read_buffer(PyObject* object, bool writes, hc_tensor* out) {
  static_assert(sizeof(Py_ssize_t) == sizeof(int64_t));
  Py_buffer buffer;
  const int wanted = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writes ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object, &buffer, wanted) != 0) {
    PyErr_Clear();
    return false;
  }
  if (buffer_count_ < first_buffers_.size())
    first_buffers_[buffer_count_] = buffer;
  else
    more_buffers_.push_back(buffer);
  ++buffer_count_;
  out->dtype = dtype_of(buffer);
  if (out->dtype < 0 || buffer.ndim > kMaxDimensions || buffer.len == 0) return false;
  out->in = out->out = buffer.buf;
  out->shape = reinterpret_cast<const int64_t*>(buffer.shape);
  out->rank = buffer.ndim;
  return true;
}

bool PlainTensors::read(PyObject* object, bool writes, hc_tensor* out) {
  return exchange_ ? read_exchanged(object, out) : read_buffer(object, writes, out);
}

bool PlainTensors::add(PyObject* source, PyObject* target) {
  hc_tensor tensor{}, result{};
  if (!read(source, source == target, &tensor)) return false;
  if (source != target) {
    if (!read(target, true, &result) || !alike(tensor, result)) return false;
    tensor.out = result.out;
  }
  if (count_ == 1) many_.push_back(one_);
  if (count_++ == 0)
    one_ = tensor;
  else
    many_.push_back(tensor);
  return true;
}

}  // namespace hc_python
