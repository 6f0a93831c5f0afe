#include "engine/sets/batch_runner.h"

#include "collective/selection.h"
#include "collective/shared/shared.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace hc {

namespace {

size_t elements_per_row(const TensorMeta& meta) {
  size_t n = 1;
  for (size_t d = 1; d < meta.shape.size(); ++d) n *= static_cast<size_t>(meta.shape[d]);
  return n;
}

std::vector<size_t> elements_in(std::span<const int64_t> rows, size_t per_row) {
  std::vector<size_t> elements;
  for (const int64_t n : rows) elements.push_back(static_cast<size_t>(n) * per_row);
  return elements;
}

bool has_elements(const std::vector<size_t>& counts) {
  return std::any_of(counts.begin(), counts.end(), [](size_t n) { return n != 0; });
}

}  // namespace

Scale scale_of(const Signature& s, DType dtype, int size) {
  Scale scale{s.prescale, s.postscale, 1};
  if (s.reduce != Reduce::kAverage) return scale;
  if (!is_float(dtype) && s.postscale == 1.0)
    scale.divisor = size;
  else
    scale.post = s.postscale / size;
  return scale;
}

BatchRunner::BatchRunner(PlanBatch batch, std::vector<Operation*> operations, const Group& group,
                         const std::vector<int>& ranks, Tag tag)
    : batch_(std::move(batch)), operations_(std::move(operations)), group_(group), ranks_(ranks), tag_(tag) {
  for (Operation* op : operations_)
    if (op) op->batch = batch_.id;
  for (const PlanEntry& entry : batch_.entries) with_joined_ = with_joined_ || entry.with_joined;
}

Result<Task> BatchRunner::task_if_alike(Operation* op, std::vector<int64_t> rows, const Group& group,
                                        const std::vector<int>& ranks) {
  PlanBatch batch;
  batch.op = op->signature().op;
  batch.entries.resize(1);
  batch.rows = std::move(rows);
  BatchRunner runner(std::move(batch), {op}, group, ranks, {});
  HC_TRY(runner.prepare());
  if (runner.tasks_.size() != 1) return error(Code::kInternal, op->describe(), " has nothing to move");
  return std::move(runner.tasks_[0]);
}

Progress BatchRunner::step(bool* moved) {
  if (!prepared_) {
    const Progress progress = begin(moved);
    if (progress != Progress::kDone) return progress;
  }
  if (!outcome_.is_ok()) return Progress::kDone;
  while (next_task_ < tasks_.size()) {
    if (!collective_) {
      if (backend_ && backend_->is_waiting()) return Progress::kPending;
      const Progress begun = start_next();
      if (begun != Progress::kDone) return begun;
    }
    const Progress progress = collective_->step(moved);
    if (progress == Progress::kFailed) status_ = collective_->status();
    if (progress != Progress::kDone) return progress;
    collective_.reset();
    ++next_task_;
    *moved = true;
  }
  return backend_ ? end() : Progress::kDone;
}

// kPending: the backend had no memory, but there may be some soon.
Progress BatchRunner::start_next() {
  auto made = make_next();
  if (made.is_ok()) {
    collective_ = made.take();
    if (timeline_ && timeline_->on()) timeline_->phase(operations_, collective_->algorithm());
    if (collective_->start() != Progress::kFailed) return Progress::kDone;
  }
  status_ = made.is_ok() ? collective_->status() : made.status();
  if (!backend_ || !backend_->may_get_memory()) return Progress::kFailed;
  status_ = Status::ok();
  collective_.reset();
  return Progress::kPending;
}

void BatchRunner::next_part(uint32_t id) {
  ++batch_.part.index;
  tag_.batch = id;
  next_task_ = 0;
}

