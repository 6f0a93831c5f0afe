// Makes the state machine of a task on host memory; selection.h chooses the algorithm.
#include "collective/collective.h"
#include "collective/selection.h"
#include "collective/shared/shared.h"

namespace hc {

Result<std::unique_ptr<Collective>> make_collective(Task task, const Group& group) {
  if (task.op == Op::kAllreduce && task.reduce == Reduce::kAdasum) return make_adasum_allreduce(std::move(task), group);
  const bool one_node = group.shared_segment && group.shared_segment->size() == group.size;
  if (one_node && group.size > 1) return make_shared_collective(std::move(task), group);
  task.algorithm = choose_between_nodes(task, group.size);
  if (task.algorithm == Algorithm::kTwoLevel) return make_two_level_allreduce(std::move(task), group);
  return make_channel_collective(std::move(task), group);
}

}  // namespace hc
