// Memory of the core as Python objects: results, shared blocks, blocks on a GPU. Thread: with the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "horoclone.h"

namespace hc_python {

// Core-owned bytes with the buffer protocol.
class Block {
 public:
  explicit Block(hc_block* block) : block_(block) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { hc_block_destroy(block_); }
  void* data() const { return block_ ? hc_block_data(block_) : nullptr; }
  size_t bytes() const { return block_ ? hc_block_bytes(block_) : 0; }
  pybind11::buffer_info buffer() const {
    static uint8_t nothing = 0;
    return {bytes() ? data() : &nothing, 1, "B", 1, {static_cast<pybind11::ssize_t>(bytes())}, {1}};
  }

 private:
  hc_block* block_;
};

// Memory of a GPU, for frameworks that read __cuda_array_interface__: they share it and keep this object.
class DeviceBlock {
 public:
  explicit DeviceBlock(hc_block* block) : block_(block, hc_block_destroy) {}
  uintptr_t data() const { return reinterpret_cast<uintptr_t>(hc_block_data(block_.get())); }
  size_t bytes() const { return hc_block_bytes(block_.get()); }
  pybind11::dict interface() const {
    using namespace pybind11::literals;
    return pybind11::dict("shape"_a = pybind11::make_tuple(bytes()), "typestr"_a = "|u1",
                          "data"_a = pybind11::make_tuple(data(), false), "version"_a = 2);
  }

 private:
  std::unique_ptr<hc_block, void (*)(hc_block*)> block_;
};

class Result : public Block {
 public:
  Result(hc_block* block, const hc_result& r)
      : Block(block),
        first_dimension(r.first_dimension),
        join_rank(r.join_rank),
        dtype(r.dtype),
        source(r.source),
        device(r.device_index),
        rows_from(r.rows_from, r.rows_from + r.rows_from_count),
        shape(r.shape, r.shape + r.shape_rank) {}
  const int64_t first_dimension;
  const int join_rank, dtype, source, device;
  const std::vector<int64_t> rows_from, shape;
};

void add_memory(pybind11::module_& m);

}  // namespace hc_python
