// The loops of reduce_kernels.h for AVX-512. Compiled with -mavx512f -mavx512bw -mavx512vl -mavx512dq
// -ffp-contract=off; without them (another architecture) there is nothing here.
#include "arithmetic/reduce_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#include <immintrin.h>

namespace hc {
namespace {

// The plain forms of these intrinsics make GCC warn of the undefined register they name; zero-masked, nothing
// is masked.
struct HalfAvx512 {
  [[gnu::always_inline]] static void widen(const std::byte* p, __m512& a, __m512& b) {
    a = _mm512_maskz_cvtph_ps(0xffff, load_vector<__m256i>(p));
    b = _mm512_maskz_cvtph_ps(0xffff, load_vector<__m256i>(p + 32));
  }
  [[gnu::always_inline]] static void narrow(std::byte* p, const __m512& a, const __m512& b) {
    const __m256i low = _mm512_maskz_cvtps_ph(0xffff, a, _MM_FROUND_TO_NEAREST_INT);
    const __m256i high = _mm512_maskz_cvtps_ph(0xffff, b, _MM_FROUND_TO_NEAREST_INT);
    __builtin_memcpy(p, &low, 32);
    __builtin_memcpy(p + 32, &high, 32);
  }
};

}  // namespace

const KernelTable* avx512_kernels() {
  static constexpr KernelTable table = make_table<64, HalfAvx512>("avx512");
  return &table;
}

}  // namespace hc

#else

namespace hc {
const KernelTable* avx512_kernels() { return nullptr; }
}  // namespace hc

#endif
