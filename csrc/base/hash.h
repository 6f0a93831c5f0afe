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

// Both halves of the product of 64 bits each.
constexpr uint64_t folded(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Of memory, as fast as it is read: four chains of 16 bytes each, which do not wait for one another. Words are those of
// this machine's byte order.
inline uint64_t hash_of_bytes(const void* data, size_t bytes) {
  constexpr uint64_t kSecret[4] = {0xa0761d6478bd642fu, 0xe7037ed1a0b428dbu, 0x8ebc6af09c88c6e3u, 0x589965cc75374cc3u};
  const auto word = [](const std::byte* at) {
    uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  uint64_t chain[4] = {kSecret[1], kSecret[2], kSecret[3], kSecret[0]};
  const auto* at = static_cast<const std::byte*>(data);
  size_t left = bytes;
  for (; left >= 64; at += 64, left -= 64)
    for (size_t i = 0; i < 4; ++i) chain[i] = folded(word(at + 16 * i) ^ kSecret[i], word(at + 16 * i + 8) ^ chain[i]);
  std::byte rest[64] = {};
  if (left) std::memcpy(rest, at, left);
  for (size_t i = 0; i < 4; ++i)
    chain[i] = folded(word(rest + 16 * i) ^ kSecret[i], word(rest + 16 * i + 8) ^ chain[i]);
  uint64_t hash = bytes;
  for (const uint64_t one : chain) mix(&hash, one);
  return hash;
}

}  // namespace hc
