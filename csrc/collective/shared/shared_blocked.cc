// The blocked algorithms of operations whose whole group shares memory.
#include "collective/shared/blocked.h"

namespace hc {
namespace {

// Every member reduces its slice of a block; then all, or the root alone, collect the slices.
class BlockedReduction : public BlockedCollective {
 public:
  BlockedReduction(Task task, const Group& group, size_t block_bytes)
      : BlockedCollective(std::move(task), group), collects_(task_.op == Op::kAllreduce || rank_ == task_.root) {
    total_ = task_.count();
    block_ = std::max<size_t>(1, block_bytes / item());
    set_blocks((total_ + block_ - 1) / block_);
    sources_.resize(n_);
  }

 private:
  size_t begin_of(uint64_t block) const { return block * block_; }
  Slices slices(uint64_t block) const { return {std::min(block_, total_ - begin_of(block)), n_, item()}; }

  void fill(uint64_t block) override {  // all but my own slice, which I read where it lies
    const Slices s = slices(block);
    std::byte* to = buffer(rank_, block);
    view_.gather(begin_of(block), s.begin(rank_), to);
    view_.gather(begin_of(block) + s.end(rank_), s.count_ - s.end(rank_), to + s.end(rank_) * item());
  }
  void start_reduce(uint64_t block) override {
    const Slices s = slices(block);
    size_t at = s.begin(rank_);
    view_.each(begin_of(block) + at, s.end(rank_) - at, [&](const Piece& part) {
      for (int m = 0; m < n_; ++m) sources_[m] = m == rank_ ? part.in : buffer(m, block) + at * item();
      std::byte* const destinations[] = {buffer(result_at(rank_), block) + at * item(), part.out};
      reduce_by_levels(shared_.levels(), task_.dtype, task_.reduce, std::span(destinations, collects_ ? 2 : 1),
                       sources_, part.count, task_.scale);
      at += part.count;
    });
  }
  void drain(uint64_t block) override {
    const Slices s = slices(block);
    for (int m = 0; m < n_ && collects_; ++m)
      if (m != rank_)
        view_.scatter(begin_of(block) + s.begin(m), s.end(m) - s.begin(m),
                      buffer(result_at(m), block) + s.begin(m) * item());
  }
  // In whose buffer the sum of member m's slice lies: over the contribution of the next, whose cache lines m has just
  // read and nobody else needs. A buffer of m's own would have to be fetched from those who read it last.
  int result_at(int m) const { return m + 1 == n_ ? 0 : m + 1; }

  const bool collects_;
  size_t total_, block_;
  std::vector<const std::byte*> sources_;
};

class BlockedBroadcast : public BlockedCollective {
 public:
  BlockedBroadcast(Task task, const Group& group, size_t block_bytes) : BlockedCollective(std::move(task), group) {
    total_ = task_.count();
    block_ = std::max<size_t>(1, block_bytes / item());
    set_blocks((total_ + block_ - 1) / block_);
    copies_own_ = rank_ == task_.root &&
                  std::any_of(task_.pieces.begin(), task_.pieces.end(), [](const Piece& p) { return p.in != p.out; });
  }

 private:
  size_t count_of(uint64_t block) const { return std::min(block_, total_ - block * block_); }
  void fill(uint64_t block) override {
    if (rank_ == task_.root) view_.gather(block * block_, count_of(block), buffer(rank_, block));
  }
  void drain(uint64_t block) override {
    if (rank_ != task_.root || copies_own_) view_.scatter(block * block_, count_of(block), buffer(task_.root, block));
  }
  size_t total_, block_;
  bool copies_own_ = false;
};

// Every member has a slice of the whole, of task.counts[m] elements from offsets_[m]; block b moves their b-th parts.
class BlockedSlices : public BlockedCollective {
 protected:
  BlockedSlices(Task task, const Group& group, size_t part_bytes) : BlockedCollective(std::move(task), group) {
    part_ = std::max<size_t>(1, part_bytes / item());
    size_t longest = 0, before = 0;
    for (size_t c : task_.counts) {
      offsets_.push_back(before);
      before += c;
      longest = std::max(longest, c);
    }
    set_blocks((longest + part_ - 1) / part_);
  }
  size_t count_of(int m, uint64_t block) const {
    const size_t from = block * part_;
    return from >= task_.counts[m] ? 0 : std::min(part_, task_.counts[m] - from);
  }

  size_t part_;  // elements
  std::vector<size_t> offsets_;
};

class BlockedGather : public BlockedSlices {
 public:
  BlockedGather(Task task, const Group& group, size_t block_bytes)
      : BlockedSlices(std::move(task), group, block_bytes),
        collects_(task_.op == Op::kAllgather || rank_ == task_.root) {}

 private:
  void fill(uint64_t block) override {
    const size_t bytes = count_of(rank_, block) * item();
    if (!bytes) return;
    const Piece& p = task_.pieces[0];
    const std::byte* from = p.in + block * part_ * item();
    if (task_.op == Op::kAllgather || !collects_) std::memcpy(buffer(rank_, block), from, bytes);
    if (!collects_) return;
    std::byte* own = p.out + (offsets_[rank_] + block * part_) * item();
    if (own != from) std::memcpy(own, from, bytes);
  }
  void drain(uint64_t block) override {
    for (int m = 0; m < n_ && collects_; ++m) {
      const size_t bytes = count_of(m, block) * item();
      if (m != rank_ && bytes)
        std::memcpy(task_.pieces[0].out + (offsets_[m] + block * part_) * item(), buffer(m, block), bytes);
    }
  }
  const bool collects_;
};

// Block b holds the b-th part of every slice, one after the other, so that all members reduce in every block.
class BlockedReducescatter : public BlockedSlices {
 public:
  BlockedReducescatter(Task task, const Group& group, size_t block_bytes)
      : BlockedSlices(std::move(task), group, block_bytes / group.shared_segment->size()) {
    sources_.resize(n_);
  }

