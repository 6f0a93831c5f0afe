#include "base/sha256.h"

#include <sys/random.h>
#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

namespace hc {
namespace {

constexpr size_t kBlockBytes = 64;

// Fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t big_endian(const uint8_t* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | uint32_t{p[3]};
}

}  // namespace

void Sha256::compress(const uint8_t* block) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) w[i] = big_endian(block + 4 * i);
  for (int i = 16; i < 64; ++i) {
    uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (int i = 0; i < 64; ++i) {
    uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const uint32_t sum[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state_[i] += sum[i];
}

void Sha256::update(std::span<const uint8_t> data) {
  total_bytes_ += data.size();
  while (!data.empty()) {
    if (pending_bytes_ == 0 && data.size() >= kBlockBytes) {
      compress(data.data());
      data = data.subspan(kBlockBytes);
      continue;
    }
    size_t take = std::min(kBlockBytes - pending_bytes_, data.size());
    std::memcpy(pending_.data() + pending_bytes_, data.data(), take);
    pending_bytes_ += take;
    data = data.subspan(take);
    if (pending_bytes_ == kBlockBytes) {
      compress(pending_.data());
      pending_bytes_ = 0;
    }
  }
}

Digest Sha256::finish() {
  const uint64_t bits = total_bytes_ * 8;
  uint8_t tail[2 * kBlockBytes] = {0x80};  // 0x80, zeros up to 8 bytes before a block's end, the length in bits
  size_t pad = (pending_bytes_ < 56 ? 56 : 120) - pending_bytes_;
  for (int i = 0; i < 8; ++i) tail[pad + static_cast<size_t>(i)] = static_cast<uint8_t>(bits >> (56 - 8 * i));
  update({tail, pad + 8});
  Digest out;
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  return out;
}

Digest sha256(std::span<const uint8_t> data) {
  Sha256 hash;
  hash.update(data);
  return hash.finish();
}

Digest hmac_sha256(std::span<const uint8_t> key, std::initializer_list<std::span<const uint8_t>> parts) {
  std::array<uint8_t, kBlockBytes> padded{};
  Digest short_key;
  if (key.size() > kBlockBytes) {
    short_key = sha256(key);
    key = short_key;
  }
  std::copy(key.begin(), key.end(), padded.begin());

  std::array<uint8_t, kBlockBytes> inner_key = padded, outer_key = padded;
  for (uint8_t& b : inner_key) b ^= 0x36;
  for (uint8_t& b : outer_key) b ^= 0x5c;
  Sha256 inner, outer;
  inner.update(inner_key);
  for (auto part : parts) inner.update(part);
  outer.update(outer_key);
  outer.update(inner.finish());
  return outer.finish();
}

bool equal_in_constant_time(std::span<const uint8_t> a, std::span<const uint8_t> b) {
  if (a.size() != b.size()) return false;
  volatile uint8_t difference = 0;  // volatile: the compiler must not leave the loop early
  for (size_t i = 0; i < a.size(); ++i) difference = static_cast<uint8_t>(difference | (a[i] ^ b[i]));
  return difference == 0;
}

Status random_bytes(std::span<uint8_t> out) {
  while (!out.empty()) {
    ssize_t got = getrandom(out.data(), out.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return error(Code::kInternal, "the kernel gave no random bytes: ", std::strerror(errno));
    out = out.subspan(static_cast<size_t>(got));
  }
  return {};
}

}  // namespace hc