Progress BatchRunner::begin(bool* moved) {
  if (backend_ && batch_.error == Code::kOk) {
    const Progress progress = backend_->begin(operations_, moved);
    if (progress == Progress::kFailed) status_ = backend_->status();
    if (progress != Progress::kDone) return progress;
  }
  if (backend_ && backend_->is_waiting()) return Progress::kPending;
  prepared_ = true;
  *moved = true;
  if (backend_)
    launch_.start([&] { return text_of("launch ", name_of(batch_.op), ", ", operations_.size(), " at a time"); });
  if (batch_.error != Code::kOk)
    outcome_ = Status(batch_.error, batch_.error_text);
  else if (backend_)
    outcome_ = backend_->outcome();
  if (!outcome_.is_ok()) return Progress::kDone;
  outcome_ = prepare();
  if (!outcome_.is_ok() && backend_ && backend_->may_get_memory()) {
    tasks_.clear();
    bytes_ = 0;
    outcome_ = Status::ok();
    prepared_ = false;
    return Progress::kPending;
  }
  // A rank that cannot allocate its results must not leave the others waiting in the collective: there is no way
  // back from here, so it is the engine that fails.
  if (!outcome_.is_ok()) {
    status_ = outcome_;
    return Progress::kFailed;
  }
  return Progress::kDone;
}

Progress BatchRunner::end() {
  status_ = backend_->finish(operations_);
  launch_.end();
  return status_.is_ok() ? Progress::kDone : Progress::kFailed;
}

Result<std::unique_ptr<Collective>> BatchRunner::make_next() {
  Task& task = tasks_[next_task_];
  if (backend_) return backend_->make_collective(task);  // a copy: it may have to be made again
  if (batch_.part.count == 1) return make_collective(std::move(task), group_);
  Task now = task;
  now.tag = tag_;
  now.part = batch_.part.index;
  now.parts = batch_.part.count;
  return make_collective(std::move(now), group_);
}

const Signature& BatchRunner::signature_of(size_t entry) const {
  return operations_[entry] ? operations_[entry]->signature() : batch_.entries[entry].signature;
}

Status BatchRunner::prepare() {
  switch (batch_.op) {
    case Op::kAllreduce:
      return prepare_allreduce();
    case Op::kBroadcast:
      return prepare_each(&BatchRunner::prepare_broadcast);
    case Op::kAllgather:
      return prepare_each(&BatchRunner::prepare_allgather);
    case Op::kReducescatter:
      return prepare_each(&BatchRunner::prepare_reducescatter);
    case Op::kAlltoall:
      return prepare_each(&BatchRunner::prepare_alltoall);
    case Op::kReduce:
      return prepare_each(&BatchRunner::prepare_reduce);
    case Op::kGather:
      return prepare_each(&BatchRunner::prepare_gather);
    case Op::kScatter:
      return prepare_scatter();
    case Op::kSend:
    case Op::kReceive:
      break;
    case Op::kBarrier:
      tasks_.push_back(task_for(0, DType::kU8));
      return Status::ok();
    case Op::kJoin:
      for (Operation* op : operations_)
        if (op) op->join_rank = batch_.last_joined < 0 ? -1 : ranks_[batch_.last_joined];
      return Status::ok();
  }
  return error(Code::kInternal, "a plan names operation ", static_cast<int>(batch_.op));
}

Task BatchRunner::task_for(size_t entry, DType dtype) const {
  Task task;
  task.op = batch_.op;
  task.dtype = dtype;
  task.algorithm = batch_.algorithm;
  task.tag = tag_;
  const bool one_node = group_.shared_segment && group_.shared_segment->size() == group_.size;
  task.segment_bytes = one_node ? batch_.tuning.block_bytes : batch_.tuning.segment_bytes;
  task.flat_bytes = batch_.tuning.flat_bytes;
  task.ring_from_bytes = batch_.tuning.ring_from_bytes;
  task.adasum_by_node = batch_.tuning.adasum_by_node;
  task.with_joined = with_joined_;
  if (entry < batch_.entries.size() && batch_.op != Op::kBarrier) {
    const Signature& s = signature_of(entry);
    task.reduce = s.reduce == Reduce::kAverage ? Reduce::kSum : s.reduce;
    task.root = s.root;
    task.scale = scale_of(s, dtype, group_.size);
    if (scales_before(entry)) task.scale.pre = 1.0;
  }
  return task;
}

