// Chooses the instruction set, and does what is not worth vector code: integers that are scaled or divided,
// identity elements. No state but the chosen table. Thread: any; select_simd belongs to start-up.
#include "arithmetic/reduce.h"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstring>
#include <limits>
#include <type_traits>

#include "arithmetic/quantize.h"
#include "arithmetic/reduce_kernels.h"
#include "base/half.h"

namespace hc {
namespace {

// Vectors that every CPU of the architecture has (SSE2, NEON).
constexpr size_t kBaseWidth = 16;

// float16 by integer operations on whole vectors, step for step what half.h does to one element (see there
// for why); elements at even positions go to a, those at odd ones to b.
struct HalfByIntegers {
  using Half = FloatLane<float, kBaseWidth>::Vec;
  using Bits = VectorOf<uint32_t, kBaseWidth>::type;

  static Half widened(Bits x) {
    const Bits sign = (x & 0x8000u) << 16, magnitude = x & 0x7fffu;
    const Bits finite = (Bits)((Half)(magnitude << 13) * 0x1p112f);  // exact, denormals too
    return (Half)(sign | (magnitude >= 0x7c00u ? (magnitude << 13) | 0x7f800000u : finite));
  }
  static Bits narrowed(Half value) {
    const Bits bits = (Bits)value, sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    const Bits normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const Bits tiny = (Bits)((Half)magnitude + 0.5f) - 0x3f000000u;
    Bits result = magnitude < 0x38800000u ? tiny : normal;
    result = magnitude >= 0x477ff000u ? Bits{} + 0x7c00u : result;
    result = magnitude > 0x7f800000u ? Bits{} + 0x7e00u : result;
    return sign | result;
  }
  // Not inlined: a hundred copies would make the library a fifth larger.
  [[gnu::noinline]] static void widen(const std::byte* p, Half& a, Half& b) {
    const Bits x = load_vector<Bits>(p);
    a = widened(x & 0xffffu);
    b = widened(x >> 16);
  }
  [[gnu::noinline]] static void narrow(std::byte* p, const Half& a, const Half& b) {
    const Bits x = narrowed(a) | (narrowed(b) << 16);
    std::memcpy(p, &x, sizeof x);
  }
};

constexpr KernelTable kBaseKernels = make_table<kBaseWidth, HalfByIntegers>("scalar");

// Null when the compiler, the architecture or this CPU has no such instructions.
const KernelTable* table_named(const char* name) {
#if defined(__x86_64__)
  if (std::strcmp(name, "avx512") == 0) {
    bool here = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return here ? avx512_kernels() : nullptr;
  }
  if (std::strcmp(name, "avx2") == 0)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? avx2_kernels() : nullptr;
#endif
  return std::strcmp(name, "scalar") == 0 ? &kBaseKernels : nullptr;
}

const KernelTable* best_table() {
  for (const char* name : {"avx512", "avx2"})
    if (const KernelTable* table = table_named(name)) return table;
  return &kBaseKernels;
}

// The same for every engine of the process, as it changes no result. Chosen at the first use.
std::atomic<const KernelTable*> chosen{nullptr};

const KernelTable& choose_kernels() {
  const KernelTable* table = best_table();
  chosen.store(table, std::memory_order_release);
  return *table;
}

inline const KernelTable& kernels() {
  const KernelTable* table = chosen.load(std::memory_order_acquire);
  return table ? *table : choose_kernels();
}

void run_kernel(DType dtype, Reduce op, const ReduceCall& call) {
  const Kernel kernel = kernels().kernel[static_cast<int>(dtype)][static_cast<int>(op)];
  assert(kernel && "the reduction takes this dtype");
  kernel(call);
}

// Calls body(T{}) with the C++ type of an integer dtype.
template <class Body>
void with_integer(DType dtype, Body&& body) {
#define HC_CASE(name, enumerator, text, bytes, kind, element, ...)      \
  case DType::enumerator:                                               \
    if constexpr (Kind::kind == Kind::kInteger) return body(element{}); \
    break;
  switch (dtype) { HC_REDUCED_DTYPES(HC_CASE) }
#undef HC_CASE
  assert(!"an integer dtype");
}

// Toward zero as int64 (out of range: the nearest there is; NaN: 0), of which the low bits are kept: so a result wraps
// like a sum does, and no conversion is undefined.
template <class T>
T truncated(double value) {
  if (!(value == value)) return 0;
  constexpr double edge = 0x1p63;
  const int64_t wide = value <= -edge  ? std::numeric_limits<int64_t>::min()
                       : value >= edge ? std::numeric_limits<int64_t>::max()
                                       : static_cast<int64_t>(value);
  return static_cast<T>(wide);
}

template <class T>
T element(const std::byte* data, size_t i) {
  T value;
  std::memcpy(&value, data + i * sizeof(T), sizeof(T));
  return value;
}
template <class T>
void set_element(std::byte* data, size_t i, T value) {
  std::memcpy(data + i * sizeof(T), &value, sizeof(T));
}

// to[i] = from[i] * factor, each truncated: in place or beside.
template <class T>
void multiply(std::byte* to, const std::byte* from, size_t count, double factor) {
  for (size_t i = 0; i < count; ++i)
    set_element(to, i, truncated<T>(static_cast<double>(element<T>(from, i)) * factor));
}

template <class T>
void divide(std::byte* data, size_t count, int64_t divisor) {
  // The quotient of the lowest value by -1 does not fit; no average has a negative divisor.
  assert(divisor > 0);
  for (size_t i = 0; i < count; ++i)
    set_element(data, i, static_cast<T>(static_cast<int64_t>(element<T>(data, i)) / divisor));
}

// Integers with factors or a divisor. Block by block beside the destinations, since these may be sources: each source
// times pre, reduced in the dtype (wrapping, as a reduction of several hops does), then times post, then divided.
class IntegerBlocks {
 public:
  IntegerBlocks(DType dtype, Reduce op, const ReduceCall& call, const Scale& scale)
      : dtype_(dtype), op_(op), call_(call), scale_(scale), width_(size_of(dtype)) {}

