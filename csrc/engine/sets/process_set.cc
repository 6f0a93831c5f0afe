#include "engine/sets/process_set.h"

#include <algorithm>

#include "agreement/mismatch.h"
#include "agreement/signature_table.h"

namespace hc {

namespace {
constexpr size_t kNamesKept = 8192;  // records of names that are not pending, per operation kind
// A session with fewer turns was a mistake: the next one takes twice as many plans to open.
constexpr uint64_t kTurnsThatPay = 64;
constexpr int kMostWanted = 4096;
// A ballot fills up to this size: what takes longer to move had better start.
constexpr size_t kFillBytes = 256 * kKiB;
constexpr int kLooksWithoutNews = 48;  // some microseconds: a Python loop submits faster

bool goes_express(const Operation& op, size_t limit) {
  const Signature& s = op.signature();
  if (s.device || s.in_arena) return false;
  switch (s.op) {
    case Op::kBarrier:
      return true;
    case Op::kAllreduce:
      if (s.reduce == Reduce::kAdasum || !op.out[0]) return false;
      break;
    case Op::kBroadcast:
    case Op::kAllgather:
    case Op::kReducescatter:
    case Op::kAlltoall:
      break;
    default:
      return false;
  }
  const size_t bytes = bytes_of(s);
  return s.tensors.size() == 1 && bytes > 0 && bytes <= std::min(kExpressBytes, limit);
}

// Whether every rank has as many rows for everybody as the others: a turn takes only what is the same on all.
bool rows_are_alike(const PlanBatch& batch, size_t size) {
  if (batch.op != Op::kAllgather && batch.op != Op::kAlltoall) return true;
  const size_t line = batch.op == Op::kAlltoall ? size : 1;
  for (size_t i = line; i < batch.rows.size(); ++i)
    if (batch.rows[i] != batch.rows[i - line]) return false;
  return true;
}
}  // namespace

int ProcessSet::position_of(int world_rank) const {
  auto at = std::lower_bound(ranks.begin(), ranks.end(), world_rank);
  return at != ranks.end() && *at == world_rank ? static_cast<int>(at - ranks.begin()) : -1;
}

NameRecord& ProcessSet::record_of(Op op, std::string_view name) {
  auto& names = names_[static_cast<int>(op)];
  auto at = names.find(std::string(name));
  if (at != names.end()) return at->second;
  if (names.size() >= kNamesKept)
    std::erase_if(names,
                  [](const auto& entry) { return entry.second.pending.load(std::memory_order_acquire) == nullptr; });
  return names[std::string(name)];
}

NameRecord* ProcessSet::known_record(Op op, std::string_view name) {
  if (name.empty()) return &unnamed_[static_cast<size_t>(op)];
  auto& names = names_[static_cast<int>(op)];
  auto at = names.find(std::string(name));
  return at == names.end() ? nullptr : &at->second;
}

Operation* ProcessSet::find_named(Op op, std::string_view name) {
  NameRecord* record = known_record(op, name);
  return record ? record->pending.load(std::memory_order_acquire) : nullptr;
}

void ProcessSet::adopt(Operation* op) {
  op->pending_at = pending.size();
  pending.push_back(op);
}

void ProcessSet::announce(Operation* op) {
  const Op kind = op->signature().op;
  // Nobody may wait for me in a turn while I wait for the coordinator. With a turn of mine under way: when it is over.
  if (express.is_busy())
    ballot.on_express = true;
  else if (express.is_on())
    express.close();
  if (kind == Op::kJoin) {
    join = op;
    if (!frozen_runs.empty()) {
      deferred_join = op;
      return;
    }
    thaw();
    ballot.joined = true;
    return;
  }
  op->slot = cache.announce(op->request, &ballot);
  for (const TensorMeta& t : op->signature().tensors)
    ballot_bytes_ += static_cast<size_t>(t.count()) * size_of(t.dtype);
  if (op->request.name.empty()) {
    Window& w = windows_[static_cast<int>(kind)];
    // Numbers are given and operations queued under one lock, so they arrive here without a gap, except for one that
    // has stepped back from the express way while later ones were agreed on.
    for (; op->request.sequence < w.base; --w.base) w.operations.push_front(nullptr);
    const uint64_t at = op->request.sequence - w.base;
    if (w.operations.size() <= at) w.operations.resize(at + 1, nullptr);
    w.operations[at] = op;
  } else if (op->slot != kNoSlot) {
    if (by_slot_.size() <= op->slot) by_slot_.resize(op->slot + 1, nullptr);
    by_slot_[op->slot] = op;
  }
}

bool ProcessSet::ballot_fills() {
  if (ballot.joined || ballot_bytes_ > kFillBytes) return false;
  const size_t announced = ballot.cached.size() + ballot.fresh.size();
  looks_without_news_ = announced == ballot_seen_ ? looks_without_news_ + 1 : 0;
  ballot_seen_ = announced;
  return looks_without_news_ < kLooksWithoutNews;
}

void ProcessSet::ballot_sent() {
  ballot.cached.clear();
  ballot.fresh.clear();
  ballot.joined = false;
  ballot.on_express = false;
  ballot_bytes_ = ballot_seen_ = 0;
  looks_without_news_ = 0;
}

Task ProcessSet::task_of(const Operation& op) const {
  const Signature& s = op.signature();
  Task task;
  task.dtype = s.tensors[0].dtype;
  task.reduce = s.reduce == Reduce::kAverage ? Reduce::kSum : s.reduce;
  task.scale = scale_of(s, task.dtype, size());
  task.pieces = {{op.in[0], op.out[0], static_cast<size_t>(s.tensors[0].count())}};
  return task;
}

Result<Task> ProcessSet::express_task_of(Operation* op) const {
  const Signature& s = op->signature();
  if (s.op == Op::kAllreduce) return task_of(*op);
  if (s.op == Op::kBarrier) {
    Task task;
    task.op = Op::kBarrier;
    return task;
  }
  const std::vector<const Signature*> alike(static_cast<size_t>(size()), &s);
  Agreement agreed = agree({s.op, op->request.name.empty(), op->request.sequence, op->request.name}, alike, {ranks});
  if (agreed.error != Code::kOk) return Status(agreed.error, agreed.text);
  return BatchRunner::task_if_alike(op, std::move(agreed.rows), group, ranks);
}

bool ProcessSet::start_frozen(Operation* op) {
  auto at = bucket_sets.find(op->bucket_set);
  if (at == bucket_sets.end() || !at->second.frozen) return false;
  BucketSet& set = at->second;
  for (int m = 0; m < lane->size(); ++m)
    if (lane->flags(m).thawed.load(std::memory_order_acquire)) return set.frozen = false;
  BucketSet::Bucket& bucket = set.buckets[op->bucket];
  const size_t flag = set.first_flag + static_cast<size_t>(op->bucket);
  auto collective = op->device ? make_frozen_arrival(group, flag, bucket.turn++)
                               : make_frozen_allreduce(task_of(*op), group, flag, bucket.turn++);
  (void)collective->start();  // it only announces the arrival
  frozen_runs.push_back({op, std::move(collective)});
  return true;
}

Operation* ProcessSet::take_armed(int32_t flag) {
  const auto at = std::find_if(armed.begin(), armed.end(), [&](const Operation* op) {
    return bucket_sets[op->bucket_set].first_flag + static_cast<size_t>(op->bucket) == static_cast<size_t>(flag);
  });
  if (at == armed.end()) return nullptr;
  Operation* op = *at;
  armed.erase(at);
  return op;
}

bool ProcessSet::start_express(Operation* op) {
  if (!express.is_on() || pending.size() != 1 || runner || !queue.empty()) return false;
  if (!goes_express(*op, express_bytes)) return false;
  const uint32_t cached = cache.find(op->request);
  if (cached == kNoSlot) return false;
  Result<Task> task = express_task_of(op);
  if (!task.is_ok()) return false;  // the agreed way says why
  const ExpressKey key{cached, op->request.sequence, hash_of(op->signature())};
  keep_repeat(*op, key, task.value());
  auto turn = express.enter(task.take(), group, key);
  if (!turn) return false;
  frozen_runs.push_back({op, std::move(turn)});
  return true;
}

void ProcessSet::keep_repeat(const Operation& op, const ExpressKey& key, const Task& task) {
  const Signature& s = op.signature();
  if (s.op != Op::kAllreduce && s.op != Op::kBroadcast && s.op != Op::kBarrier) return;  // the core owns the results
  NameRecord& record = op.name_record ? *op.name_record : unnamed_[static_cast<size_t>(s.op)];
  if (record.repeat && record.repeat->signature == s) return;
  record.repeat = std::make_unique<Repeat>(Repeat{s, key, task});
}

void ProcessSet::open_express(uint64_t first_turn) {
  if (!lane || lane->size() != size()) return;
  express.open(first_turn);
  // The plan that says so is for one operation of mine; what else I have announced, others may wait for.
  if (!express_allowed || join || pending.size() > 1) express.close();
}

Status ProcessSet::take_ballot(const Ballot& ballot) {
  // A session must be over on every member before the next one opens.
  if (ballot.on_express) express_trial.alike = 0;
  return coordinator->take(ballot, Clock::now());
}

bool ProcessSet::suits_express(const Plan& plan) {
  if (!express_allowed || !lane || lane->size() != size() || size() < 2 || express.is_on() || express.is_busy())
    return false;
  ExpressTrial& trial = express_trial;
  const PlanBatch* b = plan.batches.size() == 1 ? &plan.batches[0] : nullptr;
  const bool suits = b && b->error == Code::kOk && b->entries.size() == 1 && b->entries[0].slot != kNoSlot &&
                     !b->entries[0].assigned && !b->entries[0].has_signature && coordinator->pending() == 0 &&
                     pending.size() == 1 && !join && goes_express(*pending[0], express_bytes) &&
                     rows_are_alike(*b, static_cast<size_t>(size()));
  trial.alike = suits ? trial.alike + 1 : 0;
  if (trial.alike < trial.wanted) return false;
  const bool paid = express.successes() - trial.successes_before >= kTurnsThatPay;
  trial = {0, paid ? ExpressTrial::kFirstWanted : std::min(2 * trial.wanted, kMostWanted), express.successes()};
  return true;
}

void ProcessSet::thaw() {
  if (express.is_on() && !express.is_busy()) express.close();
  if (!lane || bucket_sets.empty()) return;
  for (auto& [id, set] : bucket_sets) set.frozen = false;
  lane->publish(lane->mine().thawed, 1);
}

void ProcessSet::pass_over(Op op, uint64_t sequence) {
  Window& w = windows_[static_cast<int>(op)];
  if (w.operations.empty()) w.base = std::max(w.base, sequence + 1);
}

void ProcessSet::forget(Operation* op) {
  pending.back()->pending_at = op->pending_at;
  pending[op->pending_at] = pending.back();
  pending.pop_back();
  if (op == join) {
    join = nullptr;
    join_pending.store(false, std::memory_order_release);
  }
  const Op kind = op->signature().op;
  if (kind != Op::kJoin && op->request.name.empty()) {
    pass_over(kind, op->request.sequence);
    Window& w = windows_[static_cast<int>(kind)];
    const uint64_t at = op->request.sequence - w.base;
    if (at < w.operations.size()) w.operations[at] = nullptr;
    while (!w.operations.empty() && !w.operations.front()) {
      w.operations.pop_front();
      ++w.base;
    }
  } else if (op->slot != kNoSlot && op->slot < by_slot_.size() && by_slot_[op->slot] == op) {
    by_slot_[op->slot] = nullptr;
  }
  if (op->name_record) op->name_record->pending.store(nullptr, std::memory_order_release);
}

}  // namespace hc
