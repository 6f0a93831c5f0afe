// See plan_cache.h. Flat vector of cache ids; a name or a signature is hashed once per announcement.
#include "agreement/plan_cache.h"

#include <array>
#include <unordered_map>

#include "agreement/signature_table.h"

namespace hc {

struct PlanCache::State {
  struct KnownId {
    bool known = false;
    bool unnamed = false;
    bool announced = false;      // named: `signature` is what this rank itself announced last
    uint32_t next = kNoCacheId;  // the cache id announced behind this one the last time: steps repeat their order
    std::string name;
    Signature signature;
  };

  uint32_t find(const std::string& name, Op op);
  KnownId* learn(Op op, const std::string& name, const Signature& signature, uint32_t cache_id);

  std::vector<KnownId> known_ids;
  size_t known = 0;
  uint32_t last = kNoCacheId;  // named, announced before this one
  std::array<std::unordered_map<std::string, uint32_t>, kOpCount> by_name;
  SignatureTable by_content;  // unnamed
};

PlanCache::PlanCache() : state_(std::make_unique<State>()) {}
PlanCache::~PlanCache() = default;

uint32_t PlanCache::announce(const Request& request, RequestList* request_list) {
  State& s = *state_;
  const Signature& signature = request.signature;
  if (request.name.empty()) {
    uint32_t cache_id = s.by_content.find(signature);
    if (cache_id == kNoCacheId)
      request_list->fresh.push_back(request);
    else
      request_list->cached.push_back({cache_id, request.sequence});
    return cache_id;
  }
  uint32_t number = s.find(request.name, signature.op);
  if (number == kNoCacheId) {
    request_list->fresh.push_back(request);
    return kNoCacheId;
  }
  State::KnownId& cache_id = s.known_ids[number];
  if (cache_id.announced && cache_id.signature == signature) {
    request_list->cached.push_back({number, 0});
    return number;
  }
  request_list->fresh.push_back(request);
  cache_id.signature = signature;
  cache_id.announced = true;
  return number;
}

uint32_t PlanCache::find(const Request& request) {
  if (request.name.empty()) return state_->by_content.find(request.signature);
  const uint32_t number = state_->find(request.name, request.signature.op);
  if (number == kNoCacheId) return kNoCacheId;
  const State::KnownId& cache_id = state_->known_ids[number];
  return cache_id.announced && cache_id.signature == request.signature ? number : kNoCacheId;
}

// The cache id of a name. The guess saves hashing it.
uint32_t PlanCache::State::find(const std::string& name, Op op) {
  uint32_t guess = last == kNoCacheId ? kNoCacheId : known_ids[last].next;
  if (guess == kNoCacheId || known_ids[guess].signature.op != op || known_ids[guess].name != name) {
    auto at = by_name[static_cast<size_t>(op)].find(name);
    if (at == by_name[static_cast<size_t>(op)].end()) return kNoCacheId;
    guess = at->second;
    if (last != kNoCacheId) known_ids[last].next = guess;
  }
  last = guess;
  return guess;
}

// A cache id is learnt once; its name never changes. Null when the cache id cannot be one of ours, or stands for
// something else.
PlanCache::State::KnownId* PlanCache::State::learn(Op op, const std::string& name, const Signature& signature,
                                                   uint32_t cache_id) {
  if (cache_id >= kMaxCacheIds) return nullptr;
  if (cache_id >= known_ids.size()) known_ids.resize(cache_id + 1);
  KnownId& s = known_ids[cache_id];
  if (s.known) return s.signature.op == op && s.name == name ? &s : nullptr;
  s.known = true;
  s.unnamed = name.empty();
  s.name = name;
  s.signature = signature;
  known++;
  if (s.unnamed)
    by_content.add(signature, cache_id);
  else
    by_name[static_cast<size_t>(op)].emplace(name, cache_id);
  return &s;
}

void PlanCache::learn(const Request& request, uint32_t cache_id) {
  State::KnownId* s = state_->learn(request.signature.op, request.name, request.signature, cache_id);
  if (s == nullptr || s->unnamed) return;
  s->signature = request.signature;
  s->announced = true;
}

void PlanCache::learn(const PlanEntry& entry) {
  if (entry.assigned && entry.has_signature)
    (void)state_->learn(entry.signature.op, entry.unnamed ? std::string() : entry.name, entry.signature,
                        entry.cache_id);
}

const Signature* PlanCache::signature_of(uint32_t cache_id) const {
  if (cache_id >= state_->known_ids.size() || !state_->known_ids[cache_id].known) return nullptr;
  return &state_->known_ids[cache_id].signature;
}

const std::string* PlanCache::name_of(uint32_t cache_id) const {
  if (cache_id >= state_->known_ids.size() || !state_->known_ids[cache_id].known) return nullptr;
  return &state_->known_ids[cache_id].name;
}

size_t PlanCache::size() const { return state_->known; }

}  // namespace hc