  void run() {
    const size_t step = kBlockBytes / width_;
    for (size_t at = 0; at < call_.count; at += step) {
      const size_t count = std::min(step, call_.count - at);
      if (scale_.pre == 1.0)
        reduce_sources(at, count);
      else
        reduce_scaled_sources(at, count);
      with_integer(dtype_, [&](auto t) {
        using T = decltype(t);
        if (scale_.post != 1.0) multiply<T>(block_, block_, count, scale_.post);
        if (scale_.divisor != 1) divide<T>(block_, count, scale_.divisor);
      });
      for (size_t d = 0; d < call_.to_count; ++d) std::memcpy(call_.to[d] + at * width_, block_, count * width_);
    }
  }

 private:
  void reduce_sources(size_t at, size_t count) {
    const std::byte* shifted[kMaxSources];
    // More sources than fit: the first block's result is the first source of the next; integers lose nothing by that.
    for (size_t first = 0; first < call_.from_count;) {
      size_t taken = 0;
      if (first > 0) shifted[taken++] = block_;
      while (taken < kMaxSources && first < call_.from_count) shifted[taken++] = call_.from[first++] + at * width_;
      reduce_into_block(shifted, taken, count);
    }
  }

  void reduce_scaled_sources(size_t at, size_t count) {
    const std::byte* const both[] = {block_, next_};
    for (size_t s = 0; s < call_.from_count; ++s) {
      const std::byte* from = call_.from[s] + at * width_;
      with_integer(dtype_, [&](auto t) { multiply<decltype(t)>(s == 0 ? block_ : next_, from, count, scale_.pre); });
      if (s > 0) reduce_into_block(both, 2, count);
    }
  }

  void reduce_into_block(const std::byte* const* from, size_t sources, size_t count) {
    std::byte* const to = block_;
    if (sources > 1)
      run_kernel(dtype_, op_, {&to, 1, from, sources, count, 1.0, 1.0});
    else
      std::memcpy(to, from[0], count * width_);
  }

