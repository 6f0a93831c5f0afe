// The loops of reduce.h, written once over the compiler's vector types and compiled once for each instruction set.
// Included by reduce.cc, reduce_avx2.cc and reduce_avx512.cc only. Everything is in an unnamed namespace and calls
// nothing of the standard library, so that the linker cannot pick AVX code for a function that an older CPU runs. All
// give the same bits: sources are reduced in order, no multiply-add is fused (-ffp-contract=off), and every NaN that
// arithmetic produces is the one canonical quiet NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "arithmetic/quantize_kernels.h"
#include "arithmetic/vectors.h"
#include "base/dtype.h"

namespace hc {

// The arguments of one call; scales other than 1 only for floats.
struct ReduceCall {
  std::byte* const* to;
  size_t to_count;
  const std::byte* const* from;
  size_t from_count;
  size_t count;  // elements
  double pre, post;
};

using Kernel = void (*)(const ReduceCall&);
struct KernelTable {
  const char* name;
  Kernel kernel[kReducedDTypeCount][kReduceCount];  // null where the reduction does not take the dtype
  void (*quantize)(const QuantizeCall&);
  void (*dequantize)(const DequantizeCall&);
};

// Null when the compiler or the architecture has no such instructions.
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();

namespace {

// A lane type describes how elements in memory become vectors to compute with. It provides Vec (the elements of one
// step), Scalar (a factor), kKind, kElementBytes, kBytes of one step in memory, load, store, reduce, scale, canonical.

// Integers, Work = the unsigned type for sums and products (which wrap), Order = the signed or unsigned one
// that is compared.
template <class Work, class Order, size_t Width>
struct IntegerLane {
  using Vec = typename VectorOf<Work, Width>::type;
  using Ordered = typename VectorOf<Order, Width>::type;
  using Scalar = double;
  static constexpr Kind kKind = Kind::kInteger;
  static constexpr bool kScales = false;
  static constexpr size_t kElementBytes = sizeof(Work), kBytes = Width;

  [[gnu::always_inline]] static Vec load(const std::byte* p) { return load_vector<Vec>(p); }
  [[gnu::always_inline]] static void store(std::byte* p, const Vec& v) { __builtin_memcpy(p, &v, sizeof v); }
  template <Reduce R>
  [[gnu::always_inline]] static Vec reduce(const Vec& acc, const Vec& next) {
    const Ordered a = (Ordered)acc, b = (Ordered)next;
    if constexpr (R == Reduce::kSum)
      return acc + next;
    else if constexpr (R == Reduce::kProduct)
      return acc * next;
    else if constexpr (R == Reduce::kMin)
      return (Vec)(b < a ? b : a);
    else if constexpr (R == Reduce::kMax)
      return (Vec)(b > a ? b : a);
    else if constexpr (R == Reduce::kAnd)
      return acc & next;
    else if constexpr (R == Reduce::kOr)
      return acc | next;
    else if constexpr (R == Reduce::kXor)
      return acc ^ next;
    else
      static_assert(kKnown<R>, "how are integers reduced?");
  }
  [[gnu::always_inline]] static Vec scale(const Vec& v, Scalar) { return v; }
  [[gnu::always_inline]] static Vec canonical(const Vec& v) { return v; }
};

// Bytes of which any value but 0 is true: or, and.
template <size_t Width>
struct BoolLane : IntegerLane<uint8_t, uint8_t, Width> {
  static constexpr Kind kKind = Kind::kBool;
  using Vec = typename VectorOf<uint8_t, Width>::type;
  [[gnu::always_inline]] static Vec load(const std::byte* p) {
    const Vec v = load_vector<Vec>(p), one = Vec{} + uint8_t{1};
    return v < one ? v : one;
  }
  template <Reduce R>
  [[gnu::always_inline]] static Vec reduce(const Vec& acc, const Vec& next) {
    if constexpr (R == Reduce::kSum || R == Reduce::kMax || R == Reduce::kOr)
      return acc | next;
    else if constexpr (R == Reduce::kProduct || R == Reduce::kMin || R == Reduce::kAnd)
      return acc & next;
    else if constexpr (R == Reduce::kXor)
      return acc ^ next;
    else
      static_assert(kKnown<R>, "how are bools reduced?");
  }
};

// float or double, in vectors of Width bytes; the base of the 16-bit lanes, which compute in float.
template <class T, size_t Width>
struct FloatLane {
  using Vec = typename VectorOf<T, Width>::type;
  using Scalar = T;
  static constexpr Kind kKind = Kind::kFloat;
  static constexpr bool kScales = true;
  static constexpr size_t kElementBytes = sizeof(T), kBytes = Width;

