// Hashes that ranks compare, or that files keep: the same in every process and with every standard library, as
// std::hash is not. No secrets depend on them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

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

// A hash of 64 bits in 32, to which each of its bits counts: with MurmurHash3's last steps (Appleby). Folding the
// halves of what mix() has left would undo its own last step, and lose the upper half of what was mixed in last.
constexpr uint32_t halved(uint64_t hash) {
  hash = (hash ^ hash >> 33) * 0xff51afd7ed558ccdu;
  hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53u;
  return static_cast<uint32_t>(hash >> 32);
}

// Of memory, as fast as it is read. Eight lanes of 64 bits take one block of 64 bytes together, so that a vector unit
// does them at once: a lane adds the product of its word's halves, masked by a key that differs for each block, as NH
// does (Black, Halevi, Krawczyk, Krovetz and Rogaway, "UMAC: Fast and Secure Message Authentication", 1999), and the
// word of its neighbour, so that a change counts even where the other half of its word is zero. Words are those of this
// machine's byte order; every instruction set gives the same value. It does not matter into which parts the memory is
// cut. Thread: one at a time.
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
    for (const uint64_t one : lanes_.sum) mix(&hash, one);
    return hash;
  }

  struct Lanes {
    alignas(64) uint64_t sum[8] = {};
    alignas(64) uint64_t key[8] = {0xa0761d6478bd642fu, 0xe7037ed1a0b428dbu, 0x8ebc6af09c88c6e3u, 0x589965cc75374cc3u,
                                   0xc4ceb9fe1a85ec53u, 0x2545f4914f6cdd1du, 0xd6e8feb86659fd93u, 0x94d049bb133111ebu};
  };
  static constexpr size_t kBlock = sizeof(Lanes::sum);

  // The loops that this processor has, the fastest first. All give the same.
  using TakeIn = void (*)(Lanes*, const std::byte* at, size_t blocks);
  static std::vector<TakeIn> loops();

 private:
  void take_in(const std::byte* at, size_t blocks) {
    static const TakeIn run = loops().front();
    if (blocks > 0) run(&lanes_, at, blocks);
  }

  Lanes lanes_;
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
