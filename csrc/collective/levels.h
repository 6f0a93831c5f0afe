// How the ranks of a machine lie together: by L3 cache within a NUMA node, by node within a socket, by socket within
// the machine. PURE values, the same on every member.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "arithmetic/reduce.h"
#include "base/topology.h"

namespace hc {

inline constexpr size_t kMaxLevels = 3;

// Partitions of the members, the finest first; each is a refinement of the next. Those that tell nothing are left out:
// all members in one group, each in a group of its own, the same groups again. None: all members are near each other.
struct Levels {
  std::vector<std::vector<int>> group;  // [level][member], numbered in the order of their first members
  bool flat() const { return group.empty(); }
  size_t members() const { return flat() ? 0 : group[0].size(); }
};

// No levels within a single NUMA node, nor where the place of some member is unknown: then it may run anywhere.
Levels levels_of(std::span<const Locality> places);

// reduce() in the order in which a levelled allreduce sums: within the finest groups first, each sum rounded to the
// dtype. All algorithms in shared memory use it, so that the same operation gives the same bits whichever is taken.
void reduce_by_levels(const Levels& levels, DType dtype, Reduce op, std::span<std::byte* const> destinations,
                      std::span<const std::byte* const> sources, size_t count, const Scale& scale);

}  // namespace hc
