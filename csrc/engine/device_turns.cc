#include "engine/device_turns.h"

#include <algorithm>

namespace hc {

uint64_t word_of(const DeviceTurn& turn) {
  return static_cast<uint64_t>(turn.sender) << 48 | static_cast<uint64_t>(turn.set) << 32 |
         static_cast<uint32_t>(turn.bucket);
}
DeviceTurn turn_of(uint64_t word) {
  return {static_cast<uint16_t>(word >> 32), static_cast<int32_t>(static_cast<uint32_t>(word)),
          static_cast<uint16_t>(word >> 48)};
}

void DeviceTurns::add(DeviceTurn turn, uint32_t count) { turns_.insert(turns_.end(), count, turn); }

void DeviceTurns::give(DeviceTurn turn, uint32_t count, bool is_mine) {
  if (is_mine) add(turn, count);
  waiting_.insert(waiting_.end(), count, word_of(turn));
}

bool DeviceTurns::pass_on(const std::vector<bool>& gone) {
  if (waiting_.empty()) return true;
  uint64_t slowest = given_;
  for (int m = 1; m < lane_->size(); ++m)
    if (!gone[static_cast<size_t>(m)])
      slowest = std::min(slowest, lane_->flags(m).turns_taken.load(std::memory_order_acquire));
  LaneFlags& mine = lane_->mine();
  const uint64_t before = given_;
  for (; !waiting_.empty() && given_ - slowest < kTurnsKept; ++given_) {
    mine.turns[given_ % kTurnsKept].store(waiting_.front(), std::memory_order_relaxed);
    waiting_.pop_front();
  }
  if (given_ != before) lane_->publish(mine.turns_given, given_);
  return waiting_.empty();
}

bool DeviceTurns::take(const std::function<bool(const DeviceTurn&)>& is_mine) {
  if (!lane_ || lane_->index() == 0) return false;
  const LaneFlags& leader = lane_->flags(0);
  const uint64_t given = leader.turns_given.load(std::memory_order_acquire);
  if (given == taken_) return false;
  for (; taken_ < given; ++taken_) {
    const DeviceTurn turn = turn_of(leader.turns[taken_ % kTurnsKept].load(std::memory_order_relaxed));
    if (is_mine(turn)) turns_.push_back(turn);
  }
  lane_->mine().turns_taken.store(taken_, std::memory_order_release);  // rank 0 looks when it lacks room: no bell
  return true;
}

bool DeviceTurns::contains(uint16_t set) const {
  return std::any_of(turns_.begin(), turns_.end(), [&](const DeviceTurn& turn) { return turn.set == set; });
}

bool DeviceTurns::contains(const DeviceTurn& turn) const {
  return std::find(turns_.begin(), turns_.end(), turn) != turns_.end();
}

void DeviceTurns::drop(uint16_t set) {
  std::erase_if(turns_, [&](const DeviceTurn& turn) { return turn.set == set; });
}

void DeviceTurns::clear() {
  turns_.clear();
  waiting_.clear();
}

}  // namespace hc
