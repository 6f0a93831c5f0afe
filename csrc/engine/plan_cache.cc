// See plan_cache.h. Flat vector of slots; a name or a signature is hashed once per announcement.
#include "engine/plan_cache.h"

#include <array>
#include <unordered_map>

#include "engine/signature_table.h"

namespace hc {

struct PlanCache::State {
  struct Slot {
    bool known = false;
    bool unnamed = false;
    bool announced = false;  // named: `signature` is what this rank itself announced last
    std::string name;
    Signature signature;
  };

  Slot* learn(Op op, const std::string& name, const Signature& signature, uint32_t slot);

  std::vector<Slot> slots;
  size_t known = 0;
  std::array<std::unordered_map<std::string, uint32_t>, kOpCount> by_name;
  SignatureTable by_content;  // unnamed
};

PlanCache::PlanCache() : state_(std::make_unique<State>()) {}
PlanCache::~PlanCache() = default;

uint32_t PlanCache::announce(const Request& request, Ballot* ballot) {
  State& s = *state_;
  const Signature& signature = request.signature;
  if (request.name.empty()) {
    uint32_t slot = s.by_content.find(signature);
    if (slot == kNoSlot)
      ballot->fresh.push_back(request);
    else
      ballot->cached.push_back({slot, request.sequence});
    return slot;
  }
  const auto& names = s.by_name[static_cast<size_t>(signature.op)];
  auto at = names.find(request.name);
  if (at == names.end()) {
    ballot->fresh.push_back(request);
    return kNoSlot;
  }
  State::Slot& slot = s.slots[at->second];
  if (slot.announced && slot.signature == signature) {
    ballot->cached.push_back({at->second, 0});
    return at->second;
  }
  ballot->fresh.push_back(request);
  slot.signature = signature;
  slot.announced = true;
  return at->second;
}

// A slot is learnt once; its name never changes. Null when the slot cannot be one of ours, or stands for something else.
PlanCache::State::Slot* PlanCache::State::learn(Op op, const std::string& name, const Signature& signature, uint32_t slot) {
  if (slot >= kMaxSlots) return nullptr;
  if (slot >= slots.size()) slots.resize(slot + 1);
  Slot& s = slots[slot];
  if (s.known) return s.signature.op == op && s.name == name ? &s : nullptr;
  s.known = true;
  s.unnamed = name.empty();
  s.name = name;
  s.signature = signature;
  known++;
  if (s.unnamed)
    by_content.add(signature, slot);
  else
    by_name[static_cast<size_t>(op)].emplace(name, slot);
  return &s;
}

void PlanCache::learn(const Request& request, uint32_t slot) {
  State::Slot* s = state_->learn(request.signature.op, request.name, request.signature, slot);
  if (s == nullptr || s->unnamed) return;
  s->signature = request.signature;
  s->announced = true;
}

void PlanCache::learn(const PlanEntry& entry) {
  if (entry.assigned && entry.has_signature)
    (void)state_->learn(entry.signature.op, entry.unnamed ? std::string() : entry.name, entry.signature, entry.slot);
}

const Signature* PlanCache::signature_of(uint32_t slot) const {
  if (slot >= state_->slots.size() || !state_->slots[slot].known) return nullptr;
  return &state_->slots[slot].signature;
}

const std::string* PlanCache::name_of(uint32_t slot) const {
  if (slot >= state_->slots.size() || !state_->slots[slot].known) return nullptr;
  return &state_->slots[slot].name;
}

size_t PlanCache::size() const { return state_->known; }

}  // namespace hc
