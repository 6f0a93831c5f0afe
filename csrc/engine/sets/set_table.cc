#include "engine/sets/set_table.h"

namespace hc {

Status SetTable::add(uint16_t id, std::vector<int> ranks) {
  auto intake =
      std::make_shared<SetIntake>(Members::of(id, parts_.context.generation, std::move(ranks), parts_.context.rank()));
  auto set = std::make_unique<ProcessSet>(parts_, intake, &pending_);
  HC_TRY(set->prepare(), "rank ", parts_.context.rank());
  if (set->members().has_me()) mine_.push_back(set.get());
  sets_[id] = std::move(set);
  parts_.intake.add(std::move(intake));
  return Status::ok();
}

std::unique_ptr<ProcessSet> SetTable::remove(int id) {
  parts_.intake.remove(id);
  const auto at = sets_.find(id);
  if (at == sets_.end()) return nullptr;
  auto removed = std::move(at->second);
  std::erase(mine_, removed.get());
  sets_.erase(at);
  return removed;
}

}  // namespace hc
