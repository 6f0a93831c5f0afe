#include "engine/sets/pending.h"

#include <algorithm>

namespace hc {

void Pending::expect(Operation* op) {
  if (op->request.name.empty()) {
    Window& w = windows_[static_cast<size_t>(op->signature().op)];
    // Numbers are given and operations queued under one lock, so they arrive here without a gap, except for one that
    // has stepped back from the bypass while later ones were agreed on.
    for (; op->request.sequence < w.base; --w.base) w.operations.push_front(nullptr);
    const uint64_t at = op->request.sequence - w.base;
    if (w.operations.size() <= at) w.operations.resize(at + 1, nullptr);
    w.operations[at] = op;
  } else if (op->cache_id != kNoCacheId) {
    if (by_cache_id_.size() <= op->cache_id) by_cache_id_.resize(op->cache_id + 1, nullptr);
    by_cache_id_[op->cache_id] = op;
  }
}

Operation* Pending::unnamed(Op op, uint64_t sequence) const {
  const Window& w = windows_[static_cast<size_t>(op)];
  if (sequence < w.base || sequence - w.base >= w.operations.size()) return nullptr;
  return w.operations[sequence - w.base];
}

void Pending::pass_over(Op op, uint64_t sequence) {
  Window& w = windows_[static_cast<size_t>(op)];
  if (w.operations.empty()) w.base = std::max(w.base, sequence + 1);
}

void Pending::remove(Operation* op) {
  all_.back()->pending_at = op->pending_at;
  all_[op->pending_at] = all_.back();
  all_.pop_back();
  --total_;
  if (op == join_) join_ = nullptr;
  const Op kind = op->signature().op;
  if (kind != Op::kJoin && op->request.name.empty()) {
    pass_over(kind, op->request.sequence);
    Window& w = windows_[static_cast<size_t>(kind)];
    const uint64_t at = op->request.sequence - w.base;
    if (at < w.operations.size()) w.operations[at] = nullptr;
    while (!w.operations.empty() && !w.operations.front()) {
      w.operations.pop_front();
      ++w.base;
    }
  } else if (op->cache_id != kNoCacheId && op->cache_id < by_cache_id_.size() && by_cache_id_[op->cache_id] == op) {
    by_cache_id_[op->cache_id] = nullptr;
  }
}

}  // namespace hc
