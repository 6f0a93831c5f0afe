// What submission knows of one process set: its members, the names in use, the sequence numbers of unnamed operations,
// and the declared buckets.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "agreement/straggler_statistics.h"
#include "base/recent_hashes.h"
#include "engine/operation/members.h"
#include "engine/operation/operation.h"
#include "engine/operation/submission.h"
#include "engine/threads/submit_lock.h"

namespace hc {

class SetIntake {
 public:
  explicit SetIntake(Members members);

  const Members members;
  // The thread that makes progress writes: on group rank 0 about every operation, elsewhere about persistent buckets.
  StragglerStatistics stragglers;
  std::atomic<bool> join_pending{false};  // set under the submit lock, cleared by the thread that makes progress

  // The next number of an unnamed operation.
  uint64_t next_sequence(Op op) HC_REQUIRES(submit_lock) { return sequences_[static_cast<size_t>(op)]++; }
  uint64_t upcoming_sequence(Op op) const HC_REQUIRES(submit_lock) { return sequences_[static_cast<size_t>(op)]; }
  // Unnamed operation `sequence` ran without this rank, which had joined: continue the numbering after it, as the other
  // ranks do.
  void skip_sequence(Op op, uint64_t sequence) HC_REQUIRES(submit_lock) {
    uint64_t& next = sequences_[static_cast<size_t>(op)];
    next = std::max(next, sequence + 1);
  }
  // Counts a submission to this set, from 1.
  uint64_t next_call() HC_REQUIRES(submit_lock) { return ++calls_; }

  // The record of a name, made when it is new. One that is used once only is forgotten soon: programs that put the
  // step into their names make a new one in every step.
  NameRecord& record_of(Op op, std::string_view name) HC_REQUIRES(submit_lock);
  // The record of a name, or (empty) of the unnamed operations of this kind; null: there is none.
  NameRecord* known_record(Op op, std::string_view name) HC_REQUIRES(submit_lock);
  // Any thread: the record of unnamed operations lives as long as this.
  NameRecord& unnamed_record(Op op) { return unnamed_[static_cast<size_t>(op)]; }
  // Null when nobody has this name pending.
  Operation* find_named(Op op, std::string_view name) HC_REQUIRES(submit_lock);

  // A declared set of buckets, with everything prepared that submitting one of them needs.
  struct Declared {
    struct Bucket {
      Request request;
      NameRecord* record = nullptr;  // set by declare(), kept while this lives
      Status refusal;                // not ok: what is wrong with the bucket
    };
    std::shared_ptr<const BucketSet> set;
    std::vector<Bucket> buckets;  // none for a set that does not lie in host memory
  };
  // Null: there is no such set.
  const Declared* declared(int id) const HC_REQUIRES(submit_lock) {
    const auto at = declared_.find(id);
    return at == declared_.end() ? nullptr : &at->second;
  }
  // A bucket of this set was submitted and is not done, whether or not it has been taken.
  bool is_pending(int id) const HC_REQUIRES(submit_lock);
  int declare(Declared declared) HC_REQUIRES(submit_lock);  // gives its id
  void undeclare(int id) HC_REQUIRES(submit_lock);
  // The last one, as if it had never been declared.
  void take_back_declared(int id) HC_REQUIRES(submit_lock) {
    undeclare(id);
    next_declared_ = id;
  }

 private:
  std::array<uint64_t, kOpCount> sequences_ HC_GUARDED_BY(submit_lock){};
  using Names = std::unordered_map<std::string, NameRecord>;
  void forget_what_came_once() HC_REQUIRES(submit_lock);

  std::array<Names, kOpCount> names_ HC_GUARDED_BY(submit_lock);  // the records' contents: see NameRecord
  // NameRecord::seen_of_loop, by the name without the iteration; there are as many as operations in loops.
  std::unordered_map<std::string, uint64_t> loops_ HC_GUARDED_BY(submit_lock);
  RecentHashes came_ HC_GUARDED_BY(submit_lock);
  // Of records made lately. The pointers last as long as the records do.
  std::vector<std::pair<Names*, const Names::value_type*>> new_ HC_GUARDED_BY(submit_lock);
  size_t look_at_ HC_GUARDED_BY(submit_lock) = 0;  // so many in new_ are looked through
  std::array<NameRecord, kOpCount> unnamed_;
  uint64_t calls_ HC_GUARDED_BY(submit_lock) = 0;
  std::map<int, Declared> declared_ HC_GUARDED_BY(submit_lock);
  int next_declared_ HC_GUARDED_BY(submit_lock) = 0;
};

}  // namespace hc
