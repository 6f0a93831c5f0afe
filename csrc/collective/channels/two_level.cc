// Allreduce over nodes with several ranks each: per block, the node's members reduce a slice each in shared memory,
// each carries its slice between the nodes (so that no single core has to feed the link), then all read the results.
// Moves 2(H-1)/H of the buffer over each node's link instead of up to 2(N-1)/N times the ranks per node. Source of the
// idea: BlueConnect (Cho et al., MLSys 2019). Thread: the thread that makes progress.
#include <deque>

#include "collective/channels/striped_allreduce.h"
#include "collective/shared/blocked.h"

namespace hc {
namespace {

class TwoLevelAllreduce : public BlockedCollective {
 public:
  TwoLevelAllreduce(Task task, const Group& group, Stripe stripe)
      : BlockedCollective(std::move(task), group), group_(group), stripe_(std::move(stripe)) {
    algorithm_ = "two level";
    total_ = task_.count();
    block_ = std::max<size_t>(1, kBlockBufferBytes / item());
    const size_t blocks = (total_ + block_ - 1) / block_;
    first_block_ = blocks * task_.part / task_.parts;
    set_blocks(blocks * (task_.part + 1) / task_.parts - first_block_);
    sources_.resize(n_);
  }

 private:
  size_t begin_of(uint64_t block) const { return (first_block_ + block) * block_; }
  // Only the first `stripes` members own a slice: the nodes may have different numbers of members.
  Slices slices(uint64_t block) const { return {std::min(block_, total_ - begin_of(block)), stripe_.stripes, item()}; }
  bool owns() const { return rank_ < stripe_.stripes; }

  void fill(uint64_t block) override {
    const Slices s = slices(block);
    std::byte* to = buffer(rank_, block);
    if (!owns()) return view_.gather(begin_of(block), s.count_, to);
    view_.gather(begin_of(block), s.begin(rank_), to);
    view_.gather(begin_of(block) + s.end(rank_), s.count_ - s.end(rank_), to + s.end(rank_) * item());
  }

  // The node's sum of my slice, then on to the other nodes.
  void start_reduce(uint64_t block) override {
    across_.emplace_back();
    const Slices s = slices(block);
    if (!owns() || s.begin(rank_) == s.end(rank_)) return;
    size_t at = s.begin(rank_);
    view_.each(begin_of(block) + at, s.end(rank_) - at, [&](const Piece& part) {
      for (int m = 0; m < n_; ++m) sources_[m] = m == rank_ ? part.in : buffer(m, block) + at * item();
      std::byte* const destinations[] = {buffer(rank_, block) + at * item()};
      reduce(task_.dtype, task_.reduce, destinations, sources_, part.count, Scale{task_.scale.pre, 1.0, 1});
      at += part.count;
    });
    StripeRange range =
        stripe_range_of(task_, buffer(rank_, block) + s.begin(rank_) * item(), s.end(rank_) - s.begin(rank_));
    // Blocks are under way together: each needs a stream of its own. Plain batches count up from 0 and stay below 2^31.
    range.tag.batch = 0x80000000u | (task_.tag.batch & 0x7fff) << 16 | static_cast<uint32_t>(block & 0xffff);
    auto made = make_striped_allreduce(range, group_, stripe_.positions);
    if (!made.is_ok()) {
      status_ = made.status();
      return;
    }
    across_.back() = made.take();
    across_.back()->release(range.count);
    if (across_.back()->start() == Progress::kFailed) status_ = across_.back()->status();
  }

  bool is_reduced(uint64_t, bool* moved) override {
    // Step all of them: they are in different stages of the same exchange. Only the front one is reported.
    for (auto& one : across_) {
      if (!one) continue;
      const Progress progress = one->step(moved);
      if (progress == Progress::kFailed) status_ = one->status();
      if (progress != Progress::kPending) one.reset();
    }
    if (across_.front() || !status_.is_ok()) return false;
    across_.pop_front();
    return true;
  }

  void drain(uint64_t block) override {
    const Slices s = slices(block);
    for (int m = 0; m < stripe_.stripes; ++m)
      view_.scatter(begin_of(block) + s.begin(m), s.end(m) - s.begin(m), buffer(m, block) + s.begin(m) * item());
  }

  const Group& group_;
  const Stripe stripe_;
  size_t total_, block_;
  size_t first_block_ = 0;                                // of this part
  std::deque<std::unique_ptr<StripedAllreduce>> across_;  // one per block started and not reported, in order
  std::vector<const std::byte*> sources_;
};

}  // namespace

Result<std::unique_ptr<Collective>> make_two_level_allreduce(Task task, const Group& group) {
  Stripe stripe = stripe_of(group);
  return std::unique_ptr<Collective>(std::make_unique<TwoLevelAllreduce>(std::move(task), group, std::move(stripe)));
}

}  // namespace hc
