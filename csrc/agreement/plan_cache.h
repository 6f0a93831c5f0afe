// One rank's memory of past agreements: which cache id stands for which name (or, unnamed, which signature), so that a
// repeated announcement is a number instead of a name, shapes and scales. PURE. It mirrors the coordinator's cache ids:
// a cache id is never given to another name, and when the coordinator's capacity is used up, new names stay uncached.
#pragma once

#include <memory>

#include "agreement/negotiation.h"

namespace hc {

class PlanCache {
 public:
  PlanCache();
  ~PlanCache();
  // Adds the request to the request list: as a cache id if this rank announced the same signature for it before, else
  // in full, and remembers that signature as the last announced one. Returns the cache id or kNoCacheId.
  uint32_t announce(const Request& request, RequestList* request_list);
  // The cache id that would announce the request; kNoCacheId: it would be announced in full.
  uint32_t find(const Request& request);
  // A plan entry with `assigned`: the cache id stands for this request from now on.
  void learn(const Request& request, uint32_t cache_id);
  // As above, on a rank that did not submit it (joined).
  void learn(const PlanEntry& entry);
  // The signature a cache id stands for on this rank; null when unknown.
  const Signature* signature_of(uint32_t cache_id) const;
  const std::string* name_of(uint32_t cache_id) const;
  size_t size() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hc
