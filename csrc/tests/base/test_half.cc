// 16-bit floats against the definition of the formats, for all 65,536 values and the points between them.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>

#include "base/half.h"

namespace {

using namespace hc;

struct Format {
  int exponent_bits, fraction_bits;
};
constexpr Format kHalf{5, 10}, kBrain{8, 7};

// The value by definition, in double.
double value_of(Format f, uint16_t bits) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1, top = (1 << f.exponent_bits) - 1;
  const int exponent = (bits & 0x7fff) >> f.fraction_bits, fraction = bits & ((1 << f.fraction_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == top) return fraction ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - f.fraction_bits);
  return sign * std::ldexp(fraction + (1 << f.fraction_bits), exponent - bias - f.fraction_bits);
}

uint16_t encode(Format f, float value) {
  return f.exponent_bits == 5 ? to_float16(value).bits : to_bfloat16(value).bits;
}
float decode(Format f, uint16_t bits) {
  return f.exponent_bits == 5 ? to_float(Float16{bits}) : to_float(BFloat16{bits});
}

int wrong_decodings(Format f) {
  int wrong = 0;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const double expected = value_of(f, static_cast<uint16_t>(bits));
    const float got = decode(f, static_cast<uint16_t>(bits));
    const bool same =
        std::isnan(expected) ? std::isnan(got) : got == expected && std::signbit(got) == std::signbit(expected);
    wrong += !same;
  }
  return wrong;
}

int wrong_round_trips(Format f) {
  int wrong = 0;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint16_t back = encode(f, decode(f, static_cast<uint16_t>(bits)));
    const bool nan = std::isnan(value_of(f, static_cast<uint16_t>(bits)));
    const uint16_t quiet = static_cast<uint16_t>(1u << (f.fraction_bits - 1));
    if (back != (nan ? bits | quiet : bits)) ++wrong;
  }
  return wrong;
}

// Between neighbours low and high: the middle goes to the even one, anything else to the nearer.
int wrong_roundings(Format f) {
  int wrong = 0;
  const uint16_t infinity = static_cast<uint16_t>(((1 << f.exponent_bits) - 1) << f.fraction_bits);
  for (uint16_t low = 0; low < infinity; ++low) {
    const uint16_t high = static_cast<uint16_t>(low + 1), even = low & 1 ? high : low;
    // The neighbour above the largest finite value is where the next one would be.
    const double gap = low + 1 == infinity ? value_of(f, low) - value_of(f, static_cast<uint16_t>(low - 1))
                                           : value_of(f, high) - value_of(f, low);
    const float middle = static_cast<float>(value_of(f, low) + gap / 2);
    wrong += encode(f, middle) != even;
    wrong += encode(f, -middle) != (even | 0x8000);
    wrong += encode(f, std::nextafter(middle, 0.0f)) != low;
    wrong += encode(f, std::nextafter(middle, std::numeric_limits<float>::infinity())) != high;
  }
  return wrong;
}

}  // namespace

TEST_CASE("every 16-bit float has the value that its format defines") {
  CHECK(wrong_decodings(kHalf) == 0);
  CHECK(wrong_decodings(kBrain) == 0);
}

TEST_CASE("every 16-bit float survives the way to float32 and back, NaN made quiet") {
  CHECK(wrong_round_trips(kHalf) == 0);
  CHECK(wrong_round_trips(kBrain) == 0);
}

TEST_CASE("float32 rounds to the nearest 16-bit float, ties to even, denormals and overflow included") {
  CHECK(wrong_roundings(kHalf) == 0);
  CHECK(wrong_roundings(kBrain) == 0);
}

TEST_CASE("a NaN of float32 never becomes an infinity or a number") {
  std::mt19937 random(7);
  int lost = 0;
  for (int i = 0; i < 100000; ++i) {
    const auto bits = static_cast<uint32_t>(random());
    const uint32_t fraction = ((bits & 0x7fffffu) >> (random() % 23)) | 1u;
    const float nan = std::bit_cast<float>((bits & 0x80000000u) | 0x7f800000u | fraction);
    lost += !std::isnan(to_float(to_float16(nan))) + !std::isnan(to_float(to_bfloat16(nan)));
  }
  CHECK(lost == 0);
}
