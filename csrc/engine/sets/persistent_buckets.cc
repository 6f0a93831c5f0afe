#include "engine/sets/persistent_buckets.h"

namespace hc {

Result<PersistentBuckets::Declared*> PersistentBuckets::add(int id, std::shared_ptr<const BucketSet> set,
                                                            SharedSegment* shared_segment) {
  const size_t n = set->buckets.size();
  Declared& d = declared_[id];
  d.runs.resize(n);
  d.set = std::move(set);
  d.has_flags = shared_segment && next_flag_ + n <= kMaxPersistentBuckets;
  if (!d.has_flags) return &d;
  d.first_flag = next_flag_;
  next_flag_ += n;
  HC_TRY(shared_segment->prepare_buckets(d.first_flag, n));
  shared_segment->publish(shared_segment->mine().invalidated, 0);
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
  for (auto& [id, d] : declared_) d.is_persistent = false;
  shared_segment->publish(shared_segment->mine().invalidated, 1);
}

}  // namespace hc
