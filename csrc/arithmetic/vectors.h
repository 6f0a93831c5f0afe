// The compiler's vector types, for the loops that are compiled once per instruction set (reduce_kernels.h,
// quantize_kernels.h). In an unnamed namespace, as those files demand.
#pragma once

#include <cstddef>

namespace hc {
namespace {

// Width bytes of T. GCC's vectors work lane by lane with +, *, < and ?:, and integers of T's width: nothing
// is promoted.
template <class T, size_t Width>
struct VectorOf {
  typedef T type __attribute__((vector_size(Width)));
};

template <class V>
[[gnu::always_inline]] inline V load_vector(const std::byte* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

}  // namespace
}  // namespace hc
