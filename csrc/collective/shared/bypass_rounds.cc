#include "collective/shared/bypass_rounds.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "collective/selection.h"
#include "collective/shared/flat_payload.h"
#include "collective/shared/halves.h"

namespace hc {

// One round. The payload is read only when all members have published equal keys; a member overwrites it only after a
// later round has succeeded, which all have entered after they had read this one. A large allreduce of two goes in
// halves: with equal keys each sums one, and then waits for the other's. Its payload is free again when the round is
// over.
class BypassRound final : public ArrivalCollective {
 public:
  BypassRound(Task task, const Group& group, const BypassKey& key, BypassRounds* rounds)
      : payload_(std::move(task), group.rank, group.shared_segment->levels()),
        bytes_(payload_.bytes()),
        shared_(*group.shared_segment),
        rank_(group.rank),
        key_(key),
        rounds_(rounds),
        round_(rounds->round()),
        place_(rounds->place()),
        at_(rounds->place_for(bytes_)) {
    if (goes_in_halves(payload_.task(), group.size)) halves_.emplace(payload_.task(), rank_);
    algorithm_ = "shm bypass";
  }

  Progress start() override {
    BypassCell& mine = cell(rank_);
    // Somebody may still look at what a round without success left here: it must not take my new key for the old
    // round's.
    mine.round.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    mine.cache_id.store(key_.cache_id, std::memory_order_relaxed);
    mine.sequence.store(key_.sequence, std::memory_order_relaxed);
    mine.signature.store(key_.signature, std::memory_order_relaxed);
    if (halves_)
      halves_->contribute(shared_.half(rank_));
    else
      payload_.contribute(payload_of(rank_));
    if (shared_.publish_to_all(mine.round, round_,
                               [&](int m) { return cell(m).round.load(std::memory_order_seq_cst) == round_; }))
      mine.last.store(round_, std::memory_order_release);
    return Progress::kPending;
  }

  Progress step(bool* moved) override {
    if (is_summed_) return collect_half(moved);
    View seen = look();
    // A member that has closed a later round has left this one with success, so everybody must be here by now; one that
    // has closed this round never enters it.
    const bool closed = seen == View::kWaiting && rounds_->most_closed() > round_;
    if (closed) seen = look();
    if (seen == View::kWaiting && !closed) return Progress::kPending;
    *moved = true;
    if (arrival_.last >= 0) arrival_ = {last_one(), Clock::now()};
    withdrawn_ = seen != View::kAllHere;
    if (!withdrawn_ && halves_) {
      halves_->sum(shared_.half(1 - rank_));
      shared_.publish(shared_.mine().bypass_summed, round_);
      is_summed_ = true;
      return collect_half(moved);
    }
    if (!withdrawn_) collect();
    rounds_->leave_round(!withdrawn_, bytes_);
    return Progress::kDone;
  }

  std::vector<int> late_members() const override {
    if (is_summed_) return {1 - rank_};
    std::vector<int> late;
    for (int m = 0; m < shared_.size(); ++m)
      if (cell(m).round.load(std::memory_order_acquire) != round_) late.push_back(m);
    return late;
  }

 private:
  enum class View { kWaiting, kAllHere, kMismatch };

  BypassCell& cell(int member) const { return shared_.bypass_cell(member, place_); }
  std::byte* payload_of(int member) const {
    return bytes_ <= sizeof(BypassCell::inline_payload) ? cell(member).inline_payload
                                                        : shared_.bypass_ring(member) + at_;
  }

  View look() {
    for (int m = 0; m < shared_.size(); ++m) {
      if (m == rank_) continue;
      const BypassCell& other = cell(m);
      const bool here = other.round.load(std::memory_order_acquire) == round_;
      const BypassKey key{other.cache_id.load(std::memory_order_relaxed),
                          other.sequence.load(std::memory_order_relaxed),
                          other.signature.load(std::memory_order_relaxed)};
      std::atomic_thread_fence(std::memory_order_acquire);
      if (!here || other.round.load(std::memory_order_relaxed) != round_) {
        arrival_.last = m;
        return View::kWaiting;
      }
      if (key != key_) return View::kMismatch;
    }
    return View::kAllHere;
  }

  // Who came last; who was missing when this member last looked, before it slept perhaps, where nobody says so.
  int last_one() const {
    for (int m = 0; m < shared_.size(); ++m)
      if (cell(m).last.load(std::memory_order_acquire) == round_) return m;
    return arrival_.last;
  }

  void collect() {
    std::vector<const std::byte*>& payloads = rounds_->payloads();
    for (int m = 0; m < shared_.size(); ++m) payloads[static_cast<size_t>(m)] = payload_of(m);
    payload_.collect(payloads);
  }

  Progress collect_half(bool* moved) {
    if (shared_.flags(1 - rank_).bypass_summed.load(std::memory_order_acquire) < round_) return Progress::kPending;
    *moved = true;
    halves_->collect(shared_.half(rank_));
    rounds_->leave_round(true, 0);
    return Progress::kDone;
  }

  const FlatPayload payload_;
  const size_t bytes_;
  std::optional<Halves> halves_;
  bool is_summed_ = false;
  SharedSegment& shared_;
  const int rank_;
  const BypassKey key_;
  BypassRounds* const rounds_;
  const uint64_t round_, place_;
  const size_t at_;  // in the ring
};

uint64_t BypassRounds::most_closed() const {
  uint64_t most = 0;
  for (int m = 0; m < shared_->size(); ++m)
    most = std::max(most, shared_->flags(m).bypass_closed.load(std::memory_order_acquire));
  return most;
}

uint64_t BypassRounds::fresh_round() const { return std::max(round_, most_closed()) + 1; }

void BypassRounds::open(uint64_t first_round) {
  round_ = first_round;
  is_on_ = true;
}

void BypassRounds::close() {
  is_on_ = false;
  shared_->publish(shared_->mine().bypass_closed, round_ + 1);
}

std::unique_ptr<ArrivalCollective> BypassRounds::enter(Task task, const Group& group, const BypassKey& key) {
  if (!is_on_ || is_busy_) return nullptr;
  if (most_closed() > round_) {
    is_on_ = false;
    return nullptr;
  }
  auto round = std::make_unique<BypassRound>(std::move(task), group, key, this);
  is_busy_ = true;
  (void)round->start();  // it only publishes
  return round;
}

size_t BypassRounds::place_for(size_t bytes) const { return ring_end_ + bytes <= kBypassRingBytes ? ring_end_ : 0; }

void BypassRounds::leave_round(bool succeeded, size_t bytes) {
  is_busy_ = false;
  ++round_;
  if (succeeded) {
    place_ ^= 1;
    if (bytes > sizeof(BypassCell::inline_payload))
      ring_end_ = (place_for(bytes) + bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    ++successes_;
  } else {
    is_on_ = false;
  }
}

}  // namespace hc
