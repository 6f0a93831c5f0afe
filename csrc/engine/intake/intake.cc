#include "engine/intake/intake.h"

#include <unistd.h>

#include <algorithm>

#include "agreement/mismatch.h"
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
  Signature& g = op->request.signature;
  g.op = s.op;
  g.reduce = s.reduce;
  g.device = s.on_device && s.op != Op::kJoin;
  g.root = has_root(s.op) ? set.position_of(s.root) : is_message(s.op) ? s.root : 0;
  g.priority = s.op == Op::kAllreduce ? s.priority : 0;
  g.prescale = s.prescale;
  g.postscale = s.postscale;
  g.tensors.resize(s.tensors.size());
  for (size_t i = 0; i < s.tensors.size(); ++i) {
    g.tensors[i].dtype = s.tensors[i].dtype;
    g.tensors[i].shape.assign(s.tensors[i].shape.begin(), s.tensors[i].shape.end());
    op->in.push_back(static_cast<const std::byte*>(s.tensors[i].in));
    op->out.push_back(static_cast<std::byte*>(s.tensors[i].out));
  }
  g.in_arena = !g.device && goes_in_place(s, op->bucket.set >= 0);
  g.splits.assign(s.splits.begin(), s.splits.end());
  if (s.op == Op::kAlltoall && s.splits.empty()) g.splits.assign(set.size(), s.tensors[0].shape[0] / set.size());
}

// Submit lock held. Whether `s` may be submitted now, and to which set.
Result<SetIntake*> Intake::check(const Submission& s) const {
  if (!failure_.is_ok())
    return failure_.with(text_of(name_of(s.op), s.name.empty() ? "" : " '", s.name, s.name.empty() ? "" : "'"));
  SetIntake* set = find_locked(s.process_set);
  if (!set)
    return error(Code::kInvalidArgument, title_of(s.op), ": Process set ", s.process_set,
                 " does not exist, or has not been registered.");
  HC_TRY(check_arguments(s, set->members, context_.rank()), "rank ", context_.rank());
  if (set->join_pending.load(std::memory_order_acquire) && !is_message(s.op))
    return error(Code::kInvalidArgument, name_of(s.op), ": rank ", context_.rank(),
                 " has joined and submits nothing until join() has returned");
  return set;
}

Status Intake::queue(const Submission& s, BucketId bucket, std::unique_ptr<DeviceWork> device, int64_t* handle) {
  std::lock_guard lock(mu_);
  auto checked = check(s);
  HC_TRY(checked.status());
  SetIntake& set = *checked.value();
  NameRecord* record = s.name.empty() || is_message(s.op) ? nullptr : &set.record_of(s.op, s.name);
  if (record && record->pending.load(std::memory_order_acquire))
    return error(Code::kInvalidArgument, name_of(s.op), " '", s.name,
                 "': an operation with this name is already pending on rank ", context_.rank(),
                 " (Duplicate tensor name). Wait for it first, or give this one another name.");
  Operation* op = handles_.acquire();
  if (!op) return error(Code::kInternal, kTooManyLive);
  op->bucket = bucket;
  fill(op, s, set.members);
  op->device = std::move(device);
  if (!op->device) op->request.signature.device = false;  // it was offered, and there is none
  if (is_message(s.op)) {
    op->request.sequence = static_cast<uint64_t>(s.tag);
  } else if (record) {
    op->name_record = record;
    record->pending.store(op, std::memory_order_release);
  } else {
    op->request.sequence = set.next_sequence(s.op);
  }
  // Messages are no calls that all ranks make alike.
  const uint64_t call = is_message(s.op) ? 0 : set.next_call();
  const uint64_t use = record ? record->uses++ : op->request.sequence;
  op->record = recorder_.submitted(
      {op->signature(), op->request.name, op->process_set, op->bucket.set >= 0, op->submitted, call, use});
  if (s.op == Op::kJoin) set.join_pending.store(true, std::memory_order_release);
  incoming_.push_back(op);
  *handle = op->handle;
  has_news_.store(true, std::memory_order_seq_cst);
  Counters::add(context_.counters.operations);
  return Status::ok();
}

