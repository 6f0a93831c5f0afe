#include "engine/sets/persistent_buckets.h"

namespace hc {

Result<PersistentBuckets::Declared*> PersistentBuckets::add(int id, std::shared_ptr<const BucketSet> set, Scope scope,
                                                            SharedSegment* shared_segment) {
  const size_t n = set->buckets.size();
  Declared& d = declared_[id];
  d.runs.resize(n);
  d.set = std::move(set);
  d.is_between_nodes = scope == Scope::kNodes;
  d.has_flags = scope != Scope::kNone && next_flag_ + n <= kMaxPersistentBuckets;
  if (!d.has_flags) return &d;
  d.first_flag = next_flag_;
  next_flag_ += n;
  if (shared_segment) HC_TRY(shared_segment->prepare_buckets(d.first_flag, n));
  if (scope == Scope::kNode) shared_segment->publish(shared_segment->mine().invalidated, 0);
  return &d;
}

BucketId PersistentBuckets::with_flag(size_t flag) const {
  for (const auto& [id, d] : declared_)
    if (d.has_flags && flag >= d.first_flag && flag < d.first_flag + d.runs.size())
      return {id, static_cast<int>(flag - d.first_flag)};
  return {};
}

void PersistentBuckets::invalidate(SharedSegment* shared_segment) {
  if (!shared_segment) return;  // others may have buckets that this rank has dropped
  for (auto& [id, d] : declared_) d.is_persistent = d.is_persistent && d.is_between_nodes;
  shared_segment->publish(shared_segment->mine().invalidated, 1);
}

std::vector<std::pair<int, const PersistentBuckets::Declared*>> PersistentBuckets::leave(int only) {
  std::vector<std::pair<int, const Declared*>> left;
  for (auto& [id, d] : declared_) {
    if (!d.is_between_nodes || !d.is_persistent || (only >= 0 && id != only)) continue;
    d.is_persistent = false;
    left.emplace_back(id, &d);
  }
  return left;
}

bool PersistentBuckets::member_left(int position, int id, std::span<const uint64_t> rounds) {
  Declared* d = find(id);
  if (!d) return true;  // dropped here
  if (!d->is_between_nodes || d->runs.size() != rounds.size()) return false;
  d->anybody_left = true;
  for (size_t i = 0; i < rounds.size(); ++i)
    if (d->runs[i].collective) d->runs[i].collective->member_left(position, rounds[i]);
  return true;
}

void PersistentBuckets::end_runs() {
  for (auto& [id, d] : declared_) {
    if (!d.is_between_nodes) continue;
    d.is_persistent = false;
    for (Declared::Run& run : d.runs) run.collective.reset();
  }
}

}  // namespace hc
