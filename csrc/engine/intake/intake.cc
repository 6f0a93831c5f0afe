#include "engine/intake/intake.h"

#include <unistd.h>

#include <algorithm>

#include "agreement/mismatch.h"
#include "base/quoted.h"
#include "collective/selection.h"
#include "engine/intake/arguments.h"
#include "engine/record/trace.h"

namespace hc {

namespace {

constexpr const char* kTooManyLive = "more than a million operations are live; wait for some and release their handles";

}  // namespace

// Declared buckets share a batch only where that changes no bit (CoordinatorOptions::arena_fusion_bytes).
bool Intake::goes_in_place(const Submission& s, bool declared) const {
  if (s.op != Op::kAllreduce) return false;
  size_t bytes = 0;
  for (const Submission::Tensor& t : s.tensors) bytes += bytes_of(t);
  return (declared || in_place_pays(bytes, s.tensors.size(), s.will_wait)) && arena_holds(s);
}

bool Intake::arena_holds(const Submission& s) const {
  const Mesh& mesh = *context_.mesh;
  if (!mesh.shares_memory(mesh.rank()) || s.tensors.empty()) return false;
  const Arena& arena = *mesh.arena(mesh.rank());
  return std::all_of(s.tensors.begin(), s.tensors.end(), [&](const Submission::Tensor& t) {
    const size_t bytes = bytes_of(t);
    return t.in == t.out && bytes && arena.contains(t.in, bytes);
  });
}

void Intake::fill(Operation* op, const Submission& s, const Members& set) const {
  op->process_set = set.id;
  op->submitted = Clock::now();
  op->tell = {s.done, s.done_context};
  op->request.name.assign(s.name);
  op->request.sequence = 0;
  for (const Submission::Tensor& t : s.tensors) {
    op->in.push_back(static_cast<const std::byte*>(t.in));
    op->out.push_back(static_cast<std::byte*>(t.out));
  }
  op->awaited.assign(s.awaited.begin(), s.awaited.end());
  if (s.op == Op::kAlltoall && s.awaited.empty()) op->awaited.assign(set.size(), s.tensors[0].shape[0] / set.size());
  write_signature(s, set, op->bucket.set >= 0, &op->request.signature);
}

void Intake::write_signature(const Submission& s, const Members& set, bool declared, Signature* to) const {
  Signature& g = *to;
  g.op = s.op;
  g.reduce = s.reduce;
  g.device = !s.place.is_host && s.op != Op::kJoin;
  g.root = has_root(s.op) ? set.position_of(s.root) : is_message(s.op) ? s.root : 0;
  g.priority = s.op == Op::kAllreduce ? s.priority : 0;
  g.left_out = s.op == Op::kAllreduce ? s.left_out : 0;
  g.prescale = s.prescale;
  g.postscale = s.postscale;
  g.tensors.resize(s.tensors.size());
  for (size_t i = 0; i < s.tensors.size(); ++i) {
    g.tensors[i].dtype = s.tensors[i].dtype;
    g.tensors[i].shape.assign(s.tensors[i].shape.begin(), s.tensors[i].shape.end());
  }
  g.in_arena = !g.device && goes_in_place(s, declared);
  g.splits.assign(s.splits.begin(), s.splits.end());
  if (s.op == Op::kAlltoall && s.splits.empty()) g.splits.assign(set.size(), s.tensors[0].shape[0] / set.size());
}

Status Intake::failure_of(Op op, std::string_view name) const {
  return failure_.with(text_of(name_of(op), name.empty() ? "" : " " + in_quotes(name)));
}

// Whether `s` may be submitted now, and to which set.
Result<SetIntake*> Intake::check(const Submission& s) const {
  if (!failure_.is_ok()) return failure_of(s.op, s.name);
  SetIntake* set = find_locked(s.process_set);
  if (!set)
    return error(Code::kInvalidArgument, title_of(s.op), ": Process set ", s.process_set,
                 " does not exist, or has not been registered.");
  HC_TRY(check_arguments(s, set->members, context_.rank()), "rank ", context_.rank());
  if (set->join_pending.load(std::memory_order_acquire) && !is_message(s.op)) return has_joined(s.op);
  return set;
}

Status Intake::has_joined(Op op) const {
  return error(Code::kInvalidArgument, name_of(op), ": rank ", context_.rank(),
               " has joined and submits nothing until join() has returned");
}

Status Intake::is_pending(Op op, std::string_view name) const {
  return error(Code::kInvalidArgument, name_of(op), " ", in_quotes(name),
               ": an operation with this name is already pending on rank ", context_.rank(),
               " (Duplicate tensor name). Wait for it first, or give this one another name.");
}

// record: of its name; null: it has none, or is a message.
int64_t Intake::enqueue(Operation* op, SetIntake& set, NameRecord* record) {
  const bool message = is_message(op->signature().op);
  if (record) {
    op->name_record = record;
    record->pending.store(op, std::memory_order_release);
  } else if (!message) {
    op->request.sequence = set.next_sequence(op->signature().op);
  }
  // Messages are no calls that all ranks make alike.
  const uint64_t call = message ? 0 : set.next_call();
  const uint64_t use = record ? record->uses++ : op->request.sequence;
  op->traces.record = recorder_.submitted(
      {op->signature(), op->request.name, op->process_set, op->bucket.set >= 0, op->submitted, call, use});
  op->span.start([&] { return op->describe(); });
  incoming_.push_back(op);
  const int64_t handle = op->handle;
  has_news_.store(true, std::memory_order_seq_cst);
  Counters::add_locked(context_.counters.operations);
  return handle;
}

Status Intake::queue(const Submission& s, BucketId bucket, std::unique_ptr<BackendWork> work, int64_t* handle) {
  SubmitLock lock(mu_);
  auto checked = check(s);
  HC_TRY(checked.status());
  SetIntake& set = *checked.value();
  NameRecord* record = s.name.empty() || is_message(s.op) ? nullptr : &set.record_of(s.op, s.name);
  if (record && record->pending.load(std::memory_order_acquire)) return is_pending(s.op, s.name);
  Operation* op = handles_.acquire();
  if (!op) return error(Code::kInternal, kTooManyLive);
  op->bucket = bucket;
  fill(op, s, set.members);
  op->work = std::move(work);
  if (!op->work) op->request.signature.device = false;  // it was offered, and there is none
  if (is_message(s.op)) op->request.sequence = static_cast<uint64_t>(s.tag);
  if (s.op == Op::kJoin) set.join_pending.store(true, std::memory_order_release);
  *handle = enqueue(op, set, record);
  return Status::ok();
}

Status Intake::queue_declared(int process_set, BucketId id, int32_t priority, int64_t* handle,
                              std::shared_ptr<const BucketSet>* elsewhere) {
  *handle = 0;
  SubmitLock lock(mu_);
  SetIntake* set = find_locked(process_set);
  const SetIntake::Declared* declared = set ? set->declared(id.set) : nullptr;
  if (!declared) return error(Code::kInvalidArgument, "bucket set ", id.set, " was not declared");
  const std::vector<BucketSet::Bucket>& memory = declared->set->buckets;
  if (id.index < 0 || id.index >= static_cast<int>(memory.size()))
    return error(Code::kInvalidArgument, "bucket ", id.index, " of ", memory.size());
  if (!declared->set->place.is_host) {
    *elsewhere = declared->set;
    return Status::ok();
  }
  const SetIntake::Declared::Bucket& bucket = declared->buckets[static_cast<size_t>(id.index)];
  if (!failure_.is_ok()) return failure_of(Op::kAllreduce, bucket.request.name);
  if (!bucket.refusal.is_ok()) return bucket.refusal;
  if (set->join_pending.load(std::memory_order_acquire)) return has_joined(Op::kAllreduce);
  if (bucket.record && bucket.record->pending.load(std::memory_order_acquire))
    return is_pending(Op::kAllreduce, bucket.request.name);
  Operation* op = handles_.acquire();
  if (!op) return error(Code::kInternal, kTooManyLive);
  op->process_set = set->members.id;
  op->bucket = id;
  op->submitted = Clock::now();
  op->request = bucket.request;
  op->request.signature.priority = priority;
  std::byte* data = memory[static_cast<size_t>(id.index)].data;
  op->in.push_back(data);
  op->out.push_back(data);
  *handle = enqueue(op, *set, bucket.record);
  return Status::ok();
}

Result<Operation*> Intake::make(const Submission& s, BucketId bucket) {
  SubmitLock lock(mu_);
  auto checked = check(s);
  HC_TRY(checked.status());
  SetIntake& set = *checked.value();
  Operation* op = handles_.acquire();
  if (!op) return error(Code::kInternal, kTooManyLive);
  fill(op, s, set.members);
  op->bucket = bucket;
  op->traces.record = recorder_.submitted(
      {op->signature(), op->request.name, op->process_set, true, op->submitted, set.next_call(), 0});
  return op;
}

std::vector<Operation*> Intake::take_all() {
  SubmitLock lock(mu_);
  std::vector<Operation*> rest(taken_.begin() + static_cast<std::ptrdiff_t>(next_taken_), taken_.end());
  rest.insert(rest.end(), incoming_.begin(), incoming_.end());
  taken_.clear();
  incoming_.clear();
  next_taken_ = 0;
  return rest;
}

void Intake::refuse(const Status& reason) {
  SubmitLock lock(mu_);
  if (failure_.is_ok()) failure_ = reason;
}

Status Intake::failure() const {
  SubmitLock lock(mu_);
  return failure_;
}

void Intake::add(std::shared_ptr<SetIntake> set) {
  SubmitLock lock(mu_);
  const int id = set->members.id;
  sets_[id] = std::move(set);
}

void Intake::remove(int process_set) {
  SubmitLock lock(mu_);
  sets_.erase(process_set);
}

std::shared_ptr<SetIntake> Intake::find(int process_set) const {
  SubmitLock lock(mu_);
  const auto at = sets_.find(process_set);
  return at == sets_.end() ? nullptr : at->second;
}

// A bucket with a fault can be declared, as an operation with one can be made: submitting it says what is wrong.
int Intake::declare(SetIntake& set, std::shared_ptr<const BucketSet> buckets) const {
  SetIntake::Declared declared;
  if (buckets->place.is_host) {
    for (int i = 0; i < static_cast<int>(buckets->buckets.size()); ++i) {
      Submission::Tensor tensor{};
      const Submission s = buckets->submission_of(set.members.id, i, {nullptr}, &tensor);
      SetIntake::Declared::Bucket& bucket = declared.buckets.emplace_back();
      bucket.request.name = s.name;
      if (Status checked = check_arguments(s, set.members, context_.rank()); !checked.is_ok())
        bucket.refusal = checked.with(text_of("rank ", context_.rank()));
      else
        write_signature(s, set.members, true, &bucket.request.signature);
    }
  }
  SubmitLock lock(mu_);
  declared.set = std::move(buckets);
  return set.declare(std::move(declared));
}

void Intake::undeclare(SetIntake& set, int id) const {
  SubmitLock lock(mu_);
  set.undeclare(id);
}

bool Intake::is_pending(const SetIntake& set, int id) const {
  SubmitLock lock(mu_);
  return set.is_pending(id);
}

void Intake::take_back_declared(SetIntake& set, int id) const {
  SubmitLock lock(mu_);
  set.take_back_declared(id);
}

Operation* Intake::find_named(SetIntake& set, Op op, std::string_view name) const {
  SubmitLock lock(mu_);
  return set.find_named(op, name);
}

void Intake::skip_sequence(SetIntake& set, Op op, uint64_t sequence) const {
  SubmitLock lock(mu_);
  set.skip_sequence(op, sequence);
}

std::string Intake::last_call() const {
  SubmitLock lock(mu_);
  return recorder_.last_call();
}

std::string Intake::stragglers_json() const {
  SubmitLock lock(mu_);
  std::string text;
  for (const auto& [id, set] : sets_)
    if (set->members.has_me())
      text += text_of(text.empty() ? "" : ",", "\"", id, "\":", set->stragglers.json(set->members.ranks));
  return text;
}

void Intake::beat() const {
  std::vector<RankMetrics::Late> late;
  if (const std::shared_ptr<SetIntake> world = find(0))
    for (const auto& [rank, times, ns] : world->stragglers.latest(kLateRanks))
      late.push_back({world->members.ranks[static_cast<size_t>(rank)], times, ns});
  context_.rank_metrics.beat(late);
}

std::string Intake::flight_record(const std::string& reason) const {
  char host[256] = "";
  (void)::gethostname(host, sizeof host - 1);
  const auto epoch = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  char stamp[40];
  std::snprintf(stamp, sizeof stamp, "%.6f", epoch);
  SubmitLock lock(mu_);
  std::string sets;
  for (const auto& [id, set] : sets_) {
    sets += text_of(sets.empty() ? "" : ",", "\"", id, "\":[");
    const std::vector<int>& ranks = set->members.ranks;
    for (size_t i = 0; i < ranks.size(); ++i) sets += text_of(i ? "," : "", ranks[i]);
    sets += "]";
  }
  return text_of("{\"version\":1,\"rank\":", context_.rank(), ",\"size\":", context_.mesh->size(),
                 ",\"generation\":", context_.generation, ",\"host\":", json_text(host), ",\"pid\":", ::getpid(),
                 ",\"time\":", stamp, ",\"reason\":", json_text(reason), ",\"process_sets\":{", sets,
                 "},\"submitted\":", recorder_.submissions(), ",\"operations\":", recorder_.json(), "}\n");
}

}  // namespace hc