 private:
  const std::byte* input_of(int m, uint64_t block) const {
    return task_.pieces[0].in + (offsets_[m] + block * part_) * item();
  }
  void fill(uint64_t block) override {
    for (int m = 0; m < n_; ++m)
      if (m != rank_ && count_of(m, block))
        std::memcpy(buffer(rank_, block) + m * part_ * item(), input_of(m, block), count_of(m, block) * item());
  }
  void start_reduce(uint64_t block) override {
    const size_t count = count_of(rank_, block);
    if (!count) return;
    for (int m = 0; m < n_; ++m)
      sources_[m] = m == rank_ ? input_of(rank_, block) : buffer(m, block) + rank_ * part_ * item();
    std::byte* const destinations[] = {task_.pieces[0].out + block * part_ * item()};
    reduce_by_levels(shared_.levels(), task_.dtype, task_.reduce, destinations, sources_, count, task_.scale);
  }
  void drain(uint64_t) override {}
  std::vector<const std::byte*> sources_;
};

// Block b of the root's buffer holds the b-th part of every member's slice, one after the other.
class BlockedScatter : public BlockedSlices {
 public:
  BlockedScatter(Task task, const Group& group, size_t block_bytes)
      : BlockedSlices(std::move(task), group, block_bytes / group.shared_segment->size()) {}

 private:
  size_t bytes_of(int m, uint64_t block) const { return count_of(m, block) * item(); }
  void fill(uint64_t block) override {
    for (int m = 0; m < n_ && rank_ == task_.root; ++m) {
      const size_t bytes = bytes_of(m, block);
      if (!bytes) continue;
      const std::byte* from = task_.pieces[0].in + (offsets_[m] + block * part_) * item();
      std::byte* own = task_.pieces[0].out + block * part_ * item();
      std::memcpy(m == rank_ ? own : buffer(rank_, block) + m * part_ * item(), from, bytes);
    }
  }
  void drain(uint64_t block) override {
    const size_t bytes = bytes_of(rank_, block);
    if (rank_ != task_.root && bytes)
      std::memcpy(task_.pieces[0].out + block * part_ * item(), buffer(task_.root, block) + rank_ * part_ * item(),
                  bytes);
  }
};

// Block b holds the b-th part of what this rank sends to each member. The number of blocks must be agreed, so it comes
// from the longest part in the whole table, which the engine puts behind counts (see Task::longest_part).
class BlockedAlltoall : public BlockedCollective {
 public:
  BlockedAlltoall(Task task, const Group& group, size_t block_bytes) : BlockedCollective(std::move(task), group) {
    part_ = std::max<size_t>(1, block_bytes / item() / n_);
    size_t sent = 0, received = 0;
    for (int m = 0; m < n_; ++m) {
      sent_.push_back(sent);
      received_.push_back(received);
      sent += task_.counts[m];
      received += task_.received_counts[m];
    }
    set_blocks((task_.longest_part + part_ - 1) / part_);
  }

 private:
  size_t part_of(size_t count, uint64_t block) const {
    const size_t from = block * part_;
    return from >= count ? 0 : std::min(part_, count - from);
  }
  void fill(uint64_t block) override {
    for (int m = 0; m < n_; ++m) {
      const size_t bytes = part_of(task_.counts[m], block) * item();
      if (!bytes) continue;
      const std::byte* from = task_.pieces[0].in + (sent_[m] + block * part_) * item();
      if (m == rank_)
        std::memcpy(task_.pieces[0].out + (received_[m] + block * part_) * item(), from, bytes);
      else
        std::memcpy(buffer(rank_, block) + m * part_ * item(), from, bytes);
    }
  }
  void drain(uint64_t block) override {
    for (int m = 0; m < n_; ++m) {
      const size_t bytes = part_of(task_.received_counts[m], block) * item();
      if (m != rank_ && bytes)
        std::memcpy(task_.pieces[0].out + (received_[m] + block * part_) * item(),
                    buffer(m, block) + rank_ * part_ * item(), bytes);
    }
  }
  size_t part_;
  std::vector<size_t> sent_, received_;
};

}  // namespace

Result<std::unique_ptr<Collective>> make_blocked_collective(Task task, const Group& group) {
  const size_t block = std::min(kBlockBufferBytes, task.segment_bytes);
  switch (task.op) {
    case Op::kAllreduce:
    case Op::kReduce:
      return std::unique_ptr<Collective>(std::make_unique<BlockedReduction>(std::move(task), group, block));
    case Op::kBroadcast:
      return std::unique_ptr<Collective>(std::make_unique<BlockedBroadcast>(std::move(task), group, block));
    case Op::kAllgather:
    case Op::kGather:
      return std::unique_ptr<Collective>(std::make_unique<BlockedGather>(std::move(task), group, block));
    case Op::kScatter:
      return std::unique_ptr<Collective>(std::make_unique<BlockedScatter>(std::move(task), group, block));
    case Op::kReducescatter:
      return std::unique_ptr<Collective>(std::make_unique<BlockedReducescatter>(std::move(task), group, block));
    case Op::kAlltoall:
      return std::unique_ptr<Collective>(std::make_unique<BlockedAlltoall>(std::move(task), group, block));
    case Op::kBarrier:  // has nothing to move in blocks
    case Op::kJoin:
    case Op::kSend:
    case Op::kReceive:
      break;
  }
  return error(Code::kInternal, "no shared-memory form of ", name_of(task.op));
}

}  // namespace hc
