// Finds the cache id of a signature by its content. It is the cache key of unnamed operations, on the ranks and on the
// coordinator. PURE; it uses hash.h rather than std::hash, so that every process computes the same.
#pragma once

#include <unordered_map>
#include <vector>

#include "agreement/negotiation.h"

namespace hc {

uint64_t hash_of(const Signature& signature);

class SignatureTable {
 public:
  // The cache id of an equal signature, or kNoCacheId.
  uint32_t find(const Signature& signature) const;
  void add(const Signature& signature, uint32_t cache_id);
  size_t size() const { return known_.size(); }

 private:
  struct Known {
    Signature signature;
    uint32_t cache_id;
  };
  std::vector<Known> known_;
  std::unordered_multimap<uint64_t, uint32_t> by_hash_;  // hash -> index into known_
};

}  // namespace hc
