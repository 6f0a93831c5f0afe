// From a task on host memory to its state machine: of the algorithm that the task demands, else the selected one.
#include "collective/collective.h"
#include "collective/selection.h"
#include "collective/shared/shared.h"

namespace hc {
namespace {

bool is_shared(Algorithm algorithm) {
  return algorithm == Algorithm::kSharedInPlace || algorithm == Algorithm::kSharedBlocked ||
         algorithm == Algorithm::kSharedFlat;
}

}  // namespace

Result<std::unique_ptr<Collective>> make_collective(Task task, const Group& group) {
  if (task.op == Op::kAllreduce && task.reduce == Reduce::kAdasum) return make_adasum_allreduce(std::move(task), group);
  const bool one_node = group.lane && group.lane->size() == group.size;
  if (one_node && group.size > 1) {
    if (!is_shared(task.algorithm)) task.algorithm = Algorithm::kAuto;
    return make_shared_collective(std::move(task), group);
  }
  // kTwoLevel is a permission: small tasks go another way.
  const bool forced = task.algorithm == Algorithm::kRing || task.algorithm == Algorithm::kRecursiveDoubling;
  if (!forced) {
    const bool two_level = task.algorithm == Algorithm::kTwoLevel;
    const Layout layout = two_level ? Layout::kSeveralNodesOfSeveral : Layout::kSeveralNodes;
    task.algorithm = select_algorithm(task.op, task.reduce, task.bytes(), layout,
                                      {task.flat_bytes, task.ring_from_bytes, two_level});
  }
  if (task.algorithm == Algorithm::kTwoLevel) return make_two_level_allreduce(std::move(task), group);
  return make_channel_collective(std::move(task), group);
}

}  // namespace hc
