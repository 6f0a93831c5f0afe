// reduce() against loops over single elements, bit by bit, for every instruction set, dtype, operation,
// number of sources and scale, with odd counts, unaligned pointers, several destinations and destinations
// that are sources.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "arithmetic/reduce.h"
#include "base/half.h"
#include "base/status.h"
#include "tests/elements.h"
#include "tests/sanitized.h"

namespace {

using namespace hc;
using Bytes = std::vector<std::byte>;

const DType kReducedTypes[] = {DType::kBool, DType::kU8,  DType::kI8,   DType::kU16, DType::kI16, DType::kI32,
                               DType::kI64,  DType::kF16, DType::kBF16, DType::kF32, DType::kF64};
const Reduce kOps[] = {Reduce::kAverage, Reduce::kSum, Reduce::kMin, Reduce::kMax,
                       Reduce::kProduct, Reduce::kAnd, Reduce::kOr,  Reduce::kXor};
const Scale kScales[] = {{1, 1, 1}, {1, 1.0 / 3, 1}, {0.7, 1.9, 1}, {1, 1, 3}, {-1.5, -0.3, 1}, {0.5, 1, 3}};

std::vector<const char*> instruction_sets() {
  std::vector<const char*> names;
  for (const char* name : {"scalar", "avx2", "avx512"})
    if (select_simd(name)) names.push_back(name);
  select_simd("auto");
  return names;
}

// One element of each kind, by the definition of reduce.h.
template <class T>
T reduced(Reduce op, T acc, T next) {
  switch (op) {
    case Reduce::kMin:
      return next != next || next < acc ? next : acc;
    case Reduce::kMax:
      return next != next || next > acc ? next : acc;
    case Reduce::kProduct:
      return acc * next;
    case Reduce::kAverage:
    case Reduce::kSum:
      return acc + next;
    case Reduce::kAnd:
    case Reduce::kOr:
    case Reduce::kXor:
    case Reduce::kAdasum:
      break;  // of bits, see integer_element; of whole tensors
  }
  return T(0);
}

// volatile: no fused multiply-add, whatever this file is compiled with.
template <class T>
T float_element(Reduce op, const std::vector<T>& sources, const Scale& scale) {
  const T pre = static_cast<T>(scale.pre), post = static_cast<T>(scale.post);
  volatile T acc = sources[0] * pre;
  for (size_t s = 1; s < sources.size(); ++s) {
    volatile T next = sources[s] * pre;
    acc = reduced<T>(op, acc, next);
  }
  acc = acc * post;
  return std::isnan(acc) ? std::numeric_limits<T>::quiet_NaN() : T(acc);
}

// Toward zero in int64, of which the low bits are kept.
template <class T>
T wrapped(double value) {
  if (std::isnan(value)) return 0;
  const double whole = std::trunc(value);
  if (whole >= 0x1p63) return static_cast<T>(std::numeric_limits<int64_t>::max());
  if (whole < -0x1p63) return static_cast<T>(std::numeric_limits<int64_t>::min());
  return static_cast<T>(static_cast<int64_t>(whole));
}
template <class T>
T scaled(T value, double factor) {
  return factor == 1 ? value : wrapped<T>(static_cast<double>(value) * factor);
}

// Every step ends in the dtype: each source scaled, the reduction that wraps, the result scaled, then divided.
template <class T>
T integer_element(Reduce op, const std::vector<T>& sources, const Scale& scale) {
  T acc = scaled(sources[0], scale.pre);
  for (size_t s = 1; s < sources.size(); ++s) {
    const T next = scaled(sources[s], scale.pre);
    const auto a = static_cast<uint64_t>(acc), b = static_cast<uint64_t>(next);
    if (op == Reduce::kMin || op == Reduce::kMax)
      acc = reduced<T>(op, acc, next);
    else
      acc = static_cast<T>(op == Reduce::kProduct ? a * b
                           : op == Reduce::kAnd   ? a & b
                           : op == Reduce::kOr    ? a | b
                           : op == Reduce::kXor   ? a ^ b
                                                  : a + b);
  }
  return static_cast<T>(static_cast<int64_t>(scaled(acc, scale.post)) / scale.divisor);
}

template <class T>
std::vector<T> elements(const std::vector<Bytes>& sources, size_t i) {
  std::vector<T> out(sources.size());
  for (size_t s = 0; s < sources.size(); ++s) std::memcpy(&out[s], sources[s].data() + i * sizeof(T), sizeof(T));
  return out;
}

template <class H, class Narrow>
H half_element(Reduce op, const std::vector<H>& sources, const Scale& scale, Narrow&& narrow) {
  std::vector<float> wide;
  for (H h : sources) wide.push_back(to_float(h));
  return narrow(float_element(op, wide, scale));
}

bool bool_element(Reduce op, const std::vector<uint8_t>& sources) {
  bool any = false, all = true, odd = false;
  for (uint8_t s : sources) {
    any |= s != 0;
    all &= s != 0;
    odd ^= s != 0;
  }
  if (op == Reduce::kXor) return odd;
  return op == Reduce::kMin || op == Reduce::kProduct || op == Reduce::kAnd ? all : any;
}

Bytes expected(DType dtype, Reduce op, const std::vector<Bytes>& s, size_t count, const Scale& scale) {
  if (s.size() == 1 && scale.pre == 1 && scale.post == 1 && (scale.divisor == 1 || is_float(dtype))) return s[0];
  Bytes out(count * size_of(dtype));
  with_element(dtype, [&]<class T>(T value) {
    for (size_t i = 0; i < count; ++i) {
      const std::vector<T> sources = elements<T>(s, i);
      if constexpr (std::is_same_v<T, Float16>)
        value = half_element(op, sources, scale, to_float16);
      else if constexpr (std::is_same_v<T, BFloat16>)
        value = half_element(op, sources, scale, to_bfloat16);
      else if constexpr (std::is_floating_point_v<T>)
        value = float_element(op, sources, scale);
      else if (dtype == DType::kBool)
        value = static_cast<T>(bool_element(op, elements<uint8_t>(s, i)));
      else
        value = integer_element(op, sources, scale);
      std::memcpy(out.data() + i * sizeof value, &value, sizeof value);
    }
  });
  return out;
}

// Half of the elements are any bits at all (NaN, infinities, denormals among them), half of moderate size;
// the edges of the format come often.
class Data {
 public:
  Bytes make(DType dtype, size_t count) {
    Bytes out(count * size_of(dtype));
    for (size_t i = 0; i < out.size(); i += sizeof(uint32_t)) {
      const auto bits = static_cast<uint32_t>(random_());
      std::memcpy(out.data() + i, &bits, std::min(sizeof bits, out.size() - i));
    }
    if (dtype == DType::kBool) {
      for (std::byte& b : out) b &= std::byte{1};
    }
    if (is_float(dtype)) {
      for (size_t i = 0; i < count; ++i) shape(dtype, out.data() + i * size_of(dtype));
    }
    return out;
  }
  size_t below(size_t n) { return random_() % n; }

