// Submission: arguments are checked, an operation is filled and queued. Any thread.
#include <algorithm>
#include <tuple>

#include "engine/engine.h"

namespace hc {

namespace {

const char* horovod_name_of(Op op) {  // as in Horovod's messages
  constexpr const char* names[kOpCount] = {"Allreduce",     "Allgather", "Broadcast", "Alltoall",
                                           "Reducescatter", "Join",      "Barrier"};
  return names[static_cast<int>(op)];
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? "," : "") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace

Status Engine::check(const Submission& s, const ProcessSet& set) const {
  if (set.group_rank < 0)
    return error(Code::kInvalidArgument, horovod_name_of(s.op), ": Rank ", mesh_->rank(),
                 " is not a member of the provided process set.");
  for (const auto& t : s.tensors) {
    for (int64_t d : t.shape)
      if (d < 0)
        return error(Code::kInvalidArgument, name_of(s.op), " '", s.name, "': negative dimension in ",
                     shape_text(t.shape));
    int64_t count = 1;
    for (int64_t d : t.shape)
      if (__builtin_mul_overflow(count, d, &count))
        return error(Code::kInvalidArgument, name_of(s.op), " '", s.name, "': shape ", shape_text(t.shape),
                     " has too many elements");
    if (count && !t.in) return error(Code::kInvalidArgument, name_of(s.op), " '", s.name, "': tensor without memory");
    if ((s.op == Op::kAllreduce || s.op == Op::kBroadcast) && count && !t.out)
      return error(Code::kInvalidArgument, name_of(s.op), " '", s.name, "': no memory for the result");
    if ((s.op == Op::kAllreduce || s.op == Op::kReducescatter) && s.reduce == Reduce::kAverage &&
        t.dtype == DType::kBool)
      return error(Code::kInvalidArgument, name_of(s.op), " '", s.name,
                   "': Average of bool has no meaning; use Sum (or) or Product (and), or convert first");
    if (s.op == Op::kAllreduce && s.reduce == Reduce::kAdasum && !is_float(t.dtype))
      return error(Code::kInvalidArgument, name_of(s.op), " '", s.name, "': Adasum needs floating-point tensors, not ",
                   name_of(t.dtype), "; use op=Sum or op=Average, or convert first");
  }
  if (s.op == Op::kBroadcast && set.position_of(s.root) < 0)
    return error(Code::kInvalidArgument, "broadcast '", s.name, "': root rank ", s.root,
                 " is not a member of process set ", set.id);
  if (s.op == Op::kReducescatter && s.reduce != Reduce::kSum && s.reduce != Reduce::kAverage)
    return error(Code::kInvalidArgument, "reducescatter '", s.name,
                 "': Reducescatter currently only supports AVERAGE and SUM. Pass op=Sum or op=Average, or take this "
                 "rank's rows of an allreduce");
  if (s.op != Op::kAlltoall) return Status::ok();
  const auto& t = s.tensors[0];
  if (t.shape.empty())
    return error(Code::kInvalidArgument, "alltoall '", s.name, "': the tensor must have at least one dimension");
  const int64_t rows = t.shape[0];
  if (s.splits.empty()) {
    if (rows % set.size())
      return error(Code::kInvalidArgument, "alltoall '", s.name, "': first dimension ", rows,
                   " is not divisible by the number of ranks ", set.size(), "; pass splits");
    return Status::ok();
  }
  if (static_cast<int>(s.splits.size()) != set.size())
    return error(Code::kInvalidArgument, "alltoall '", s.name, "': splits has ", s.splits.size(), " entries for ",
                 set.size(), " ranks");
  int64_t sum = 0;
  for (int64_t n : s.splits) {
    if (n < 0) return error(Code::kInvalidArgument, "alltoall '", s.name, "': negative entry in splits");
    sum += n;
  }
  if (sum > rows)
    return error(Code::kInvalidArgument, "alltoall '", s.name, "': the sum of splits, ", sum,
                 ", exceeds the first dimension ", rows);
  return Status::ok();
}

bool Engine::arena_holds(const Submission& s) const {
  if (s.op != Op::kAllreduce || !mesh_->shares_memory(mesh_->rank()) || s.tensors.empty()) return false;
  const Arena& arena = *mesh_->arena(mesh_->rank());
  return std::all_of(s.tensors.begin(), s.tensors.end(), [&](const Submission::Tensor& t) {
    size_t bytes = size_of(t.dtype);
    for (int64_t d : t.shape) bytes *= static_cast<size_t>(d);
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
  g.in_arena = arena_holds(s);
  g.root = s.op == Op::kBroadcast ? set.position_of(s.root) : 0;
  g.prescale = s.prescale;
  g.postscale = s.postscale;
  g.tensors.resize(s.tensors.size());
  for (size_t i = 0; i < s.tensors.size(); ++i) {
    g.tensors[i].dtype = s.tensors[i].dtype;
    g.tensors[i].shape.assign(s.tensors[i].shape.begin(), s.tensors[i].shape.end());
    op->in.push_back(static_cast<const std::byte*>(s.tensors[i].in));
    op->out.push_back(static_cast<std::byte*>(s.tensors[i].out));
  }
  g.splits.assign(s.splits.begin(), s.splits.end());
  if (s.op == Op::kAlltoall && s.splits.empty()) g.splits.assign(set.size(), s.tensors[0].shape[0] / set.size());
}

Status Engine::submit(const Submission& s, int64_t* handle) {
  if (!connected_.load(std::memory_order_acquire))
    return error(Code::kNotInitialized, "Horovod has not been initialized; use hvd.init().");
  {
    std::lock_guard lock(submit_mu_);
    HC_TRY(queue_locked(s, nullptr, handle));
  }
  if (!s.will_wait && sleepers_.load(std::memory_order_seq_cst) > 0) mesh_->wake_self();
  return Status::ok();
}

Status Engine::submit_declared(int process_set, int bucket_set, int bucket, int64_t* handle) {
  if (!connected_.load(std::memory_order_acquire))
    return error(Code::kNotInitialized, "Horovod has not been initialized; use hvd.init().");
  {
    std::lock_guard lock(submit_mu_);
    ProcessSet* set = find_set(process_set);
    if (!set || !set->bucket_sets.contains(bucket_set))
      return error(Code::kInvalidArgument, "bucket set ", bucket_set, " was not declared");
    const BucketSet& declared = set->bucket_sets[bucket_set];
    if (bucket < 0 || bucket >= static_cast<int>(declared.buckets.size()))
      return error(Code::kInvalidArgument, "bucket ", bucket, " of ", declared.buckets.size());
    const BucketSet::Bucket& b = declared.buckets[bucket];
    const Submission::Tensor tensor{b.data, b.data, b.shape, b.dtype};
    Submission s;
    s.reduce = declared.reduce;
    s.process_set = process_set;
    s.name = b.name;
    s.prescale = declared.prescale;
    s.postscale = declared.postscale;
    s.tensors = {&tensor, 1};
    const std::pair<int, int> which{bucket_set, bucket};
    HC_TRY(queue_locked(s, &which, handle));
  }
  if (sleepers_.load(std::memory_order_seq_cst) > 0) mesh_->wake_self();
  return Status::ok();
}

// Submit lock held: checks, fills an operation and queues it.
Status Engine::queue_locked(const Submission& s, const std::pair<int, int>* bucket, int64_t* handle) {
  if (!failure_.is_ok())
    return failure_.with(text_of(name_of(s.op), s.name.empty() ? "" : " '", s.name, s.name.empty() ? "" : "'"));
  ProcessSet* set = find_set(s.process_set);
  if (!set)
    return error(Code::kInvalidArgument, horovod_name_of(s.op), ": Process set ", s.process_set,
                 " does not exist, or has not been registered.");
  HC_TRY(check(s, *set), "rank ", mesh_->rank());
  if (set->join_pending.load(std::memory_order_acquire))
    return error(Code::kInvalidArgument, name_of(s.op), ": rank ", mesh_->rank(),
                 " has joined and submits nothing until join() has returned");
  NameRecord* record = s.name.empty() ? nullptr : &set->record_of(s.op, s.name);
  if (record && record->pending.load(std::memory_order_acquire))
    return error(Code::kInvalidArgument, name_of(s.op), " '", s.name,
                 "': an operation with this name is already pending on rank ", mesh_->rank(),
                 " (Duplicate tensor name). Wait for it first, or give this one another name.");
  Operation* op = handles_.acquire();
  if (!op)
    return error(Code::kInternal, "more than a million operations are live; wait for some and release their handles");
  fill(op, s, *set);
  if (bucket) std::tie(op->bucket_set, op->bucket) = *bucket;
  if (record) {
    op->name_record = record;
    record->pending.store(op, std::memory_order_release);
  } else {
    op->request.sequence = set->next_sequence(s.op);
  }
  recorder_.submitted(op, ++set->calls, record ? record->uses++ : op->request.sequence);
  if (s.op == Op::kJoin) set->join_pending.store(true, std::memory_order_release);
  incoming_.push_back(op);
  *handle = op->handle;
  has_incoming_.store(true, std::memory_order_seq_cst);
  counters_.operations.fetch_add(1, std::memory_order_relaxed);
  return Status::ok();
}

}  // namespace hc
