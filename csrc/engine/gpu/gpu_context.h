// Which GPU this rank works on, memory on it that NCCL can be told of, and what has gone wrong there. An operation on
// tensors in the memory of a GPU is done when it has been enqueued: streams wait for its result, the host does not.
//
// Thread: adopt, prepare, allocate, find_memory and the results from any; the others belong to the thread that makes
// progress. Owner: the engine.
#pragma once

#include <map>
#include <memory>

#include "base/mutex.h"
#include "collective/gpu/device_group.h"
#include "device/memory_pressure.h"
#include "engine/context.h"
#include "engine/operation/operation.h"
#include "engine/operation/submission.h"
#include "engine/tune/tuner.h"

namespace hc {

// What to do before a step is captured into a CUDA graph; the end of an error.
inline constexpr const char* kWarmUpBeforeCapture =
    "Run at least two whole steps (forward, backward, optimizer.step()) on every rank before the capture";

class GpuContext {
 public:
  GpuContext(Context& context, const Tuner& tuner) : context_(context), tuner_(tuner) {}

  // The GPU that this rank works on; the first index decides. Unsupported for another one.
  Result<std::shared_ptr<Gpu>> adopt(int index);
  bool has_gpu() const { return has_gpu_.load(std::memory_order_relaxed); }
  std::shared_ptr<Gpu> gpu() const;  // null: none yet
  // What `s`, on device memory, carries besides. The event is recorded here because only the caller knows that its
  // stream has been given all work. Null: there is no GPU to offer, what comes has to come to host memory.
  // may_be_captured: nobody has looked yet whether the stream goes into a graph.
  Result<std::unique_ptr<DeviceWork>> prepare(const Submission& s, bool may_be_captured = true);
  // Something has come for an operation that had offered its GPU.
  void settle(Operation* op);
  DeviceOptions options() const;

  // Of an operation that is done: makes `stream` wait for its result, also copies result i to `to`, behind that.
  Status wait_on_stream(const Operation* op, int64_t handle, CuStream stream) const;
  Status copy_result(Operation* op, int64_t handle, size_t i, void* to, size_t bytes, CuStream stream) const;

  // Memory that NCCL can be told of; Unsupported, with the reason, where it cannot.
  Result<std::shared_ptr<Memory>> allocate(int device_index, size_t bytes);
  // Whether all buckets begin with memory of allocate(), each with its own; they then own it.
  bool find_memory(BucketSet* buckets);

  // NCCL notices a dead peer before the mesh does, or after, and does not say which one. So its error ends the job a
  // moment later, unless somebody's departure does first.
  void fail(const Status& status);
  bool has_failed() const { return !failure_.is_ok(); }
  const Status& failure() const { return failure_; }
  // Not ok when the moment is over: why the job ends.
  Status blame(TimePoint now) const;

  MemoryPressure& memory_pressure() { return pressure_; }

  // How a process set's tensors on GPUs are reduced: "nccl", "peers" or "host", and why; why our kernels are not used.
  struct Way {
    std::string backend, reason, no_kernels;
  };
  void note_way(int process_set, Way way);
  // {"0": {"backend", "reason", "no_kernels"}}, with every set that has been on a GPU. Any thread.
  std::string ways_json() const;

  // At the end of the engine's life.
  void close();

 private:
  std::unique_ptr<DeviceWork> offer(int index);
  Status refuse_captured(const Submission& s, Gpu& gpu) const;
  Result<std::shared_ptr<const NcclApi>> nccl_of_memory(const Gpu& gpu) HC_REQUIRES(mu_);

  Context& context_;
  const Tuner& tuner_;
  MemoryPressure pressure_;
  std::atomic<bool> has_gpu_{false};
  mutable Mutex mu_;
  std::shared_ptr<Gpu> gpu_ HC_GUARDED_BY(mu_);
  // What somebody may send can be taken there, while there is no gpu_.
  std::shared_ptr<Gpu> offered_gpu_ HC_GUARDED_BY(mu_);
  std::shared_ptr<const NcclApi> memory_nccl_ HC_GUARDED_BY(mu_);          // null: not looked for, or not found
  std::map<std::byte*, std::weak_ptr<Memory>> memory_ HC_GUARDED_BY(mu_);  // of allocate()
  std::map<int, Way> ways_ HC_GUARDED_BY(mu_);

  // The thread that makes progress.
  Status failure_;  // what CUDA or NCCL said; who is to blame may still be on its way here
  TimePoint failed_at_{};
};

}  // namespace hc
