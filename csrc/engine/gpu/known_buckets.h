// The buckets of one process set that NCCL knows in advance: the same on every rank, in the same order, and so is what
// it is to forget. All ranks are in NCCL together then, which may take long; so each step of it is only looked at, and
// the thread that makes progress goes on. No launch of the set begins meanwhile.
//
// Thread: the thread that makes progress, or one that holds the progress lock. Owner: a DeviceSide.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "collective/gpu/device_group.h"
#include "engine/context.h"
#include "engine/operation/backend.h"

namespace hc {

class KnownBuckets {
 public:
  KnownBuckets(Context& context, const Members& members) : context_(context), members_(members) {}

  bool any() const { return !known_.empty(); }
  // A bit for each that this rank needs no more, in the order in which NCCL was told.
  int64_t dropped() const;
  void drop(const BucketSet& buckets);

  // NCCL forgets what all ranks have dropped, then is told of `buckets` where all.registers. Null: nothing of that.
  // may_begin: whether nothing of the set that was called before is still to be launched.
  std::shared_ptr<SetBackend::Confirmation> change(DeviceGroup* device, std::shared_ptr<const BucketSet> buckets,
                                                   const SetBackend::Capabilities& all,
                                                   std::function<bool()> may_begin);
  bool is_changing() const { return !changes_.expired(); }

 private:
  class Change;
  struct Known {
    std::shared_ptr<const BucketSet> buckets;
    bool dropped = false;
  };

  Context& context_;
  const Members& members_;
  std::vector<Known> known_;
  std::weak_ptr<const Change> changes_;  // the one that is in NCCL
};

}  // namespace hc
