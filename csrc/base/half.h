// float16 (IEEE 754 binary16) and bfloat16 to and from float32, one element at a time: round to nearest, ties
// to even; infinities, denormals and signed zeros exact; a NaN stays a NaN, made quiet, with the upper bits
// of its payload. These are the rules of the CPU's own conversions, so that vector code gives the same bits.
// Thread: any.
#pragma once

#include <bit>
#include <cstdint>

#include "base/dtype.h"

namespace hc {

inline float to_float(BFloat16 value) { return std::bit_cast<float>(uint32_t{value.bits} << 16); }

inline BFloat16 to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  const uint32_t odd = (bits >> 16) & 1u;  // half of the last place minus one, plus one for odd: ties to even
  return {static_cast<uint16_t>((bits + 0x7fffu + odd) >> 16)};
}

inline float to_float(Float16 value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, or NaN made quiet
    const uint32_t fraction = (magnitude & 0x3ffu) << 13;
    return std::bit_cast<float>(sign | 0x7f800000u | fraction | (fraction ? 0x400000u : 0u));
  }
  if (magnitude >= 0x400u) return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
  const float tiny = static_cast<float>(magnitude) * 0x1p-24f;  // zero or denormal: exact in float32
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(tiny));
}

inline Float16 to_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    const uint32_t sum = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f);
    return {static_cast<uint16_t>(sign | (sum - 0x3f000000u))};
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return {static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfffu + odd) >> 13))};
}

}  // namespace hc
