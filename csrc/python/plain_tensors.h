// Reads tensors from Python objects without calling back into Python: by DLPack's table of C functions where a
// framework's tensors have one (torch from 2.10 on), by the buffer protocol for NumPy's arrays. Only plain ones are
// read: dense and in host memory. Thread: with the GIL.
#pragma once

#include <Python.h>

#include <array>
#include <cstdint>
#include <vector>

#include "horoclone.h"

namespace hc_python {

// DLPack's own structures (github.com/dmlc/dlpack, dlpack.h, major version 1), as far as they are used here.
struct DlTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t dimensions;
  uint8_t dtype_code, dtype_bits;
  uint16_t dtype_lanes;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};
struct DlExchange {
  uint32_t major, minor;
  const DlExchange* previous;
  void* unused[3];
  int (*read)(void* object, DlTensor* out);  // null: the framework has none
};
constexpr const char* kDlExchangeName = "dlpack_exchange_api";

// Describes the tensors of one call to the core. Buffers that it opens are held until it is destroyed.
class PlainTensors {
 public:
  // exchange: of the tensors' framework; null: they have the buffer protocol.
  explicit PlainTensors(const DlExchange* exchange) : exchange_(exchange) {}
  PlainTensors(const PlainTensors&) = delete;
  PlainTensors& operator=(const PlainTensors&) = delete;
  ~PlainTensors();
  // target: where the result goes, shaped like the source; the same object: in place. False, and no exception: it is
  // not plain.
  bool add(PyObject* source, PyObject* target);
  // Describes one tensor, for a caller that lays it out itself. Its shape lives as long as the object.
  bool read(PyObject* object, bool writes, hc_tensor* out);
  void reserve(size_t n) {
    if (n > 1) many_.reserve(n);
  }
  const hc_tensor* data() const { return many_.empty() ? &one_ : many_.data(); }
  int32_t count() const { return count_; }

 private:
  bool read_exchanged(PyObject* object, hc_tensor* out) const;
  bool read_buffer(PyObject* object, bool writes, hc_tensor* out);

  const DlExchange* const exchange_;
  // Most calls have one tensor, or a source and a target: for these no memory is allocated.
  hc_tensor one_{};
  std::vector<hc_tensor> many_;  // all of them, where there are several
  int32_t count_ = 0;
  std::array<Py_buffer, 2> first_buffers_;
  std::vector<Py_buffer> more_buffers_;
  size_t buffer_count_ = 0;
};

}  // namespace hc_python
