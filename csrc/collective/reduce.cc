// Chooses the instruction set, and does what is not worth vector code: integers that are scaled or divided,
// neutral elements. No state but the chosen table. Thread: any; select_simd belongs to start-up.
#include "collective/reduce.h"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstring>
#include <limits>

#include "base/half.h"
#include "collective/quantize.h"
#include "collective/reduce_kernels.h"

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

const KernelTable& kernels() {
  const KernelTable* table = chosen.load(std::memory_order_acquire);
  if (!table) {
    table = best_table();
    chosen.store(table, std::memory_order_release);
  }
  return *table;
}

Fold fold_of(Reduce op) {
  assert(op != Reduce::kAdasum);
  switch (op) {
    case Reduce::kMin:
      return Fold::kMin;
    case Reduce::kMax:
      return Fold::kMax;
    case Reduce::kProduct:
      return Fold::kProduct;
    default:
      return Fold::kSum;
  }
}

void run_kernel(DType dtype, Fold fold, const ReduceCall& call) {
  kernels().kernel[static_cast<int>(dtype)][static_cast<int>(fold)](call);
}

// Calls body(T{}) with the C++ type of an integer dtype.
template <class Body>
void with_integer(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kU8:
      return body(uint8_t{});
    case DType::kI8:
      return body(int8_t{});
    case DType::kU16:
      return body(uint16_t{});
    case DType::kI16:
      return body(int16_t{});
    case DType::kI32:
      return body(int32_t{});
    case DType::kI64:
      return body(int64_t{});
    default:
      assert(!"an integer dtype");
  }
}

