// The only place that knows arithmetic: element-wise reduction of N sources, scaling, identity elements.
// Untyped on purpose (pointer, dtype, count); templates and SIMD live in reduce.cc and its
// per-instruction-set twins, chosen once at run time (scalar, AVX2, AVX-512).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace hc {

// How a reduction scales: each source by `pre`, the result by `post`, and integers by `divisor` (Average). Floats:
// Average is post *= 1/N, made once in engine/; divisor is not looked at. 16-bit floats compute in float32 and round
// once. Integers stay in their dtype between all steps, so that one call and several hops agree: each source times pre,
// a sum that wraps, the result times post, then divided in int64, toward zero. A product with a factor is computed in
// double, truncated toward zero to int64 (what does not fit becomes the nearest int64, NaN 0), and of that the low bits
// are kept: -1.0 is 255 in uint8.
struct Scale {
  double pre = 1.0;
  double post = 1.0;
  int64_t divisor = 1;
  bool is_unit() const { return pre == 1.0 && post == 1.0 && divisor == 1; }
};

// destinations[d][i] = post * (pre*sources[0][i] op pre*sources[1][i] op ...) / divisor, for every d, summed
// in the order of `sources`. Pointers need no alignment. A destination may be exactly one of the sources;
// partial overlap is not allowed. Sum and Average both add. bool: Sum, Max, Or = or; Product, Min,
// And = and; Xor: whether an odd number is true. Integers
// wrap. Min/Max propagate NaN. Which
// reductions take which dtypes: base/reductions.h. Adasum is not done here.
void reduce(DType dtype, Reduce op, std::span<std::byte* const> destinations, std::span<const std::byte* const> sources,
            size_t count, const Scale& scale);

// destination[i] = source[i] * factor (integers as above; bool: factor ignored). May be in
// place.
void scale_copy(DType dtype, std::byte* destination, const std::byte* source, size_t count, double factor);
// In place: the end of an allreduce made of several hops: post, then divisor.
void finish(DType dtype, std::byte* data, size_t count, const Scale& scale);

// The element that changes nothing (Identity in base/reductions.h); the largest / smallest float is inf / -inf.
void fill_identity(DType dtype, Reduce op, std::byte* destination, size_t count);

// "avx512", "avx2" or "scalar"; HOROCLONE_SIMD (read by the caller) may force a lower one with select_simd.
const char* simd_name();
bool select_simd(const char* name);

}  // namespace hc
