// Large operations on private tensors on a machine with several NUMA nodes: blocks travel through buffers of the shared
// segment as in shared_blocked.cc, but by a LevelSchedule, so that each byte crosses a link between sockets as few
// times as possible. A member waits only for those whose buffers it reads: flags cross the links, too.
#include "collective/shared/levelled.h"

#include "collective/pieces.h"
#include "collective/shared/shared.h"

namespace hc {
namespace {

class LevelledCollective : public Collective {
 public:
  LevelledCollective(Task task, const Group& group, size_t block_bytes)
      : task_(std::move(task)),
        shared_(*group.shared_segment),
        n_(shared_.size()),
        rank_(shared_.index()),
        item_(size_of(task_.dtype)),
        block_(std::max<size_t>(1, block_bytes / item_)),
        first_(shared_.block_total),
        view_(task_.pieces, item_) {
    algorithm_ = "shm levels";
    if (task_.op == Op::kAllgather) {
      slot_ = std::max<size_t>(1, block_ / static_cast<size_t>(n_));
      block_ = slot_ * static_cast<size_t>(n_);
      const size_t longest = *std::max_element(task_.counts.begin(), task_.counts.end());
      blocks_ = (longest + slot_ - 1) / slot_;
      for (size_t at = 0; size_t c : task_.counts) offsets_.push_back(at), at += c;
    } else {
      total_ = task_.count();
      blocks_ = (total_ + block_ - 1) / block_;
    }
    if (blocks_ == 0) return;
    stages_ = shared_.level_stages(task_.op, task_.root, count_of(0), item_);
    last_stages_ = shared_.level_stages(task_.op, task_.root, count_of(blocks_ - 1), item_);
    done_.resize(stages_->size() + 1);
    readers_ = readers_of_mine();
    others_ = others();
    buffers_.resize(static_cast<size_t>(n_));
  }

  Progress start() override {
    shared_.block_total += blocks_;
    return Progress::kPending;
  }

  Progress step(bool* moved) override {
    for (unsigned passes = 0; passes < 4; ++passes) {  // then other process sets may proceed
      // The latest stage first, which frees buffers.
      size_t s = done_.size();
      while (s > 0 && !can_do(s - 1)) --s;
      if (s == 0) break;
      run(s - 1);
      *moved = true;
    }
    return blocks_ == 0 || done_.back() == blocks_ ? Progress::kDone : Progress::kPending;
  }

 private:
  size_t count_of(uint64_t block) const {
    return task_.op == Op::kAllgather ? block_ : std::min(block_, total_ - block * block_);
  }
  const LevelStage& stage_of(size_t stage, uint64_t block) const {
    return (*(block + 1 == blocks_ ? last_stages_ : stages_))[stage - 1];
  }
  // Who may read my buffer in a block of this operation. In an allreduce whoever reads mine is read by me as well: what
  // one sums the other fetches.
  std::vector<int> readers_of_mine() const {
    std::vector<int> readers;
    for (const LevelStage& stage : *stages_) readers.insert(readers.end(), stage.sources.begin(), stage.sources.end());
    std::sort(readers.begin(), readers.end());
    readers.erase(std::unique(readers.begin(), readers.end()), readers.end());
    return task_.op == Op::kAllreduce ? readers : others();
  }
  std::vector<int> others() const {
    std::vector<int> all;
    for (int m = 0; m < n_; ++m)
      if (m != rank_) all.push_back(m);
    return all;
  }
  std::atomic<uint64_t>& counter(int member, size_t stage) const {
    SegmentFlags& flags = shared_.flags(member);
    if (stage == 0) return flags.filled;
    return stage == stages_->size() ? flags.consumed : flags.stages[stage - 1].blocks;
  }
  bool reached(const std::vector<int>& members, size_t stage, uint64_t value) const {
    return std::all_of(members.begin(), members.end(),
                       [&](int m) { return counter(m, stage).load(std::memory_order_acquire) >= value; });
  }
  bool can_do(size_t stage) const {
    const uint64_t block = done_[stage];
    if (block == blocks_) return false;
    if (stage > 0)
      return block < done_[stage - 1] && reached(stage_of(stage, block).sources, stage - 1, first_ + block + 1);
    if (block >= done_.back() + kBlockBuffers) return false;
    // The first blocks use buffers of the operation before, which anybody may read.
    const std::vector<int>& readers = block < kBlockBuffers ? others_ : readers_;
    return first_ + block < kBlockBuffers || reached(readers, stages_->size(), first_ + block + 1 - kBlockBuffers);
  }
  void run(size_t stage) {
    const uint64_t block = done_[stage]++;
    if (stage == 0) {
      fill(block);
    } else {
      for (int m = 0; m < n_; ++m) buffers_[static_cast<size_t>(m)] = buffer(m, block);
      const LevelStage& one = stage_of(stage, block);
      for (const LevelStep& step : one.steps) {
        if (one.kind == LevelStage::Kind::kDeliver)
          deliver(block, step);
        else
          run_level_step(task_, one, step, count_of(block), buffers_, rank_);
      }
    }
    shared_.publish(counter(rank_, stage), first_ + block + 1);
  }
  std::byte* buffer(int member, uint64_t block) const { return shared_.block_buffer(member, first_ + block); }

