// All arithmetic on host memory: element-wise reduction of N sources, scaling, identity elements. Untyped on purpose
// (pointer, dtype, count); templates and SIMD are in reduce.cc and reduce_kernels.h, which is compiled once per
// instruction set (scalar, AVX2, AVX-512) and chosen once at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace hc {

// How a reduction scales: each source is multiplied by `pre`, the result by `post`, and integers are then divided by
// `divisor` (Average). For floats Average is part of `post`, which becomes postscale / N, and `divisor` is ignored;
// scale_of in engine/sets/batch_runner.h decides that. 16-bit floats compute in float32 and round once. Integers keep
// their dtype between all steps, so that one call and several hops agree: each source times pre, a sum that wraps, the
// result times post, then a division in int64 that rounds toward zero. A product with a factor is computed in double,
// truncated toward zero to int64 (values that do not fit become the nearest int64, NaN becomes 0), and its low bits are
// kept: -1.0 is 255 in uint8.
struct Scale {
  double pre = 1.0;
  double post = 1.0;
  int64_t divisor = 1;
  bool is_unit() const { return pre == 1.0 && post == 1.0 && divisor == 1; }
};

// destinations[d][i] = post * (pre*sources[0][i] op pre*sources[1][i] op ...) / divisor, for every d, reduced in the
// order of `sources`. Pointers need no alignment. A destination may be exactly one of the sources; partial overlap is
// not allowed. Sum and Average both add. bool: Sum, Max and Or are or; Product, Min and And are and; Xor tells whether
// an odd number is true. Integers wrap. Min and Max propagate NaN. base/reductions.h says which reductions take which
// dtypes. Adasum is not done here.
void reduce(DType dtype, Reduce op, std::span<std::byte* const> destinations, std::span<const std::byte* const> sources,
            size_t count, const Scale& scale);

// destination[i] = source[i] * factor (integers as above; bool ignores the factor). May work in place.
void scale_copy(DType dtype, std::byte* destination, const std::byte* source, size_t count, double factor);
// The last step of an allreduce made of several hops, in place: multiplies by post, then divides by divisor.
void finish(DType dtype, std::byte* data, size_t count, const Scale& scale);

// Fills with the identity element (Identity in base/reductions.h); the largest and smallest floats are inf and -inf.
void fill_identity(DType dtype, Reduce op, std::byte* destination, size_t count);

// "avx512", "avx2" or "scalar"; HOROCLONE_SIMD (read by the caller) may force a lower one with select_simd.
const char* simd_name();
bool select_simd(const char* name);

}  // namespace hc
