// The declared buckets of one process set. Where every rank agrees, their plan is persistent: a bucket starts as soon
// as it is submitted, without any message. Where all members share memory, who leaves the plans sets a flag there;
// between nodes it tells the others how often it has begun each bucket (docs/decisions/buckets.md).
//
// Thread: the thread that makes progress, or who holds the progress lock. Owner: a process set.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "collective/collective.h"
#include "collective/shared/shared.h"
#include "engine/operation/submission.h"

namespace hc {

class PersistentBuckets {
 public:
  struct Declared {
    std::shared_ptr<const BucketSet> set;
    size_t first_flag = 0;   // of its buckets' flags in the shared segment
    bool has_flags = false;  // there was room for them
    bool is_persistent = false;
    bool is_between_nodes = false;
    bool anybody_left = false;  // between nodes: another member has left the plan
    struct Run {
      std::unique_ptr<PersistentCollective> collective;  // made at the first use
      uint64_t rounds = 0;                               // how often it has begun
    };
    std::vector<Run> runs;  // [bucket]
    size_t flag_of(int bucket) const { return first_flag + static_cast<size_t>(bucket); }
  };

  // The bucket with this flag; it exists.
  BucketId with_flag(size_t flag) const;
  // A member has left the persistent plans.
  bool anybody_left(const SharedSegment& shared_segment) const {
    for (int m = 0; m < shared_segment.size(); ++m)
      if (shared_segment.flags(m).invalidated.load(std::memory_order_acquire)) return true;
    return false;
  }
  // Null: there is no such set.
  Declared* find(int id) {
    const auto at = declared_.find(id);
    return at == declared_.end() ? nullptr : &at->second;
  }
  enum class Scope { kNone, kNode, kNodes };  // of a persistent plan: nowhere, where all share memory, between nodes
  // shared_segment: of the members on this node; null: there is none.
  Result<Declared*> add(int id, std::shared_ptr<const BucketSet> set, Scope scope, SharedSegment* shared_segment);
  void remove(int id) { declared_.erase(id); }
  // The last one, as if it had never been added.
  void take_back(int id) {
    if (const Declared* d = find(id); d && d->has_flags) next_flag_ = d->first_flag;
    remove(id);
  }
  // Begins bucket `id` and gives what then is to be stepped; make(flag) makes it at its first use. Null: its plan is
  // not persistent, or no longer. looks: whether another member has left the plans; else somebody else does that.
  template <class Make>
  PersistentCollective* enter(BucketId id, SharedSegment* shared_segment, bool looks, Make&& make) {
    Declared* d = find(id.set);
    if (!d || !d->is_persistent) return nullptr;
    if (looks && !d->is_between_nodes && anybody_left(*shared_segment)) {
      // Who has begun this bucket already, and has left since, is told in this way that it will not come.
      invalidate(shared_segment);
      return nullptr;
    }
    Declared::Run& run = d->runs[static_cast<size_t>(id.index)];
    if (!run.collective) run.collective = make(d->flag_of(id.index));
    run.collective->begin(run.rounds++);
    return run.collective.get();
  }
  // From now on this rank enters no persistent plan.
  void invalidate(SharedSegment* shared_segment);
  // Between nodes: the sets whose plan this rank leaves now, all of them or one; others are to be told.
  std::vector<std::pair<int, const Declared*>> leave(int only = -1);
  // Another member has left, after so many rounds of each bucket. False: these are not the buckets of that set.
  bool member_left(int position, int id, std::span<const uint64_t> rounds);
  // Between nodes: drops what is under way, after which no tensor is touched.
  void end_runs();

 private:
  std::map<int, Declared> declared_;
  size_t next_flag_ = 0;
};

}  // namespace hc