  void fill(uint64_t block) {
    if (task_.op == Op::kAllgather) return fill_slot(block);
    if (task_.op == Op::kBroadcast && rank_ != task_.root) return;
    view_.gather(block * block_, count_of(block), buffer(rank_, block));
  }
  void deliver(uint64_t block, const LevelStep& step) {
    const std::byte* from = buffers_[static_cast<size_t>(step.sources[0])];
    if (task_.op == Op::kAllgather) return deliver_slots(block, step, from);
    if (task_.op == Op::kBroadcast && rank_ == task_.root && !copies_own()) return;
    const size_t end = std::min(step.end, count_of(block));
    if (step.begin < end) view_.scatter(block * block_ + step.begin, end - step.begin, from + step.begin * item_);
  }
  bool copies_own() const {
    return std::any_of(task_.pieces.begin(), task_.pieces.end(), [](const Piece& p) { return p.in != p.out; });
  }

  // Allgather: block b holds the b-th part of every member's elements, one slot behind the other.
  size_t count_in_slot(int m, uint64_t block) const {
    const size_t from = block * slot_, all = task_.counts[static_cast<size_t>(m)];
    return from >= all ? 0 : std::min(slot_, all - from);
  }
  void fill_slot(uint64_t block) {
    const size_t bytes = count_in_slot(rank_, block) * item_;
    if (bytes)
      std::memcpy(buffer(rank_, block) + static_cast<size_t>(rank_) * slot_ * item_,
                  task_.pieces[0].in + block * slot_ * item_, bytes);
  }
  void deliver_slots(uint64_t block, const LevelStep& step, const std::byte* from) {
    for (size_t m = step.begin / slot_; m * slot_ < step.end; ++m) {
      const size_t slot = m * slot_, begin = std::max(step.begin, slot) - slot;
      const size_t end = std::min(std::min(step.end - slot, slot_), count_in_slot(static_cast<int>(m), block));
      if (end <= begin) continue;
      std::byte* to = task_.pieces[0].out + (offsets_[m] + block * slot_ + begin) * item_;
      std::memcpy(to, from + (slot + begin) * item_, (end - begin) * item_);
    }
  }

  Task task_;
  SharedSegment& shared_;
  const int n_, rank_;
  const size_t item_;
  size_t block_;      // elements
  size_t slot_ = 0;   // of them for each member, in an allgather
  size_t total_ = 0;  // elements, but in an allgather
  std::vector<size_t> offsets_;
  const uint64_t first_;
  uint64_t blocks_ = 0;
  PieceView view_;
  std::shared_ptr<const std::vector<LevelStage>> stages_, last_stages_;  // of all blocks, and of the last
  std::vector<uint64_t> done_;                                           // [stage]: blocks
  std::vector<int> readers_, others_;
  std::vector<std::byte*> buffers_;
};

}  // namespace

Result<std::unique_ptr<Collective>> make_levelled_collective(Task task, const Group& group) {
  const size_t block = std::min(kBlockBufferBytes, task.segment_bytes);
  return std::unique_ptr<Collective>(std::make_unique<LevelledCollective>(std::move(task), group, block));
}

}  // namespace hc
