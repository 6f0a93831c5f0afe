// Operations on tensors in the memory of a GPU: which GPU, in which order batches start on it, what happens while they
// run. An operation is done when it has been enqueued: streams wait for its result, the host does not.
//
// Batches of different process sets must start in the same order on every rank, else two communicators wait for each
// other. Rank 0 of the world gives that order: plans of the global set come from it anyway; for other sets their
// coordinator asks, and rank 0 tells all members. Its frames arrive in the order in which they were sent. Where all
// ranks share memory the order is written there (device_turns.h), and declared buckets of sets with rank 0 are frozen:
// when all ranks have arrived at one, rank 0 gives it a turn. docs/decisions/0025 has the argument.
#include <algorithm>

#include "engine/engine.h"

namespace hc {

namespace {

constexpr double kBlameS = 1;  // how long a device's error waits for the news of whom it comes from

GpuOperations operations_of(const std::string& word) {
  if (word == "nccl") return GpuOperations::kNccl;
  if (word == "peers") return GpuOperations::kPeers;
  return word == "host" ? GpuOperations::kHost : GpuOperations::kAuto;
}

}  // namespace

Result<std::shared_ptr<Gpu>> Engine::adopt_gpu(int index) {
  std::lock_guard lock(device_mu_);
  if (!gpu_) {
    auto api = CudaApi::load(config_.cuda_library);
    HC_TRY(api.status());
    auto gpu = Gpu::adopt(api.take(), index);
    HC_TRY(gpu.status());
    gpu_ = gpu.take();
    has_gpu_.store(true);
  }
  if (gpu_->index() != index)
    return error(Code::kUnsupported, "the tensor is on device ", index, ", but this rank works on device ",
                 gpu_->index(),
                 ": one process drives one GPU. Start one rank for each GPU and call "
                 "torch.cuda.set_device(hvd.local_rank()) before the first tensor");
  return gpu_;
}

// Any thread; the event is recorded here because only the caller knows that its stream has been given all work.
Result<std::unique_ptr<DeviceWork>> Engine::prepare_device(const Submission& s) {
  if (s.tensors.empty() && (s.op == Op::kScatter || s.op == Op::kReceive)) return offer_device(s.device_index);
  auto gpu = adopt_gpu(s.device_index);
  if (s.op == Op::kJoin && !gpu.is_ok()) return std::unique_ptr<DeviceWork>();  // its tensors stand in on the host
  HC_TRY(gpu.status());
  auto work = std::make_unique<DeviceWork>();
  work->gpu = gpu.take();
  HC_TRY(refuse_captured(s, *work->gpu));
  work->ready_given = s.ready_event;
  if (s.op == Op::kJoin || s.ready_event) return work;
  auto ready = work->gpu->record(s.stream);
  HC_TRY(ready.status());
  work->ready = ready.take();
  return work;
}

// For what may come from another GPU, or not: this rank works on that device only once something has come. Null: there
// is nothing to offer, what comes has to come to host memory.
std::unique_ptr<DeviceWork> Engine::offer_device(int index) {
  std::lock_guard lock(device_mu_);
  if (!gpu_ && (!offered_gpu_ || offered_gpu_->index() != index)) {
    auto api = CudaApi::load(config_.cuda_library);
    if (!api.is_ok()) return nullptr;
    auto gpu = Gpu::adopt(api.take(), index);
    if (!gpu.is_ok()) return nullptr;
    offered_gpu_ = gpu.take();
  }
  auto work = std::make_unique<DeviceWork>();
  work->gpu = gpu_ ? gpu_ : offered_gpu_;
  return work;
}

// Driving thread: something has come.
void Engine::settle_device(Operation* op) {
  std::lock_guard lock(device_mu_);
  if (!gpu_) gpu_ = op->device->gpu;
  op->device->gpu = gpu_;
  has_gpu_.store(true);
}

Status Engine::stream_wait(int64_t handle, CuStream stream) {
  Operation* op = finished(handle);
  if (!op || !op->device) return error(Code::kInvalidArgument, "handle ", handle, " is no finished work on a device");
  return op->device->done ? op->device->gpu->wait(stream, op->device->done->get()) : Status::ok();
}

Status Engine::copy_result(int64_t handle, size_t i, void* to, size_t bytes, CuStream stream) {
  HC_TRY(stream_wait(handle, stream));
  DeviceWork& work = *finished(handle)->device;
  if (!bytes) return Status::ok();
  if (i >= work.results.size() || !work.results[i] || work.results[i]->bytes() < bytes)
    return error(Code::kInvalidArgument, "handle ", handle, " has no result ", i, " of ", bytes, " bytes");
  HC_TRY(work.gpu->copy(cu_pointer(to), work.results[i]->at(), bytes, stream));
  auto read = work.gpu->record(stream);
  HC_TRY(read.status());
  work.results[i]->used_until(read.take());
  work.results[i].reset();
  return Status::ok();
}

DeviceOptions Engine::device_options() const {
  DeviceOptions options;
  options.operations = operations_of(config_.gpu_operations);
  options.nccl_library = config_.nccl_library;
  options.nccl_folders = config_.nccl_folders;
  options.kernels = {config_.gpu_kernels == "off", config_.nvrtc_library, config_.nvrtc_folders, config_.kernel_cache};
  options.peer_bytes = config_.gpu_peer_bytes;
  options.init_timeout_s = config_.init_timeout_s;
  options.adasum_by_node = agreed_tuning_.adasum_by_node;
  options.two_level = config_.hierarchical_allreduce == 1;
  return options;
}

// The batch that `set.runner` has just got.
void Engine::put_on_device(ProcessSet& set) {
  if (!set.device) set.device = std::make_unique<DeviceGroup>(set.group, device_options());
  if (set.runner->batch().op == Op::kScatter)
    for (Operation* op : set.runner->operations())
      if (op && op->device) settle_device(op);
  {
    std::lock_guard lock(device_mu_);
    if (gpu_) set.device->use(gpu_);
  }
  const Tag tag{static_cast<uint16_t>(generation_), set.id, set.runner->batch().id, 0};
  set.runner->on_device(std::make_unique<DeviceBatch>(
      set.device.get(), tag, [this, turn = DeviceTurn{set.id}] { return device_turns_.is_next(turn); }));
}

// Whether declared buckets can be frozen as far as this rank knows. The turns come from rank 0 of the world, which must
// see the arrivals. NCCL must be up, for there is no agreement left in which it could be set up, and it must do all of
// them: the host's collectives have an order of their own.
bool Engine::may_freeze_on_device(const ProcessSet& set, const BucketSet& buckets) const {
  if (!device_turns_.in_memory() || set.coordinator_rank() != 0 || !set.device) return false;
  Signature s;
  s.reduce = buckets.reduce;
  s.prescale = buckets.prescale;
  s.postscale = buckets.postscale;
  return std::all_of(buckets.buckets.begin(), buckets.buckets.end(), [&](const BucketSet::Bucket& b) {
    Task task;
    task.dtype = b.dtype;
    task.reduce = s.reduce == Reduce::kAverage ? Reduce::kSum : s.reduce;
    task.scale = scale_of(s, b.dtype, set.size());
    return set.device->enqueues(task);
  });
}

// All ranks have arrived at a frozen bucket.
void Engine::arm(ProcessSet& set, Operation* op) {
  set.armed.push_back(op);
  const size_t flag = set.bucket_sets[op->bucket_set].first_flag + static_cast<size_t>(op->bucket);
  if (mesh_->rank() == 0) device_turns_.give({set.id, static_cast<int32_t>(flag)}, 1, true);
}

std::unique_ptr<BatchRunner> Engine::runner_of_armed(ProcessSet& set, Operation* op) {
  PlanBatch batch;
  batch.on_device = true;
  batch.tuning = set.tuning;
  batch.entries.resize(1);
  const Tag tag{static_cast<uint16_t>(generation_), set.id, 0, 0};
  auto runner = std::make_unique<BatchRunner>(std::move(batch), std::vector<Operation*>{op}, set.group, set.ranks, tag);
  runner->show_in(&timeline_);
  runner->on_device(std::make_unique<DeviceBatch>(set.device.get(), tag, [] { return true; }));
  return runner;
}

void Engine::launch_armed(ProcessSet& set, bool* moved) {
  while (!failed_.load(std::memory_order_relaxed) && device_failure_.is_ok()) {
    if (!set.armed_runner) {
      const DeviceTurn* turn = device_turns_.next();
      if (set.armed.empty() || !turn || turn->set != set.id || turn->bucket < 0) return;
      Operation* op = set.take_armed(turn->bucket);
      if (!op) return;
      set.armed_runner = runner_of_armed(set, op);
    }
    const Progress progress = set.armed_runner->step(moved);
    if (progress == Progress::kFailed) return device_failed(set.armed_runner->status());
    if (progress == Progress::kPending) {
      waits_on_device_ = true;
      return;
    }
    const auto runner = std::move(set.armed_runner);
    device_turns_.over();
    counters_.bytes_reduced.fetch_add(runner->bytes(), std::memory_order_relaxed);
    complete(set, runner->operations()[0], runner->outcome());
    *moved = true;
  }
}

void Engine::device_batch_over(ProcessSet& set) {
  if (device_turns_.is_next({set.id})) device_turns_.over();
  if (set.device && !set.device->reason().empty() && set.group_rank == 0 &&
      set.device->reason() != set.told_about_device) {
    set.told_about_device = set.device->reason();
    const bool on_gpu = set.device->way() == DeviceGroup::Way::kNccl || set.device->way() == DeviceGroup::Way::kPeers;
    if (on_gpu || config_.gpu_operations == "host")
      log_.debug("process set ", set.id, ": tensors on GPUs are reduced by ", set.told_about_device);
    else
      log_.warning("process set ", set.id,
                   ": tensors on GPUs travel through host memory, which is slower: ", set.told_about_device);
  }
}

// Driving thread. Whether something that was launched has not ended yet; what is done with it is forgotten.
bool Engine::device_in_flight() {
  if (!has_gpu_.load(std::memory_order_relaxed) || failed_.load()) return false;
  const TimePoint now = Clock::now();
  if (messages_.links().oldest_flight_s(now) > 0) return true;
  return std::any_of(sets_.begin(), sets_.end(), [&](const auto& entry) {
    return entry.second->device && entry.second->device->oldest_flight_s(now) > 0;
  });
}

// At the end, no thread drives any more.
void Engine::leave_devices() {
  for (auto& [id, set] : sets_) {
    set->runner.reset();
    set->armed_runner.reset();
    set->device.reset();
  }
  messages_.links().leave();
  device_turns_.clear();
  device_failure_ = Status::ok();
  std::lock_guard lock(device_mu_);
  has_gpu_.store(false);
  offered_gpu_.reset();
  if (gpu_) gpu_->close();
}

// NCCL notices a dead peer before the mesh does, or after, and does not say which one. So its error ends the job a
// moment later, unless somebody's departure does first.
void Engine::device_failed(const Status& status) {
  if (!device_failure_.is_ok()) return;
  device_failure_ = Status(status.code(), text_of("the GPU of ", mesh_->describe(mesh_->rank()), ": ", status.text()));
  device_failed_at_ = Clock::now();
}

void Engine::blame_for_device(TimePoint now) {
  if (failed_.load() || seconds_between(device_failed_at_, now) < kBlameS) return;
  fail_everything(Status(device_failure_.code(),
                         text_of(device_failure_.text(),
                                 ". No rank's end was noticed: is it the network between GPUs, or this GPU? "
                                 "NCCL_DEBUG=INFO shows more")));
}

// The reason of the end, with what the devices' libraries have to say about it on this rank.
Status Engine::with_words_of_device(const Status& reason) {
  if (!has_gpu_.load(std::memory_order_relaxed)) return reason;
  for (const auto& [id, set] : sets_)
    if (set->device)
      if (Status ok = set->device->check(); !ok.is_ok()) device_failed(ok);
  if (Status ok = messages_.links().check(); !ok.is_ok()) device_failed(ok);
  if (device_failure_.is_ok() || reason.text().find(device_failure_.text()) != std::string::npos) return reason;
  return Status(reason.code(), text_of(reason.text(), " On this rank, ", device_failure_.text()), reason.culprit());
}

// What NCCL has noticed by itself, and turns that rank 0 can give no more.
void Engine::check_device() {
  if (!has_gpu_.load(std::memory_order_relaxed)) return;
  if (Status ok = messages_.links().check(); !ok.is_ok()) return device_failed(ok);
  for (const auto& [id, set] : sets_) {
    if (!set->device) continue;
    if (Status ok = set->device->check(); !ok.is_ok()) return device_failed(ok.with(text_of("process set ", id)));
    const bool waits = (id != 0 && set->runner && set->runner->is_on_device()) || !set->armed.empty();
    if (left_[0] && waits && !device_turns_.contains(static_cast<uint16_t>(id)))
      return fail_everything(
          Status(Code::kAborted, text_of(mesh_->describe(0), " has shut down, and it orders the work on GPUs"), 0));
  }
}

}  // namespace hc
