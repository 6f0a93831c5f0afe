// The loops of reduce_kernels.h for AVX2 with F16C. Compiled with -mavx2 -mf16c -ffp-contract=off; without
// them (another architecture) there is nothing here.
#include "arithmetic/reduce_kernels.h"

#if defined(__AVX2__) && defined(__F16C__)

#include <immintrin.h>

namespace hc {
namespace {

struct HalfAvx2 {
  [[gnu::always_inline]] static void widen(const std::byte* p, __m256& a, __m256& b) {
    a = _mm256_cvtph_ps(load_vector<__m128i>(p));
    b = _mm256_cvtph_ps(load_vector<__m128i>(p + 16));
  }
  [[gnu::always_inline]] static void narrow(std::byte* p, const __m256& a, const __m256& b) {
    const __m128i low = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT);
    const __m128i high = _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT);
    __builtin_memcpy(p, &low, 16);
    __builtin_memcpy(p + 16, &high, 16);
  }
};

}  // namespace

const KernelTable* avx2_kernels() {
  static constexpr KernelTable table = make_table<32, HalfAvx2>("avx2");
  return &table;
}

}  // namespace hc

#else

namespace hc {
const KernelTable* avx2_kernels() { return nullptr; }
}  // namespace hc

#endif
