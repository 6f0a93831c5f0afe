// The order in which this rank starts work on its GPU: the same on every rank, so that two communicators never wait for
// each other crosswise. Rank 0 of the world gives it. Where all ranks share memory it travels in rank 0's shared
// segment, so that buckets of frozen plans take their turns without a message. Else each turn goes straight to its
// ranks in a frame, and plans of the world's set, which are turns too, along their tree: each says how much of the
// other comes before it, so the order is the same whatever arrives first, and no rank on the way is needed, which may
// have shut down.
//
// Thread: the thread that makes progress. Owner: the engine.
#pragma once

#include <deque>
#include <functional>
#include <vector>

#include "agreement/negotiation.h"
#include "collective/shared/shared.h"

namespace hc {

struct DeviceTurn {
  uint16_t set = 0;
  int32_t bucket = -1;  // the arrival flag of a frozen bucket; -1: the next planned batch of the set
  uint16_t sender = 0;  // set is kMessageStream: of the message whose number is `bucket`
  bool operator==(const DeviceTurn&) const = default;
};
uint64_t word_of(const DeviceTurn& turn);
DeviceTurn turn_of(uint64_t word);

class DeviceTurns {
 public:
  // shared_segment: of the world, with every rank in it.
  void attach(SharedSegment* shared_segment) { shared_ = shared_segment; }
  // Turns travel in shared memory, so frozen buckets can have some.
  bool in_memory() const { return shared_ != nullptr; }

  void add(DeviceTurn turn, uint32_t count);  // mine

  // Rank 0, where turns travel in frames: that `rank` is given so many. The number of batches of plans before them.
  uint32_t given_to(int rank, uint32_t count);
  // Rank 0: so many batches of a plan come next; the turns that were given since the last such plan.
  std::vector<TurnsBefore> plan(uint32_t batches);
  // The others: from a frame of rank 0; after: that number of batches. is_mine: whether this rank takes part.
  void take_given(DeviceTurn turn, uint32_t count, uint32_t after, bool is_mine);
  // The others: batches of a plan of the world's set.
  void take_plan(uint32_t batches, int rank, const std::vector<TurnsBefore>& before);

  // Rank 0, where turns travel in shared memory: everybody's; is_mine: mine, too.
  void give(DeviceTurn turn, uint32_t count, bool is_mine);
  // Rank 0: passes on what there was no room for. False: some of it waits for ranks to take theirs; `gone` take none.
  bool pass_on(const std::vector<bool>& gone);
  // The others, in shared memory: whether rank 0 has given something that was not taken yet.
  bool has_news() const {
    return shared_ && shared_->index() != 0 && shared_->flags(0).turns_given.load(std::memory_order_acquire) != taken_;
  }
  // The others: takes what rank 0 has given; is_mine: whether this rank takes part. True: something came.
  bool take(const std::function<bool(const DeviceTurn&)>& is_mine);

  size_t kept_back() const { return waiting_.size(); }

  const DeviceTurn* next() const { return turns_.empty() ? nullptr : &turns_.front(); }
  bool is_next(const DeviceTurn& turn) const { return !turns_.empty() && turns_.front() == turn; }
  // Also what came before its place in the order.
  bool contains(uint16_t set) const;
  bool contains(const DeviceTurn& turn) const;
  void over() { turns_.pop_front(); }  // the next one has been used
  void drop(uint16_t set);             // it has been removed
  void clear();

 private:
  // What waits for its place: after so many of the other kind.
  struct Early {
    DeviceTurn turn;
    uint32_t count = 0, after = 0;
    bool is_mine = true;
  };
  bool any(const std::function<bool(const DeviceTurn&)>& is_it) const;
  void settle();

  SharedSegment* shared_ = nullptr;
  std::deque<DeviceTurn> turns_;
  std::deque<uint64_t> waiting_;    // rank 0: not passed on yet
  uint64_t given_ = 0, taken_ = 0;  // words in rank 0's shared segment, in all

  // In frames. All numbers are of this generation and wrap around.
  std::vector<uint32_t> given_out_;     // rank 0: to each rank since the last plan with batches
  std::deque<Early> frames_, plans_;    // the others: in the order in which they came
  uint32_t planned_ = 0, granted_ = 0;  // batches and turns in their places
  uint32_t expected_ = 0;               // turns before the newest plan
};

}  // namespace hc
