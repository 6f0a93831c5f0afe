#include "base/hash.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hc {
namespace {

constexpr uint64_t kStride = 0x9e3779b97f4a7c15u;  // between the keys of two blocks

#if defined(__x86_64__)

// Every x86-64 processor has these.
void take_in_sse2(MemoryHash::Lanes* lanes, const std::byte* at, size_t blocks) {
  __m128i sum[4], key[4];
  std::memcpy(sum, lanes->sum, sizeof sum);
  std::memcpy(key, lanes->key, sizeof key);
  const __m128i stride = _mm_set1_epi64x(static_cast<int64_t>(kStride));
  for (; blocks > 0; --blocks, at += MemoryHash::kBlock)
    for (int i = 0; i < 4; ++i) {
      const __m128i word = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + 16 * i));
      const __m128i masked = _mm_xor_si128(word, key[i]);
      const __m128i product = _mm_mul_epu32(masked, _mm_srli_epi64(masked, 32));
      sum[i] = _mm_add_epi64(sum[i], _mm_add_epi64(product, _mm_shuffle_epi32(word, 0x4e)));
      key[i] = _mm_add_epi64(key[i], stride);
    }
  std::memcpy(lanes->sum, sum, sizeof sum);
  std::memcpy(lanes->key, key, sizeof key);
}

__attribute__((target("avx2"))) void take_in_avx2(MemoryHash::Lanes* lanes, const std::byte* at, size_t blocks) {
  __m256i sum[2], key[2];
  std::memcpy(sum, lanes->sum, sizeof sum);
  std::memcpy(key, lanes->key, sizeof key);
  const __m256i stride = _mm256_set1_epi64x(static_cast<int64_t>(kStride));
  for (; blocks > 0; --blocks, at += MemoryHash::kBlock)
    for (int i = 0; i < 2; ++i) {
      const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 32 * i));
      const __m256i masked = _mm256_xor_si256(word, key[i]);
      const __m256i product = _mm256_mul_epu32(masked, _mm256_srli_epi64(masked, 32));
      sum[i] = _mm256_add_epi64(sum[i], _mm256_add_epi64(product, _mm256_shuffle_epi32(word, 0x4e)));
      key[i] = _mm256_add_epi64(key[i], stride);
    }
  std::memcpy(lanes->sum, sum, sizeof sum);
  std::memcpy(lanes->key, key, sizeof key);
}

#endif

void take_in_plainly(MemoryHash::Lanes* lanes, const std::byte* at, size_t blocks) {
  for (; blocks > 0; --blocks, at += MemoryHash::kBlock) {
    uint64_t word[8];
    std::memcpy(word, at, sizeof word);
    for (size_t i = 0; i < 8; ++i) {
      const uint64_t masked = word[i] ^ lanes->key[i];
      lanes->sum[i] += (masked & 0xffffffffu) * (masked >> 32) + word[i ^ 1];
      lanes->key[i] += kStride;
    }
  }
}

}  // namespace

std::vector<MemoryHash::TakeIn> MemoryHash::loops() {
  std::vector<TakeIn> found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) found.push_back(take_in_avx2);
  found.push_back(take_in_sse2);
#endif
  found.push_back(take_in_plainly);
  return found;
}

}  // namespace hc
