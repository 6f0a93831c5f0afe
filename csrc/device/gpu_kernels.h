// Our kernels on one GPU: loaded once, launched into streams. What they compute is told in kernel_arguments.h and, as
// meaning, in arithmetic/reduce.h. Thread: any. Owner: a Gpu.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>

#include "base/dtype.h"
#include "device/cuda_api.h"
#include "device/kernel_arguments.h"
#include "device/kernel_image.h"

namespace hc {

class Gpu;

// One tensor and where it lies in a packed buffer.
struct PackedPiece {
  CuPointer tensor = 0;
  size_t count = 0;  // elements
  size_t place = 0;  // bytes from the buffer's beginning, a multiple of kPlaceBytes
};

// From the tensors' type to the packed one and back. Same type, factor and divisor 1: bytes are copied.
struct Packing {
  DType tensor = DType::kF32, packed = DType::kF32;
  double factor = 1;    // of each element
  int64_t divisor = 1;  // unpack, integers: then divided, toward zero
  bool is_copy() const { return tensor == packed && factor == 1 && divisor == 1; }
};

struct Reduction {
  DType dtype = DType::kF32;
  Reduce op = Reduce::kSum;  // not Adasum
  double pre = 1, post = 1;
  int64_t divisor = 1;  // integers
  std::span<const CuPointer> in, out;
  size_t count = 0;  // elements
};

class GpuKernels {
 public:
  // Takes seconds where the kernels are compiled. Unsupported says why there are none.
  static Result<std::unique_ptr<GpuKernels>> load(Gpu* gpu, const KernelOptions& options);
  ~GpuKernels();
  GpuKernels(const GpuKernels&) = delete;
  GpuKernels& operator=(const GpuKernels&) = delete;

  // The bytes between a piece's beginning in a packed buffer and the next one's.
  static size_t packed_bytes(size_t count, DType packed) {
    return (count * size_of(packed) + kPlaceBytes - 1) / kPlaceBytes * kPlaceBytes;
  }
  Status pack(const Packing& how, CuPointer packed, std::span<const PackedPiece> pieces, CuStream stream) {
    return move(true, how, packed, pieces, stream);
  }
  Status unpack(const Packing& how, CuPointer packed, std::span<const PackedPiece> pieces, CuStream stream) {
    return move(false, how, packed, pieces, stream);
  }
  // Every input is read before any output is written, element by element: an output may be one of the inputs.
  Status reduce(const Reduction& reduction, CuStream stream);

  // The three kernels of Adasum, of vectors of float or double (kernel_arguments.h). adasum.cc.
  Status adasum_products(DType work, CuPointer lines, std::span<const AdasumRow> rows, CuStream stream) {
    return adasum_rows("hc_adasum_products_", work, lines, rows, stream);
  }
  Status adasum_combine(DType work, CuPointer sums, std::span<const AdasumRow> rows, CuStream stream) {
    return adasum_rows("hc_adasum_combine_", work, sums, rows, stream);
  }
  struct Fold {
    CuPointer from = 0, to = 0;
    unsigned lanes_in = 1, lanes_out = 1;
  };
  Status adasum_fold(const Fold& fold, std::span<const AdasumSum> sums, CuStream stream);

  const std::string& origin() const { return origin_; }  // how they came here

 private:
  GpuKernels(Gpu* gpu, CuModule module, std::string origin) : gpu_(*gpu), module_(module), origin_(std::move(origin)) {}
  static Result<std::unique_ptr<GpuKernels>> made_of(Gpu* gpu, CuModule module, const KernelImage& image);
  void look_up_all();
  Status move(bool packs, const Packing& how, CuPointer packed, std::span<const PackedPiece> pieces, CuStream stream);
  Status adasum_rows(const char* kernel, DType work, CuPointer sums, std::span<const AdasumRow> rows, CuStream stream);
  struct Grid {
    unsigned blocks = 1, rows = 1;
  };
  Status launch(const std::string& name, void* arguments, const Grid& grid, CuStream stream);

  Gpu& gpu_;
  const CuModule module_;
  const std::string origin_;
  unsigned most_blocks_ = 1;                     // of a launch; the rest of its work in strides
  std::map<std::string, CuFunction> functions_;  // by name; written before anybody launches
};

}  // namespace hc