// Toward zero; out of range becomes the nearest value there is, NaN becomes 0 (the plain conversion is
// undefined there).
template <class T>
T truncated(double value) {
  if (!(value == value)) return 0;
  constexpr double low = static_cast<double>(std::numeric_limits<T>::min());
  constexpr double high = static_cast<double>(std::numeric_limits<T>::max());  // int64: rounded up to 2^63
  if (value <= low) return std::numeric_limits<T>::min();
  if (value >= high) return std::numeric_limits<T>::max();
  return static_cast<T>(value);
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

double folded(Fold fold, double acc, double next) {
  switch (fold) {
    case Fold::kMin:
      return std::min(acc, next);
    case Fold::kMax:
      return std::max(acc, next);
    case Fold::kProduct:
      return acc * next;
    default:
      return acc + next;
  }
}

// post * (pre*s0 op pre*s1 ...) / divisor in double.
template <class T>
void reduce_in_double(Fold fold, const ReduceCall& c, int64_t divisor) {
  for (size_t i = 0; i < c.count; ++i) {
    double acc = c.pre * static_cast<double>(element<T>(c.from[0], i));
    for (size_t s = 1; s < c.from_count; ++s)
      acc = folded(fold, acc, c.pre * static_cast<double>(element<T>(c.from[s], i)));
    const T result = truncated<T>(acc * c.post / static_cast<double>(divisor));
    for (size_t d = 0; d < c.to_count; ++d) set_element(c.to[d], i, result);
  }
}

template <class T>
void divide(std::byte* data, size_t count, int64_t divisor) {
  // The quotient of the lowest value by -1 does not fit; no average has a negative divisor.
  assert(divisor > 0);
  for (size_t i = 0; i < count; ++i)
    set_element(data, i, static_cast<T>(static_cast<int64_t>(element<T>(data, i)) / divisor));
}

// Folds in the dtype (wrapping, as a reduction of several hops does), then divides: block by block beside the
// destinations, since these may be sources.
void reduce_and_divide(DType dtype, Fold fold, const ReduceCall& c, int64_t divisor) {
  constexpr size_t kBlockBytes = 4096;
  constexpr size_t kMaxSources = 64;
  alignas(64) std::byte block[kBlockBytes];
  std::byte* const block_at = block;
  const size_t width = size_of(dtype), step = kBlockBytes / width;
  for (size_t at = 0; at < c.count; at += step) {
    const size_t count = std::min(step, c.count - at);
    const std::byte* shifted[kMaxSources];
    // More sources than fit: the first block's result is the first source of the next; integers lose nothing
    // by that.
    for (size_t first = 0; first < c.from_count;) {
      size_t taken = 0;
      if (first > 0) shifted[taken++] = block;
      while (taken < kMaxSources && first < c.from_count) shifted[taken++] = c.from[first++] + at * width;
      if (taken == 1)
        std::memcpy(block, shifted[0], count * width);
      else
        run_kernel(dtype, fold, {&block_at, 1, shifted, taken, count, 1.0, 1.0});
    }
    with_integer(dtype, [&](auto t) { divide<decltype(t)>(block, count, divisor); });
    for (size_t d = 0; d < c.to_count; ++d) std::memcpy(c.to[d] + at * width, block, count * width);
  }
}

template <class T>
void fill(std::byte* data, size_t count, T value) {
  for (size_t i = 0; i < count; ++i) set_element(data, i, value);
}

template <class T>
T neutral_integer(Reduce op) {
  switch (op) {
    case Reduce::kMin:
      return std::numeric_limits<T>::max();
    case Reduce::kMax:
      return std::numeric_limits<T>::min();
    case Reduce::kProduct:
      return 1;
    default:
      return 0;
  }
}

float neutral_float(Reduce op) {
  switch (op) {
    case Reduce::kMin:
      return std::numeric_limits<float>::infinity();
    case Reduce::kMax:
      return -std::numeric_limits<float>::infinity();
    case Reduce::kProduct:
      return 1;
    default:
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
  const Fold fold = fold_of(op);
  if (scaled && !is_float(dtype))
    return with_integer(dtype, [&](auto t) { reduce_in_double<decltype(t)>(fold, call, scale.divisor); });
  if (divided) return reduce_and_divide(dtype, fold, call, scale.divisor);
  run_kernel(dtype, fold, call);
}

void scale_copy(DType dtype, std::byte* destination, const std::byte* source, size_t count, double factor) {
  reduce(dtype, Reduce::kSum, {&destination, 1}, {&source, 1}, count, Scale{factor, 1.0, 1});
}

void finish(DType dtype, std::byte* data, size_t count, const Scale& scale) {
  const std::byte* source = data;
  reduce(dtype, Reduce::kSum, {&data, 1}, {&source, 1}, count, Scale{1.0, scale.post, scale.divisor});
}

void fill_neutral(DType dtype, Reduce op, std::byte* destination, size_t count) {
  switch (dtype) {
    case DType::kBool:
      return fill(destination, count, static_cast<uint8_t>(op == Reduce::kMin || op == Reduce::kProduct));
    case DType::kF16:
      return fill(destination, count, to_float16(neutral_float(op)));
    case DType::kBF16:
      return fill(destination, count, to_bfloat16(neutral_float(op)));
    case DType::kF32:
      return fill(destination, count, neutral_float(op));
    case DType::kF64:
      return fill(destination, count, static_cast<double>(neutral_float(op)));
    default:
      with_integer(dtype, [&](auto t) { fill(destination, count, neutral_integer<decltype(t)>(op)); });
  }
}

void quantize(const BlockFormat& format, const float* in, size_t count, float* residual, std::byte* message) {
  kernels().quantize({in, count, residual, format.block, format.share, message});
}

void dequantize(const BlockFormat& format, const std::byte* message, float* out, size_t count, bool add) {
  kernels().dequantize({message, format.block, format.share, out, count, add});
}

const char* simd_name() { return kernels().name; }

bool select_simd(const char* name) {
  const KernelTable* table = std::strcmp(name, "auto") == 0 ? best_table() : table_named(name);
  if (table) chosen.store(table, std::memory_order_release);
  return table != nullptr;
}

}  // namespace hc