// The identity element of a rank that has joined must not be scaled: 1 times a factor is not 1. So where a factor would
// change it, every rank that has data scales its own before the collective, which then has no prescale. All ranks
// decide alike: for the whole batch, as its entries share the tasks.
bool BatchRunner::scales_before(size_t entry) const {
  const Signature& s = signature_of(entry);
  const bool stays = has_zero_identity(s.reduce) && std::isfinite(s.prescale);
  return with_joined_ && batch_.op == Op::kAllreduce && !backend_ && s.prescale != 1.0 && !stays;
}

// Into the memory of the result, where the collective then works in place.
void BatchRunner::scale_before(size_t entry, size_t tensor, Piece* piece) {
  const Signature& s = signature_of(entry);
  scale_copy(s.tensors[tensor].dtype, piece->out, piece->in, piece->count, s.prescale);
  piece->in = piece->out;
}

Status BatchRunner::piece_or_identity(size_t entry, size_t tensor, Piece* piece) {
  const TensorMeta& meta = signature_of(entry).tensors[tensor];
  const auto count = static_cast<size_t>(meta.count());
  if (Operation* op = operations_[entry]) {
    *piece = {op->in[tensor], op->out[tensor], count};
    if (scales_before(entry)) scale_before(entry, tensor, piece);
    return Status::ok();
  }
  const Reduce reduce = signature_of(entry).reduce;
  if (backend_) {
    auto made = backend_->identity(meta.dtype, reduce, count);
    HC_TRY(made.status(), "the identity element of a joined rank");
    *piece = {made.value(), made.value(), count};
    return Status::ok();
  }
  auto memory = Memory::make_private(count * size_of(meta.dtype));
  if (!memory) return error(Code::kInternal, "no memory for the identity element of a joined rank");
  fill_identity(meta.dtype, reduce, memory->data(), count);
  identity_.push_back(memory);
  *piece = {memory->data(), memory->data(), count};
  return Status::ok();
}

// One task per dtype, in order of appearance; a buffer that lies in an arena is reduced where it lies.
Status BatchRunner::prepare_allreduce() {
  std::vector<Task> by_dtype;
  for (size_t e = 0; e < operations_.size(); ++e) {
    const Signature& s = signature_of(e);
    for (size_t t = 0; t < s.tensors.size(); ++t) {
      const DType dtype = s.tensors[t].dtype;
      Piece piece;
      HC_TRY(piece_or_identity(e, t, &piece));
      bytes_ += piece.count * size_of(dtype);
      if (reduces_in_place(batch_.in_arena, s.reduce)) {
        tasks_.push_back(task_for(e, dtype));
        tasks_.back().algorithm = Algorithm::kSharedInPlace;
        tasks_.back().pieces = {piece};
        continue;
      }
      auto at = std::find_if(by_dtype.begin(), by_dtype.end(), [&](const Task& task) { return task.dtype == dtype; });
      if (at == by_dtype.end()) at = by_dtype.insert(by_dtype.end(), task_for(e, dtype));
      if (piece.count) at->pieces.push_back(piece);
    }
  }
  for (Task& task : by_dtype)
    if (!task.pieces.empty()) tasks_.push_back(std::move(task));
  return Status::ok();
}

Status BatchRunner::prepare_each(Status (BatchRunner::*one)(size_t, size_t, size_t)) {
  size_t flat = 0;  // position among all tensors of the batch: PlanBatch::rows is indexed by it
  for (size_t e = 0; e < operations_.size(); ++e) {
    if (!operations_[e])
      return error(Code::kInternal, "a plan names a ", name_of(batch_.op), " that this rank did not submit");
    for (size_t t = 0; t < signature_of(e).tensors.size(); ++t)
      HC_TRY((this->*one)(e, t, flat++), operations_[e]->describe());
  }
  return Status::ok();
}

