// Executes one batch of a plan: turns its entries into tasks (one per dtype, or per tensor), runs them one after the
// other and says how the operations ended. Resumable, like the collectives it steps.
//
// Thread: the thread that makes progress. Owner: a process set.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/nvtx.h"
#include "collective/collective.h"
#include "engine/operation/batch_backend.h"
#include "engine/operation/operation.h"
#include "engine/record/timeline.h"

namespace hc {

// Turns Average into arithmetic, and nothing else does: floats are scaled by 1/N, integers with unit scales divided by
// N.
Scale scale_of(const Signature& signature, DType dtype, int size);

class BatchRunner {
 public:
  // operations: what this rank submitted for each entry, null where it did not (it has joined). `ranks` are the world
  // ranks of the set.
  BatchRunner(PlanBatch batch, std::vector<Operation*> operations, const Group& group, const std::vector<int>& ranks,
              Tag tag);

  // The task of `op`, which has one tensor in host memory, if every rank submitted the same; `rows` as in PlanBatch.
  // Allocates memory for its result.
  static Result<Task> task_if_alike(Operation* op, std::vector<int64_t> rows, const Group& group,
                                    const std::vector<int>& ranks);

  // kFailed: a transport failed and the whole engine must stop; status() has the reason. A batch that carries an error,
  // or whose results do not fit into memory, is kDone with an outcome() that is not ok: only its operations fail.
  Progress step(bool* moved);
  const Status& status() const { return status_; }
  const Status& outcome() const { return outcome_; }
  // For a batch in parts, kDone refers to the part. If there are more, the next one runs as batch `id` of the plan.
  bool has_more() const { return batch_.part.index + 1 < batch_.part.count && outcome_.is_ok(); }
  void next_part(uint32_t id);
  const std::vector<Operation*>& operations() const { return operations_; }
  const PlanBatch& batch() const { return batch_; }
  size_t bytes() const { return bytes_; }
  void show_in(Timeline* timeline) { timeline_ = timeline; }
  // Before the first step: the tensors do not lie in host memory.
  void use(std::unique_ptr<BatchBackend> backend) { backend_ = std::move(backend); }
  bool is_on_host() const { return backend_ == nullptr; }

 private:
  const Signature& signature_of(size_t entry) const;
  Progress begin(bool* moved);
  Progress end();
  Progress start_next();
  Result<std::unique_ptr<Collective>> make_next();
  Status prepare();
  Status prepare_allreduce();
  Status prepare_each(Status (BatchRunner::*one)(size_t entry, size_t tensor, size_t flat));
  Status prepare_broadcast(size_t entry, size_t tensor, size_t flat);
  Status prepare_allgather(size_t entry, size_t tensor, size_t flat);
  Status prepare_reducescatter(size_t entry, size_t tensor, size_t flat);
  Status prepare_alltoall(size_t entry, size_t tensor, size_t flat);
  Status prepare_reduce(size_t entry, size_t tensor, size_t flat);
  Status prepare_gather(size_t entry, size_t tensor, size_t flat);
  Status prepare_scatter();
  Task task_for(size_t entry, DType dtype) const;
  bool scales_before(size_t entry) const;
  // The rows that each rank contributes to a tensor, or receives of it. flat: its position among the batch's tensors.
  Status rows_by_rank(size_t flat, std::span<const int64_t>* rows) const;
  // The out pointer for a result of `rows` rows: the caller's memory, or the core's. fits: whether these are the rows
  // that the caller's memory has room for, which only the agreement knows.
  Result<std::byte*> result_memory(Operation* op, size_t tensor, int64_t rows, size_t row_bytes, bool fits = true);
  Status piece_or_identity(size_t entry, size_t tensor, Piece* piece);
  void scale_before(size_t entry, size_t tensor, Piece* piece);

  PlanBatch batch_;
  std::vector<Operation*> operations_;
  const Group& group_;
  const std::vector<int>& ranks_;
  Tag tag_;

  std::unique_ptr<BatchBackend> backend_;  // null: host memory
  nvtx::Span launch_;                      // from the first to the last thing that it gives the backend, for tools
  std::vector<Task> tasks_;
  size_t next_task_ = 0;
  std::unique_ptr<Collective> collective_;
  std::vector<std::shared_ptr<Memory>> identity_;  // in place of operations this rank did not submit
  bool with_joined_ = false;                       // some rank does not have all operations of the batch
  bool prepared_ = false;
  Status status_, outcome_;
  size_t bytes_ = 0;
  Timeline* timeline_ = nullptr;
};

}  // namespace hc
