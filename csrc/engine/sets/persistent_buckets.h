// The declared buckets of one process set. Where all members share memory and every rank agrees, their plan is
// persistent: a bucket starts as soon as it is submitted, without any message.
//
// Thread: the thread that makes progress, or who holds the progress lock. Owner: a process set.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "collective/collective.h"
#include "collective/shared/shared.h"
#include "engine/operation/submission.h"

namespace hc {

class PersistentBuckets {
 public:
  struct Declared {
    std::shared_ptr<const BucketSet> set;
    size_t first_flag = 0;   // of its buckets' flags in the lane
    bool has_flags = false;  // there was room for them
    bool is_persistent = false;
    std::vector<uint64_t> turns;  // [bucket] how often it has run persistent
    size_t flag_of(int bucket) const { return first_flag + static_cast<size_t>(bucket); }
  };

  // Null: there is no such set.
  Declared* find(int id);
  // lane: of the set when all members share memory, else null.
  Result<Declared*> add(int id, std::shared_ptr<const BucketSet> set, SharedLane* lane);
  void remove(int id) { declared_.erase(id); }
  // The arrival at bucket `id`, which then is reduced where it lies (task) or by a GPU (null). Null: its plan is not
  // persistent, or no longer.
  std::unique_ptr<FrozenCollective> enter(BucketId id, const Task* task, const Group& group);
  // This rank enters no persistent plan any more.
  void invalidate(SharedLane* lane);

 private:
  std::map<int, Declared> declared_;
  size_t next_flag_ = 0;
};

}  // namespace hc