  [[gnu::always_inline]] static Vec load(const std::byte* p) { return load_vector<Vec>(p); }
  [[gnu::always_inline]] static void store(std::byte* p, const Vec& v) { __builtin_memcpy(p, &v, sizeof v); }
  template <Reduce R>
  [[gnu::always_inline]] static Vec reduce(const Vec& acc, const Vec& next) {
    // With a NaN in either the comparison is false and acc stays: right when the NaN is there, not when it is
    // in next.
    if constexpr (R == Reduce::kSum)
      return acc + next;
    else if constexpr (R == Reduce::kProduct)
      return acc * next;
    else if constexpr (R == Reduce::kMin)
      return unless_nan(next, next < acc ? next : acc);
    else if constexpr (R == Reduce::kMax)
      return unless_nan(next, next > acc ? next : acc);
    else
      static_assert(kKnown<R>, "how are floats reduced?");
  }
  [[gnu::always_inline]] static Vec unless_nan(const Vec& next, const Vec& best) { return next != next ? next : best; }
  [[gnu::always_inline]] static Vec scale(const Vec& v, Scalar factor) { return v * factor; }
  [[gnu::always_inline]] static Vec canonical(const Vec& v) {
    constexpr T quiet = sizeof(T) == 4 ? T(__builtin_nanf("")) : T(__builtin_nan(""));
    return v == v ? v : Vec{} + quiet;
  }
};

// Two vectors of float for one vector of 16-bit elements. Convert::widen(p, a, b) and narrow(p, a, b) choose
// which elements go to which of the two; no NaN but the canonical one comes to narrow.
template <class Convert, size_t Width>
struct PairLane {
  using Base = FloatLane<float, Width>;
  using Half = typename Base::Vec;
  struct Vec {
    Half a, b;
  };
  using Scalar = float;
  static constexpr Kind kKind = Kind::kFloat;
  static constexpr bool kScales = true;
  static constexpr size_t kElementBytes = 2, kBytes = Width;

  [[gnu::always_inline]] static Vec load(const std::byte* p) {
    Vec v;
    Convert::widen(p, v.a, v.b);
    return v;
  }
  [[gnu::always_inline]] static void store(std::byte* p, const Vec& v) { Convert::narrow(p, v.a, v.b); }
  template <Reduce R>
  [[gnu::always_inline]] static Vec reduce(const Vec& acc, const Vec& next) {
    return {Base::template reduce<R>(acc.a, next.a), Base::template reduce<R>(acc.b, next.b)};
  }
  [[gnu::always_inline]] static Vec scale(const Vec& v, Scalar f) { return {v.a * f, v.b * f}; }
  [[gnu::always_inline]] static Vec canonical(const Vec& v) { return {Base::canonical(v.a), Base::canonical(v.b)}; }
};

// bfloat16 is the upper half of a float. a holds the elements at even positions, b those at odd ones: both
// come by shifts and masks, without shuffles. (AVX512-BF16 is of no use here: its conversion flushes
// denormals to zero.)
template <size_t Width>
struct BFloatConvert {
  using Half = typename VectorOf<float, Width>::type;
  using Bits = typename VectorOf<uint32_t, Width>::type;

  [[gnu::always_inline]] static void widen(const std::byte* p, Half& a, Half& b) {
    const Bits x = load_vector<Bits>(p);
    a = (Half)(x << 16);
    b = (Half)(x & 0xffff0000u);
  }
  // Nearest, ties to even, in the upper half. The canonical NaN comes through: 0x7fc00000 + 0x7fff keeps its
  // upper half.
  [[gnu::always_inline]] static Bits rounded(const Half& v) {
    const Bits bits = (Bits)v;
    return bits + (((bits >> 16) & 1u) + 0x7fffu);
  }
  [[gnu::always_inline]] static void narrow(std::byte* p, const Half& a, const Half& b) {
    const Bits x = (rounded(a) >> 16) | (rounded(b) & 0xffff0000u);
    __builtin_memcpy(p, &x, sizeof x);
  }
};

// Vectors in flight: enough loads to hide the latency of L2, few enough for 16 registers.
inline constexpr int kUnroll = 4;

// N sources, or as many as the call says for N = 0.
template <class L, Reduce R, int N, bool Pre, bool Post>
struct Loop {
  using Vec = typename L::Vec;
  using Scalar = typename L::Scalar;

  // Steps vectors at byte offset `at`. Every source is read before the first destination is written, so one
  // may be the other.
  template <int Steps>
  [[gnu::always_inline]] static void steps(const ReduceCall& c, const std::byte* const* from, size_t at) {
    const Scalar pre = static_cast<Scalar>(c.pre), post = static_cast<Scalar>(c.post);
    const size_t sources = N > 0 ? static_cast<size_t>(N) : c.from_count;
    Vec acc[Steps];
#pragma GCC unroll 4
    for (int i = 0; i < Steps; ++i) acc[i] = loaded(from[0] + at + i * L::kBytes, pre);
#pragma GCC unroll 8
    for (size_t s = 1; s < sources; ++s) {
      const std::byte* p = from[s] + at;
#pragma GCC unroll 4
      for (int i = 0; i < Steps; ++i) acc[i] = L::template reduce<R>(acc[i], loaded(p + i * L::kBytes, pre));
    }
#pragma GCC unroll 4
    for (int i = 0; i < Steps; ++i) {
      if constexpr (Post) acc[i] = L::scale(acc[i], post);
      acc[i] = L::canonical(acc[i]);
    }
    for (size_t d = 0; d < c.to_count; ++d) {
      std::byte* p = c.to[d] + at;
#pragma GCC unroll 4
      for (int i = 0; i < Steps; ++i) L::store(p + i * L::kBytes, acc[i]);
    }
  }

