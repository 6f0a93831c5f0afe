// SipHash-2-4 (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012): a code of 64 bits for short messages,
// which only those can make who know the key. Words are those of this machine's byte order. Thread: any; an object
// belongs to one.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>

namespace hc {

struct SipKey {
  uint64_t low = 0, high = 0;
};

class SipHash {
 public:
  explicit SipHash(const SipKey& key)
      : v_{key.low ^ 0x736f6d6570736575u, key.high ^ 0x646f72616e646f6du, key.low ^ 0x6c7967656e657261u,
           key.high ^ 0x7465646279746573u} {}

  void add(uint64_t word) {
    bytes_ += sizeof word;
    mix_in(word);
  }

  // The message ends with `rest`. Afterwards the object must not be used.
  uint64_t finish(std::span<const uint8_t> rest = {}) {
    for (; rest.size() >= sizeof(uint64_t); rest = rest.subspan(sizeof(uint64_t))) {
      uint64_t word;
      std::memcpy(&word, rest.data(), sizeof word);
      add(word);
    }
    uint64_t last = (bytes_ + rest.size()) << 56;
    for (size_t i = 0; i < rest.size(); ++i) last |= uint64_t{rest[i]} << 8 * i;
    mix_in(last);
    v_[2] ^= 0xff;
    for (int i = 0; i < 4; ++i) round();
    return v_[0] ^ v_[1] ^ v_[2] ^ v_[3];
  }

 private:
  void mix_in(uint64_t word) {
    v_[3] ^= word;
    round();
    round();
    v_[0] ^= word;
  }
  void round() {
    v_[0] += v_[1];
    v_[2] += v_[3];
    v_[1] = std::rotl(v_[1], 13) ^ v_[0];
    v_[3] = std::rotl(v_[3], 16) ^ v_[2];
    v_[0] = std::rotl(v_[0], 32);
    v_[2] += v_[1];
    v_[0] += v_[3];
    v_[1] = std::rotl(v_[1], 17) ^ v_[2];
    v_[3] = std::rotl(v_[3], 21) ^ v_[0];
    v_[2] = std::rotl(v_[2], 32);
  }

  uint64_t v_[4];
  uint64_t bytes_ = 0;
};

}  // namespace hc
