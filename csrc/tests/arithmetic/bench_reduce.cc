// Speed of reduce() beside memcpy on one core, in GB/s of bytes read: per dtype, number of sources, footprint
// and instruction set. Best of several rounds. `bench_reduce [KiB per buffer ...]`.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "arithmetic/reduce.h"

namespace {

using namespace hc;

constexpr int kMaxSources = 9;

// Seconds of one call: the best of `rounds`, each long enough for the clock.
template <class Body>
double best_seconds(size_t bytes, Body&& body) {
  const int rounds = 9, calls = static_cast<int>(1 + (24u << 20) / bytes);
  double best = 1e9;
  for (int round = 0; round < rounds; ++round) {
    auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) body();
    std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    best = std::min(best, taken.count() / calls);
  }
  return best;
}

struct Buffers {
  explicit Buffers(size_t bytes) : memory((kMaxSources + 1) * (bytes + 4096) + 4096), bytes(bytes) {
    size_t at = 4096 - reinterpret_cast<uintptr_t>(memory.data()) % 4096;
    for (int i = 0; i <= kMaxSources; ++i, at += bytes + 4096) each.push_back(memory.data() + at + 192 * i);
  }
  std::vector<std::byte> memory;
  std::vector<std::byte*> each;
  size_t bytes;
};

double reduce_rate(Buffers& b, DType dtype, int sources, const Scale& scale) {
  const size_t count = b.bytes / size_of(dtype);
  for (int i = 0; i <= kMaxSources; ++i) fill_identity(dtype, Reduce::kProduct, b.each[i], count);
  std::byte* to = b.each[kMaxSources];
  std::vector<const std::byte*> from(b.each.begin(), b.each.begin() + sources);
  double seconds = best_seconds(b.bytes, [&] { reduce(dtype, Reduce::kSum, {&to, 1}, from, count, scale); });
  return static_cast<double>(b.bytes) * sources / seconds * 1e-9;
}

void report(size_t bytes) {
  Buffers b(bytes);
  double copy = best_seconds(bytes, [&] { std::memcpy(b.each[1], b.each[0], bytes); });
  std::printf("%zu KiB per buffer: memcpy %.1f GB/s\n", bytes >> 10, static_cast<double>(bytes) / copy * 1e-9);
  for (const char* simd : {"avx512", "avx2", "scalar"}) {
    if (!select_simd(simd)) continue;
    for (DType dtype : {DType::kF32, DType::kF64, DType::kF16, DType::kBF16, DType::kI32, DType::kU8}) {
      std::printf("  %-7s %-9s", simd, name_of(dtype));
      for (int sources : {2, 3, 4, 8, 9}) std::printf("  %d: %5.1f", sources, reduce_rate(b, dtype, sources, {}));
      if (is_float(dtype)) std::printf("  2 averaged: %5.1f", reduce_rate(b, dtype, 2, {1.0, 0.5, 1}));
      std::printf("\n");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    for (size_t kib : {32, 256, 4096, 65536}) report(kib << 10);
    return 0;
  }
  for (int i = 1; i < argc; ++i) report(static_cast<size_t>(std::atol(argv[i])) << 10);
}
