// The communicators of the two-level algorithm on GPUs: one among the ranks of this rank's node, one among the ranks
// that have its place on the other nodes. Made after the process set's own, one after the other, without blocking.
//
// Thread: the thread that makes progress. Owner: a DeviceGroup.
#pragma once

#include <memory>
#include <vector>

#include "collective/collective.h"
#include "collective/gpu/nccl_comm.h"

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
  DeviceLevels(std::shared_ptr<const NcclApi> nccl, std::shared_ptr<Gpu> gpu, const LevelPlace& place)
      : nccl_(std::move(nccl)), gpu_(std::move(gpu)), place_(place) {}

  const LevelPlace& place() const { return place_; }
  NcclComm* inner() const { return inner_.get(); }
  NcclComm* outer() const { return outer_.get(); }
  // Begins to make the next one of the two; what it is made of comes from the leaders. `*comm` is what to ask whether
  // it is up.
  Status begin(bool inner, const NcclId& id, NcclComm** comm);
  bool complete() const { return inner_ && outer_; }
  // Both of them, in the order of their making; null: not made.
  std::vector<NcclComm*> comms() const { return {inner_.get(), outer_.get()}; }
  void abort();  // this and the next two: as of NcclComm
  void await_abort(const Deadline& limit);
  void forget();

 private:
  const std::shared_ptr<const NcclApi> nccl_;
  const std::shared_ptr<Gpu> gpu_;
  const LevelPlace place_;
  std::unique_ptr<NcclComm> inner_, outer_;
};

}  // namespace hc