Result<std::byte*> BatchRunner::result_memory(Operation* op, size_t tensor, int64_t rows, size_t row_bytes, bool fits) {
  op->first_dimension.resize(std::max<size_t>(1, op->in.size()));
  op->results.resize(op->first_dimension.size());
  op->first_dimension[tensor] = rows;
  const size_t bytes = static_cast<size_t>(rows) * row_bytes;
  bytes_ += bytes;
  if (fits && tensor < op->out.size() && op->out[tensor]) {
    op->results[tensor] = nullptr;  // of a round of the bypass that it has stepped back from
    return op->out[tensor];
  }
  op->results_in_work = backend_ != nullptr;
  if (backend_) return backend_->result_memory(op, tensor, bytes);
  auto memory = Memory::make_private(bytes);
  if (!memory) return error(Code::kInternal, "no memory for a result of ", bytes, " bytes");
  op->results[tensor] = memory;
  return memory->data();
}

Status BatchRunner::prepare_broadcast(size_t entry, size_t tensor, size_t) {
  Piece piece;
  HC_TRY(piece_or_identity(entry, tensor, &piece));
  const DType dtype = signature_of(entry).tensors[tensor].dtype;
  bytes_ += piece.count * size_of(dtype);
  if (!piece.count) return Status::ok();
  tasks_.push_back(task_for(entry, dtype));
  tasks_.back().pieces = {piece};
  return Status::ok();
}

Status BatchRunner::rows_by_rank(size_t flat, std::span<const int64_t>* rows) const {
  const size_t n = group_.size;
  if (batch_.rows.size() < (flat + 1) * n) return error(Code::kInternal, "the plan lacks the ranks' row counts");
  *rows = std::span(batch_.rows).subspan(flat * n, n);
  return Status::ok();
}

Status BatchRunner::prepare_allgather(size_t entry, size_t tensor, size_t flat) {
  const TensorMeta& meta = signature_of(entry).tensors[tensor];
  const size_t per_row = elements_per_row(meta);
  std::span<const int64_t> of_rank;
  HC_TRY(rows_by_rank(flat, &of_rank));
  Task task = task_for(entry, meta.dtype);
  task.counts = elements_in(of_rank, per_row);
  const int64_t rows = std::accumulate(of_rank.begin(), of_rank.end(), int64_t{0});
  const bool alike = std::all_of(of_rank.begin(), of_rank.end(), [&](int64_t n) { return n == of_rank[group_.rank]; });
  // The caller's memory has room for this rank's rows times the ranks.
  Operation* op = operations_[entry];
  auto out = result_memory(op, tensor, rows, per_row * size_of(meta.dtype), alike);
  if (!out.is_ok()) return out.status();
  task.pieces = {{op->in[tensor], out.value(), task.counts[group_.rank]}};
  if (rows * static_cast<int64_t>(per_row) > 0) tasks_.push_back(std::move(task));
  return Status::ok();
}

Status BatchRunner::prepare_reducescatter(size_t entry, size_t tensor, size_t flat) {
  const TensorMeta& meta = signature_of(entry).tensors[tensor];
  const size_t per_row = elements_per_row(meta);
  std::span<const int64_t> of_rank;
  HC_TRY(rows_by_rank(flat, &of_rank));
  Task task = task_for(entry, meta.dtype);
  task.counts = elements_in(of_rank, per_row);
  auto out = result_memory(operations_[entry], tensor, of_rank[group_.rank], per_row * size_of(meta.dtype));
  if (!out.is_ok()) return out.status();
  task.pieces = {{operations_[entry]->in[tensor], out.value(), task.counts[group_.rank]}};
  if (has_elements(task.counts)) tasks_.push_back(std::move(task));
  return Status::ok();
}

