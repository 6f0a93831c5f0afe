// See plan_cache.h. Flat vector of slots; a name or a signature is hashed once per announcement.
#include "agreement/plan_cache.h"

#include <array>
#include <unordered_map>

#include "agreement/signature_table.h"

namespace hc {

struct PlanCache::State {
  struct Slot {
    bool known = false;
    bool unnamed = false;
    bool announced = false;   // named: `signature` is what this rank itself announced last
    uint32_t next = kNoSlot;  // the slot announced behind this one the last time: steps repeat their order
    std::string name;
    Signature signature;
  };

  uint32_t find(const std::string& name, Op op);
  Slot* learn(Op op, const std::string& name, const Signature& signature, uint32_t slot);

  std::vector<Slot> slots;
  size_t known = 0;
  uint32_t last = kNoSlot;  // named, announced before this one
  std::array<std::unordered_map<std::string, uint32_t>, kOpCount> by_name;
  SignatureTable by_content;  // unnamed
};

PlanCache::PlanCache() : state_(std::make_unique<State>()) {}
PlanCache::~PlanCache() = default;

uint32_t PlanCache::announce(const Request& request, RequestList* request_list) {
  State& s = *state_;
  const Signature& signature = request.signature;
  if (request.name.empty()) {
    uint32_t slot = s.by_content.find(signature);
    if (slot == kNoSlot)
      request_list->fresh.push_back(request);
    else
      request_list->cached.push_back({slot, request.sequence});
    return slot;
  }
  uint32_t number = s.find(request.name, signature.op);
  if (number == kNoSlot) {
    request_list->fresh.push_back(request);
    return kNoSlot;
  }
  State::Slot& slot = s.slots[number];
  if (slot.announced && slot.signature == signature) {
    request_list->cached.push_back({number, 0});
    return number;
  }
  request_list->fresh.push_back(request);
  slot.signature = signature;
  slot.announced = true;
  return number;
}

uint32_t PlanCache::find(const Request& request) {
  if (request.name.empty()) return state_->by_content.find(request.signature);
  const uint32_t number = state_->find(request.name, request.signature.op);
  if (number == kNoSlot) return kNoSlot;
  const State::Slot& slot = state_->slots[number];
  return slot.announced && slot.signature == request.signature ? number : kNoSlot;
}

// The slot of a name. The guess saves hashing it.
uint32_t PlanCache::State::find(const std::string& name, Op op) {
  uint32_t guess = last == kNoSlot ? kNoSlot : slots[last].next;
  if (guess == kNoSlot || slots[guess].signature.op != op || slots[guess].name != name) {
    auto at = by_name[static_cast<size_t>(op)].find(name);
    if (at == by_name[static_cast<size_t>(op)].end()) return kNoSlot;
    guess = at->second;
    if (last != kNoSlot) slots[last].next = guess;
  }
  last = guess;
  return guess;
}

// A slot is learnt once; its name never changes. Null when the slot cannot be one of ours, or stands for something
// else.
PlanCache::State::Slot* PlanCache::State::learn(Op op, const std::string& name, const Signature& signature,
                                                uint32_t slot) {
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
