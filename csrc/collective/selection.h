// Chooses the algorithm by operation, size and layout, for host memory and GPUs, from submission to the schedule of one
// block. This is the only place that does. The choice depends only on what every rank knows, so all ranks choose alike;
// where one rank chooses for its own tensors (in_place_pays), the agreement reconciles the answers. PURE values.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "base/settings_table.h"
#include "collective/collective.h"
#include "collective/levels.h"

namespace hc {

enum class Layout : uint8_t { kOneNode, kSeveralNodes, kSeveralNodesOfSeveral };

struct Thresholds {
  size_t flat_bytes = defaults::flat_bytes;  // shared memory: up to this many bytes per rank take the flat path
  size_t ring_from_bytes = defaults::ring_threshold_bytes;  // between nodes: recursive doubling below
  bool two_level = true;                                    // reduce within each node first
  int ranks = 2;                                            // that exchange messages: of the set, or one of each node
};

// `bytes`: the task's; in shared memory the largest contribution of any member.
Algorithm select_algorithm(Op op, Reduce reduce, size_t bytes, Layout layout, const Thresholds& thresholds);

// ---- a task on host memory

// All members share memory: one of the kShared algorithms. The task may demand kSharedInPlace or kSharedBlocked.
Algorithm choose_in_shared_memory(const Task& task);
// Of the blocked operations those that move less between sockets when they go by levels.
bool goes_by_levels(Op op, const Levels& levels);
// Several nodes. The task may demand a ring, a circulant graph or recursive doubling; kTwoLevel permits two levels,
// which small tasks do not use. ranks: of the group.
Algorithm choose_between_nodes(const Task& task, int ranks);
// An allreduce over channels alone, whatever the layout: what the task demands, else by size.
Algorithm choose_over_channels(const Task& task, int ranks);
// The part between the nodes of one block of a two-level allreduce: a ring or recursive doubling.
Algorithm select_for_block(size_t block_bytes, size_t ring_from_bytes);
// A buffer that lies in an arena on every rank is reduced where it lies. Adasum works on whole tensors elsewhere.
bool reduces_in_place(bool in_arena, Reduce reduce);

// ---- before there is a task

// `node`: the node of each member. Without shared memory every rank counts as a node of its own.
Layout layout_of(std::span<const int> node);
// Whether an allreduce whose tensors lie in this rank's arena should be announced as reducible in place.
bool in_place_pays(size_t bytes, size_t tensors, bool caller_waits);
// The algorithm that a plan names for a batch when nothing else was decided.
Algorithm algorithm_in_plan(Op op, bool may_be_two_level);
// Whether such an operation of a set of `ranks` members is not negotiated when it repeats (shared/bypass_rounds.h).
bool may_bypass(Op op, Reduce reduce, size_t bytes, int ranks, size_t flat_bytes);
// Whether each of two members sums one half, in such a round.
bool goes_in_halves(const Task& task, int ranks);
// The largest batch into which buffers in arenas may be fused without changing any bit (docs/decisions/buckets.md).
size_t most_fused_in_arenas(bool one_node, size_t ring_from_bytes);

const char* name_of(Algorithm algorithm);  // as in a timeline: "ring", "shm flat"; kAuto is "direct"

struct Selection {
  Op op = Op::kAllreduce;
  size_t from_bytes = 0;  // up to the next row of the operation
  Algorithm algorithm = Algorithm::kAuto;
};
// select_algorithm as a table: for each operation, in ascending order of sizes.
std::vector<Selection> selection_table(Layout layout, const Thresholds& thresholds);
// {"one node": [{"operation", "from_bytes", "algorithm"} ...], "8 nodes": ..., "8 nodes of several ranks": ...}
std::string selection_json(const Thresholds& thresholds);

}  // namespace hc
