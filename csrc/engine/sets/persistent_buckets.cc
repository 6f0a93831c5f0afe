#include "engine/sets/persistent_buckets.h"

namespace hc {

PersistentBuckets::Declared* PersistentBuckets::find(int id) {
  const auto at = declared_.find(id);
  return at == declared_.end() ? nullptr : &at->second;
}

Result<PersistentBuckets::Declared*> PersistentBuckets::add(int id, std::shared_ptr<const BucketSet> set,
                                                            SharedLane* lane) {
  const size_t n = set->buckets.size();
  Declared& d = declared_[id];
  d.turns.resize(n);
  d.set = std::move(set);
  d.has_flags = lane && next_flag_ + n <= kMaxFrozenBuckets;
  if (!d.has_flags) return &d;
  d.first_flag = next_flag_;
  next_flag_ += n;
  HC_TRY(lane->prepare_buckets(d.first_flag, n));
  lane->publish(lane->mine().thawed, 0);
  return &d;
}

std::unique_ptr<FrozenCollective> PersistentBuckets::enter(BucketId id, const Task* task, const Group& group) {
  Declared* d = find(id.set);
  if (!d || !d->is_persistent) return nullptr;
  for (int m = 0; m < group.lane->size(); ++m)
    if (group.lane->flags(m).thawed.load(std::memory_order_acquire)) {
      d->is_persistent = false;
      return nullptr;
    }
  uint64_t& turn = d->turns[static_cast<size_t>(id.index)];
  const size_t flag = d->flag_of(id.index);
  auto arrival = task ? make_frozen_allreduce(*task, group, flag, turn++) : make_frozen_arrival(group, flag, turn++);
  (void)arrival->start();  // it only announces the arrival
  return arrival;
}

void PersistentBuckets::invalidate(SharedLane* lane) {
  if (!lane || declared_.empty()) return;
  for (auto& [id, d] : declared_) d.is_persistent = false;
  lane->publish(lane->mine().thawed, 1);
}

}  // namespace hc
