#include "collective/gpu/device_levels.h"

#include <algorithm>

#include "collective/nodes.h"

namespace hc {

LevelPlace level_place(const std::vector<int>& node, int rank) {
  const std::vector<std::vector<int>> ranks = ranks_by_node(node);
  const auto uneven = [&](const auto& one) { return one.size() != ranks.front().size(); };
  if (ranks.size() < 2 || ranks.front().size() < 2 || std::any_of(ranks.begin(), ranks.end(), uneven)) return {};
  for (size_t n = 0; n < ranks.size(); ++n) {
    const auto at = std::find(ranks[n].begin(), ranks[n].end(), rank);
    if (at == ranks[n].end()) continue;
    const auto inner = static_cast<size_t>(at - ranks[n].begin());
    return {static_cast<int>(inner), static_cast<int>(ranks[n].size()), ranks[n].front(),
            static_cast<int>(n),     static_cast<int>(ranks.size()),    ranks.front()[inner]};
  }
  return {};
}

Status DeviceLevels::begin(bool inner, const NcclId& id, NcclComm** comm) {
  std::unique_ptr<NcclComm>& made = inner ? inner_ : outer_;
  made = std::make_unique<NcclComm>(nccl_, gpu_);
  *comm = made.get();
  const int size = inner ? place_.inner_size : place_.outer_size;
  const int rank = inner ? place_.inner_rank : place_.outer_rank;
  const std::string name = inner ? "communicator of a node" : "communicator between nodes";
  return made->begin(size, id, rank, "horoclone " + name).with("the " + name);
}

void DeviceLevels::abort() {
  for (NcclComm* one : comms())
    if (one) one->abort();
}

void DeviceLevels::await_abort(const Deadline& limit) {
  for (NcclComm* one : comms())
    if (one) one->await_abort(limit);
}

void DeviceLevels::forget() {
  for (NcclComm* one : comms())
    if (one) one->forget();
}

}  // namespace hc