 private:
  void shape(DType dtype, std::byte* at) {
    const float edges[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, -NAN, 1e-40f, -3e-45f, 65504.0f, 3.4e38f, 6e-8f};
    const size_t kind = below(8);
    if (kind < 4) return;
    const float value = kind == 4 ? edges[below(std::size(edges))] : std::normal_distribution<float>()(random_);
    store(dtype, at, value);
  }
  std::mt19937 random_{20260131};
};

// `bytes` at an odd place between two fences that nobody may write on.
class Fenced {
 public:
  Fenced(const Bytes& content, size_t shift) : memory_(shift + content.size() + 2 * kFence, kMark), shift_(shift) {
    bytes_ = content.size();
    if (bytes_) std::memcpy(data(), content.data(), bytes_);
  }
  std::byte* data() { return memory_.data() + kFence + shift_; }
  bool holds(const Bytes& content) {
    return content.empty() || std::memcmp(data(), content.data(), content.size()) == 0;
  }
  bool intact() const {
    size_t marks = 0;
    for (size_t i = 0; i < memory_.size(); ++i) {
      const bool inside = i >= kFence + shift_ && i < kFence + shift_ + bytes_;
      marks += !inside && memory_[i] == kMark;
    }
    return marks == memory_.size() - bytes_;
  }

