#include "engine/intake/set_intake.h"

#include "base/hash.h"

namespace hc {

namespace {
constexpr size_t kNamesKept = 8192;                      // records of names that are not pending, per operation kind
constexpr std::string_view kIteration = " (iteration ";  // as horoclone.h has it
constexpr size_t kNewKept = 16;  // a step with fewer names is told from the next at its second time

bool is_idle(const NameRecord& record) {
  return record.declared == 0 && record.pending.load(std::memory_order_acquire) == nullptr;
}
}  // namespace

SetIntake::SetIntake(Members its_members)
    : members(std::move(its_members)), stragglers(members.size()), came_(kNamesKept), look_at_(kNewKept) {}

void SetIntake::forget_what_came_once() {
  std::erase_if(new_, [](const auto& made) {
    const auto& [names, entry] = made;
    if (entry->second.declared != 0 || entry->second.uses > 1) return true;
    if (!is_idle(entry->second)) return false;
    names->erase(names->find(entry->first));
    return true;
  });
  look_at_ = std::max(kNewKept, 2 * new_.size());
}

NameRecord& SetIntake::record_of(Op op, std::string_view name) {
  auto& names = names_[static_cast<size_t>(op)];
  auto at = names.find(std::string(name));
  if (at != names.end()) return at->second;
  if (new_.size() >= look_at_) forget_what_came_once();
  if (names.size() >= kNamesKept) {
    std::erase_if(new_, [&names](const auto& made) { return made.first == &names; });
    std::erase_if(names, [](const auto& entry) { return is_idle(entry.second); });
  }
  const auto made = names.try_emplace(std::string(name)).first;
  if (const size_t end = name.rfind(kIteration); end != std::string_view::npos)
    made->second.seen_of_loop = &loops_[std::string(name.substr(0, end))];
  uint64_t hash = hash_of_text(name);
  mix(&hash, static_cast<uint64_t>(op));
  if (came_.again(hash))
    made->second.uses = 1;
  else
    new_.emplace_back(&names, &*made);
  return made->second;
}

NameRecord* SetIntake::known_record(Op op, std::string_view name) {
  if (name.empty()) return &unnamed_record(op);
  auto& names = names_[static_cast<size_t>(op)];
  auto at = names.find(std::string(name));
  return at == names.end() ? nullptr : &at->second;
}

Operation* SetIntake::find_named(Op op, std::string_view name) {
  NameRecord* record = known_record(op, name);
  return record ? record->pending.load(std::memory_order_acquire) : nullptr;
}

int SetIntake::declare(Declared declared) {
  for (Declared::Bucket& bucket : declared.buckets) {
    if (!bucket.refusal.is_ok() || bucket.request.name.empty()) continue;
    bucket.record = &record_of(Op::kAllreduce, bucket.request.name);
    ++bucket.record->declared;
  }
  declared_[next_declared_] = std::move(declared);
  return next_declared_++;
}

bool SetIntake::is_pending(int id) const {
  const Declared* known = declared(id);
  return known && std::any_of(known->buckets.begin(), known->buckets.end(), [](const Declared::Bucket& bucket) {
           return bucket.record && bucket.record->pending.load(std::memory_order_acquire);
         });
}

void SetIntake::undeclare(int id) {
  const auto at = declared_.find(id);
  if (at == declared_.end()) return;
  for (Declared::Bucket& bucket : at->second.buckets)
    if (bucket.record) --bucket.record->declared;
  declared_.erase(at);
}

}  // namespace hc
