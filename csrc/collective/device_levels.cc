#include "collective/device_levels.h"

#include <algorithm>

namespace hc {

LevelPlace level_place(const std::vector<int>& node, int rank) {
  std::vector<int> seen;                // nodes, in the order of their first ranks
  std::vector<std::vector<int>> ranks;  // of each
  for (int r = 0; r < static_cast<int>(node.size()); ++r) {
    const auto at = std::find(seen.begin(), seen.end(), node[static_cast<size_t>(r)]);
    const size_t n = static_cast<size_t>(at - seen.begin());
    if (at == seen.end()) {
      seen.push_back(node[static_cast<size_t>(r)]);
      ranks.emplace_back();
    }
    ranks[n].push_back(r);
  }
  const auto uneven = [&](const auto& one) { return one.size() != ranks.front().size(); };
  if (seen.size() < 2 || ranks.front().size() < 2 || std::any_of(ranks.begin(), ranks.end(), uneven)) return {};
  for (size_t n = 0; n < ranks.size(); ++n) {
    const auto at = std::find(ranks[n].begin(), ranks[n].end(), rank);
    if (at == ranks[n].end()) continue;
    const auto inner = static_cast<size_t>(at - ranks[n].begin());
    return {static_cast<int>(inner), static_cast<int>(ranks[n].size()), ranks[n].front(),
            static_cast<int>(n),     static_cast<int>(ranks.size()),    ranks.front()[inner]};
  }
  return {};
}

Status DeviceLevels::begin(bool inner, const NcclId& id, NcclHandle* handle) {
  NcclHandle& made = inner ? inner_ : outer_;
  NcclConfig config;
  const int size = inner ? place_.inner_size : place_.outer_size;
  const int rank = inner ? place_.inner_rank : place_.outer_rank;
  const NcclResult begun = nccl_->ncclCommInitRankConfig(&made, size, id, rank, &config);
  *handle = made;
  return nccl_->check(begun, "ncclCommInitRankConfig", nullptr)
      .with(inner ? "the communicator of a node" : "the communicator between nodes");
}

}  // namespace hc