 private:
  static constexpr size_t kFence = 64;
  static constexpr std::byte kMark{0xa5};
  Bytes memory_;
  size_t shift_, bytes_ = 0;
};

struct Case {
  DType dtype;
  Reduce op;
  size_t sources, count;
  Scale scale;
  std::string text(const char* simd) const {
    return text_of(simd, " ", name_of(dtype), " ", name_of(op), " of ", sources, " x ", count, ", scale ", scale.pre,
                   " ", scale.post, " /", scale.divisor);
  }
};

// Runs one case on every instruction set, with shifts, aliases and destinations drawn from `data`.
void check_case(const Case& c, Data& data, const std::vector<const char*>& simds) {
  std::vector<Bytes> inputs;
  for (size_t s = 0; s < c.sources; ++s) inputs.push_back(data.make(c.dtype, c.count));
  const Bytes right = expected(c.dtype, c.op, inputs, c.count, c.scale);
  const size_t extra = data.below(3), aliased = data.below(extra == 0 ? c.sources : c.sources + 1);
  for (const char* simd : simds) {
    std::vector<Fenced> memory;
    for (const Bytes& input : inputs) memory.emplace_back(input, data.below(70));
    for (size_t d = 0; d < extra; ++d) memory.emplace_back(Bytes(right.size(), std::byte{0x77}), data.below(70));

    std::vector<const std::byte*> from;
    std::vector<std::byte*> to;
    for (size_t s = 0; s < c.sources; ++s) from.push_back(memory[s].data());
    for (size_t d = 0; d < extra; ++d) to.push_back(memory[c.sources + d].data());
    if (aliased < c.sources) to.push_back(memory[aliased].data());

    select_simd(simd);
    reduce(c.dtype, c.op, to, from, c.count, c.scale);
    bool good = true;
    for (size_t m = 0; m < memory.size(); ++m) {
      const bool written = m >= c.sources || m == aliased;
      good = good && memory[m].intact() && memory[m].holds(written ? right : inputs[m]);
    }
    CHECK_MESSAGE(good, c.text(simd));
  }
  select_simd("auto");
}

}  // namespace

TEST_CASE("every instruction set gives the bits of the definition") {
  const auto simds = instruction_sets();
  MESSAGE("instruction sets: ", simds.size());
  Data data;
  const size_t counts[] = {0, 1, 3, 17, 63, 130, 517};
  // Each dtype and operation meets every number of sources with every count, and every scale with both, by turns.
  constexpr size_t kTurns = kSanitized ? 6 : 3;
  for (DType dtype : kReducedTypes)
    for (Reduce op : kOps)
      for (size_t s = 0; s < std::size(kScales) && takes(reduced_as(op), dtype); ++s)
        for (size_t sources : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13})
          for (size_t c = 0; c < std::size(counts); ++c)
            if ((s + sources + c) % kTurns == 0) check_case({dtype, op, sources, counts[c], kScales[s]}, data, simds);
}

TEST_CASE("many sources keep their order") {
  const auto simds = instruction_sets();
  Data data;
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kI32, DType::kU8})
    for (const Scale& scale : kScales) check_case({dtype, Reduce::kSum, 150, 1100, scale}, data, simds);
}

TEST_CASE("a byte that is neither 0 nor 1 is true") {
  for (const char* simd : instruction_sets()) {
    REQUIRE(select_simd(simd));
    const Bytes two(100, std::byte{2}), one(100, std::byte{1}), right(100, std::byte{1});
    Bytes out(100);
    const std::byte* from[] = {two.data(), one.data()};
    std::byte* to = out.data();
    for (Reduce op : {Reduce::kSum, Reduce::kMax, Reduce::kMin, Reduce::kProduct, Reduce::kAnd, Reduce::kOr}) {
      reduce(DType::kBool, op, {&to, 1}, from, 100, {});
      CHECK(out == right);
    }
    reduce(DType::kBool, Reduce::kXor, {&to, 1}, from, 100, {});
    CHECK(out == Bytes(100));
  }
  select_simd("auto");
}

