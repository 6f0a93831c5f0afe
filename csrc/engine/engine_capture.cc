// A step that a framework captures into a CUDA graph: declared buckets go into the graph when they are submitted, on
// the submitting thread. Nothing is agreed on, for nothing runs: the ranks must capture, and later replay, the same
// things in the same order, as with NCCL itself. Everything else refuses a stream that is being captured.
#include <tuple>

#include "engine/engine.h"

namespace hc {

namespace {

constexpr const char* kWarmUp =
    "Run at least two whole steps (forward, backward, optimizer.step()) on every rank before the capture";

}  // namespace

Status Engine::refuse_captured(const Submission& s, Gpu& gpu) const {
  if (s.ready_event || s.op == Op::kJoin) return Status::ok();
  auto captured = gpu.is_captured(s.stream);
  HC_TRY(captured.status());
  if (!captured.value()) return Status::ok();
  return error(Code::kUnsupported,
               "its stream is being captured into a CUDA graph, which can only hold the buckets of a "
               "DistributedOptimizer that has trained already. ",
               kWarmUp, ", and call other operations outside of it");
}

// Declared and on the device. Any thread; it has the gate for the time of the call, because NCCL wants one thread at a
// time.
Status Engine::capture_declared(const Submission& s, std::pair<int, int> which, int64_t* handle) {
  auto gpu = adopt_gpu(s.device_index);
  HC_TRY(gpu.status());
  auto work = std::make_unique<DeviceWork>();
  work->gpu = gpu.take();
  const GateHold held(this);
  Status captured = capture_in_gate(s, which, std::move(work), handle);
  return captured.is_ok() ? captured : captured.with(text_of("capture of allreduce '", s.name, "'"));
}

Status Engine::capture_in_gate(const Submission& s, std::pair<int, int> which, std::unique_ptr<DeviceWork> work,
                               int64_t* handle) {
  ProcessSet* set = find_set(s.process_set);
  const DeviceGroup* device = set ? set->device.get() : nullptr;
  if (!device || device->way() == DeviceGroup::Way::kUnknown)
    return error(Code::kUnsupported, "NCCL is not up yet. ", kWarmUp);
  if (device->way() != DeviceGroup::Way::kNccl)
    return error(Code::kUnsupported,
                 "NCCL does not move its data, and only NCCL's work can be captured: ", device->reason());
  Operation* op = nullptr;
  {
    std::lock_guard lock(submit_mu_);
    HC_TRY(failure_);
    HC_TRY(check(s, *set));
    if (set->join_pending.load(std::memory_order_acquire))
      return error(Code::kInvalidArgument, "rank ", mesh_->rank(), " has joined");
    op = handles_.acquire();
    if (!op) return error(Code::kInternal, "more than a million operations are live; release their handles");
    fill(op, s, *set);
    std::tie(op->bucket_set, op->bucket) = which;
    op->record = recorder_.submitted(
        {op->signature(), op->request.name, op->process_set, op->bucket_set >= 0, op->submitted, ++set->calls, 0});
  }
  *handle = op->handle;
  const Task task = set->task_of(*op);
  Status outcome =
      DeviceGroup::nccl_does(task, false)
          ? Status::ok()
          : error(Code::kUnsupported, "NCCL does not do this reduction by itself, and nothing else can be captured");
  if (outcome.is_ok()) {
    auto done = set->device->capture(task, s.stream);
    outcome = done.status();
    if (done.is_ok()) work->done = done.take();
  }
  op->device = std::move(work);
  finish(op, outcome);
  if (!outcome.is_ok()) handles_.release(*handle);
  return outcome;
}

}  // namespace hc
