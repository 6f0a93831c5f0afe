// Groups the members of a group by machine. PURE.
#pragma once

#include <algorithm>
#include <vector>

namespace hc {

// The members of each node, in group order; nodes in the order of their first members. `node`: the node of each member.
inline std::vector<std::vector<int>> ranks_by_node(const std::vector<int>& node) {
  std::vector<int> seen;
  std::vector<std::vector<int>> ranks;
  for (size_t r = 0; r < node.size(); ++r) {
    const auto at = std::find(seen.begin(), seen.end(), node[r]);
    const auto n = static_cast<size_t>(at - seen.begin());
    if (at == seen.end()) {
      seen.push_back(node[r]);
      ranks.emplace_back();
    }
    ranks[n].push_back(static_cast<int>(r));
  }
  return ranks;
}

}  // namespace hc
