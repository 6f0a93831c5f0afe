// One element of any dtype that is reduced, as a float64 and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/dtype.h"
#include "base/half.h"

namespace hc {

inline double load(DType t, const std::byte* p) {
  auto as = [&](auto value) {
    std::memcpy(&value, p, sizeof value);
    return value;
  };
  switch (t) {
    case DType::kBool:
    case DType::kU8:
      return as(uint8_t{});
    case DType::kI8:
      return as(int8_t{});
    case DType::kU16:
      return as(uint16_t{});
    case DType::kI16:
      return as(int16_t{});
    case DType::kI32:
      return as(int32_t{});
    case DType::kI64:
      return static_cast<double>(as(int64_t{}));
    case DType::kF16:
      return to_float(as(Float16{}));
    case DType::kBF16:
      return to_float(as(BFloat16{}));
    case DType::kF32:
      return as(float{});
    case DType::kF64:
      return as(double{});
  }
  return 0;
}
inline void store(DType t, std::byte* p, double v) {
  auto put = [&](auto value) { std::memcpy(p, &value, sizeof value); };
  switch (t) {
    case DType::kBool:
    case DType::kU8:
      return put(static_cast<uint8_t>(v));
    case DType::kI8:
      return put(static_cast<int8_t>(v));
    case DType::kU16:
      return put(static_cast<uint16_t>(v));
    case DType::kI16:
      return put(static_cast<int16_t>(v));
    case DType::kI32:
      return put(static_cast<int32_t>(v));
    case DType::kI64:
      return put(static_cast<int64_t>(v));
    case DType::kF16:
      return put(to_float16(static_cast<float>(v)));
    case DType::kBF16:
      return put(to_bfloat16(static_cast<float>(v)));
    case DType::kF32:
      return put(static_cast<float>(v));
    case DType::kF64:
      return put(v);
  }
}

}  // namespace hc
