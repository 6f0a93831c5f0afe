#include "engine/sets/bypass.h"

#include <algorithm>

#include "collective/selection.h"

namespace hc {

namespace {

// A session with fewer rounds was a mistake: the next one takes twice as many plans to open.
constexpr uint64_t kRoundsThatPay = 64;
constexpr int kMaxWanted = 4096;

// Whether every rank has as many rows for everybody as the others: a round takes only what is the same on all.
bool rows_are_alike(const PlanBatch& batch, size_t size) {
  if (batch.op != Op::kAllgather && batch.op != Op::kAlltoall) return true;
  const size_t line = batch.op == Op::kAlltoall ? size : 1;
  for (size_t i = line; i < batch.rows.size(); ++i)
    if (batch.rows[i] != batch.rows[i - line]) return false;
  return true;
}

}  // namespace

void Bypass::attach(SharedSegment* shared_segment, bool allowed, bool all_share_memory) {
  rounds_.attach(shared_segment);
  ranks_ = shared_segment->size();
  allowed_ = allowed;
  all_share_memory_ = all_share_memory;
}

bool Bypass::takes(const Operation& op) const {
  const Signature& s = op.signature();
  if (s.device || s.in_arena || (s.op == Op::kAllreduce && !op.out[0])) return false;
  const bool one_tensor = s.op == Op::kBarrier || s.tensors.size() == 1;
  return one_tensor && may_bypass(s.op, s.reduce, bytes_of(s), ranks_, flat_bytes_);
}

void Bypass::open(uint64_t first_round, const Pending& pending) {
  if (!all_share_memory_) return;
  rounds_.open(first_round);
  // The plan that says so is for one operation of this rank.
  if (!allowed_ || pending.join() || pending.size() > 1) rounds_.close();
}

bool Bypass::suits(const Plan& plan, const Pending& pending, size_t coordinator_pending, size_t size) {
  if (!allowed_ || !all_share_memory_ || size < 2 || rounds_.is_on() || rounds_.is_busy()) return false;
  const PlanBatch* b = plan.batches.size() == 1 ? &plan.batches[0] : nullptr;
  const bool suits = b && b->error == Code::kOk && b->entries.size() == 1 && b->entries[0].cache_id != kNoCacheId &&
                     !b->entries[0].assigned && !b->entries[0].has_signature && coordinator_pending == 0 &&
                     pending.size() == 1 && !pending.join() && takes(*pending.all()[0]) && rows_are_alike(*b, size);
  trial_.alike = suits ? trial_.alike + 1 : 0;
  if (trial_.alike < trial_.wanted) return false;
  const bool paid = rounds_.successes() - trial_.successes_before >= kRoundsThatPay;
  trial_ = {0, paid ? Trial::kFirstWanted : std::min(2 * trial_.wanted, kMaxWanted), rounds_.successes()};
  return true;
}

}  // namespace hc
