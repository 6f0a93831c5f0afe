// Which algorithm runs, by operation, size and layout: the one place that says so. The choice depends only on what
// every rank knows, so all ranks make the same one. PURE values.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/settings_table.h"
#include "collective/collective.h"

namespace hc {

enum class Layout : uint8_t { kOneNode, kSeveralNodes, kSeveralNodesOfSeveral };

struct Thresholds {
  size_t flat_bytes = defaults::flat_bytes;  // shared memory: up to this many bytes per rank go the flat way
  size_t ring_from_bytes = defaults::ring_threshold_bytes;  // between nodes: a ring from here on
  bool two_level = true;                                    // reduce within each node first
};

// `bytes`: the task's; in shared memory the most that any member puts into its slot.
Algorithm select_algorithm(Op op, Reduce reduce, size_t bytes, Layout layout, const Thresholds& thresholds);

const char* name_of(Algorithm algorithm);  // as in a timeline: "ring", "shm flat"; kAuto is "direct"

struct Selection {
  Op op = Op::kAllreduce;
  size_t from_bytes = 0;  // up to the next row of the operation
  Algorithm algorithm = Algorithm::kAuto;
};
// select_algorithm as a table: for each operation, in ascending order of sizes.
std::vector<Selection> selection_table(Layout layout, const Thresholds& thresholds);
// {"one node": [{"operation", "from_bytes", "algorithm"} ...], "several nodes": ..., "several nodes of several ranks":
// ...}
std::string selection_json(const Thresholds& thresholds);

}  // namespace hc
