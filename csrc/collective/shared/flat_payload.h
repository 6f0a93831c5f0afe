// What a member of a small operation writes into its buffer, and how it computes the result from all buffers. The
// negotiated path (shared.cc) and the bypass (bypass_rounds.h) share it. Sums run in the order of reduce_by_levels.
// Thread: the thread that makes progress.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "collective/collective.h"
#include "collective/levels.h"

namespace hc {

class FlatPayload {
 public:
  // `rank`: the group rank of this member; `levels` outlives the payload. alltoall: every member sends the same counts.
  FlatPayload(Task task, int rank, const Levels& levels) : task_(std::move(task)), rank_(rank), levels_(levels) {}

  const Task& task() const { return task_; }
  Op op() const { return task_.op; }
  int root() const { return task_.root; }
  // Only the root's buffer is read.
  bool comes_from_root() const { return task_.op == Op::kBroadcast || task_.op == Op::kScatter; }
  // The size of a buffer that holds something; the same for all members that call the same operation.
  size_t bytes() const;
  void contribute(std::byte* to) const;
  // buffers: of every member, by group rank.
  void collect(std::span<const std::byte* const> buffers) const;

 private:
  size_t item() const { return size_of(task_.dtype); }
  size_t input_count(const Piece& piece) const;
  size_t bytes_before_mine() const;
  void reduce_pieces(std::span<const std::byte* const> buffers) const;
  void reduce_at(std::span<const std::byte* const> buffers, size_t offset, std::byte* out, size_t count) const;
  void copy_from_root(const std::byte* buffer) const;
  void concatenate(std::span<const std::byte* const> buffers) const;
  void take_my_parts(std::span<const std::byte* const> buffers) const;

  const Task task_;
  const int rank_;
  const Levels& levels_;
};

}  // namespace hc
