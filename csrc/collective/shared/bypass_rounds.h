// The bypass for a small operation in shared memory: no agreement goes before it. Every member publishes what it
// calls the operation and its payload in one place; once all have published the same, all have the result. When they
// have not, the operation steps back with its memory unchanged and is agreed on like any other.
//
// A session is a row of rounds. Every member opens it at the same round (the coordinator says which, in a plan) and
// each round takes one operation of every member. The rule that keeps the members of one mind:
//   a member that has not published in a round may close it; whoever has published waits until all have, or until it
//   sees the round closed by one that has not. So a round succeeds on every member or on none.
// Closing a round ends the session. A member closes before it announces anything to the coordinator, so nobody waits in
// a round for a member that is busy elsewhere. docs/decisions/0023 has the argument in full.
//
// Thread: the thread that makes progress. Owner: the engine's process set.
#pragma once

#include <memory>
#include <vector>

#include "collective/collective.h"
#include "collective/shared/shared.h"

namespace hc {

// What must be equal on all members for an operation to be one and the same.
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
  // Rounds in which all members met, since the beginning.
  uint64_t successes() const { return successes_; }

  // A round that no member has used or closed, for a new session. Only while no member has one open.
  uint64_t fresh_round() const;
  void open(uint64_t first_round);
  // Only between rounds of mine.
  void close();
  // Enters the next round with a task that puts at most kBypassBytes into a cell; null: no session is open (any more).
  // The task holds if every member calls the same: that they do is what the round finds out.
  std::unique_ptr<ArrivalCollective> enter(Task task, const Group& group, const BypassKey& key);

  // For a round under way. Its number, which of the two cells it uses, and where in the ring a payload goes: clear of
  // that of the round before, and the same place on all members, as it depends only on the rounds that succeeded.
  uint64_t round() const { return round_; }
  uint64_t place() const { return place_; }
  size_t place_for(size_t bytes) const;
  // No member enters a round before this one any more.
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
