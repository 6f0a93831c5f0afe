// The loops of quantize.h over the compiler's vector types. reduce_kernels.h includes them, so they are compiled once
// for each instruction set and follow the same rules: an unnamed namespace, no standard library, no fused multiply-add.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arithmetic/vectors.h"

namespace hc {

struct QuantizeCall {
  const float* in;
  size_t count;
  float* residual;  // or null
  size_t block, shard;
  std::byte* message;
};

struct DequantizeCall {
  const std::byte* message;
  size_t block, shard;
  float* out;
  size_t count;
  bool add;
};

namespace {

template <size_t Width>
struct BlockLoops {
  using F = typename VectorOf<float, Width>::type;
  using I = typename VectorOf<int32_t, Width>::type;
  using B = typename VectorOf<int8_t, Width / 4>::type;
  static constexpr size_t kLanes = Width / 4;
  static constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000, kNaN = 0x7fc00000;
  // Adding and subtracting it rounds to the nearest integer, ties to even: there, floats are 1 apart.
  static constexpr float kRounder = 12582912.0f;

  template <class V>
  [[gnu::always_inline]] static V load(const void* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  template <class V>
  [[gnu::always_inline]] static void store(void* p, const V& v) {
    __builtin_memcpy(p, &v, sizeof v);
  }

  // Bits of the largest magnitude: those of floats without a sign order like integers, and NaN lies above infinity.
  static int32_t top_of(const float* x, size_t count) {
    I most{};
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const I bits = load<I>(x + i) & kMagnitude;
      most = bits > most ? bits : most;
    }
    int32_t top = 0;
    for (size_t lane = 0; lane < kLanes; ++lane) top = most[lane] > top ? most[lane] : top;
    for (; i < count; ++i) {
      const int32_t bits = load<int32_t>(x + i) & kMagnitude;
      top = bits > top ? bits : top;
    }
    return top;
  }

  static void add_to(float* residual, const float* in, size_t count) {
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(residual + i, load<F>(residual + i) + load<F>(in + i));
    for (; i < count; ++i) residual[i] += in[i];
  }

  static void round_block(const float* x, size_t count, float scale, float* residual, int8_t* to) {
    const float divisor = scale == 0.0f ? 1.0f : scale;
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const F value = load<F>(x + i), whole = (value / divisor + kRounder) - kRounder;
      if (residual) store(residual + i, value - whole * scale);
      store(to + i, __builtin_convertvector(__builtin_convertvector(whole, I), B));
    }
    for (; i < count; ++i) {
      const float value = x[i], whole = (value / divisor + kRounder) - kRounder;
      if (residual) residual[i] = value - whole * scale;
      to[i] = static_cast<int8_t>(whole);
    }
  }

  static void quantize(const QuantizeCall& c) {
    std::byte* scales = c.message;
    int8_t* to = reinterpret_cast<int8_t*>(c.message + c.shard / c.block * sizeof(float));
    for (size_t first = 0; first < c.shard; first += c.block, scales += sizeof(float), to += c.block) {
      size_t count = first < c.count ? c.count - first : 0;
      if (count > c.block) count = c.block;
      const float* x = c.in + first;
      float* residual = c.residual ? c.residual + first : nullptr;
      if (residual) {
        add_to(residual, x, count);
        x = residual;
      }
      int32_t bits = top_of(x, count);
      const bool finite = bits < kInfinity;
      float scale;
      __builtin_memcpy(&scale, finite ? &bits : &kNaN, sizeof scale);
      if (finite) scale /= 127.0f;
      __builtin_memcpy(scales, &scale, sizeof scale);
      if (finite) {
        round_block(x, count, scale, residual, to);
      } else {
        if (residual) __builtin_memset(residual, 0, count * sizeof(float));
        count = 0;
      }
      __builtin_memset(to + count, 0, c.block - count);
    }
  }

  template <bool Add>
  static void expand(const int8_t* from, float scale, float* out, size_t count) {
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const F value = __builtin_convertvector(load<B>(from + i), F) * scale;
      store(out + i, Add ? load<F>(out + i) + value : value);
    }
    for (; i < count; ++i)
      out[i] = Add ? out[i] + static_cast<float>(from[i]) * scale : static_cast<float>(from[i]) * scale;
  }

  static void dequantize(const DequantizeCall& c) {
    const std::byte* scales = c.message;
    const int8_t* from = reinterpret_cast<const int8_t*>(c.message + c.shard / c.block * sizeof(float));
    for (size_t first = 0; first < c.count; first += c.block, from += c.block, scales += sizeof(float)) {
      const size_t count = c.count - first < c.block ? c.count - first : c.block;
      const float scale = load<float>(scales);
      c.add ? expand<true>(from, scale, c.out + first, count) : expand<false>(from, scale, c.out + first, count);
    }
  }
};

}  // namespace
}  // namespace hc
