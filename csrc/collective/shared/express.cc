#include "collective/shared/express.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "collective/shared/flat_payload.h"

namespace hc {

// One turn. The payload is read only when all members have published equal keys; a member overwrites it only after a
// later turn has succeeded, which all have entered after they had read this one.
class ExpressTurn final : public ArrivalCollective {
 public:
  ExpressTurn(Task task, const Group& group, const ExpressKey& key, Express* express)
      : payload_(std::move(task), group.rank),
        bytes_(payload_.bytes()),
        lane_(*group.lane),
        rank_(group.rank),
        key_(key),
        express_(express),
        turn_(express->turn()),
        place_(express->place()),
        at_(express->place_for(bytes_)) {
    algorithm_ = "shm express";
  }

  Progress start() override {
    ExpressSlot& mine = slot(rank_);
    // Somebody may still look at what a turn without success left here: it must not take my new key for the old turn's.
    mine.turn.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    mine.slot.store(key_.slot, std::memory_order_relaxed);
    mine.sequence.store(key_.sequence, std::memory_order_relaxed);
    mine.signature.store(key_.signature, std::memory_order_relaxed);
    payload_.contribute(payload_of(rank_));
    if (lane_.meet(mine.turn, turn_, [&](int m) { return slot(m).turn.load(std::memory_order_seq_cst) == turn_; }))
      mine.last.store(turn_, std::memory_order_release);
    return Progress::kPending;
  }

  Progress step(bool* moved) override {
    View seen = look();
    // A member that has closed a later turn has left this one with success, so everybody must be here by now; one that
    // has closed this turn never enters it.
    const bool closed = seen == View::kWaiting && express_->most_closed() > turn_;
    if (closed) seen = look();
    if (seen == View::kWaiting && !closed) return Progress::kPending;
    *moved = true;
    if (arrival_.last >= 0) arrival_ = {last_one(), Clock::now()};
    withdrawn_ = seen != View::kAllHere;
    if (!withdrawn_) collect();
    express_->leave_turn(!withdrawn_, bytes_);
    return Progress::kDone;
  }

  std::vector<int> late_members() const override {
    std::vector<int> late;
    for (int m = 0; m < lane_.size(); ++m)
      if (slot(m).turn.load(std::memory_order_acquire) != turn_) late.push_back(m);
    return late;
  }

 private:
  enum class View { kWaiting, kAllHere, kMismatch };

  ExpressSlot& slot(int member) const { return lane_.express_slot(member, place_); }
  std::byte* payload_of(int member) const {
    return bytes_ <= sizeof(ExpressSlot::few) ? slot(member).few : lane_.express_ring(member) + at_;
  }

  View look() {
    for (int m = 0; m < lane_.size(); ++m) {
      if (m == rank_) continue;
      const ExpressSlot& other = slot(m);
      const bool here = other.turn.load(std::memory_order_acquire) == turn_;
      const ExpressKey key{other.slot.load(std::memory_order_relaxed), other.sequence.load(std::memory_order_relaxed),
                           other.signature.load(std::memory_order_relaxed)};
      std::atomic_thread_fence(std::memory_order_acquire);
      if (!here || other.turn.load(std::memory_order_relaxed) != turn_) {
        arrival_.last = m;
        return View::kWaiting;
      }
      if (key != key_) return View::kMismatch;
    }
    return View::kAllHere;
  }

  // Who came last; who was missing when this member last looked, before it slept perhaps, where nobody says so.
  int last_one() const {
    for (int m = 0; m < lane_.size(); ++m)
      if (slot(m).last.load(std::memory_order_acquire) == turn_) return m;
    return arrival_.last;
  }

  void collect() {
    std::vector<const std::byte*>& slots = express_->payloads();
    for (int m = 0; m < lane_.size(); ++m) slots[static_cast<size_t>(m)] = payload_of(m);
    payload_.collect(slots);
  }

  const FlatPayload payload_;
  const size_t bytes_;
  SharedLane& lane_;
  const int rank_;
  const ExpressKey key_;
  Express* const express_;
  const uint64_t turn_, place_;
  const size_t at_;  // in the ring
};

uint64_t Express::most_closed() const {
  uint64_t most = 0;
  for (int m = 0; m < lane_->size(); ++m)
    most = std::max(most, lane_->flags(m).express_closed.load(std::memory_order_acquire));
  return most;
}

uint64_t Express::fresh_turn() const { return std::max(turn_, most_closed()) + 1; }

void Express::open(uint64_t first_turn) {
  turn_ = first_turn;
  is_on_ = true;
}

void Express::close() {
  is_on_ = false;
  lane_->publish(lane_->mine().express_closed, turn_ + 1);
}

std::unique_ptr<ArrivalCollective> Express::enter(Task task, const Group& group, const ExpressKey& key) {
  if (!is_on_ || is_busy_) return nullptr;
  if (most_closed() > turn_) {
    is_on_ = false;
    return nullptr;
  }
  auto turn = std::make_unique<ExpressTurn>(std::move(task), group, key, this);
  is_busy_ = true;
  (void)turn->start();  // it only publishes
  return turn;
}

size_t Express::place_for(size_t bytes) const { return ring_end_ + bytes <= kExpressRingBytes ? ring_end_ : 0; }

void Express::leave_turn(bool met, size_t bytes) {
  is_busy_ = false;
  ++turn_;
  if (met) {
    place_ ^= 1;
    if (bytes > sizeof(ExpressSlot::few))
      ring_end_ = (place_for(bytes) + bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    ++successes_;
  } else {
    is_on_ = false;
  }
}

}  // namespace hc
