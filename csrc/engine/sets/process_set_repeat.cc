// Calls that repeat: while a session of the bypass is open, a small call like an earlier one is published by the
// calling thread, which also takes the result. This happens only when nothing else is under way, so nothing waits for
// the engine's iterations that are left out meanwhile. It is limited in time: if other members are late, the call
// becomes an ordinary operation that has entered its round already; at once where the caller does not wait.
#include <algorithm>

#include "base/clock.h"
#include "engine/sets/process_set.h"
#include "engine/threads/idle.h"

namespace hc {

namespace {

bool is_like(const Submission::Tensor& t, const TensorMeta& known) {
  return t.in && t.out && t.dtype == known.dtype && std::ranges::equal(t.shape, known.shape);
}

// For so long nobody looks at what peers say and, from Python, its lock is kept.
constexpr int kMaxPauses = 1000;
constexpr size_t kMaxRepeats = 4;  // of the calls of one kind without a name, which come in several forms by turns
constexpr double kLongestUs = 80;

// root: as a group rank.
bool is_like(const Submission& s, int root, const Signature& known) {
  return s.op == known.op && s.reduce == known.reduce && root == known.root && s.prescale == known.prescale &&
         s.postscale == known.postscale &&
         (s.op != Op::kAllreduce || (s.priority == known.priority && s.left_out == known.left_out)) &&
         s.splits.empty() && s.awaited.empty() &&
         std::ranges::equal(s.tensors, known.tensors, [](const auto& t, const auto& k) { return is_like(t, k); });
}

bool are_equal(std::span<const int64_t> splits) {
  return std::ranges::all_of(splits, [&](int64_t rows) { return rows == splits[0]; });
}

}  // namespace

void ProcessSet::keep_repeat(const Operation& op, const BypassKey& key, const Task& task) {
  const Signature& s = op.signature();
  if (s.op != Op::kBarrier && !op.out[0]) return;  // the core owns the result
  if (!are_equal(s.splits)) return;
  NameRecord& record = op.name_record ? *op.name_record : intake_->unnamed_record(s.op);
  auto& repeats = record.repeats;
  if (std::ranges::any_of(repeats, [&](const auto& known) { return known->signature == s; })) return;
  if (repeats.size() == (op.name_record ? 1 : kMaxRepeats)) repeats.erase(repeats.begin());
  repeats.push_back(std::make_unique<Repeat>(Repeat{s, key, task}));
}

// Rank 0 measures operations while it searches for settings, and the others are to hear of new ones soon.
bool ProcessSet::may_repeat() const {
  const Context& context = parts_.context;
  const Tuning& newest = parts_.tuner.newest();
  const bool tunes = newest.searching || (members().id == 0 && tuning_.version != newest.version);
  return bypass_.is_on() && !bypass_.is_busy() && !batches_.has_work() && !parts_.timeline.on() && !tunes &&
         !context.has_failed() && !context.stopping.load(std::memory_order_relaxed) && !parts_.intake.has_news() &&
         !parts_.intake.handles().may_run_out();
}

// Inlined: the whole call takes less than a microsecond.
[[gnu::always_inline]] inline void ProcessSet::measure_repeat(Op op, uint64_t bytes, std::string_view name,
                                                              NameRecord* record, TimePoint submitted,
                                                              const ArrivalCollective::Arrival& arrival,
                                                              uint64_t ticks) {
  RankMetrics& rank_metrics = parts_.context.rank_metrics;
  const uint64_t from = rank_metrics.at(submitted), now = rank_metrics.at(ticks);
  uint64_t* seen = name.empty() ? nullptr : record->seen();
  rank_metrics.ran({op, bytes, from, moment_of_arrival(submitted, arrival), now, name, seen}, record);
  if (rank_metrics.is_beat_due(now)) parts_.intake.beat();
}

bool ProcessSet::repeat(const Submission& s, ProgressLock& progress_lock, int spin_pauses, int64_t* handle) {
  if (!may_repeat()) return false;
  const TimePoint submitted = Clock::now();
  SubmitLock lock(parts_.intake.submit_mutex());
  NameRecord* record = intake_->known_record(s.op, s.name);
  if (!record || record->pending.load(std::memory_order_acquire)) return false;
  const int root = has_root(s.op) ? members().position_of(s.root) : 0;
  const auto found =
      std::ranges::find_if(record->repeats, [&](const auto& repeat) { return is_like(s, root, repeat->signature); });
  if (found == record->repeats.end() || parts_.intake.goes_in_place(s, false)) return false;
  const Repeat& known = **found;
  Task task = known.task;
  if (!s.tensors.empty()) {
    task.pieces[0].in = static_cast<const std::byte*>(s.tensors[0].in);
    task.pieces[0].out = static_cast<std::byte*>(s.tensors[0].out);
  }
  BypassKey key = known.key;
  if (s.name.empty()) key.sequence = intake_->upcoming_sequence(s.op);
  auto round = bypass_.enter(std::move(task), group_, key);
  if (!round) return false;
  const uint64_t use = s.name.empty() ? intake_->next_sequence(s.op) : record->uses++;
  if (!s.name.empty()) record->pending.store(&repeating_, std::memory_order_release);
  Recorder& recorder = parts_.intake.recorder();
  const uint64_t number =
      recorder.submitted({known.signature, s.name, members().id, false, submitted, intake_->next_call(), use});
  Counters& counters = parts_.context.counters;
  Counters::add_locked(counters.operations);
  lock.unlock();
  wake_readers();
  bool moved = false;
  Idle idle(std::min(spin_pauses, kMaxPauses), std::min(parts_.context.config.yield_us, kLongestUs));
  Progress progress = round->step(&moved);
  while (progress == Progress::kPending && s.will_wait && !progress_lock.wanted() && idle.pause())
    progress = round->step(&moved);
  wake_readers();  // of what a step has published: the other may sleep already, waiting for my half
  if (progress == Progress::kDone && !round->withdrawn()) {
    if (s.name.empty()) pending_.pass_over(s.op, use);
    Counters::add_locked(counters.bypassed);
    const uint64_t bytes = bytes_of(known.signature), ticks = processor_ticks();
    Counters::add_locked(counters.bytes_reduced, bytes);
    note_arrival(submitted, round->arrival());
    recorder.done(number, Code::kOk, ticks);
    measure_repeat(s.op, bytes, s.name, record, submitted, round->arrival(), ticks);
    if (!s.name.empty()) record->pending.store(nullptr, std::memory_order_release);
    return true;
  }

  Operation* op = make_late(s, record, number, use);
  op->submitted = submitted;
  op->traces.is_counted = true;
  RankMetrics& rank_metrics = parts_.context.rank_metrics;
  rank_metrics.began(rank_metrics.at(submitted));
  if (op->name_record) rank_metrics.repeats(record->seen(), false, rank_metrics.at(submitted));
  *handle = op->handle;
  pending_.add(op);
  if (progress == Progress::kPending)
    arrivals_.emplace_back(op, std::move(round));
  else
    announce(op);
  return true;
}

// The operation that a call becomes when the others are late. number: of the flight record; use: of its name.
Operation* ProcessSet::make_late(const Submission& s, NameRecord* record, uint64_t number, uint64_t use) {
  const SubmitLock lock(parts_.intake.submit_mutex());
  Operation* op = parts_.intake.handles().acquire();
  parts_.intake.fill(op, s, members());
  op->traces.record = number;
  op->request.sequence = s.name.empty() ? use : 0;
  if (s.name.empty()) return op;
  op->name_record = record;
  record->pending.store(op, std::memory_order_release);
  return op;
}

}  // namespace hc
