// Calls that repeat: while an express session is open, a small blocking call like one before is published and taken by
// the thread that makes it, without an operation, a handle or a turn of the engine. Only when nothing else is under
// way, so nothing waits for the turns that the engine does not make meanwhile; and not for long: where the others are
// late the call becomes an operation like any other, whose turn has been entered already.
#include <algorithm>

#include "engine/engine.h"
#include "engine/progress/idle.h"

namespace hc {

namespace {

bool is_like(const Submission::Tensor& t, const TensorMeta& known) {
  return t.in && t.out && t.dtype == known.dtype && std::ranges::equal(t.shape, known.shape);
}

// For so long nobody looks at what peers say and, from Python, its lock is kept.
constexpr int kMostPauses = 1000;
constexpr double kLongestUs = 80;

// A rank of another process set, say, may have said something.
constexpr int kCallsWithoutALook = 256;

// root: as a group rank.
bool is_like(const Submission& s, int root, const Signature& known) {
  return s.op == known.op && s.reduce == known.reduce && root == known.root && s.prescale == known.prescale &&
         s.postscale == known.postscale && (s.op != Op::kAllreduce || s.priority == known.priority) &&
         s.splits.empty() &&
         std::ranges::equal(s.tensors, known.tensors, [](const auto& t, const auto& k) { return is_like(t, k); });
}

}  // namespace

Status Engine::call(const Submission& s, int64_t* handle) {
  *handle = 0;
  if (s.on_device || s.done || !connected_.load(std::memory_order_acquire) || !gate_.try_enter())
    return submit(s, handle);
  if (++calls_without_a_look_ >= kCallsWithoutALook) {  // the engine's turn, which sees what peers say
    calls_without_a_look_ = 0;
    leave_gate();
    return submit(s, handle);
  }
  bool repeated = false;
  try {
    repeated = repeat(s, handle);
  } catch (const std::exception& e) {  // perhaps in a turn that the others wait for
    fail_after(e);
    leave_gate();
    throw;
  }
  if (repeated && *handle != 0) {
    gate_.leave(has_incoming_.load(std::memory_order_seq_cst));  // the caller waits for it at once
    return Status::ok();
  }
  if (repeated && mesh_->is_awake()) rest_after_driving();  // else whoever sleeps has said so, and it still says so
  leave_gate();
  return repeated ? Status::ok() : submit(s, handle);
}

// Rank 0 measures operations, and the others are to hear of new settings soon. Gate held.
bool Engine::is_tuning(const ProcessSet& set) const {
  return tuning_.searching || (set.id == 0 && set.tuning.version != tuning_.version);
}

// Gate held.
bool Engine::may_repeat(const ProcessSet& set) const {
  return set.express.is_on() && !set.express.is_busy() && !set.runner && set.queue.empty() && outstanding() == 0 &&
         !timeline_.on() && !is_tuning(set) && !failed_.load(std::memory_order_relaxed) &&
         !stopping_.load(std::memory_order_relaxed) && !has_abort_.load(std::memory_order_relaxed) &&
         !has_incoming_.load(std::memory_order_seq_cst) && !handles_.may_run_out();
}

// Gate held. False: it is a call like any other. True with a handle: it is an operation now.
bool Engine::repeat(const Submission& s, int64_t* handle) {
  ProcessSet* set = find_set(s.process_set);
  if (!set || !may_repeat(*set)) return false;
  const TimePoint submitted = Clock::now();
  std::unique_lock lock(submit_mu_);
  NameRecord* record = set->known_record(s.op, s.name);
  if (!record || !record->repeat || record->pending.load(std::memory_order_acquire)) return false;
  const Repeat& known = *record->repeat;
  if (!is_like(s, has_root(s.op) ? set->position_of(s.root) : 0, known.signature) || goes_in_place(s, false))
    return false;
  Task task = known.task;
  if (!s.tensors.empty()) {
    task.pieces[0].in = static_cast<const std::byte*>(s.tensors[0].in);
    task.pieces[0].out = static_cast<std::byte*>(s.tensors[0].out);
  }
  ExpressKey key = known.key;
  if (s.name.empty()) key.sequence = set->upcoming_sequence(s.op);
  auto turn = set->express.enter(std::move(task), set->group, key);
  if (!turn) return false;
  const uint64_t use = s.name.empty() ? set->next_sequence(s.op) : record->uses++;
  if (!s.name.empty()) record->pending.store(&repeating_, std::memory_order_release);
  const uint64_t number = recorder_.submitted({known.signature, s.name, set->id, false, submitted, ++set->calls, use});
  lock.unlock();
  wake_readers(*set);
  counters_.operations.fetch_add(1, std::memory_order_relaxed);
  bool moved = false;
  Idle idle(std::min(spin_pauses_, kMostPauses), std::min(config_.yield_us, kLongestUs));
  Progress progress = turn->step(&moved);
  while (progress == Progress::kPending && !gate_.wanted() && idle.pause()) progress = turn->step(&moved);
  if (progress == Progress::kDone && !turn->withdrawn()) {
    if (s.name.empty())
      set->pass_over(s.op, use);
    else
      record->pending.store(nullptr, std::memory_order_release);
    counters_.express.fetch_add(1, std::memory_order_relaxed);
    counters_.bytes_reduced.fetch_add(bytes_of(known.signature), std::memory_order_relaxed);
    note_arrival(*set, submitted, turn->arrival());
    recorder_.done(number, Code::kOk, Recorder::now());
    return true;
  }

  lock.lock();
  Operation* op = handles_.acquire();
  fill(op, s, *set);
  op->submitted = submitted;
  op->record = number;
  op->request.sequence = s.name.empty() ? use : 0;
  if (!s.name.empty()) {
    op->name_record = record;
    record->pending.store(op, std::memory_order_release);
  }
  lock.unlock();
  *handle = op->handle;
  set->adopt(op);
  if (progress == Progress::kPending)
    set->frozen_runs.push_back({op, std::move(turn)});
  else
    set->announce(op);
  return true;
}

}  // namespace hc