  static constexpr size_t kBlockBytes = 4096;
  static constexpr size_t kMaxSources = 64;
  const DType dtype_;
  const Reduce op_;
  const ReduceCall& call_;
  const Scale& scale_;
  const size_t width_;
  alignas(64) std::byte block_[kBlockBytes];
  alignas(64) std::byte next_[kBlockBytes];
};

template <class T>
void fill(std::byte* data, size_t count, T value) {
  for (size_t i = 0; i < count; ++i) set_element(data, i, value);
}

// kAllOnes is of bits: no reduction of floats has it.
float float_identity(Identity which) {
  switch (which) {
    case Identity::kZero:
    case Identity::kAllOnes:
      return 0;
    case Identity::kOne:
      return 1;
    case Identity::kHighest:
      return std::numeric_limits<float>::infinity();
    case Identity::kLowest:
      return -std::numeric_limits<float>::infinity();
  }
  return 0;
}

template <class T>
T identity_element(Identity which) {
  if constexpr (std::is_same_v<T, Float16>) {
    return to_float16(float_identity(which));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return to_bfloat16(float_identity(which));
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(float_identity(which));
  } else {
    static_assert(std::is_integral_v<T>, "which elements change nothing?");
    switch (which) {
      case Identity::kZero:
        return 0;
      case Identity::kOne:
        return 1;
      case Identity::kAllOnes:
        return static_cast<T>(-1);
      case Identity::kHighest:
        return std::numeric_limits<T>::max();
      case Identity::kLowest:
        return std::numeric_limits<T>::min();
    }
    return 0;
  }
}

}  // namespace

void reduce(DType dtype, Reduce op, std::span<std::byte* const> destinations, std::span<const std::byte* const> sources,
            size_t count, const Scale& scale) {
  if (count == 0 || sources.empty()) return;
  const bool scaled = dtype != DType::kBool && (scale.pre != 1.0 || scale.post != 1.0);
  const bool divided = dtype != DType::kBool && !is_float(dtype) && scale.divisor != 1;
  if (sources.size() == 1 && !scaled && !divided) {
    for (std::byte* to : destinations)
      if (to != sources[0]) std::memcpy(to, sources[0], count * size_of(dtype));
    return;
  }
  const ReduceCall call{destinations.data(),      destinations.size(),      sources.data(), sources.size(), count,
                        scaled ? scale.pre : 1.0, scaled ? scale.post : 1.0};
  if ((scaled || divided) && !is_float(dtype)) return IntegerBlocks(dtype, op, call, scale).run();
  run_kernel(dtype, op, call);
}

void scale_copy(DType dtype, std::byte* destination, const std::byte* source, size_t count, double factor) {
  reduce(dtype, Reduce::kSum, {&destination, 1}, {&source, 1}, count, Scale{factor, 1.0, 1});
}

void finish(DType dtype, std::byte* data, size_t count, const Scale& scale) {
  const std::byte* source = data;
  reduce(dtype, Reduce::kSum, {&data, 1}, {&source, 1}, count, Scale{1.0, scale.post, scale.divisor});
}

void fill_identity(DType dtype, Reduce op, std::byte* destination, size_t count) {
  const Identity which = identity_of(op);
#define HC_CASE(name, enumerator, text, bytes, kind, element, ...) \
  case DType::enumerator:                                          \
    return fill(destination, count, identity_element<element>(which));
  switch (dtype) { HC_REDUCED_DTYPES(HC_CASE) }
#undef HC_CASE
}

void quantize(const BlockFormat& format, const float* in, size_t count, float* residual, std::byte* message) {
  kernels().quantize({in, count, residual, format.block, format.shard, message});
}

void dequantize(const BlockFormat& format, const std::byte* message, float* out, size_t count, bool add) {
  kernels().dequantize({message, format.block, format.shard, out, count, add});
}

const char* simd_name() { return kernels().name; }

bool select_simd(const char* name) {
  const KernelTable* table = std::strcmp(name, "auto") == 0 ? best_table() : table_named(name);
  if (table) chosen.store(table, std::memory_order_release);
  return table != nullptr;
}

}  // namespace hc