Result<Operation*> Intake::make(const Submission& s, BucketId bucket) {
  std::lock_guard lock(mu_);
  auto checked = check(s);
  HC_TRY(checked.status());
  SetIntake& set = *checked.value();
  Operation* op = handles_.acquire();
  if (!op) return error(Code::kInternal, kTooManyLive);
  fill(op, s, set.members);
  op->bucket = bucket;
  op->record = recorder_.submitted(
      {op->signature(), op->request.name, op->process_set, true, op->submitted, set.next_call(), 0});
  return op;
}

Result<std::shared_ptr<const BucketSet>> Intake::declared(int process_set, BucketId bucket) const {
  std::lock_guard lock(mu_);
  const SetIntake* set = find_locked(process_set);
  auto buckets = set ? set->declared(bucket.set) : nullptr;
  if (!buckets) return error(Code::kInvalidArgument, "bucket set ", bucket.set, " was not declared");
  if (bucket.index < 0 || bucket.index >= static_cast<int>(buckets->buckets.size()))
    return error(Code::kInvalidArgument, "bucket ", bucket.index, " of ", buckets->buckets.size());
  return buckets;
}

void Intake::take() {
  if (!taken_.empty()) return;  // an exception has left some
  std::lock_guard lock(mu_);
  taken_.swap(incoming_);
  has_news_.store(false, std::memory_order_release);
}

Operation* Intake::next() {
  if (next_taken_ < taken_.size()) return taken_[next_taken_++];
  taken_.clear();
  next_taken_ = 0;
  return nullptr;
}

std::vector<Operation*> Intake::take_all() {
  std::lock_guard lock(mu_);
  std::vector<Operation*> rest(taken_.begin() + static_cast<std::ptrdiff_t>(next_taken_), taken_.end());
  rest.insert(rest.end(), incoming_.begin(), incoming_.end());
  taken_.clear();
  incoming_.clear();
  next_taken_ = 0;
  return rest;
}

void Intake::refuse(const Status& reason) {
  std::lock_guard lock(mu_);
  if (failure_.is_ok()) failure_ = reason;
}

Status Intake::failure() const {
  std::lock_guard lock(mu_);
  return failure_;
}

void Intake::add(std::shared_ptr<SetIntake> set) {
  std::lock_guard lock(mu_);
  const int id = set->members.id;
  sets_[id] = std::move(set);
}

void Intake::remove(int process_set) {
  std::lock_guard lock(mu_);
  sets_.erase(process_set);
}

SetIntake* Intake::find_locked(int process_set) const {
  const auto at = sets_.find(process_set);
  return at == sets_.end() ? nullptr : at->second.get();
}

std::shared_ptr<SetIntake> Intake::find(int process_set) const {
  std::lock_guard lock(mu_);
  const auto at = sets_.find(process_set);
  return at == sets_.end() ? nullptr : at->second;
}

int Intake::declare(SetIntake& set, std::shared_ptr<const BucketSet> buckets) {
  std::lock_guard lock(mu_);
  return set.declare(std::move(buckets));
}

void Intake::undeclare(SetIntake& set, int id) {
  std::lock_guard lock(mu_);
  set.undeclare(id);
}

Operation* Intake::find_named(SetIntake& set, Op op, std::string_view name) const {
  std::lock_guard lock(mu_);
  return set.find_named(op, name);
}

void Intake::skip_sequence(SetIntake& set, Op op, uint64_t sequence) const {
  std::lock_guard lock(mu_);
  set.skip_sequence(op, sequence);
}

std::string Intake::last_call() const {
  std::lock_guard lock(mu_);
  return recorder_.last_call();
}

std::string Intake::lateness_json() const {
  std::lock_guard lock(mu_);
  std::string text;
  for (const auto& [id, set] : sets_)
    if (set->members.has_me())
      text += text_of(text.empty() ? "" : ",", "\"", id, "\":", set->lateness.json(set->members.ranks));
  return text;
}

std::string Intake::flight_record(const std::string& reason) const {
  char host[256] = "";
  (void)::gethostname(host, sizeof host - 1);
  const auto epoch = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  char stamp[40];
  std::snprintf(stamp, sizeof stamp, "%.6f", epoch);
  std::lock_guard lock(mu_);
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
