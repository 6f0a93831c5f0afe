// The bypass of the negotiation, for small blocking calls that repeat: while a session is open, ranks enter operations
// in rounds through shared memory, without a message. Here is when one opens on the coordinator's wish, and which
// operations may enter. The rounds themselves are in collective/shared/bypass_rounds.h.
//
// Thread: the thread that makes progress, or who holds the progress lock. Owner: a process set.
#pragma once

#include <memory>

#include "agreement/negotiation.h"
#include "collective/shared/bypass_rounds.h"
#include "engine/operation/operation.h"
#include "engine/sets/pending.h"

namespace hc {

class Bypass {
 public:
  // Once, before use. limit_bytes: larger operations are agreed on; the same on all members.
  void attach(SharedSegment* shared_segment, bool allowed, size_t limit_bytes, bool all_share_memory);
  void set_limit(size_t bytes) { limit_bytes_ = bytes; }
  void allow(bool allowed) { allowed_ = allowed; }

  bool is_on() const { return rounds_.is_on(); }
  bool is_busy() const { return rounds_.is_busy(); }
  // Whether an operation like this may enter a round.
  bool takes(const Operation& op) const;
  // Null: no session is open any more.
  std::unique_ptr<ArrivalCollective> enter(Task task, const Group& group, const BypassKey& key) {
    return rounds_.enter(std::move(task), group, key);
  }
  // A plan opens a session; what else this rank has announced, others may wait for.
  void open(uint64_t first_round, const Pending& pending);
  void close() {
    if (is_on() && !is_busy()) rounds_.close();
  }

  // Group rank 0: whether the plans so far look like a loop of blocking calls.
  bool suits(const Plan& plan, const Pending& pending, size_t coordinator_pending, size_t size);
  void reset_trial() { trial_.alike = 0; }
  uint64_t fresh_round() const { return rounds_.fresh_round(); }

 private:
  struct Trial {  // group rank 0
    static constexpr int kFirstWanted = 8;
    int alike = 0, wanted = kFirstWanted;  // plans in a row that suit; how many open a session
    uint64_t successes_before = 0;         // of the session before
  };
  BypassRounds rounds_;
  bool allowed_ = true;
  bool all_share_memory_ = false;
  size_t limit_bytes_ = 0;
  Trial trial_;
};

}  // namespace hc
