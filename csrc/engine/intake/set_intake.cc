#include "engine/intake/set_intake.h"

namespace hc {

namespace {
constexpr size_t kNamesKept = 8192;  // records of names that are not pending, per operation kind
}

NameRecord& SetIntake::record_of(Op op, std::string_view name) {
  auto& names = names_[static_cast<size_t>(op)];
  auto at = names.find(std::string(name));
  if (at != names.end()) return at->second;
  if (names.size() >= kNamesKept)
    std::erase_if(names, [](const auto& entry) {
      return entry.second.declared == 0 && entry.second.pending.load(std::memory_order_acquire) == nullptr;
    });
  return names[std::string(name)];
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
  for (Declared::Bucket& bucket : declared.buckets)
    if (bucket.record) ++bucket.record->declared;
  declared_[next_declared_] = std::move(declared);
  return next_declared_++;
}

void SetIntake::undeclare(int id) {
  const auto at = declared_.find(id);
  if (at == declared_.end()) return;
  for (Declared::Bucket& bucket : at->second.buckets)
    if (bucket.record) --bucket.record->declared;
  declared_.erase(at);
}

}  // namespace hc
