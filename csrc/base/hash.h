// Hashes that ranks compare, or that files keep: the same in every process and with every standard library, as
// std::hash is not. No secrets depend on them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace hc {

constexpr void mix(uint64_t* hash, uint64_t value) {
  *hash = (*hash ^ value) * 0x9e3779b97f4a7c15u;
  *hash ^= *hash >> 32;
}

// FNV-1a, mixed once more so that the upper bits depend on short texts too.
constexpr uint64_t hash_of_text(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  mix(&hash, text.size());
  return hash;
}

// A hash of 64 bits in 32.
constexpr uint32_t halved(uint64_t hash) { return static_cast<uint32_t>(hash ^ hash >> 32); }

// Both halves of the product of 64 bits each.
constexpr uint64_t folded(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Of memory, as fast as it is read: four chains of 16 bytes each, which do not wait for one another. Words are those of
// this machine's byte order. It does not matter into which parts the memory is cut. Thread: one at a time.
class MemoryHash {
 public:
  void add(const void* data, size_t bytes) {
    const auto* at = static_cast<const std::byte*>(data);
    bytes_ += bytes;
    if (waiting_ > 0) {
      const size_t take = bytes < kBlock - waiting_ ? bytes : kBlock - waiting_;
      std::memcpy(rest_ + waiting_, at, take);
      at += take;
      bytes -= take;
      waiting_ += take;
      if (waiting_ < kBlock) return;
      take_in(rest_, 1);
      waiting_ = 0;
    }
    take_in(at, bytes / kBlock);
    waiting_ = bytes % kBlock;
    if (waiting_ > 0) std::memcpy(rest_, at + bytes - waiting_, waiting_);
  }

  // Afterwards the object must not be used.
  uint64_t finish() {
    std::memset(rest_ + waiting_, 0, kBlock - waiting_);
    take_in(rest_, 1);
    uint64_t hash = bytes_;
    for (const uint64_t one : chain_) mix(&hash, one);
    return hash;
  }

 private:
  static constexpr size_t kBlock = 64;
  static constexpr uint64_t kSecret[4] = {0xa0761d6478bd642fu, 0xe7037ed1a0b428dbu, 0x8ebc6af09c88c6e3u,
                                          0x589965cc75374cc3u};
  static uint64_t word(const std::byte* at) {
    uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  void take_in(const std::byte* at, size_t blocks) {
    uint64_t chain[4] = {chain_[0], chain_[1], chain_[2], chain_[3]};
    for (; blocks > 0; --blocks, at += kBlock)
      for (size_t i = 0; i < 4; ++i)
        chain[i] = folded(word(at + 16 * i) ^ kSecret[i], word(at + 16 * i + 8) ^ chain[i]);
    std::memcpy(chain_, chain, sizeof chain);
  }

  uint64_t chain_[4] = {kSecret[1], kSecret[2], kSecret[3], kSecret[0]};
  uint64_t bytes_ = 0;
  size_t waiting_ = 0;  // bytes in rest_
  std::byte rest_[kBlock] = {};
};

inline uint64_t hash_of_bytes(const void* data, size_t bytes) {
  MemoryHash hash;
  hash.add(data, bytes);
  return hash.finish();
}

}  // namespace hc
