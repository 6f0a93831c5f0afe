// The kernels that run on a GPU: many tensors into one packed buffer and back, with a cast and a scale on the way, and
// the reduction of N inputs, each read once, into N outputs, each written once. The meaning is that of
// arithmetic/reduce.h. One source for nvcc, NVRTC and g++ (then a kernel is a function of one thread's place, which the
// tests' fake of the driver calls for every thread); so it includes no standard header.
#include "device/kernel_arguments.h"

namespace hc {

// Which elements a thread works on: first, first + step, ...; `row` counts the grid's second dimension.
struct Place {
  unsigned long long first, step;
  unsigned row;
};

}  // namespace hc

#if defined(__CUDACC__) || defined(__HIP__)
#ifdef __HIP__
#define HC_ARGUMENT
#else
#define HC_ARGUMENT __grid_constant__
#endif
#define HC_DEVICE __device__ __forceinline__
#define HC_NOT_INLINED __device__ __noinline__
#define HC_MAY_ALIAS
#define HC_ONE_BY_ONE _Pragma("unroll 1")
#define HC_KERNEL(name, Arguments, body)                                                                   \
  extern "C" __global__ void __launch_bounds__(hc::kThreadsPerBlock) name(const HC_ARGUMENT Arguments a) { \
    const hc::Place here{(unsigned long long)blockIdx.x * blockDim.x + threadIdx.x,                        \
                         (unsigned long long)gridDim.x * blockDim.x, blockIdx.y};                          \
    body(a, here);                                                                                         \
  }
#else
#define HC_DEVICE inline
#define HC_NOT_INLINED inline
#define HC_MAY_ALIAS [[gnu::may_alias]]
#define HC_ONE_BY_ONE
#define HC_KERNEL(name, Arguments, body)                                                                      \
  extern "C" __attribute__((visibility("default"))) const unsigned name##_bytes = sizeof(Arguments);          \
  extern "C" __attribute__((visibility("default"))) void name(const void* arguments, const hc::Place& here) { \
    body(*static_cast<const Arguments*>(arguments), here);                                                    \
  }
#endif

