#include "plain_tensors.h"

#include <cstring>

namespace hc_python {

namespace {

constexpr int32_t kDlCpu = 1;
constexpr int kMaxDimensions = 64;

// hc_dtype of what DLPack calls a kind and a number of bits; -1: the core has no such numbers.
int32_t dtype_of(const DlTensor& t) {
  enum : uint8_t { kInt = 0, kUnsigned = 1, kFloat = 2, kBrainFloat = 4, kBool = 6 };
  if (t.dtype_lanes != 1) return -1;
  switch (t.dtype_code << 8 | t.dtype_bits) {
    case kBool << 8 | 8:
      return HC_BOOL;
    case kUnsigned << 8 | 8:
      return HC_UINT8;
    case kInt << 8 | 8:
      return HC_INT8;
    case kUnsigned << 8 | 16:
      return HC_UINT16;
    case kInt << 8 | 16:
      return HC_INT16;
    case kInt << 8 | 32:
      return HC_INT32;
    case kInt << 8 | 64:
      return HC_INT64;
    case kFloat << 8 | 16:
      return HC_FLOAT16;
    case kBrainFloat << 8 | 16:
      return HC_BFLOAT16;
    case kFloat << 8 | 32:
      return HC_FLOAT32;
    case kFloat << 8 | 64:
      return HC_FLOAT64;
    default:
      return -1;
  }
}

// hc_dtype of a format of Python's module struct, in native byte order.
int32_t dtype_of(const Py_buffer& b) {
  if (!b.format || !b.format[0] || b.format[1]) return -1;
  switch (b.format[0]) {
    case '?':
      return HC_BOOL;
    case 'B':
      return HC_UINT8;
    case 'b':
      return HC_INT8;
    case 'H':
      return HC_UINT16;
    case 'h':
      return HC_INT16;
    case 'i':
    case 'l':
    case 'q':
      return b.itemsize == 4 ? HC_INT32 : b.itemsize == 8 ? HC_INT64 : -1;
    case 'e':
      return HC_FLOAT16;
    case 'f':
      return HC_FLOAT32;
    case 'd':
      return b.itemsize == 8 ? HC_FLOAT64 : -1;
    default:
      return -1;
  }
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

bool alike(const hc_tensor& a, const hc_tensor& b) {
  return a.dtype == b.dtype && a.rank == b.rank &&
         (a.rank == 0 || std::memcmp(a.shape, b.shape, static_cast<size_t>(a.rank) * sizeof(int64_t)) == 0);
}

}  // namespace

PlainTensors::~PlainTensors() {
  for (Py_buffer& buffer : buffers_) PyBuffer_Release(&buffer);
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
  buffers_.push_back(buffer);
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
  tensors_.push_back(tensor);
  return true;
}

}  // namespace hc_python
