// Lets small blocking calls that repeat bypass the negotiation: while a session is open, ranks enter operations in
// rounds through shared memory, without a message. This class decides when the coordinator opens a session and which
// operations may enter; collective/shared/bypass_rounds.h runs the rounds.
//
// Thread: the thread that makes progress, or one that holds the progress lock. Owner: a process set.
#pragma once

#include <memory>

#include "agreement/negotiation.h"
#include "collective/shared/bypass_rounds.h"
#include "engine/operation/operation.h"
#include "engine/sets/pending.h"

namespace hc {

class Bypass {
 public:
  // Called once, before use.
  void attach(SharedSegment* shared_segment, bool allowed, bool all_share_memory);
  // Equal on all members: larger operations are negotiated (may_bypass).
  void set_flat_bytes(size_t bytes) { flat_bytes_ = bytes; }
  void allow(bool allowed) { allowed_ = allowed; }

  bool is_on() const { return rounds_.is_on(); }
  bool is_busy() const { return rounds_.is_busy(); }
  // Whether an operation like this may enter a round.
  bool takes(const Operation& op) const;
  // Null: no session is open any more.
  std::unique_ptr<ArrivalCollective> enter(Task task, const Group& group, const BypassKey& key) {
    return rounds_.enter(std::move(task), group, key);
  }
  // Opens a session because a plan says so, and closes it at once if other ranks may wait for something else that this
  // rank has announced.
  void open(uint64_t first_round, const Pending& pending);
  void close() {
    if (is_on() && !is_busy()) rounds_.close();
  }

  // Group rank 0: whether the plans so far look like a loop of blocking calls, so that a session pays.
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
  int ranks_ = 0;
  size_t flat_bytes_ = 0;
  Trial trial_;
};

}  // namespace hc
