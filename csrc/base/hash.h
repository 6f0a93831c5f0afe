// Hashes that ranks compare, or that files keep: the same in every process and with every standard library, as
// std::hash is not. No secrets depend on them.
#pragma once

#include <cstdint>
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

}  // namespace hc
