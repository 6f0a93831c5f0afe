// The base of the blocked algorithms in shared memory: private tensors travel through buffers of the shared segment in
// blocks, in a pipeline of three stages. Used by shared_blocked.cc (one node) and two_level.cc (several nodes). Thread:
// the thread that makes progress.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "collective/collective.h"
#include "collective/pieces.h"
#include "collective/shared/shared.h"

namespace hc {

inline bool all_reached(const SharedSegment& shared_segment, std::atomic<uint64_t> SegmentFlags::* counter,
                        uint64_t value) {
  for (int m = 0; m < shared_segment.size(); ++m)
    if ((shared_segment.flags(m).*counter).load(std::memory_order_acquire) < value) return false;
  return true;
}

// Blocks through buffers. A block passes three stages on every member: fill (my contribution into my buffer), reduce
// (allreduce and reducescatter: my slice of it) and drain (what I need from the others' buffers). Fill of later blocks
// runs ahead of drain by up to kBlockBuffers, which hides a late peer.
class BlockedCollective : public Collective {
 public:
  BlockedCollective(Task task, const Group& group)
      : task_(std::move(task)),
        shared_(*group.shared_segment),
        n_(shared_.size()),
        rank_(shared_.index()),
        view_(task_.pieces, size_of(task_.dtype)) {
    first_ = shared_.block_total;
    algorithm_ = "shm blocks";
  }

  Progress start() override {
    shared_.block_total += blocks_;
    return Progress::kPending;
  }

  Progress step(bool* moved) override {
    bool any = true;
    while (any) {
      any = false;
      if (drained_ < blocks_ && can_drain()) {
        drain(drained_++);
        shared_.publish_to_all(&SegmentFlags::consumed, first_ + drained_);
        any = true;
      } else if (reduced_ < started_ && is_reduced(reduced_, moved)) {
        shared_.publish_to_all(&SegmentFlags::reduced, first_ + ++reduced_);
        any = true;
      } else if (started_ < blocks_ && can_reduce()) {
        start_reduce(started_++);
        any = true;
      } else if (filled_ < blocks_ && can_fill()) {
        fill(filled_++);
        shared_.publish_to_all(&SegmentFlags::filled, first_ + filled_);
        any = true;
      }
      if (!status_.is_ok()) return Progress::kFailed;
      *moved |= any;
      if (any && ++passes_ % 4 == 0) break;  // let other process sets proceed
    }
    return drained_ == blocks_ ? Progress::kDone : Progress::kPending;
  }

 protected:
  virtual void fill(uint64_t block) = 0;
  // May leave work for is_reduced() to finish; then every member's drain of the block waits for it.
  virtual void start_reduce(uint64_t) {}
  virtual bool is_reduced(uint64_t, bool*) { return true; }
  virtual void drain(uint64_t block) = 0;

  size_t item() const { return size_of(task_.dtype); }
  std::byte* buffer(int member, uint64_t block) const { return shared_.block_buffer(member, first_ + block); }
  void set_blocks(size_t blocks) { blocks_ = blocks; }

  Task task_;
  SharedSegment& shared_;
  const int n_;     // members of the shared segment
  const int rank_;  // mine among them
  PieceView view_;

 private:
  bool can_fill() const {
    const uint64_t block = first_ + filled_;
    return filled_ < drained_ + kBlockBuffers &&
           (block < kBlockBuffers || all_reached(shared_, &SegmentFlags::consumed, block - kBlockBuffers + 1));
  }
  bool can_reduce() const {
    return started_ < filled_ && all_reached(shared_, &SegmentFlags::filled, first_ + started_ + 1);
  }
  bool can_drain() const {
    return drained_ < reduced_ && all_reached(shared_, &SegmentFlags::reduced, first_ + drained_ + 1);
  }

  uint64_t first_ = 0;
  uint64_t blocks_ = 0, filled_ = 0, started_ = 0, reduced_ = 0, drained_ = 0;
  unsigned passes_ = 0;
};

}  // namespace hc
