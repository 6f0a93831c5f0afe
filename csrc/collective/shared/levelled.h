// What the levelled algorithms share: shared.cc runs them on tensors that lie in the arenas, levelled.cc on blocks of
// private ones. Thread: the thread that makes progress.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "collective/collective.h"
#include "collective/shared/level_schedule.h"

namespace hc {

// A step into the member's own buffer, cut at `total` elements. buffers: [member], where the schedule's position 0 is.
inline void run_level_step(const Task& task, const LevelStage& stage, const LevelStep& step, size_t total,
                           const std::vector<std::byte*>& buffers, int rank) {
  if (step.begin >= total) return;
  const size_t from = step.begin * size_of(task.dtype), count = std::min(step.end, total) - step.begin;
  std::byte* const own = buffers[static_cast<size_t>(rank)] + from;
  if (stage.kind != LevelStage::Kind::kReduce) {
    const std::byte* const source = buffers[static_cast<size_t>(step.sources[0])] + from;
    if (source != own) std::memcpy(own, source, count * size_of(task.dtype));
    return;
  }
  std::vector<const std::byte*> sources;
  for (int m : step.sources) sources.push_back(buffers[static_cast<size_t>(m)] + from);
  Scale scale;
  if (stage.first) scale.pre = task.scale.pre;
  if (stage.last) scale.post = task.scale.post, scale.divisor = task.scale.divisor;
  std::byte* const destinations[] = {own};
  reduce(task.dtype, task.reduce, destinations, sources, count, scale);
}

}  // namespace hc
