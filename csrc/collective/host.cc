// Which algorithm a task takes on host memory. The choice depends only on what every rank knows (the plan, the layout,
// the sizes), so all ranks make the same one.
#include "collective/collective.h"
#include "collective/shared.h"

namespace hc {

Result<std::unique_ptr<Collective>> make_collective(Task task, const Group& group) {
  if (task.op == Op::kAllreduce && task.reduce == Reduce::kAdasum) return make_adasum_allreduce(std::move(task), group);
  const bool one_node = group.lane && group.lane->size() == group.size;
  if (one_node && group.size > 1) {
    if (task.algorithm != Algorithm::kSharedInPlace && task.algorithm != Algorithm::kSharedBlocked &&
        task.algorithm != Algorithm::kSharedFlat)
      task.algorithm = Algorithm::kAuto;
    return make_shared_collective(std::move(task), group);
  }
  // Below this the messages' latency counts, not their bytes: recursive doubling over all ranks.
  constexpr size_t kTwoLevelBytes = 8u << 10;
  if (task.algorithm == Algorithm::kTwoLevel && task.op == Op::kAllreduce && task.bytes() > kTwoLevelBytes)
    return make_two_level_allreduce(std::move(task), group);
  if (task.algorithm != Algorithm::kRing && task.algorithm != Algorithm::kRecursiveDoubling)
    task.algorithm = Algorithm::kAuto;
  return make_channel_collective(std::move(task), group);
}

}  // namespace hc
