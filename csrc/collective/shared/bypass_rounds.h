// Runs a small operation in shared memory without negotiating it first. Every member publishes the key of its operation
// together with its payload; once all have published equal keys, all have the result. If the keys differ, the operation
// is withdrawn with its memory unchanged and is negotiated like any other.
//
// A session is a sequence of rounds. Every member opens it at the same round, which the coordinator names in a plan,
// and each round takes one operation of every member. One rule keeps the members consistent: a member that has not
// published in a round may close it; a member that has published waits until all have, or until it sees that a member
// which has not published has closed the round. So a round succeeds on every member or on none.
//
// Closing a round ends the session. A member closes before it announces anything to the coordinator, so nobody waits in
// a round for a member that is busy elsewhere. docs/decisions/bypass.md has the argument in full.
//
// Thread: the thread that makes progress. Owner: the engine's process set.
#pragma once

#include <memory>
#include <vector>

#include "collective/collective.h"
#include "collective/shared/shared.h"

namespace hc {

// What must be equal on all members of a round for their operations to be the same one.
struct BypassKey {
  uint64_t cache_id = 0;   // of the cache of agreements
  uint64_t sequence = 0;   // unnamed operations
  uint64_t signature = 0;  // hash of it
  bool operator==(const BypassKey&) const = default;
};

class BypassRounds {
 public:
  // The shared segment holds all members of the set.
  void attach(SharedSegment* shared_segment) {
    shared_ = shared_segment;
    payloads_.resize(shared_segment ? static_cast<size_t>(shared_segment->size()) : 0);
  }
  bool is_on() const { return is_on_; }
  // A round of mine is under way.
  bool is_busy() const { return is_busy_; }
  // How many rounds have succeeded since the beginning.
  uint64_t successes() const { return successes_; }

  // A round that no member has used or closed, for a new session. Only while no member has one open.
  uint64_t fresh_round() const;
  void open(uint64_t first_round);
  // Only between rounds of mine.
  void close();
  // Enters the next round with a task that may_bypass() permits. Null: no session is open (any more).
  // The task is valid only if every member calls the same operation; the round finds that out.
  std::unique_ptr<ArrivalCollective> enter(Task task, const Group& group, const BypassKey& key);

  // For a round under way: its number, which of the two cells it uses, and the payload's offset in the ring. The offset
  // is clear of the payload of the round before and equal on all members, because it depends only on the rounds that
  // succeeded.
  uint64_t round() const { return round_; }
  uint64_t place() const { return place_; }
  size_t place_for(size_t bytes) const;
  // The first round that a member may still enter: all before it are closed by some member.
  uint64_t most_closed() const;
  // The payloads of all members.
  std::vector<const std::byte*>& payloads() { return payloads_; }
  // succeeded: all members were there with equal keys.
  void leave_round(bool succeeded, size_t bytes);

 private:
  SharedSegment* shared_ = nullptr;
  bool is_on_ = false, is_busy_ = false;
  uint64_t round_ = 1;   // the next to enter, or the one under way
  uint64_t place_ = 0;   // which of my two cells it uses; it changes with every round that succeeds
  size_t ring_end_ = 0;  // of the payload of the last round that succeeded
  uint64_t successes_ = 0;
  std::vector<const std::byte*> payloads_;  // of all members, in the round under way
};

}  // namespace hc
