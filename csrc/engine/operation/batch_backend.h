// Where the tensors of a batch lie and who moves them, when that is not host memory. BatchRunner makes the tasks and
// steps them; what is different elsewhere is behind this interface, and nothing of it runs for host memory.
//
// Thread: the thread that makes progress. Owner: a BatchRunner.
#pragma once

#include <memory>
#include <vector>

#include "collective/collective.h"
#include "engine/operation/operation.h"

namespace hc {

class BatchBackend {
 public:
  virtual ~BatchBackend() = default;
  // kDone: tasks may start, or outcome() says why not. kFailed: the engine must stop; status() has the reason.
  virtual Progress begin(const std::vector<Operation*>& operations, bool* moved) = 0;
  virtual const Status& status() const = 0;
  virtual const Status& outcome() const = 0;
  virtual Result<std::unique_ptr<Collective>> make_collective(Task task) = 0;
  // Memory for a result that the core owns.
  virtual Result<std::byte*> result_memory(Operation* op, size_t tensor, size_t bytes) = 0;
  // The identity element, in place of a tensor that this rank did not submit.
  virtual Result<std::byte*> identity(DType dtype, Reduce reduce, size_t count) = 0;
  // After a failure that has enqueued nothing: whether it is for want of memory and somebody may give some; then what
  // has failed is tried again once is_waiting() says no.
  virtual bool may_get_memory() = 0;
  virtual bool is_waiting() const = 0;
  // The tasks are enqueued.
  virtual Status finish(const std::vector<Operation*>& operations) = 0;
};

}  // namespace hc
