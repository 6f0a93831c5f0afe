// Quantises float32 to 8-bit integers, in blocks that share a scale (largest magnitude / 127): a quarter of the bytes.
// The loops are in quantize_kernels.h, compiled once per instruction set as in reduce.h; all give the same bits.
// Thread: any.
#pragma once

#include <cstddef>

namespace hc {

// A message holds `shard` elements in whole blocks: first the blocks' scales as float32, then the integers. Elements
// beyond those given are zeros.
struct BlockFormat {
  size_t block = 256;
  size_t shard = 0;  // a multiple of block
};

// residual: null, or `count` numbers that are added to the input and then hold the rounding errors. A block with an
// infinity or NaN arrives as NaN and leaves no residual.
void quantize(const BlockFormat& format, const float* in, size_t count, float* residual, std::byte* message);
// Writes or adds the first `count` elements.
void dequantize(const BlockFormat& format, const std::byte* message, float* out, size_t count, bool add);

}  // namespace hc
