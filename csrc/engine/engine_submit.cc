// Submission: an operation is filled and queued. Any thread.
#include <algorithm>
#include <tuple>

#include "agreement/mismatch.h"
#include "engine/engine.h"

namespace hc {

namespace {

// Smaller tensors that lie in the arena go with the private ones, of which many are copied into one batch: in place
// each is a batch of its own, with two meetings of all ranks. A caller that waits at once has nothing to fuse it with,
// and in place is the faster there from kInPlaceAloneBytes on (docs/decisions/0030).
constexpr size_t kInPlaceBytes = 64 * kKiB, kInPlaceAloneBytes = 16 * kKiB;

size_t bytes_of(const Submission::Tensor& t) {
  size_t bytes = size_of(t.dtype);
  for (int64_t d : t.shape) bytes *= static_cast<size_t>(d);
  return bytes;
}

}  // namespace

// Declared buckets share a batch only where that changes no bit (CoordinatorOptions::arena_fusion_bytes).
bool Engine::goes_in_place(const Submission& s, bool declared) const {
  if (s.op != Op::kAllreduce) return false;
  size_t bytes = 0;
  for (const Submission::Tensor& t : s.tensors) bytes += bytes_of(t);
  const size_t pays = s.tensors.size() * (s.will_wait ? kInPlaceAloneBytes : kInPlaceBytes);
  return (declared || bytes >= pays) && arena_holds(s);
}

bool Engine::arena_holds(const Submission& s) const {
  if (!mesh_->shares_memory(mesh_->rank()) || s.tensors.empty()) return false;
  const Arena& arena = *mesh_->arena(mesh_->rank());
  return std::all_of(s.tensors.begin(), s.tensors.end(), [&](const Submission::Tensor& t) {
    const size_t bytes = bytes_of(t);
    return t.in == t.out && bytes && arena.contains(t.in, bytes);
  });
}

void Engine::fill(Operation* op, const Submission& s, const ProcessSet& set) {
  op->process_set = set.id;
  op->submitted = Clock::now();
  op->done_callback = s.done;
  op->done_context = s.done_context;
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
  g.in_arena = !g.device && goes_in_place(s, op->bucket_set >= 0);
  g.splits.assign(s.splits.begin(), s.splits.end());
  if (s.op == Op::kAlltoall && s.splits.empty()) g.splits.assign(set.size(), s.tensors[0].shape[0] / set.size());
}

Status Engine::submit(const Submission& s, int64_t* handle) {
  if (!connected_.load(std::memory_order_acquire))
    return error(Code::kNotInitialized, "Horovod has not been initialized; use hvd.init().");
  std::unique_ptr<DeviceWork> device;
  if (s.on_device) {
    auto prepared = prepare_device(s);
    HC_TRY(prepared.status(), name_of(s.op), " '", s.name, "': rank ", mesh_->rank());
    device = prepared.take();
  }
  {
    std::lock_guard lock(submit_mu_);
    HC_TRY(queue_locked(s, nullptr, handle, std::move(device)));
  }
  if (!s.will_wait && sleepers_.load(std::memory_order_seq_cst) > 0) mesh_->wake_self();
  return Status::ok();
}

Status Engine::submit_declared(int process_set, int bucket_set, int bucket, DeclaredCall call, int64_t* handle) {
  if (!connected_.load(std::memory_order_acquire))
    return error(Code::kNotInitialized, "Horovod has not been initialized; use hvd.init().");
  Submission s;
  Submission::Tensor tensor{};
  {
    std::lock_guard lock(submit_mu_);
    HC_TRY(fill_declared(process_set, {bucket_set, bucket}, &s, &tensor));
  }
  s.stream = call.stream;
  s.priority = call.priority;
  std::unique_ptr<DeviceWork> device;
  if (s.on_device) {
    auto gpu = adopt_gpu(s.device_index);
    HC_TRY(gpu.status());
    auto captured = gpu.value()->is_captured(call.stream);
    HC_TRY(captured.status());
    if (captured.value()) return capture_declared(s, {bucket_set, bucket}, handle);
    auto prepared = prepare_device(s);
    HC_TRY(prepared.status(), name_of(s.op), " '", s.name, "': rank ", mesh_->rank());
    device = prepared.take();
  }
  {
    std::lock_guard lock(submit_mu_);
    const std::pair<int, int> which{bucket_set, bucket};
    HC_TRY(queue_locked(s, &which, handle, std::move(device)));
  }
  if (sleepers_.load(std::memory_order_seq_cst) > 0) mesh_->wake_self();
  return Status::ok();
}

// Submit lock held: what a declared bucket (set and number) is. It points into the declaration, which the caller keeps.
Status Engine::fill_declared(int process_set, std::pair<int, int> which, Submission* s,
                             Submission::Tensor* tensor) const {
  const ProcessSet* set = find_set(process_set);
  const auto [bucket_set, bucket] = which;
  if (!set || !set->bucket_sets.contains(bucket_set))
    return error(Code::kInvalidArgument, "bucket set ", bucket_set, " was not declared");
  const BucketSet& declared = set->bucket_sets.at(bucket_set);
  if (bucket < 0 || bucket >= static_cast<int>(declared.buckets.size()))
    return error(Code::kInvalidArgument, "bucket ", bucket, " of ", declared.buckets.size());
  const BucketSet::Bucket& b = declared.buckets[static_cast<size_t>(bucket)];
  *tensor = {b.data, b.data, b.shape, b.dtype};
  s->reduce = declared.reduce;
  s->process_set = process_set;
  s->name = b.name;
  s->prescale = declared.prescale;
  s->postscale = declared.postscale;
  s->tensors = {tensor, 1};
  s->on_device = declared.on_device;
  s->device_index = declared.device_index;
  return Status::ok();
}

// Submit lock held: checks, fills an operation and queues it.
Status Engine::queue_locked(const Submission& s, const std::pair<int, int>* bucket, int64_t* handle,
                            std::unique_ptr<DeviceWork> device) {
  if (!failure_.is_ok())
    return failure_.with(text_of(name_of(s.op), s.name.empty() ? "" : " '", s.name, s.name.empty() ? "" : "'"));
  ProcessSet* set = find_set(s.process_set);
  if (!set)
    return error(Code::kInvalidArgument, title_of(s.op), ": Process set ", s.process_set,
                 " does not exist, or has not been registered.");
  HC_TRY(check(s, *set), "rank ", mesh_->rank());
  if (set->join_pending.load(std::memory_order_acquire) && !is_message(s.op))
    return error(Code::kInvalidArgument, name_of(s.op), ": rank ", mesh_->rank(),
                 " has joined and submits nothing until join() has returned");
  NameRecord* record = s.name.empty() || is_message(s.op) ? nullptr : &set->record_of(s.op, s.name);
  if (record && record->pending.load(std::memory_order_acquire))
    return error(Code::kInvalidArgument, name_of(s.op), " '", s.name,
                 "': an operation with this name is already pending on rank ", mesh_->rank(),
                 " (Duplicate tensor name). Wait for it first, or give this one another name.");
  Operation* op = handles_.acquire();
  if (!op)
    return error(Code::kInternal, "more than a million operations are live; wait for some and release their handles");
  if (bucket) std::tie(op->bucket_set, op->bucket) = *bucket;
  fill(op, s, *set);
  op->device = std::move(device);
  if (!op->device) op->request.signature.device = false;  // it was offered, and there is none
  if (is_message(s.op)) {
    op->request.sequence = static_cast<uint64_t>(s.tag);
  } else if (record) {
    op->name_record = record;
    record->pending.store(op, std::memory_order_release);
  } else {
    op->request.sequence = set->next_sequence(s.op);
  }
  // Messages are no calls that all ranks make alike.
  const uint64_t call = is_message(s.op) ? 0 : ++set->calls;
  const uint64_t use = record ? record->uses++ : op->request.sequence;
  op->record = recorder_.submitted(
      {op->signature(), op->request.name, op->process_set, op->bucket_set >= 0, op->submitted, call, use});
  if (s.op == Op::kJoin) set->join_pending.store(true, std::memory_order_release);
  incoming_.push_back(op);
  *handle = op->handle;
  has_incoming_.store(true, std::memory_order_seq_cst);
  counters_.operations.fetch_add(1, std::memory_order_relaxed);
  return Status::ok();
}

}  // namespace hc