Status BatchRunner::prepare_alltoall(size_t entry, size_t tensor, size_t) {
  const TensorMeta& meta = signature_of(entry).tensors[tensor];
  const size_t per_row = elements_per_row(meta), n = group_.size, me = group_.rank;
  if (batch_.rows.size() < n * n) return error(Code::kInternal, "the plan lacks the table of rows");
  Task task = task_for(entry, meta.dtype);
  Operation* op = operations_[entry];
  int64_t rows = 0, longest = 0;
  op->rows_from.clear();  // of a round of the bypass that it has stepped back from
  for (size_t r = 0; r < n; ++r) {
    task.counts.push_back(static_cast<size_t>(batch_.rows[me * n + r]) * per_row);
    const int64_t from = batch_.rows[r * n + me];
    op->rows_from.push_back(from);
    task.received_counts.push_back(static_cast<size_t>(from) * per_row);
    rows += from;
  }
  for (int64_t r : batch_.rows) longest = std::max(longest, r);
  task.longest_part = static_cast<size_t>(longest) * per_row;
  auto out = result_memory(op, tensor, rows, per_row * size_of(meta.dtype), op->rows_from == op->awaited);
  if (!out.is_ok()) return out.status();
  task.pieces = {{op->in[tensor], out.value(), static_cast<size_t>(rows) * per_row}};
  if (task.longest_part) tasks_.push_back(std::move(task));
  return Status::ok();
}

Status BatchRunner::prepare_reduce(size_t entry, size_t tensor, size_t) {
  Piece piece;
  HC_TRY(piece_or_identity(entry, tensor, &piece));
  const DType dtype = signature_of(entry).tensors[tensor].dtype;
  bytes_ += piece.count * size_of(dtype);
  if (!piece.count) return Status::ok();
  tasks_.push_back(task_for(entry, dtype));
  if (tasks_.back().root != group_.rank) piece.out = nullptr;
  tasks_.back().pieces = {piece};
  return Status::ok();
}

Status BatchRunner::prepare_gather(size_t entry, size_t tensor, size_t flat) {
  if (signature_of(entry).root == group_.rank) return prepare_allgather(entry, tensor, flat);
  const TensorMeta& meta = signature_of(entry).tensors[tensor];
  std::span<const int64_t> of_rank;
  HC_TRY(rows_by_rank(flat, &of_rank));
  Task task = task_for(entry, meta.dtype);
  task.counts = elements_in(of_rank, elements_per_row(meta));
  bytes_ += task.counts[group_.rank] * size_of(meta.dtype);
  task.pieces = {{operations_[entry]->in[tensor], nullptr, task.counts[group_.rank]}};
  if (has_elements(task.counts)) tasks_.push_back(std::move(task));
  return Status::ok();
}

// What comes is described by the root's signature, which the plan carries.
Status BatchRunner::prepare_scatter() {
  Operation* op = operations_[0];
  const Signature& s = batch_.entries[0].signature;
  const size_t me = group_.rank;
  if (!op || s.tensors.size() != 1 || s.tensors[0].shape.empty())
    return error(Code::kInternal, "a plan names a scatter without saying of what, or that this rank did not submit");
  std::span<const int64_t> of_rank;
  HC_TRY(rows_by_rank(0, &of_rank));
  op->received = s.tensors[0];
  op->received->shape[0] = of_rank[me];
  const size_t per_row = elements_per_row(s.tensors[0]);
  Task task = task_for(0, s.tensors[0].dtype);
  task.counts = elements_in(of_rank, per_row);
  const bool root = static_cast<size_t>(task.root) == me;
  auto out = result_memory(op, 0, of_rank[me], per_row * size_of(task.dtype));
  if (!out.is_ok()) return out.status();
  task.pieces = {{root ? op->in[0] : nullptr, out.value(), task.counts[me]}};
  if (has_elements(task.counts)) tasks_.push_back(std::move(task));
  return Status::ok();
}

}  // namespace hc
