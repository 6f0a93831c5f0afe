// The order in which this rank starts work on its GPU: the same on every rank, so that two communicators never wait for
// each other crosswise. Rank 0 of the world gives it. Where all ranks share memory it travels in rank 0's shared
// segment, so that buckets of persistent plans take their tickets without a message. Else each ticket goes straight to
// its ranks in a frame, and plans of the world's set, which are tickets too, along their tree: each says how much of
// the other comes before it, so the order is the same whatever arrives first, and no rank on the way is needed, which
// may have shut down.
//
// In shared memory persistent buckets are numbered, and anything else comes before the buckets that none of its ranks
// has begun: a rank may wait for it before it fills them. docs/decisions/gpu-launch-order.md has the argument.
//
// Thread: the thread that makes progress. Owner: LaunchOrder.
#pragma once

#include <deque>
#include <functional>
#include <span>
#include <vector>

#include "agreement/negotiation.h"
#include "collective/shared/shared.h"
#include "engine/operation/members.h"

namespace hc {

struct LaunchTicket {
  uint16_t set = 0;
  int32_t bucket = -1;  // the arrival flag of a persistent bucket; -1: the next planned batch of the set
  uint16_t sender = 0;  // set is kMessageStream: of the message whose number is `bucket`
  // A persistent bucket that starts together with the one of the next ticket, in one group of NCCL.
  bool with_next = false;
  bool ahead = false;   // of a persistent bucket: rank 0 may still withdraw it
  uint32_t number = 0;  // of a persistent bucket, in the order of the list; wraps around
  bool is_bucket() const { return bucket >= 0 && set != kMessageStream; }
  bool operator==(const LaunchTicket& other) const {
    return set == other.set && bucket == other.bucket && sender == other.sender;
  }
};
uint64_t word_of(const LaunchTicket& ticket);
LaunchTicket ticket_of(uint64_t word);

class LaunchTickets {
 public:
  // shared_segment: of the world, with every rank in it.
  void attach(SharedSegment* shared_segment) { shared_ = shared_segment; }
  // Tickets travel in shared memory, so persistent buckets can have some.
  bool in_memory() const { return shared_ != nullptr; }

  void add(LaunchTicket ticket, uint32_t count);  // mine

  // Rank 0, where tickets travel in frames: that `rank` is given so many. The number of batches of plans before them.
  uint32_t given_to(int rank, uint32_t count);
  // Rank 0: so many batches of a plan come next; the tickets that were given since the last such plan.
  std::vector<TicketsBefore> plan(uint32_t batches);
  // The others: from a frame of rank 0; after: that number of batches. is_mine: whether this rank takes part.
  void take_given(LaunchTicket ticket, uint32_t count, uint32_t after, bool is_mine);
  // The others: batches of a plan of the world's set.
  void take_plan(uint32_t batches, int rank, const std::vector<TicketsBefore>& before);

  // Rank 0, where tickets travel in shared memory: of a persistent bucket; of anything else, in which `ranks` take
  // part.
  void give_bucket(LaunchTicket ticket);
  void give(LaunchTicket ticket, uint32_t count, std::span<const int> ranks);
  // Rank 0: tickets of persistent buckets that it has not filled itself yet. It may withdraw what no rank has begun.
  void give_ahead(std::span<const LaunchTicket> buckets);
  void withdraw_ahead();
  bool has_ahead() const { return has_ahead_; }
  uint64_t times_withdrawn() const { return times_withdrawn_; }
  // Rank 0: passes on what there was no room for. False: some of it waits for ranks to take theirs; `gone` take none.
  bool pass_on(const std::vector<bool>& gone);
  // The others, in shared memory: whether rank 0 has given something that was not taken yet.
  bool has_news() const {
    return shared_ && shared_->index() != 0 &&
           shared_->flags(0).tickets_given.load(std::memory_order_acquire) != taken_;
  }
  // This rank begins the persistent buckets of the next `count` tickets. False: something may come before them, which
  // the others know from rank 0 and this rank has to read first.
  bool begin_buckets(size_t count);
  bool is_held() const;
  // The others: takes what rank 0 has given; is_mine: whether this rank takes part. True: something came.
  bool take(const std::function<bool(const LaunchTicket&)>& is_mine);

  const std::deque<uint64_t>& kept_back() const { return waiting_; }

  const LaunchTicket* next() const { return at(0); }
  const LaunchTicket* at(size_t place) const { return place < tickets_.size() ? &tickets_[place] : nullptr; }
  bool is_next(const LaunchTicket& ticket) const { return !tickets_.empty() && tickets_.front() == ticket; }
  // Also what came before its place in the order.
  bool contains(uint16_t set) const;
  bool contains(const LaunchTicket& ticket) const;
  void over() { tickets_.pop_front(); }  // the next one has been used
  void drop(uint16_t set);               // it has been removed
  void clear();

 private:
  // What waits for its place: after so many of the other kind.
  struct Early {
    LaunchTicket ticket;
    uint32_t count = 0, after = 0;
    bool is_mine = true;
  };
  uint32_t begun_by(int rank, uint32_t reads_first);
  void insert(const LaunchTicket& ticket, uint32_t place);
  void cut(uint32_t last);
  void take_word(LaunchTicket ticket, const std::function<bool(const LaunchTicket&)>& is_mine);
  bool any(const std::function<bool(const LaunchTicket&)>& is_it) const;
  void settle();

  SharedSegment* shared_ = nullptr;
  std::deque<LaunchTicket> tickets_;
  std::deque<uint64_t> waiting_;    // rank 0: not passed on yet
  uint64_t given_ = 0, taken_ = 0;  // words in rank 0's shared segment, in all
  uint32_t numbered_ = 0;           // persistent buckets in the list
  uint32_t begun_ = 0;              // rank 0: the newest that it has begun
  std::vector<uint32_t> placed_;    // rank 0: behind which bucket each rank's newest other ticket stands
  bool has_ahead_ = false;          // rank 0
  uint64_t times_withdrawn_ = 0;
  uint32_t place_ = 0, ahead_ = 0;  // the others, from words about those that follow

  // In frames. All numbers are of this generation and wrap around.
  std::vector<uint32_t> given_out_;     // rank 0: to each rank since the last plan with batches
  std::deque<Early> frames_, plans_;    // the others: in the order in which they came
  uint32_t planned_ = 0, granted_ = 0;  // batches and tickets in their places
  uint32_t expected_ = 0;               // tickets before the newest plan
};

}  // namespace hc
