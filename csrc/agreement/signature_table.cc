// See signature_table.h.
#include "agreement/signature_table.h"

#include <bit>

#include "base/hash.h"

namespace hc {

uint64_t hash_of(const Signature& s) {
  uint64_t h = 0x243f6a8885a308d3u;
  mix(&h, static_cast<uint64_t>(s.op) | static_cast<uint64_t>(s.reduce) << 8 | static_cast<uint64_t>(s.device) << 16 |
              static_cast<uint64_t>(s.in_arena) << 24 | static_cast<uint64_t>(static_cast<uint32_t>(s.root)) << 32);
  // Adding zero turns -0.0, which compares equal to 0.0, into it.
  mix(&h, std::bit_cast<uint64_t>(s.prescale + 0.0));
  mix(&h, std::bit_cast<uint64_t>(s.postscale + 0.0));
  mix(&h, static_cast<uint32_t>(s.priority) | static_cast<uint64_t>(static_cast<uint32_t>(s.left_out)) << 32);
  for (const TensorMeta& t : s.tensors) {
    mix(&h, static_cast<uint64_t>(t.dtype) << 32 | t.shape.size());
    for (int64_t d : t.shape) mix(&h, static_cast<uint64_t>(d));
  }
  for (int64_t rows : s.splits) mix(&h, static_cast<uint64_t>(rows));
  return h;
}

uint32_t SignatureTable::find(const Signature& signature) const {
  if (known_.empty()) return kNoCacheId;
  auto [at, end] = by_hash_.equal_range(hash_of(signature));
  for (; at != end; ++at)
    if (known_[at->second].signature == signature) return known_[at->second].cache_id;
  return kNoCacheId;
}

void SignatureTable::add(const Signature& signature, uint32_t cache_id) {
  by_hash_.emplace(hash_of(signature), static_cast<uint32_t>(known_.size()));
  known_.push_back({signature, cache_id});
}

}  // namespace hc
