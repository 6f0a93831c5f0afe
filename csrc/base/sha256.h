// SHA-256 (FIPS 180-4), HMAC-SHA-256 (RFC 2104), comparison without timing leaks, and random bytes from the
// kernel: what the handshake of every connection needs, and nothing more. Thread: any; a Sha256 belongs to
// one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>

#include "base/status.h"

namespace hc {

using Digest = std::array<uint8_t, 32>;

inline std::span<const uint8_t> bytes_of(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

class Sha256 {
 public:
  void update(std::span<const uint8_t> data);
  Digest finish();  // afterwards the object must not be used

 private:
  void compress(const uint8_t* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> pending_{};  // the first pending_bytes_ wait for a whole block
  size_t pending_bytes_ = 0;
  uint64_t total_bytes_ = 0;
};

Digest sha256(std::span<const uint8_t> data);

// Of the concatenation of `parts`. Fields of variable length need their lengths among the parts, or two
// different messages may get one code.
Digest hmac_sha256(std::span<const uint8_t> key, std::initializer_list<std::span<const uint8_t>> parts);

// Takes the same time wherever the first difference lies. Different sizes are unequal (a size is no secret).
bool equal_in_constant_time(std::span<const uint8_t> a, std::span<const uint8_t> b);

// From getrandom(2); waits only for the kernel's first seeding after boot.
Status random_bytes(std::span<uint8_t> out);

}  // namespace hc
