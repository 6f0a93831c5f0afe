// A large allreduce of two members, each of which sums one half. The sum is written over the other's contribution, so
// a cache line changes its core once there and once back; a member that wrote its sum elsewhere would have to fetch
// those lines from the core that read them last (docs/decisions/bypass.md). Thread: the thread that makes progress.
#pragma once

#include <cstring>

#include "collective/collective.h"
#include "collective/pieces.h"

namespace hc {

class Halves {
 public:
  // rank: 0 or 1. A task with one piece.
  Halves(const Task& task, int rank) : task_(task), rank_(rank), slices_(piece().count, 2, size_of(task.dtype)) {}

  // My elements of the half that the other sums.
  void contribute(std::byte* mine) const { std::memcpy(mine, piece().in + offset_of(1 - rank_), bytes_of(1 - rank_)); }
  // My half, over the other's elements and into my tensor; in rank order.
  void sum(std::byte* theirs) const {
    std::byte* const out = piece().out + offset_of(rank_);
    const std::byte* const in = piece().in + offset_of(rank_);
    std::byte* const destinations[] = {theirs, out};
    const std::byte* const sources[] = {rank_ == 0 ? in : theirs, rank_ == 0 ? theirs : in};
    reduce(task_.dtype, task_.reduce, destinations, sources, slices_.end(rank_) - slices_.begin(rank_), task_.scale);
  }
  void collect(const std::byte* mine) const {
    std::memcpy(piece().out + offset_of(1 - rank_), mine, bytes_of(1 - rank_));
  }

 private:
  const Piece& piece() const { return task_.pieces[0]; }
  size_t offset_of(int half) const { return slices_.begin(half) * size_of(task_.dtype); }
  size_t bytes_of(int half) const { return slices_.end(half) * size_of(task_.dtype) - offset_of(half); }

  const Task& task_;
  const int rank_;
  const Slices slices_;
};

}  // namespace hc