  [[gnu::always_inline]] static Vec loaded(const std::byte* p, Scalar pre) {
    Vec v = L::load(p);
    if constexpr (Pre) v = L::scale(v, pre);
    return v;
  }

  // The last elements, fewer than one vector: through buffers of a whole one.
  [[gnu::noinline]] static void tail(const ReduceCall& c, size_t at, size_t bytes) {
    const Scalar pre = static_cast<Scalar>(c.pre), post = static_cast<Scalar>(c.post);
    alignas(64) std::byte buffer[L::kBytes] = {};
    Vec acc{};
    for (size_t s = 0; s < c.from_count; ++s) {
      __builtin_memcpy(buffer, c.from[s] + at, bytes);
      const Vec next = loaded(buffer, pre);
      acc = s == 0 ? next : L::template reduce<R>(acc, next);
    }
    if constexpr (Post) acc = L::scale(acc, post);
    L::store(buffer, L::canonical(acc));
    for (size_t d = 0; d < c.to_count; ++d) __builtin_memcpy(c.to[d] + at, buffer, bytes);
  }

  static void run(const ReduceCall& c) {
    const std::byte* known[N > 0 ? N : 1];
    for (int s = 0; s < N; ++s) known[s] = c.from[s];
    const std::byte* const* from = N > 0 ? known : c.from;
    const size_t bytes = c.count * L::kElementBytes;
    size_t at = 0;
    for (; at + kUnroll * L::kBytes <= bytes; at += kUnroll * L::kBytes) steps<kUnroll>(c, from, at);
    for (; at + L::kBytes <= bytes; at += L::kBytes) steps<1>(c, from, at);
    if (at < bytes) Loop<L, R, 0, Pre, Post>::tail(c, at, bytes - at);
  }
};

// Picks the loop of one dtype and operation. Two floats summed are the common case and gain up to a fifth
// from a count that is known; more sources, integers and the other operations gain nothing that can be
// measured.
template <class L, Reduce R>
void reduce_sources(const ReduceCall& c) {
  constexpr int kPair = L::kScales && R == Reduce::kSum ? 2 : 0;
  const bool pair = c.from_count == 2;
  if constexpr (L::kScales) {
    if (c.pre != 1.0) return Loop<L, R, 0, true, true>::run(c);
    if (c.post != 1.0) return pair ? Loop<L, R, kPair, false, true>::run(c) : Loop<L, R, 0, false, true>::run(c);
  }
  pair ? Loop<L, R, kPair, false, false>::run(c) : Loop<L, R, 0, false, false>::run(c);
}

template <class L, Reduce R>
constexpr Kernel kernel_of() {
  if constexpr (is_element_reduction(R, L::kKind))
    return reduce_sources<L, R>;
  else
    return nullptr;
}

template <class L>
constexpr void fill_row(Kernel (&row)[kReduceCount]) {
#define HC_KERNEL(name, identity, kinds) \
  row[static_cast<int>(Reduce::k##name)] = kernel_of<L, reduced_as(Reduce::k##name)>();
  HC_REDUCTIONS(HC_KERNEL)
#undef HC_KERNEL
}

// How elements of type T are computed with; integers, if nothing else is said. Only the conversion of float16 needs
// instructions of its own.
template <class T, size_t Width, class HalfConvert>
struct LaneOf {
  static_assert(std::is_integral_v<T>, "how are these elements computed with?");
  using type = IntegerLane<std::make_unsigned_t<T>, T, Width>;
};
template <size_t Width, class HalfConvert>
struct LaneOf<bool, Width, HalfConvert> {
  using type = BoolLane<Width>;
};
template <size_t Width, class HalfConvert>
struct LaneOf<Float16, Width, HalfConvert> {
  using type = PairLane<HalfConvert, Width>;
};
template <size_t Width, class HalfConvert>
struct LaneOf<BFloat16, Width, HalfConvert> {
  using type = PairLane<BFloatConvert<Width>, Width>;
};
template <size_t Width, class HalfConvert>
struct LaneOf<float, Width, HalfConvert> {
  using type = FloatLane<float, Width>;
};
template <size_t Width, class HalfConvert>
struct LaneOf<double, Width, HalfConvert> {
  using type = FloatLane<double, Width>;
};

template <size_t Width, class HalfConvert>
constexpr KernelTable make_table(const char* name) {
  KernelTable t{};
  t.name = name;
  t.quantize = BlockLoops<Width>::quantize;
  t.dequantize = BlockLoops<Width>::dequantize;
#define HC_ROW(name, enumerator, text, bytes, kind, element, ...) \
  fill_row<typename LaneOf<element, Width, HalfConvert>::type>(t.kernel[static_cast<int>(DType::enumerator)]);
  HC_REDUCED_DTYPES(HC_ROW)
#undef HC_ROW
  return t;
}

}  // namespace
}  // namespace hc
