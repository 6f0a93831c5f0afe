// quantize() and dequantize() against loops over single elements, bit by bit, for every instruction set.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "arithmetic/quantize.h"
#include "arithmetic/reduce.h"

namespace {

using namespace hc;

std::vector<float> numbers(size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> made(count);
  for (float& one : made) one = normal(generator) * std::exp2(static_cast<float>(generator() % 20) - 10);
  return made;
}

size_t bytes_of_message(const BlockFormat& f) { return f.shard / f.block * sizeof(float) + f.shard; }

// By the definition; volatile keeps the compiler from fusing.
std::vector<std::byte> defined(const BlockFormat& f, const std::vector<float>& in, std::vector<float>* residual) {
  std::vector<std::byte> message(bytes_of_message(f));
  for (size_t b = 0; b < f.shard / f.block; ++b) {
    const size_t begin = std::min(in.size(), b * f.block), end = std::min(in.size(), (b + 1) * f.block);
    float top = 0;
    bool finite = true;
    for (size_t i = begin; i < end; ++i) {
      if (residual) (*residual)[i] += in[i];
      const float x = residual ? (*residual)[i] : in[i];
      finite = finite && std::isfinite(x);
      top = std::max(top, std::fabs(x));
    }
    const float scale = finite ? top / 127.0f : std::numeric_limits<float>::quiet_NaN();
    std::memcpy(message.data() + 4 * b, &scale, 4);
    for (size_t i = begin; i < end; ++i) {
      const float x = residual ? (*residual)[i] : in[i];
      const float whole = finite ? std::nearbyint(x / (scale == 0 ? 1.0f : scale)) : 0.0f;
      volatile float product = whole * scale;
      if (residual) (*residual)[i] = finite ? x - product : 0.0f;
      message[4 * (f.shard / f.block) + i] = static_cast<std::byte>(static_cast<int8_t>(whole));
    }
  }
  return message;
}

const char* const kSets[] = {"scalar", "avx2", "avx512"};

TEST_CASE("quantize: the same bits as by the definition, with every instruction set") {
  for (const char* set : kSets) {
    if (!select_simd(set)) continue;
    CAPTURE(set);
    for (size_t block : {1u, 3u, 64u, 100u, 256u})
      for (size_t count : {size_t{0}, size_t{1}, block - 1, 3 * block, 3 * block + 2}) {
        const BlockFormat f{block, 5 * block};
        CAPTURE(block);
        CAPTURE(count);
        const std::vector<float> in = numbers(count, 7);
        std::vector<float> residual = numbers(count, 8), wanted_residual = residual;
        for (bool keeps : {false, true}) {
          std::vector<std::byte> message(bytes_of_message(f) + 1, std::byte{0x55});
          quantize(f, in.data(), count, keeps ? residual.data() : nullptr, message.data());
          const auto wanted = defined(f, in, keeps ? &wanted_residual : nullptr);
          CHECK(std::memcmp(message.data(), wanted.data(), wanted.size()) == 0);
          CHECK(message.back() == std::byte{0x55});
          CHECK(residual == wanted_residual);
          std::vector<float> out(count, 2.0f), sum = numbers(count, 9), before = sum;
          dequantize(f, message.data(), out.data(), count, false);
          dequantize(f, message.data(), sum.data(), count, true);
          for (size_t i = 0; i < count; ++i) {
            float scale;
            std::memcpy(&scale, message.data() + 4 * (i / block), 4);
            volatile float value = static_cast<float>(static_cast<int8_t>(message[4 * 5 + i])) * scale;
            REQUIRE(out[i] == value);
            volatile float total = before[i] + value;
            REQUIRE(sum[i] == total);
          }
        }
      }
  }
  select_simd("auto");
}

TEST_CASE("quantize: the nearest of 255 steps; a block that is not finite arrives as NaN and harms no other") {
  for (const char* set : kSets) {
    if (!select_simd(set)) continue;
    CAPTURE(set);
    const BlockFormat f{64, 192};
    std::vector<float> in = numbers(192, 3), residual(192, 0.0f), out(192);
    for (size_t i = 0; i < 64; ++i) in[i] = static_cast<float>(i) - 20;  // largest 43
    in[70] = std::numeric_limits<float>::infinity();
    in[80] = std::numeric_limits<float>::quiet_NaN();
    std::fill(in.begin() + 128, in.end(), 0.0f);
    std::vector<std::byte> message(bytes_of_message(f));
    quantize(f, in.data(), 192, residual.data(), message.data());
    dequantize(f, message.data(), out.data(), 192, false);
    for (size_t i = 0; i < 64; ++i) CHECK(std::fabs(out[i] - in[i]) <= 43.0f / 127 / 2 * 1.0001f);
    for (size_t i = 64; i < 128; ++i) CHECK((std::isnan(out[i]) && residual[i] == 0.0f));
    for (size_t i = 128; i < 192; ++i) CHECK((out[i] == 0.0f && residual[i] == 0.0f));
  }
  select_simd("auto");
}

}  // namespace
