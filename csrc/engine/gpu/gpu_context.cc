#include "engine/gpu/gpu_context.h"

#include <algorithm>

#include "base/quoted.h"
#include "engine/gpu/device_side.h"
#include "engine/intake/intake.h"

namespace hc {

namespace {

constexpr double kBlameS = 1;  // how long a device's error waits for the news of whom it comes from

GpuOperations operations_of(const std::string& word) {
  if (word == "nccl") return GpuOperations::kNccl;
  if (word == "peers") return GpuOperations::kPeers;
  return word == "host" ? GpuOperations::kHost : GpuOperations::kAuto;
}

}  // namespace

std::unique_ptr<Backend> make_gpu_backend(Context& context, const Tuner& tuner, ControlLink& link,
                                          const Intake& intake) {
  return std::make_unique<GpuContext>(context, tuner, link, intake);
}

std::unique_ptr<SetBackend> GpuContext::make_set(ProcessSet& set) { return std::make_unique<DeviceSide>(*this, set); }

bool GpuContext::has_part_in(const LaunchTicket& ticket) const {
  if (ticket.set == kMessageStream)
    return messages_.expects_ticket(ticket.sender, static_cast<uint32_t>(ticket.bucket));
  const auto set = intake_.find(ticket.set);
  return set && set->members.has_me();
}

Result<std::shared_ptr<Gpu>> GpuContext::adopt(int index) {
  MutexLock lock(mu_);
  if (!gpu_) {
    auto api = CudaApi::load(context_.config.cuda_library);
    HC_TRY(api.status());
    auto gpu = Gpu::adopt(api.take(), index);
    HC_TRY(gpu.status());
    gpu_ = gpu.take();
    in_use_.store(true);
  }
  if (gpu_->index() != index)
    return error(Code::kUnsupported, "the tensor is on device ", index, ", but this rank works on device ",
                 gpu_->index(),
                 ": one process drives one GPU. Start one rank for each GPU and call "
                 "torch.cuda.set_device(hvd.local_rank()) before the first tensor");
  return gpu_;
}

Result<std::unique_ptr<BackendWork>> GpuContext::prepare(const Submission& s, bool* captured) {
  using Work = std::unique_ptr<BackendWork>;
  if (s.tensors.empty() && (s.op == Op::kScatter || s.op == Op::kReceive)) return Work(offer(s.place.index));
  auto gpu = adopt(s.place.index);
  if (s.op == Op::kJoin && !gpu.is_ok()) return Work();  // its identity elements lie on the host
  HC_TRY(gpu.status());
  auto work = std::make_unique<DeviceWork>();
  work->gpu = gpu.take();
  const Gpu::Current current(*work->gpu, Gpu::Current::For::kStreams);
  if (captured) {
    auto found = work->gpu->is_captured(static_cast<CuStream>(s.stream));
    HC_TRY(found.status());
    *captured = found.value();
    if (*captured) return Work();
  } else {
    HC_TRY(refuse_captured(s, *work->gpu));
  }
  work->ready_given = static_cast<CuEvent>(s.ready_event);
  if (s.ready_event) return Work(std::move(work));
  auto ready = work->gpu->record(static_cast<CuStream>(s.stream));
  if (s.op != Op::kJoin) HC_TRY(ready.status());
  if (ready.is_ok()) work->ready = ready.take();
  return Work(std::move(work));
}

// For what may come from another GPU, or not: this rank works on that device only once something has come. Null: there
// is nothing to offer, what comes has to come to host memory.
std::unique_ptr<DeviceWork> GpuContext::offer(int index) {
  MutexLock lock(mu_);
  if (!gpu_ && (!offered_gpu_ || offered_gpu_->index() != index)) {
    auto api = CudaApi::load(context_.config.cuda_library);
    if (!api.is_ok()) return nullptr;
    auto gpu = Gpu::adopt(api.take(), index);
    if (!gpu.is_ok()) return nullptr;
    offered_gpu_ = gpu.take();
  }
  auto work = std::make_unique<DeviceWork>();
  work->gpu = gpu_ ? gpu_ : offered_gpu_;
  return work;
}

Status GpuContext::refuse_captured(const Submission& s, Gpu& gpu) const {
  if (s.ready_event || s.op == Op::kJoin) return Status::ok();
  auto captured = gpu.is_captured(static_cast<CuStream>(s.stream));
  HC_TRY(captured.status());
  if (!captured.value()) return Status::ok();
  return error(Code::kUnsupported,
               "its stream is being captured into a CUDA graph, which can only hold the buckets of a "
               "DistributedOptimizer that has trained already. ",
               kWarmUpBeforeCapture, ", and call other operations outside of it");
}

void GpuContext::settle(Operation* op) {
  MutexLock lock(mu_);
  DeviceWork& work = *work_of(op);
  if (!gpu_) gpu_ = work.gpu;
  work.gpu = gpu_;
  in_use_.store(true);
}

Status GpuContext::wait_on_stream(const Operation* op, int64_t handle, void* stream) const {
  if (!op || !op->work) return error(Code::kInvalidArgument, "handle ", handle, " is no finished work on a device");
  const DeviceWork& work = *work_of(op);
  return work.done ? work.gpu->wait(static_cast<CuStream>(stream), work.done->get()) : Status::ok();
}

Status GpuContext::copy_result(Operation* op, int64_t handle, size_t i, void* to, size_t bytes, void* at) const {
  const auto stream = static_cast<CuStream>(at);
  HC_TRY(wait_on_stream(op, handle, stream));
  DeviceWork& work = *work_of(op);
  if (!bytes) return Status::ok();
  if (i >= work.results.size() || !work.results[i] || work.results[i]->bytes() < bytes)
    return error(Code::kInvalidArgument, "handle ", handle, " has no result ", i, " of ", bytes, " bytes");
  HC_TRY(work.gpu->copy(cu_pointer(to), work.results[i]->at(), bytes, stream));
  work.results[i]->give_back_behind(stream);
  work.results[i].reset();
  return Status::ok();
}

DeviceOptions GpuContext::options() const {
  DeviceOptions options;
  options.operations = operations_of(context_.config.gpu_operations);
  options.nccl_library = context_.config.nccl_library;
  options.nccl_folders = context_.config.nccl_folders;
  options.kernels = {context_.config.gpu_kernels == "off", context_.config.nvrtc_library, context_.config.nvrtc_folders,
                     context_.config.kernel_cache};
  options.peer_bytes = context_.config.gpu_peer_bytes;
  options.init_timeout_s = context_.config.init_timeout_s;
  options.adasum_by_node = tuner_.agreed().adasum_by_node;
  options.two_level = context_.config.hierarchical_allreduce == 1;
  return options;
}

Result<std::shared_ptr<const NcclApi>> GpuContext::nccl_of_memory(const Gpu& gpu) {
  if (!memory_nccl_) {
    auto loaded = NcclApi::load(context_.config.nccl_library, context_.config.nccl_folders, gpu.api().platform);
    HC_TRY(loaded.status());
    memory_nccl_ = loaded.take();
  }
  if (memory_nccl_->registration() == NcclApi::Registration::kNone)
    return error(Code::kUnsupported, "NCCL ", nccl_version_text(memory_nccl_->version), " in ", memory_nccl_->file,
                 " cannot be told of memory in advance; ", nccl_version_text(kNcclRegisters), " and newer can");
  return memory_nccl_;
}

Result<std::shared_ptr<Memory>> GpuContext::allocate(int index, size_t bytes) {
  HC_TRY(context_.check_connected());
  if (!context_.config.gpu_register) return error(Code::kUnsupported, "HOROCLONE_GPU_REGISTER is off");
  if (context_.config.gpu_operations == "host" || context_.config.gpu_operations == "peers")
    return error(Code::kUnsupported, "HOROCLONE_GPU_OPERATIONS is ", context_.config.gpu_operations);
  auto adopted = adopt(index);
  HC_TRY(adopted.status());
  const std::shared_ptr<Gpu> gpu = adopted.take();
  std::shared_ptr<const NcclApi> nccl;
  {
    MutexLock lock(mu_);
    auto loaded = nccl_of_memory(*gpu);
    HC_TRY(loaded.status());
    nccl = loaded.take();
  }
  void* at = nullptr;
  {  // may wait for the device, and so for another rank: not with the lock that the thread that makes progress takes
    const Gpu::Current current(*gpu);
    HC_TRY(nccl->check(nccl->ncclMemAlloc(&at, std::max<size_t>(bytes, 1)), "ncclMemAlloc", nullptr));
  }
  auto made = Memory::make_foreign(static_cast<std::byte*>(at), bytes, [gpu, nccl, at] {
    const Gpu::Current current(*gpu);
    (void)nccl->ncclMemFree(at);
  });
  MutexLock lock(mu_);
  std::erase_if(memory_, [](const auto& entry) { return entry.second.expired(); });
  memory_[made->data()] = made;
  return made;
}

bool GpuContext::find_memory(BucketSet* buckets) {
  MutexLock lock(mu_);
  for (const BucketSet::Bucket& b : buckets->buckets) {
    const auto at = memory_.find(b.data);
    auto memory = at == memory_.end() ? nullptr : at->second.lock();
    if (!memory) break;
    buckets->memory.push_back(std::move(memory));
  }
  if (buckets->memory.size() == buckets->buckets.size()) return true;
  buckets->memory.clear();
  return false;
}

void GpuContext::note_way(int process_set, Way way) {
  MutexLock lock(mu_);
  ways_[process_set] = std::move(way);
}

std::string GpuContext::json() const {
  MutexLock lock(mu_);
  std::string text = "{";
  for (const auto& [set, way] : ways_)
    text += text_of(text.size() > 1 ? "," : "", "\"", set, "\":{\"backend\":", json_string(way.backend),
                    ",\"reason\":", json_string(way.reason), ",\"no_kernels\":", json_string(way.no_kernels), "}");
  return text + "}";
}

void GpuContext::fail(const Status& status) {
  if (!failure_.is_ok()) return;
  const auto gpu = this->gpu();
  const std::string device = gpu ? text_of(" (device ", gpu->index(), ")") : "";
  failure_ = Status(status.code(), text_of("the GPU of ", context_.me(), device, ": ", status.text()));
  failed_at_ = Clock::now();
}

Status GpuContext::blame(TimePoint now) const {
  if (failure_.is_ok() || seconds_between(failed_at_, now) < kBlameS) return Status::ok();
  return Status(failure_.code(), text_of(failure_.text(),
                                         ". No rank's end was noticed: is it the network between GPUs, or this GPU? "
                                         "NCCL_DEBUG=INFO shows more"));
}

std::shared_ptr<Gpu> GpuContext::gpu() const {
  MutexLock lock(mu_);
  return gpu_;
}

void GpuContext::close() {
  messages_.links().leave();
  order_.tickets().clear();
  failure_ = Status::ok();
  MutexLock lock(mu_);
  in_use_.store(false);
  offered_gpu_.reset();
  if (gpu_) gpu_->close();
}

}  // namespace hc
