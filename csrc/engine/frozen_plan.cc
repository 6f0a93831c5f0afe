// See frozen_plan.h.
#include "engine/frozen_plan.h"

#include <algorithm>

namespace hc {

FrozenPlan::FrozenPlan(std::vector<uint32_t> declared) {
  std::sort(declared.begin(), declared.end());
  declared.erase(std::unique(declared.begin(), declared.end()), declared.end());
  for (uint32_t slot : declared) declared_.push_back({.slot = slot});
}

FrozenPlan::Declared* FrozenPlan::find(uint32_t slot) {
  auto at = std::lower_bound(declared_.begin(), declared_.end(), slot,
                             [](const Declared& d, uint32_t wanted) { return d.slot < wanted; });
  return at != declared_.end() && at->slot == slot ? &*at : nullptr;
}

void FrozenPlan::forget_step() {
  for (Declared& d : declared_) d.seen = false;
  step_.clear();
  seen_ = 0;
}

void FrozenPlan::start_over() {
  forget_step();
  order_.clear();
}

bool FrozenPlan::observe(const PlanBatch& batch) {
  if (frozen_) return false;
  FrozenBatch now{{}, batch.algorithm, batch.in_arena};
  bool steady = batch.error == Code::kOk && batch.op == Op::kAllreduce;
  bool again = false;
  for (const PlanEntry& e : batch.entries) {
    Declared* d = e.unnamed ? nullptr : find(e.slot);
    // A new signature or a joined rank shows as one of these: such a step is not one to repeat.
    steady = steady && d != nullptr && !e.assigned && !e.has_signature;
    if (d == nullptr) continue;
    again = again || d->seen;
    now.slots.push_back(e.slot);
  }
  if (now.slots.empty()) {
    // A join comes between steps of different lengths.
    if (batch.op == Op::kJoin) start_over();
    return false;
  }
  if (!steady || again) {
    start_over();
    return false;
  }
  for (uint32_t slot : now.slots) find(slot)->seen = true;
  seen_ += now.slots.size();
  step_.push_back(std::move(now));
  if (seen_ < declared_.size()) return false;
  frozen_ = step_ == order_;
  order_ = std::move(step_);
  forget_step();
  if (!frozen_) return false;
  submitted_.assign(order_.size(), 0);
  for (uint32_t b = 0; b < order_.size(); b++)
    for (uint32_t slot : order_[b].slots) {
      find(slot)->batch = b;
      find(slot)->submitted = 0;
    }
  return true;
}

bool FrozenPlan::submit(uint32_t slot) {
  Declared* d = frozen_ ? find(slot) : nullptr;
  if (d == nullptr) return false;
  // Its batch must have been complete as often as it was submitted.
  if (submitted_[d->batch] / order_[d->batch].slots.size() < d->submitted) return false;
  d->submitted++;
  submitted_[d->batch]++;
  return true;
}

bool FrozenPlan::ready(uint64_t place) const {
  if (!frozen_) return false;
  size_t batch = static_cast<size_t>(place % order_.size());
  return submitted_[batch] >= (place / order_.size() + 1) * order_[batch].slots.size();
}

std::vector<uint32_t> FrozenPlan::thaw(uint64_t first_not_run) {
  std::vector<uint32_t> in_vain;
  if (!frozen_) return in_vain;
  uint64_t step = first_not_run / order_.size();
  uint64_t batch = first_not_run % order_.size();
  for (const Declared& d : declared_)
    if (d.submitted > step + (d.batch < batch ? 1 : 0)) in_vain.push_back(d.slot);
  frozen_ = false;
  generation_++;
  start_over();
  return in_vain;
}

ArrivalWord::Verdict ArrivalWord::verdict(uint32_t generation, uint64_t step, int size) const {
  // Arrivals outlive the break that follows them: a slow rank still learns that its batch runs.
  if (arrivals() >= (step + 1) * static_cast<uint64_t>(size)) return Verdict::kRuns;
  return era() == era_of(generation) ? Verdict::kWaiting : Verdict::kBroken;
}

std::optional<ArrivalWord> ArrivalWord::arrive(uint32_t generation) const {
  uint64_t mine = era_of(generation);
  if (era() == mine) return ArrivalWord(value_ + 1);
  // The word of an earlier generation starts anew. Nobody waits for it any more: between two freezes lie two steps
  // through the coordinator, in which every rank took part.
  if (is_before(mine)) return ArrivalWord(mine << kArrivalBits | 1);
  return std::nullopt;
}

std::optional<ArrivalWord> ArrivalWord::broken(uint32_t generation, uint64_t step, int size) const {
  uint64_t mine = era_of(generation);
  uint64_t closed = (mine | 1) << kArrivalBits;
  if (is_before(mine)) return ArrivalWord(closed);
  if (era() != mine || arrivals() >= (step + 1) * static_cast<uint64_t>(size)) return std::nullopt;
  return ArrivalWord(closed | arrivals());
}

}  // namespace hc
