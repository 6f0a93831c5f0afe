// The inter-node stage of a two-level allreduce. Within a node the members share memory; each of the first `stripes` of
// them carries its own 1/stripes of the buffer between the nodes, over channels, so that no single core has to feed the
// link. How the shared-memory part uses it, for a buffer that every local member can reach:
//   1. stripe_of(group) says which stripe is mine and who carries it on the other nodes;
//   2. make_striped_allreduce on my contiguous range of the node's sum, with a block size; start();
//   3. as the node's sum in the range grows from the front (local reduce-scatter), release(elements so far);
//   4. step() until done; finished() says how much of the front holds the final result, scaled, the same bits on every
//      node, and may be read by the others (local allgather) while the rest is still moving.
// So the three stages overlap block by block. Without overlap: release(count) before start().
// Thread: the one that makes progress. Owner: the collective that contains it.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "collective/channels/schedule_runner.h"
#include "collective/collective.h"

namespace hc {

struct Stripe {
  int stripes = 0;             // members of the smallest node; the same for everybody
  int index = 0;               // mine: my place among my node's members
  std::vector<int> positions;  // group positions that carry this stripe, one per node; empty where index >= stripes
};
// When nodes have different numbers of members, those beyond the size of the smallest node carry no stripe.
Stripe stripe_of(const Group& group);

struct StripeRange {
  std::byte* data = nullptr;  // the node's sum of my range; becomes the sum over nodes. Must stay until the end
  size_t count = 0;
  DType dtype = DType::kF32;
  Reduce reduce = Reduce::kSum;
  Scale scale;             // post and divisor are applied here, once; pre belongs to the first stage and must be 1
  size_t block_count = 0;  // elements after which the next stage may go on; 0 = one block. The same on every node
  size_t segment_bytes = defaults::segment_bytes;
  size_t ring_from_bytes = defaults::ring_threshold_bytes;  // of one block: a ring from here on
  Tag tag;  // two stripes with the same tag over the same pair of ranks must not be live at once
};

// Of a task whose first stage has scaled by `pre`; the tag is the task's.
StripeRange stripe_range_of(const Task& task, std::byte* data, size_t count);

class StripedAllreduce final : public Collective {
 public:
  StripedAllreduce(Task task, const Group& stripe_group, Schedule schedule, std::vector<size_t> block_ends,
                   std::vector<int> block_begins);
  Progress start() override;
  Progress step(bool* moved) override;

  // The first `count` elements of the range hold the node's sum. `count` never shrinks; may be called before start().
  void release(size_t count) { runner_.release(count); }
  // How many elements at the front are final. They may be read but not changed: sends to other nodes may still read
  // them.
  size_t finished();
  const char* schedule_name() const { return runner_.schedule().name; }  // "inter-node ring", ...

 private:
  Progress pass_on(Progress progress);

  ScheduleRunner runner_;
  const std::vector<size_t> block_ends_;  // [blocks] elements
  const std::vector<int> block_begins_;   // [blocks] first step
  size_t blocks_finished_ = 0;
  int checked_ = 0;  // every step before this one is complete, as far as results go
};

// positions: the group positions that carry this stripe, in the same order on each of them; mine among them.
Result<std::unique_ptr<StripedAllreduce>> make_striped_allreduce(const StripeRange& range, const Group& group,
                                                                 std::span<const int> positions);

}  // namespace hc