TEST_CASE("the identity element changes nothing") {
  Data data;
  const size_t count = 99;
  for (DType dtype : kReducedTypes)
    for (Reduce op : kOps) {
      if (!takes(op, dtype)) continue;
      // Numbers that addition of zero and multiplication by one leave alone bit by bit: no NaN, no negative
      // zero.
      Bytes values(count * size_of(dtype));
      std::byte* at = values.data();
      fill_identity(dtype, Reduce::kProduct, at, count);
      if (dtype != DType::kBool) scale_copy(dtype, at, at, count, 5);
      Bytes identity(values.size()), out(values.size());
      fill_identity(dtype, op, identity.data(), count);
      const std::byte* from[] = {identity.data(), values.data()};
      std::byte* to = out.data();
      reduce(dtype, op, {&to, 1}, from, count, {});
      CHECK_MESSAGE(out == values, name_of(dtype) << " " << name_of(op));
    }
}

TEST_CASE("scale_copy and finish scale once, integers in double toward zero and wrapping") {
  int32_t in[] = {7, -7, 2147483647, -2147483647 - 1, 0}, out[5];
  auto* from = reinterpret_cast<std::byte*>(in);
  auto* to = reinterpret_cast<std::byte*>(out);
  scale_copy(DType::kI32, to, from, 5, 0.5);
  CHECK((out[0] == 3 && out[1] == -3 && out[2] == 1073741823 && out[3] == -1073741824 && out[4] == 0));
  scale_copy(DType::kI32, to, from, 5, 2);  // out of range: the low bits
  CHECK((out[0] == 14 && out[2] == -2 && out[3] == 0));
  scale_copy(DType::kI32, to, from, 5, std::nan(""));
  CHECK((out[0] == 0 && out[2] == 0));
  scale_copy(DType::kI32, to, from, 5, 1e300);  // beyond int64 too: the nearest there is, then its low bits
  CHECK((out[0] == -1 && out[1] == 0));

  uint8_t small[] = {1, 2, 5, 255};
  auto* bytes = reinterpret_cast<std::byte*>(small);
  scale_copy(DType::kU8, bytes, bytes, 4, -1.5);
  CHECK((small[0] == 255 && small[1] == 253 && small[2] == 249 && small[3] == static_cast<uint8_t>(-382)));

  int64_t wide[] = {int64_t{1} << 62, -(int64_t{1} << 62) - 1, 0, (int64_t{1} << 60) + 1};
  auto* widest = reinterpret_cast<std::byte*>(wide);
  scale_copy(DType::kI64, widest, widest, 4, 4);  // nothing is wider than int64: the nearest there is
  CHECK((wide[0] == INT64_MAX && wide[1] == INT64_MIN && wide[3] == int64_t{1} << 62));
  scale_copy(DType::kI64, widest, widest, 4, INFINITY);
  CHECK((wide[0] == INT64_MAX && wide[1] == INT64_MIN && wide[2] == 0));

  finish(DType::kI32, from, 5, {0.25, 1, 2});  // pre was applied on the way; the divisor is not in double
  CHECK((in[0] == 3 && in[1] == -3 && in[2] == 1073741823 && in[3] == -1073741824));

  int64_t big[] = {(int64_t{1} << 62) + 1, -((int64_t{1} << 62) + 3)};
  finish(DType::kI64, reinterpret_cast<std::byte*>(big), 2, {1, 1, 2});
  CHECK((big[0] == int64_t{1} << 61 && big[1] == -((int64_t{1} << 61) + 1)));

  float value[] = {3, -1e38f};
  finish(DType::kF32, reinterpret_cast<std::byte*>(value), 2, {1, 0.25, 4});  // floats have no divisor
  CHECK((value[0] == 0.75f && value[1] == -2.5e37f));

  uint8_t flags[] = {1, 0};
  scale_copy(DType::kBool, reinterpret_cast<std::byte*>(flags), reinterpret_cast<std::byte*>(flags), 2, 0.5);
  CHECK((flags[0] == 1 && flags[1] == 0));
}

TEST_CASE("an instruction set is chosen by name, and one that is not there is refused") {
  CHECK(select_simd("scalar"));
  CHECK(std::string(simd_name()) == "scalar");
  CHECK_FALSE(select_simd("neon2"));
  CHECK(std::string(simd_name()) == "scalar");
  CHECK(select_simd("auto"));
  const auto all = instruction_sets();
  CHECK(std::string(simd_name()) == all.back());
}
