#include "engine/process_set.h"

#include <algorithm>

namespace hc {

namespace {
constexpr size_t kNamesKept = 8192;  // records of names that are not pending, per operation kind
}

int ProcessSet::position_of(int world_rank) const {
  auto at = std::lower_bound(ranks.begin(), ranks.end(), world_rank);
  return at != ranks.end() && *at == world_rank ? static_cast<int>(at - ranks.begin()) : -1;
}

NameRecord& ProcessSet::record_of(Op op, std::string_view name) {
  auto& names = names_[static_cast<int>(op)];
  auto at = names.find(std::string(name));
  if (at != names.end()) return at->second;
  if (names.size() >= kNamesKept)
    std::erase_if(names,
                  [](const auto& entry) { return entry.second.pending.load(std::memory_order_acquire) == nullptr; });
  return names[std::string(name)];
}

Operation* ProcessSet::find_named(Op op, std::string_view name) {
  auto& names = names_[static_cast<int>(op)];
  auto at = names.find(std::string(name));
  return at == names.end() ? nullptr : at->second.pending.load(std::memory_order_acquire);
}

void ProcessSet::adopt(Operation* op) {
  op->pending_at = pending.size();
  pending.push_back(op);
}

void ProcessSet::announce(Operation* op) {
  const Op kind = op->signature().op;
  if (kind == Op::kJoin) {
    join = op;
    if (!frozen_runs.empty()) {
      deferred_join = op;
      return;
    }
    thaw();
    ballot.joined = true;
    return;
  }
  op->slot = cache.announce(op->request, &ballot);
  if (op->request.name.empty()) {
    Window& w = windows_[static_cast<int>(kind)];
    // Numbers are given and operations queued under one lock, so they arrive here without a gap.
    const uint64_t at = op->request.sequence - w.base;
    if (w.operations.size() <= at) w.operations.resize(at + 1, nullptr);
    w.operations[at] = op;
  } else if (op->slot != kNoSlot) {
    if (by_slot_.size() <= op->slot) by_slot_.resize(op->slot + 1, nullptr);
    by_slot_[op->slot] = op;
  }
}

bool ProcessSet::start_frozen(Operation* op) {
  auto at = bucket_sets.find(op->bucket_set);
  if (at == bucket_sets.end() || !at->second.frozen) return false;
  BucketSet& set = at->second;
  for (int m = 0; m < lane->size(); ++m)
    if (lane->flags(m).thawed.load(std::memory_order_acquire)) return set.frozen = false;
  BucketSet::Bucket& bucket = set.buckets[op->bucket];
  Task task;
  task.reduce = set.reduce == Reduce::kAverage ? Reduce::kSum : set.reduce;
  task.dtype = bucket.dtype;
  task.scale = scale_of(op->signature(), bucket.dtype, size());
  task.pieces = {{op->in[0], op->out[0], static_cast<size_t>(op->signature().tensors[0].count())}};
  auto collective = make_frozen_allreduce(std::move(task), group, set.first_flag + op->bucket, bucket.turn++);
  (void)collective->start();  // it only announces the arrival
  frozen_runs.push_back({op, std::move(collective)});
  return true;
}

void ProcessSet::thaw() {
  if (!lane || bucket_sets.empty()) return;
  for (auto& [id, set] : bucket_sets) set.frozen = false;
  lane->publish(lane->mine().thawed, 1);
}

void ProcessSet::forget(Operation* op) {
  pending.back()->pending_at = op->pending_at;
  pending[op->pending_at] = pending.back();
  pending.pop_back();
  if (op == join) {
    join = nullptr;
    join_pending.store(false, std::memory_order_release);
  }
  const Op kind = op->signature().op;
  if (kind != Op::kJoin && op->request.name.empty()) {
    Window& w = windows_[static_cast<int>(kind)];
    const uint64_t at = op->request.sequence - w.base;
    if (at < w.operations.size()) w.operations[at] = nullptr;
    while (!w.operations.empty() && !w.operations.front()) {
      w.operations.pop_front();
      ++w.base;
    }
  } else if (op->slot != kNoSlot && op->slot < by_slot_.size() && by_slot_[op->slot] == op) {
    by_slot_[op->slot] = nullptr;
  }
  if (op->name_record) op->name_record->pending.store(nullptr, std::memory_order_release);
}

}  // namespace hc
