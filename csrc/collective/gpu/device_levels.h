// The communicators of the two-level algorithm on GPUs: one among the ranks of this rank's node, one among the ranks
// that have its place on the other nodes. Made after the process set's own, one after the other, without blocking.
//
// Thread: the thread that makes progress. Owner: a DeviceGroup.
#pragma once

#include <string>
#include <vector>

#include "collective/collective.h"
#include "device/nccl_api.h"

namespace hc {

// A rank's place among `inner_size` ranks of its node and among `outer_size` nodes. Leaders are group ranks: they hand
// out the id of a communicator.
struct LevelPlace {
  int inner_rank = 0, inner_size = 1, inner_leader = 0;
  int outer_rank = 0, outer_size = 1, outer_leader = 0;
};
// Of group rank `rank`. inner_size 1: there are no levels, as there is one node, every rank is one, or the nodes have
// different numbers of ranks.
LevelPlace level_place(const std::vector<int>& node, int rank);

class DeviceLevels {
 public:
  DeviceLevels(std::shared_ptr<const NcclApi> nccl, const LevelPlace& place) : nccl_(std::move(nccl)), place_(place) {}

  const LevelPlace& place() const { return place_; }
  NcclHandle inner() const { return inner_; }
  NcclHandle outer() const { return outer_; }
  // Begins to make the next one of the two; what it is made of comes from the leaders. `*handle` is what to ask whether
  // it is up.
  Status begin(bool inner, const NcclId& id, NcclHandle* handle);
  bool complete() const { return inner_ && outer_; }
  // Both of them, in the order of their making; null: not made.
  std::vector<NcclHandle> handles() const { return {inner_, outer_}; }
  // They have ended or were given up by somebody else.
  void forget() { inner_ = outer_ = nullptr; }

 private:
  const std::shared_ptr<const NcclApi> nccl_;
  const LevelPlace place_;
  NcclHandle inner_ = nullptr, outer_ = nullptr;
};

}  // namespace hc
