// The C++ type of any dtype that is reduced; one element of it as a float64 and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/dtype.h"
#include "base/half.h"

namespace hc {

// Calls body(T{}) with the C++ type of a dtype.
template <class Body>
auto with_element(DType t, Body&& body) {
  switch (t) {
    case DType::kBool:
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
    case DType::kF16:
      return body(Float16{});
    case DType::kBF16:
      return body(BFloat16{});
    case DType::kF32:
      return body(float{});
    case DType::kF64:
      break;
  }
  return body(double{});
}

inline double load(DType t, const std::byte* p) {
  return with_element(t, [&]<class T>(T value) -> double {
    std::memcpy(&value, p, sizeof value);
    if constexpr (std::is_arithmetic_v<T>)
      return static_cast<double>(value);
    else
      return to_float(value);
  });
}
inline void store(DType t, std::byte* p, double v) {
  with_element(t, [&]<class T>(T value) {
    if constexpr (std::is_same_v<T, Float16>)
      value = to_float16(static_cast<float>(v));
    else if constexpr (std::is_same_v<T, BFloat16>)
      value = to_bfloat16(static_cast<float>(v));
    else
      value = static_cast<T>(v);
    std::memcpy(p, &value, sizeof value);
  });
}

}  // namespace hc
