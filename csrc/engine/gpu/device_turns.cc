#include "engine/gpu/device_turns.h"

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
  for (int m = 1; m < shared_->size(); ++m)
    if (!gone[static_cast<size_t>(m)])
      slowest = std::min(slowest, shared_->flags(m).turns_taken.load(std::memory_order_acquire));
  SegmentFlags& mine = shared_->mine();
  const uint64_t before = given_;
  for (; !waiting_.empty() && given_ - slowest < kTurnsKept; ++given_) {
    mine.turns[given_ % kTurnsKept].store(waiting_.front(), std::memory_order_relaxed);
    waiting_.pop_front();
  }
  if (given_ != before) shared_->publish(mine.turns_given, given_);
  return waiting_.empty();
}

bool DeviceTurns::take(const std::function<bool(const DeviceTurn&)>& is_mine) {
  if (!shared_ || shared_->index() == 0) return false;
  const SegmentFlags& leader = shared_->flags(0);
  const uint64_t given = leader.turns_given.load(std::memory_order_acquire);
  if (given == taken_) return false;
  for (; taken_ < given; ++taken_) {
    const DeviceTurn turn = turn_of(leader.turns[taken_ % kTurnsKept].load(std::memory_order_relaxed));
    if (is_mine(turn)) turns_.push_back(turn);
  }
  shared_->mine().turns_taken.store(taken_, std::memory_order_release);  // rank 0 looks when it lacks room: no bell
  return true;
}

// ---- in frames

uint32_t DeviceTurns::given_to(int rank, uint32_t count) {
  const auto r = static_cast<size_t>(rank);
  if (given_out_.size() <= r) given_out_.resize(r + 1);
  given_out_[r] += count;
  return planned_;
}

std::vector<TurnsBefore> DeviceTurns::plan(uint32_t batches) {
  planned_ += batches;
  std::vector<TurnsBefore> runs;
  for (uint32_t r = 0; r < given_out_.size(); ++r) {
    if (given_out_[r] == 0) continue;
    if (!runs.empty() && runs.back().first + runs.back().ranks == r && runs.back().turns == given_out_[r])
      ++runs.back().ranks;
    else
      runs.push_back({r, 1, given_out_[r]});
  }
  given_out_.clear();
  return runs;
}

void DeviceTurns::take_given(DeviceTurn turn, uint32_t count, uint32_t after, bool is_mine) {
  frames_.push_back({turn, count, after, is_mine});
  settle();
}

void DeviceTurns::take_plan(uint32_t batches, int rank, const std::vector<TurnsBefore>& before) {
  const auto r = static_cast<uint32_t>(rank);
  for (const TurnsBefore& run : before)
    if (r >= run.first && r - run.first < run.ranks) expected_ += run.turns;
  plans_.push_back({{0}, batches, expected_, true});
  settle();
}

void DeviceTurns::settle() {
  const auto settle_one = [this](std::deque<Early>* from, uint32_t* passed, uint32_t other) {
    if (from->empty() || from->front().after != other) return false;
    const Early& first = from->front();
    if (first.is_mine) add(first.turn, first.count);
    *passed += first.count;
    from->pop_front();
    return true;
  };
  while (settle_one(&frames_, &granted_, planned_) || settle_one(&plans_, &planned_, granted_)) {
  }
}

// ----

bool DeviceTurns::any(const std::function<bool(const DeviceTurn&)>& is_it) const {
  const auto early = [&](const Early& e) { return e.is_mine && is_it(e.turn); };
  return std::any_of(turns_.begin(), turns_.end(), is_it) || std::any_of(frames_.begin(), frames_.end(), early) ||
         std::any_of(plans_.begin(), plans_.end(), early);
}

bool DeviceTurns::contains(uint16_t set) const {
  return any([&](const DeviceTurn& turn) { return turn.set == set; });
}

bool DeviceTurns::contains(const DeviceTurn& turn) const {
  return any([&](const DeviceTurn& other) { return other == turn; });
}

void DeviceTurns::drop(uint16_t set) {
  std::erase_if(turns_, [&](const DeviceTurn& turn) { return turn.set == set; });
  for (Early& early : frames_) early.is_mine = early.is_mine && early.turn.set != set;
}

void DeviceTurns::clear() {
  turns_.clear();
  waiting_.clear();
  given_out_.clear();
  frames_.clear();
  plans_.clear();
  planned_ = granted_ = expected_ = 0;
}

}  // namespace hc