namespace hc {
namespace {

using U8 = unsigned char;
using I8 = signed char;
using U16 = unsigned short;
using I16 = short;
using I32 = int;
using U32 = unsigned;
using I64 = long long;
using U64 = unsigned long long;
using F32 = float;
using F64 = double;
struct F16 {
  U16 bits;
};
struct BF16 {
  U16 bits;
};
struct Bool {
  U8 byte;
};

// ---- conversions: nearest, ties to even; a NaN becomes the canonical one

union FloatBits {
  float value;
  U32 bits;
};
HC_DEVICE float float_of(U32 bits) {
  FloatBits u;
  u.bits = bits;
  return u.value;
}
HC_DEVICE U32 bits_of(float value) {
  FloatBits u;
  u.value = value;
  return u.bits;
}
union DoubleBits {
  double value;
  U64 bits;
};

HC_DEVICE float widened(BF16 v) { return float_of((U32)v.bits << 16); }
HC_DEVICE float widened(F16 v) {
#ifdef __CUDA_ARCH__
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(v.bits));
  return wide;
#else
  const U32 sign = (U32)(v.bits & 0x8000u) << 16, magnitude = v.bits & 0x7fffu;
  const float finite = float_of(magnitude << 13) * 0x1p112f;  // exact, denormals too
  return float_of(sign | (magnitude >= 0x7c00u ? (magnitude << 13) | 0x7f800000u : bits_of(finite)));
#endif
}
HC_DEVICE void narrow(float v, BF16* to) {
  const U32 bits = bits_of(v);
  to->bits = v == v ? (U16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16) : (U16)0x7fc0u;
}
HC_DEVICE void narrow(float v, F16* to) {
  if (v != v) {
    to->bits = 0x7e00u;
    return;
  }
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(v));
#else
  const U32 sign = (bits_of(v) >> 16) & 0x8000u, magnitude = bits_of(v) & 0x7fffffffu;
  if (magnitude >= 0x477ff000u)  // 65520 and above round to infinity
    to->bits = (U16)(sign | 0x7c00u);
  else if (magnitude < 0x38800000u)  // adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    to->bits = (U16)(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
  else
    to->bits = (U16)(sign | ((magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
#endif
}
HC_DEVICE float canonical(float v) { return v == v ? v : float_of(0x7fc00000u); }
HC_DEVICE double canonical(double v) {
  DoubleBits quiet;
  quiet.bits = 0x7ff8000000000000ull;
  return v == v ? v : quiet.value;
}

// Toward zero as I64 (out of range: the nearest there is; NaN: 0), of which the low bits are kept.
template <class T>
HC_DEVICE T truncated(double v) {
  constexpr double edge = 0x1p63;
  constexpr I64 high = (I64)(~0ull >> 1);
  if (!(v == v)) return 0;
  if (v <= -edge) return (T)(-high - 1);
  if (v >= edge) return (T)high;
  return (T)(I64)v;
}
// An integer times a factor. 1 leaves alone those of 64 bits that a fake cannot hold.
template <class T>
HC_DEVICE T multiplied(T v, double factor) {
  return factor == 1 ? v : truncated<T>((double)v * factor);
}

// The divisor is a number of ranks. A division of 64 bits is some hundred instructions: once is enough.
HC_NOT_INLINED I64 quotient(I64 v, I64 divisor) { return v / divisor; }
template <class T>
HC_DEVICE T divided(T v, I64 divisor) {
  if (divisor == 1) return v;
  return sizeof(T) < 8 ? (T)((I32)v / (I32)divisor) : (T)quotient((I64)v, divisor);
}

// ---- elements, 16 bytes at a time where the addresses allow it

template <class T, unsigned N>
struct HC_MAY_ALIAS alignas(16) Chunk {
  T v[N];
};

template <class T>
HC_DEVICE T* pointer(U64 address) {
  return reinterpret_cast<T*>(address);
}
HC_DEVICE bool is_aligned(U64 address) { return address % 16 == 0; }

// to[i] = convert(from[i]) for this thread's share of `count` elements.
template <bool kVector, class From, class To, class Convert>
HC_DEVICE void convert_all(U64 from, U64 to, U64 count, const Place& here, Convert convert) {
  constexpr unsigned kSmaller = sizeof(From) < sizeof(To) ? sizeof(From) : sizeof(To), kEach = 16 / kSmaller;
  U64 done = 0;
  if (kVector && is_aligned(from) && is_aligned(to)) {
    const auto* in = pointer<const Chunk<From, kEach>>(from);
    auto* out = pointer<Chunk<To, kEach>>(to);
    const U64 chunks = count / kEach;
    HC_ONE_BY_ONE
    for (U64 c = here.first; c < chunks; c += here.step) {
      const Chunk<From, kEach> read = in[c];
      Chunk<To, kEach> made;
      for (unsigned i = 0; i < kEach; ++i) made.v[i] = convert(read.v[i]);
      out[c] = made;
    }
    done = chunks * kEach;
  }
  HC_ONE_BY_ONE
  for (U64 i = done + here.first; i < count; i += here.step) pointer<To>(to)[i] = convert(pointer<const From>(from)[i]);
}

// ---- pack and unpack: T is the tensor's type, W the packed one

// The packed element for a tensor's, and the way back. kVector: worth code for 16 bytes at a time.
template <class T, class W>
struct Cast {  // float as float
  static constexpr bool kVector = true;
  static HC_DEVICE W there(T v, double factor) { return (W)v * (W)factor; }
  static HC_DEVICE T back(W v, double factor, I64) { return v * (W)factor; }
};
template <>
struct Cast<double, double> {
  static constexpr bool kVector = true;
  static HC_DEVICE double there(double v, double factor) { return v * factor; }
  static HC_DEVICE double back(double v, double factor, I64) { return v * factor; }
};
template <class T>
struct CastHalf {
  static constexpr bool kVector = true;
  static HC_DEVICE float there(T v, double factor) { return widened(v) * (float)factor; }
  static HC_DEVICE T back(float v, double factor, I64) {
    T narrow_one;
    narrow(v * (float)factor, &narrow_one);
    return narrow_one;
  }
};
template <>
struct Cast<F16, float> : CastHalf<F16> {};
template <>
struct Cast<BF16, float> : CastHalf<BF16> {};
// Integers: scaled on both sides in their own type. 16-bit ones travel as 32-bit ones, whose lower half wraps as they
// do.
template <class T, class W>
struct CastInteger {
  static constexpr bool kVector = true;
  static HC_DEVICE W there(T v, double factor) { return multiplied(v, factor); }
  static HC_DEVICE T back(W v, double factor, I64 divisor) { return divided(multiplied((T)v, factor), divisor); }
};
template <>
struct Cast<U8, U8> : CastInteger<U8, U8> {};
template <>
struct Cast<I8, I8> : CastInteger<I8, I8> {};
template <>
struct Cast<U16, I32> : CastInteger<U16, I32> {};
template <>
struct Cast<I16, I32> : CastInteger<I16, I32> {};
template <>
struct Cast<I32, I32> : CastInteger<I32, I32> {};
template <>
struct Cast<I64, I64> : CastInteger<I64, I64> {};

template <class T, class W>
HC_DEVICE void pack(const PackArguments& a, const Place& here) {
  const KernelPiece piece = a.piece[here.row];
  const double factor = a.factor;
  convert_all<Cast<T, W>::kVector, T, W>(piece.at, a.packed + (U64)piece.place * kPlaceBytes, piece.count, here,
                                         [factor](T v) { return Cast<T, W>::there(v, factor); });
}
template <class T, class W>
HC_DEVICE void unpack(const PackArguments& a, const Place& here) {
  const KernelPiece piece = a.piece[here.row];
  const double factor = a.factor;
  const I64 divisor = a.divisor;
  convert_all<Cast<T, W>::kVector, W, T>(a.packed + (U64)piece.place * kPlaceBytes, piece.at, piece.count, here,
                                         [factor, divisor](W v) { return Cast<T, W>::back(v, factor, divisor); });
}
HC_DEVICE void pack_bytes(const PackArguments& a, const Place& here) {
  const KernelPiece piece = a.piece[here.row];
  convert_all<true, U8, U8>(piece.at, a.packed + (U64)piece.place * kPlaceBytes, piece.count, here,
                            [](U8 v) { return v; });
}
HC_DEVICE void unpack_bytes(const PackArguments& a, const Place& here) {
  const KernelPiece piece = a.piece[here.row];
  convert_all<true, U8, U8>(a.packed + (U64)piece.place * kPlaceBytes, piece.at, piece.count, here,
                            [](U8 v) { return v; });
}

// ---- reduce

template <Reduce R, class T>
HC_DEVICE T reduced_float(T acc, T next) {
  if constexpr (R == Reduce::kSum)
    return acc + next;
  else if constexpr (R == Reduce::kProduct)
    return acc * next;
  else if constexpr (R == Reduce::kMin || R == Reduce::kMax)
    return next != next || (R == Reduce::kMin ? next < acc : next > acc) ? next : acc;
  else
    static_assert(kKnown<R>, "how are floats reduced?");
}

// A lane: how an element in memory becomes what is computed with, and its kind, which says what reduces it. kVector:
// worth code for 16 bytes at a time.
template <class T>
struct FloatLane {
  static constexpr Kind kKind = Kind::kFloat;
  static constexpr bool kVector = true;
  using Memory = T;
  using Work = T;
  static HC_DEVICE Work load(T v, double pre) { return v * (T)pre; }
  template <Reduce R>
  static HC_DEVICE Work reduce(Work acc, Work next) {
    return reduced_float<R>(acc, next);
  }
  static HC_DEVICE T store(Work v, double post, I64) { return canonical(v * (T)post); }
};
template <class T>
struct HalfLane {
  static constexpr Kind kKind = Kind::kFloat;
  static constexpr bool kVector = true;
  using Memory = T;
  using Work = float;
  static HC_DEVICE float load(T v, double pre) { return widened(v) * (float)pre; }
  template <Reduce R>
  static HC_DEVICE float reduce(float acc, float next) {
    return reduced_float<R>(acc, next);
  }
  static HC_DEVICE T store(float v, double post, I64) {
    T made;
    narrow(v * (float)post, &made);
    return made;
  }
};
// Integers wrap in Work, which has at least as many bits; what is above their type is dropped at the end, and then they
// are scaled and divided. Min and Max leave the range nowhere. kFinishes: there is something to scale or to divide.
template <class T, class W, class Unsigned, bool kFinishes>
struct IntegerLane {
  static constexpr Kind kKind = Kind::kInteger;
  static constexpr bool kVector = !kFinishes;
  using Memory = T;
  using Work = W;
  static HC_DEVICE W load(T v, double pre) { return kFinishes ? multiplied(v, pre) : v; }
  template <Reduce R>
  static HC_DEVICE W reduce(W acc, W next) {
    if constexpr (R == Reduce::kSum)
      return (W)((Unsigned)acc + (Unsigned)next);
    else if constexpr (R == Reduce::kProduct)
      return (W)((Unsigned)acc * (Unsigned)next);
    else if constexpr (R == Reduce::kMin || R == Reduce::kMax)
      return (next < acc) == (R == Reduce::kMin) ? next : acc;
    else if constexpr (R == Reduce::kAnd || R == Reduce::kOr)
      return R == Reduce::kAnd ? acc & next : acc | next;
    else if constexpr (R == Reduce::kXor)
      return acc ^ next;
    else
      static_assert(kKnown<R>, "how are integers reduced?");
  }
  static HC_DEVICE T store(W v, double post, I64 divisor) {
    return kFinishes ? divided(multiplied((T)v, post), divisor) : (T)v;
  }
};
struct BoolLane {
  static constexpr Kind kKind = Kind::kBool;
  static constexpr bool kVector = true;
  using Memory = Bool;
  using Work = U32;
  static HC_DEVICE U32 load(Bool v, double) { return v.byte != 0; }
  template <Reduce R>
  static HC_DEVICE U32 reduce(U32 acc, U32 next) {
    if constexpr (R == Reduce::kSum || R == Reduce::kMax || R == Reduce::kOr)
      return acc | next;
    else if constexpr (R == Reduce::kProduct || R == Reduce::kMin || R == Reduce::kAnd)
      return acc & next;
    else if constexpr (R == Reduce::kXor)
      return acc ^ next;
    else
      static_assert(kKnown<R>, "how are bools reduced?");
  }
  static HC_DEVICE Bool store(U32 v, double, I64) { return Bool{(U8)v}; }
};

// Elements [at, at + N) of every source; all are read before the first destination is written.
template <class Lane, Reduce R, unsigned N, class Vector>
HC_DEVICE void reduce_vector(const ReduceArguments& a, U64 at) {
  typename Lane::Work acc[N];
  const Vector first = pointer<const Vector>(a.in[0])[at];
  for (unsigned i = 0; i < N; ++i) acc[i] = Lane::load(first.v[i], a.pre);
  HC_ONE_BY_ONE
  for (int s = 1; s < a.sources; ++s) {
    const Vector next = pointer<const Vector>(a.in[s])[at];
    for (unsigned i = 0; i < N; ++i) acc[i] = Lane::template reduce<R>(acc[i], Lane::load(next.v[i], a.pre));
  }
  Vector made;
  for (unsigned i = 0; i < N; ++i) made.v[i] = Lane::store(acc[i], a.post, a.divisor);
  HC_ONE_BY_ONE
  for (int d = 0; d < a.destinations; ++d) pointer<Vector>(a.out[d])[at] = made;
}

template <class T>
struct HC_MAY_ALIAS One {
  T v[1];
};

template <class Lane, Reduce R>
HC_DEVICE void reduce_with(const ReduceArguments& a, const Place& here) {
  using T = typename Lane::Memory;
  constexpr unsigned kEach = 16 / sizeof(T);
  bool aligned = Lane::kVector;
  HC_ONE_BY_ONE
  for (int s = 0; s < a.sources; ++s) aligned = aligned && is_aligned(a.in[s]);
  HC_ONE_BY_ONE
  for (int d = 0; d < a.destinations; ++d) aligned = aligned && is_aligned(a.out[d]);
  const U64 chunks = aligned ? a.count / kEach : 0;
  HC_ONE_BY_ONE
  for (U64 c = here.first; c < chunks; c += here.step) reduce_vector<Lane, R, kEach, Chunk<T, kEach>>(a, c);
  HC_ONE_BY_ONE
  for (U64 i = chunks * kEach + here.first; i < a.count; i += here.step) reduce_vector<Lane, R, 1, One<T>>(a, i);
}

template <Reduce R, Kind K>
constexpr bool kIsReduction = is_element_reduction(R, K);  // evaluated outside of device code
template <class Lane>
HC_DEVICE void reduce_by(const ReduceArguments& a, const Place& here) {
#define HC_CASE(name, identity, kinds)                                                                     \
  case Reduce::k##name:                                                                                    \
    if constexpr (kIsReduction<Reduce::k##name, Lane::kKind>) reduce_with<Lane, Reduce::k##name>(a, here); \
    return;
  switch (a.reduce) { HC_REDUCTIONS(HC_CASE) }
#undef HC_CASE
}

template <class T, class W, class Unsigned>
HC_DEVICE void reduce_integers(const ReduceArguments& a, const Place& here) {
  if (a.scaled || a.divisor != 1)
    reduce_by<IntegerLane<T, W, Unsigned, true>>(a, here);
  else
    reduce_by<IntegerLane<T, W, Unsigned, false>>(a, here);
}

// ---- Adasum (Maleki et al., MLSys 2021): sums are in double, in an order that depends on sizes only

// visit(i, a[i], b[i]) for this thread's share of a row, 16 bytes at a time where the addresses allow it.
template <class T, class Visit>
HC_DEVICE void each_pair(const AdasumRow& row, const Place& here, Visit visit) {
  constexpr unsigned kEach = 16 / sizeof(T);
  const U64 chunks = is_aligned(row.a) && is_aligned(row.b) ? row.count / kEach : 0;
  HC_ONE_BY_ONE
  for (U64 c = here.first; c < chunks; c += here.step) {
    const Chunk<T, kEach> a = pointer<const Chunk<T, kEach>>(row.a)[c], b = pointer<const Chunk<T, kEach>>(row.b)[c];
    for (unsigned i = 0; i < kEach; ++i) visit(c * kEach + i, a.v[i], b.v[i]);
  }
  HC_ONE_BY_ONE
  for (U64 i = chunks * kEach + here.first; i < row.count; i += here.step)
    visit(i, pointer<const T>(row.a)[i], pointer<const T>(row.b)[i]);
}

// One block for each row: thread t writes lane t of the row's line.
template <class T>
HC_DEVICE void adasum_products(const AdasumArguments& a, const Place& here) {
  const AdasumRow row = a.row[here.row];
  double sum[3] = {0, 0, 0};
  each_pair<T>(row, here, [&sum](U64, T x, T y) {
    sum[0] += (double)x * (double)x;
    sum[1] += (double)x * (double)y;
    sum[2] += (double)y * (double)y;
  });
  double* line = pointer<double>(a.sums) + (U64)row.place * 3 * kAdasumLanes;
  for (unsigned which = 0; which < 3; ++which) line[which * kAdasumLanes + here.first] = sum[which];
}

HC_DEVICE void adasum_fold(const AdasumFoldArguments& a, const Place& here) {
  const AdasumSum sum = a.sum[here.row];
  for (U64 at = here.first; at < 3ull * a.lanes_out; at += here.step) {
    const U64 which = at / a.lanes_out, lane = at % a.lanes_out;
    double total = 0;
    for (U64 line = sum.first; line < (U64)sum.first + sum.count; ++line) {
      const double* from = pointer<const double>(a.from) + (line * 3 + which) * a.lanes_in;
      for (U64 i = lane; i < a.lanes_in; i += a.lanes_out) total += from[i];
    }
    pointer<double>(a.to)[(U64)here.row * 3 * a.lanes_out + at] = total;
  }
}

template <class T>
HC_DEVICE void adasum_combine(const AdasumArguments& a, const Place& here) {
  const AdasumRow row = a.row[here.row];
  const double* sums = pointer<const double>(a.sums) + 3ull * row.place;
  // A vector of zeros leaves the other as it is. (NaN and infinity go through to the result.)
  const double of_a = sums[0] == 0 ? 1 : 1 - sums[1] / (2 * sums[0]);
  const double of_b = sums[2] == 0 ? 1 : 1 - sums[1] / (2 * sums[2]);
  T* to = pointer<T>(row.a);
  each_pair<T>(row, here, [to, of_a, of_b](U64 i, T x, T y) { to[i] = (T)(of_a * (double)x + of_b * (double)y); });
}

}  // namespace
}  // namespace hc

#define HC_PACKS(name, T, W)                                             \
  HC_KERNEL(hc_pack_##name, hc::PackArguments, (hc::pack<hc::T, hc::W>)) \
  HC_KERNEL(hc_unpack_##name, hc::PackArguments, (hc::unpack<hc::T, hc::W>))

HC_KERNEL(hc_pack_bytes, hc::PackArguments, hc::pack_bytes)
HC_KERNEL(hc_unpack_bytes, hc::PackArguments, hc::unpack_bytes)
HC_PACKS(f32_f32, F32, F32)
HC_PACKS(f64_f64, F64, F64)
HC_PACKS(f16_f32, F16, F32)
HC_PACKS(bf16_f32, BF16, F32)
HC_PACKS(u16_i32, U16, I32)
HC_PACKS(i16_i32, I16, I32)
HC_PACKS(u8_u8, U8, U8)
HC_PACKS(i8_i8, I8, I8)
HC_PACKS(i32_i32, I32, I32)
HC_PACKS(i64_i64, I64, I64)
HC_KERNEL(hc_reduce_bool, hc::ReduceArguments, hc::reduce_by<hc::BoolLane>)
HC_KERNEL(hc_reduce_u8, hc::ReduceArguments, (hc::reduce_integers<hc::U8, hc::I32, hc::U32>))
HC_KERNEL(hc_reduce_i8, hc::ReduceArguments, (hc::reduce_integers<hc::I8, hc::I32, hc::U32>))
HC_KERNEL(hc_reduce_u16, hc::ReduceArguments, (hc::reduce_integers<hc::U16, hc::I32, hc::U32>))
HC_KERNEL(hc_reduce_i16, hc::ReduceArguments, (hc::reduce_integers<hc::I16, hc::I32, hc::U32>))
HC_KERNEL(hc_reduce_i32, hc::ReduceArguments, (hc::reduce_integers<hc::I32, hc::I32, hc::U32>))
HC_KERNEL(hc_reduce_i64, hc::ReduceArguments, (hc::reduce_integers<hc::I64, hc::I64, hc::U64>))
HC_KERNEL(hc_reduce_f16, hc::ReduceArguments, hc::reduce_by<hc::HalfLane<hc::F16>>)
HC_KERNEL(hc_reduce_bf16, hc::ReduceArguments, hc::reduce_by<hc::HalfLane<hc::BF16>>)
HC_KERNEL(hc_reduce_f32, hc::ReduceArguments, hc::reduce_by<hc::FloatLane<float>>)
HC_KERNEL(hc_reduce_f64, hc::ReduceArguments, hc::reduce_by<hc::FloatLane<double>>)
HC_KERNEL(hc_adasum_products_f32, hc::AdasumArguments, hc::adasum_products<float>)
HC_KERNEL(hc_adasum_products_f64, hc::AdasumArguments, hc::adasum_products<double>)
HC_KERNEL(hc_adasum_combine_f32, hc::AdasumArguments, hc::adasum_combine<float>)
HC_KERNEL(hc_adasum_combine_f64, hc::AdasumArguments, hc::adasum_combine<double>)
HC_KERNEL(hc_adasum_fold, hc::AdasumFoldArguments, hc::adasum_fold)
