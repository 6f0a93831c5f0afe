#include "device/gpu.h"

#include <algorithm>
#include <bit>
#include <thread>

namespace hc {

namespace {

constexpr size_t kSmallestBlock = 64u << 10, kLargeBlock = 32u << 20, kLargeUnit = 2u << 20;
// A pool keeps so much that nobody uses, so that small buffers of each step cost no page tables; what is beyond goes
// back to the device when somebody next waits for a stream or an event.
constexpr uint64_t kPoolKeeps = 32u << 20;
constexpr double kCloseLimitS = 2;
constexpr unsigned kPortable = 1;  // CU_MEMHOSTALLOC_PORTABLE

// Blocks come in powers of two, so that one of an earlier batch fits the next. Large ones are not doubled: the
// framework wants the memory as well.
size_t rounded(size_t bytes) {
  if (bytes > kLargeBlock) return (bytes + kLargeUnit - 1) / kLargeUnit * kLargeUnit;
  return std::bit_ceil(std::max(bytes, kSmallestBlock));
}

// Of the stock: a large one may be a quarter larger than what is wanted.
bool fits(size_t block, size_t wanted) {
  return block == wanted || (wanted > kLargeBlock && block > wanted && block - wanted <= wanted / 4);
}

// What the scopes of Gpu::Current have done on this thread.
struct Here {
  const Gpu* gpu = nullptr;  // whose context is current
  bool relaxed = false;      // its calls disturb no capture
  bool is_ours = false;
  CuContext kept = nullptr;  // ours: stays current
};
thread_local Here here;

}  // namespace

// ---- scopes

Gpu::Current::Current(const Gpu& gpu, For what) : gpu_(gpu), outer_(here.gpu) {
  const CudaApi& cuda = *gpu.api_;
  if (here.is_ours) {
    if (here.kept == gpu.context_) return;
    if (cuda.cuCtxSetCurrent(gpu.context_) == kCuSuccess) here.kept = gpu.context_;
    if (!here.relaxed) here.relaxed = cuda.cuThreadExchangeStreamCaptureMode(&mode_) == kCuSuccess;
    return;
  }
  if (here.gpu != &gpu) {
    if (cuda.cuCtxGetCurrent(&before_) != kCuSuccess || before_ != gpu.context_)
      changed_ = cuda.cuCtxSetCurrent(gpu.context_) == kCuSuccess;
    here.gpu = &gpu;
  }
  if (what == For::kStreams || here.relaxed) return;
  here.relaxed = exchanged_ = cuda.cuThreadExchangeStreamCaptureMode(&mode_) == kCuSuccess;
}

Gpu::Current::~Current() {
  if (here.is_ours) return;
  if (exchanged_) {
    (void)gpu_.api_->cuThreadExchangeStreamCaptureMode(&mode_);
    here.relaxed = false;
  }
  if (changed_) (void)gpu_.api_->cuCtxSetCurrent(before_);
  here.gpu = outer_;
}

void Gpu::own_this_thread() { here.is_ours = true; }

// ---- events and memory

GpuEvent::~GpuEvent() { gpu_->give_back(event_); }

void Gpu::give_back(CuEvent event) {
  MutexLock lock(mu_);
  events_.push_back(event);
}

GpuStream::~GpuStream() { gpu_->end_stream(stream_); }

GpuMemory::~GpuMemory() {
  if (data_) give_back_behind(stream_ ? stream_->get() : nullptr);
}

void GpuMemory::give_back_behind(CuStream stream) {
  std::byte* const data = std::exchange(data_, nullptr);
  if (kind_ == Kind::kPool) return gpu_->free_behind(stream, cu_pointer(data));
  if (kind_ == Kind::kDevice)
    if (auto used = gpu_->record(stream); used.is_ok()) last_use_ = used.take();
  gpu_->give_back(kind_, {data, bytes_, std::move(last_use_)});
}

Result<std::shared_ptr<Gpu>> Gpu::adopt(std::shared_ptr<const CudaApi> api, int index) {
  std::shared_ptr<Gpu> gpu(new Gpu(std::move(api), index));
  const CudaApi& cuda = gpu->api();
  unsigned flags = 0;
  int active = 0;
  HC_TRY(cuda.check(cuda.cuDeviceGet(&gpu->device_, index), "cuDeviceGet"), "device ", index);
  HC_TRY(cuda.check(cuda.cuDevicePrimaryCtxGetState(gpu->device_, &flags, &active), "cuDevicePrimaryCtxGetState"));
  if (!active)
    return error(Code::kUnsupported, "device ", index, " has no ", cuda.platform.name(),
                 " context in this process: the tensor's framework makes it, and did not for this device");
  // Not cuDeviceGetUuid_v2, which tells the instances of one GPU (MIG) apart: NCCL refuses two ranks on one GPU,
  // whatever their instances.
  HC_TRY(cuda.check(cuda.cuDeviceGetUuid(&gpu->uuid_, gpu->device_), "cuDeviceGetUuid"));
  HC_TRY(cuda.check(cuda.cuDevicePrimaryCtxRetain(&gpu->context_, gpu->device_), "cuDevicePrimaryCtxRetain"));
  return gpu;
}

Gpu::~Gpu() {
  if (!context_) return;
  close();
  kernels_.reset();
  {
    const Current current(*this);
    for (CuEvent event : events_) (void)api_->cuEventDestroy(event);
    if (pool_) (void)api_->cuMemPoolDestroy(pool_);
  }
  (void)api_->cuDevicePrimaryCtxRelease(device_);
}

Result<GpuKernels*> Gpu::kernels(const KernelOptions& options) {
  MutexLock lock(kernels_mu_);
  if (!kernels_sought_) {
    kernels_sought_ = true;
    auto loaded = GpuKernels::load(this, options);
    no_kernels_ = loaded.status();
    if (loaded.is_ok()) kernels_ = loaded.take();
  }
  HC_TRY(no_kernels_);
  return kernels_.get();
}

Result<GpuStreamPtr> Gpu::make_stream() {
  const Current current(*this);
  int least = 0, greatest = 0;
  HC_TRY(api_->check(api_->cuCtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange"));
  CuStream stream = nullptr;
  HC_TRY(api_->check(api_->cuStreamCreateWithPriority(&stream, kCuStreamNonBlocking, greatest),
                     "cuStreamCreateWithPriority"));
  return std::make_shared<GpuStream>(shared_from_this(), stream);
}

void Gpu::end_stream(CuStream stream) {
  const Current current(*this);
  (void)api_->cuStreamDestroy(stream);
}

Result<GpuEventPtr> Gpu::record(CuStream stream) {
  const Current current(*this, Current::For::kStreams);
  CuEvent event = nullptr;
  {
    MutexLock lock(mu_);
    if (!events_.empty()) {
      event = events_.back();
      events_.pop_back();
    }
  }
  if (!event) {
    const Current creating(*this);
    HC_TRY(api_->check(api_->cuEventCreate(&event, kCuEventDisableTiming), "cuEventCreate"));
  }
  auto made = std::make_shared<GpuEvent>(shared_from_this(), event);
  HC_TRY(api_->check(api_->cuEventRecord(event, stream), "cuEventRecord"));
  return made;
}

Status Gpu::wait(CuStream stream, CuEvent event) {
  const Current current(*this, Current::For::kStreams);
  return api_->check(api_->cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent");
}

Result<bool> Gpu::passed(const GpuEvent& event) {
  const Current current(*this);
  const CuResult result = api_->cuEventQuery(event.get());
  if (result == kCuNotReady) return false;
  HC_TRY(api_->check(result, "cuEventQuery"));
  return true;
}

Result<bool> Gpu::is_captured(CuStream stream) {
  const Current current(*this, Current::For::kStreams);
  int status = 0;
  HC_TRY(api_->check(api_->cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing"));
  return status != 0;
}

CuMemPool Gpu::pool() {
  MutexLock lock(mu_);
  if (std::exchange(pool_sought_, true)) return pool_;
  const Current current(*this);
  int has_pools = 0;
  CuMemPoolProps props;
  props.device = device_;
  if (api_->cuDeviceGetAttribute(&has_pools, api_->attributes.memory_pools, device_) != kCuSuccess || !has_pools ||
      api_->cuMemPoolCreate(&pool_, &props) != kCuSuccess)
    return pool_ = nullptr;
  // Else, where memory is short, CUDA makes a stream wait for work of another one, which may wait for another rank.
  int waits = 0;
  (void)api_->cuMemPoolSetAttribute(pool_, kCuPoolReuseInternalDependencies, &waits);
  uint64_t keeps = kPoolKeeps;
  (void)api_->cuMemPoolSetAttribute(pool_, kCuPoolReleaseThreshold, &keeps);
  return pool_;
}

// In the order of streams: nobody waits, and cuMemFree, which waits for the device, is not called.
Result<GpuMemoryPtr> Gpu::device_memory(size_t bytes, const GpuStreamPtr& stream) {
  using Kind = GpuMemory::Kind;
  if (const CuMemPool pool = this->pool()) {
    const Current current(*this, Current::For::kStreams);
    CuPointer at = 0;
    const size_t wanted = std::max<size_t>(bytes, 1);
    if (const CuResult result = api_->cuMemAllocFromPoolAsync(&at, wanted, pool, stream->get()); result != kCuSuccess)
      return refused(result, "cuMemAllocFromPoolAsync", wanted);
    return std::make_shared<GpuMemory>(shared_from_this(), Kind::kPool, reinterpret_cast<std::byte*>(at), wanted,
                                       stream);
  }
  auto block = take(Kind::kDevice, bytes);
  HC_TRY(block.status());
  const Block b = block.take();
  return std::make_shared<GpuMemory>(shared_from_this(), Kind::kDevice, b.data, b.bytes, stream);
}

void Gpu::free_behind(CuStream stream, CuPointer memory) {
  const Current current(*this, Current::For::kStreams);
  (void)api_->cuMemFreeAsync(memory, stream);
}

Status Gpu::refused(CuResult result, const char* call, size_t bytes) {
  Status status = api_->check(result, call);
  if (result != kCuOutOfMemory) return status.with(text_of(bytes, " bytes for device ", index_));
  was_full_.store(true);
  return status.with(text_of(bytes, " bytes for device ", index_, ", where the framework leaves too little free: ",
                             "smaller batches or models, or torch.cuda.set_per_process_memory_fraction(0.9)"));
}

Result<GpuMemoryPtr> Gpu::pinned_memory(size_t bytes) {
  auto block = take(GpuMemory::Kind::kPinned, bytes);
  HC_TRY(block.status());
  const Block b = block.take();
  return std::make_shared<GpuMemory>(shared_from_this(), GpuMemory::Kind::kPinned, b.data, b.bytes);
}

// From the stock, a block whose last use is over; or new.
Result<Gpu::Block> Gpu::take(GpuMemory::Kind kind, size_t bytes) {
  const size_t wanted = rounded(bytes);
  {
    const Current current(*this);
    MutexLock lock(mu_);
    auto& stock = stock_[kind];
    const auto at = std::find_if(stock.begin(), stock.end(), [&](const Block& b) {
      return fits(b.bytes, wanted) && (!b.last_use || api_->cuEventQuery(b.last_use->get()) == kCuSuccess);
    });
    if (at != stock.end()) {
      Block found = std::move(*at);
      stock.erase(at);
      return found;
    }
  }
  Block made{nullptr, wanted, nullptr};
  CuResult result = allocate(kind, &made);
  if (result != kCuSuccess) {
    drop_stock(kind, 0);
    result = allocate(kind, &made);
  }
  if (result == kCuSuccess) return made;
  return refused(result, kind == GpuMemory::Kind::kPinned ? "cuMemHostAlloc" : "cuMemAlloc", wanted);
}

CuResult Gpu::allocate(GpuMemory::Kind kind, Block* block) {
  const Current current(*this);
  CuResult result;
  if (kind == GpuMemory::Kind::kPinned) {
    void* at = nullptr;
    result = api_->cuMemHostAlloc(&at, block->bytes, kPortable);
    block->data = static_cast<std::byte*>(at);
  } else {
    CuPointer at = 0;
    result = api_->cuMemAlloc(&at, block->bytes);
    block->data = reinterpret_cast<std::byte*>(at);
  }
  return result;
}

void Gpu::free(GpuMemory::Kind kind, const Block& block) {
  const Current current(*this);
  if (kind == GpuMemory::Kind::kPinned)
    (void)api_->cuMemFreeHost(block.data);
  else
    (void)api_->cuMemFree(cu_pointer(block.data));
}

// Waits until the last use is over, not longer than the deadline.
bool Gpu::is_idle(const Block& block, const Deadline& deadline) {
  if (!block.last_use) return true;
  const Current current(*this);
  while (api_->cuEventQuery(block.last_use->get()) == kCuNotReady) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

// What is still in use at the deadline stays: freeing it would wait for the device, or pull memory from under it.
void Gpu::drop_stock(GpuMemory::Kind kind, double limit_s) {
  std::vector<Block> dropped, kept;
  {
    MutexLock lock(mu_);
    dropped.swap(stock_[kind]);
  }
  const Deadline deadline = Deadline::in(limit_s);
  for (Block& block : dropped) {
    if (is_idle(block, deadline))
      free(kind, block);
    else if (!closed_)
      kept.push_back(std::move(block));
  }
  MutexLock lock(mu_);
  auto& stock = stock_[kind];
  std::move(kept.begin(), kept.end(), std::back_inserter(stock));
}

void Gpu::give_back(GpuMemory::Kind kind, Block block) {
  {
    MutexLock lock(mu_);
    if (!closed_) {
      stock_[kind].push_back(std::move(block));
      return;
    }
  }
  if (is_idle(block, Deadline::in(kCloseLimitS))) free(kind, block);
}

void Gpu::trim() {
  {
    const Current current(*this);
    MutexLock lock(mu_);
    if (pool_) (void)api_->cuMemPoolTrimTo(pool_, 0);
  }
  drop_stock(GpuMemory::Kind::kDevice, 0);
}

void Gpu::close() {
  {
    MutexLock lock(mu_);
    closed_ = true;
  }
  drop_stock(GpuMemory::Kind::kDevice, kCloseLimitS);
  drop_stock(GpuMemory::Kind::kPinned, kCloseLimitS);
}

Status Gpu::copy(CuPointer to, CuPointer from, size_t bytes, CuStream stream) {
  const Current current(*this, Current::For::kStreams);
  return api_->check(api_->cuMemcpyDtoDAsync(to, from, bytes, stream), "cuMemcpyDtoDAsync");
}

Status Gpu::copy_to_host(std::byte* to, CuPointer from, size_t bytes, CuStream stream) {
  const Current current(*this);
  return api_->check(api_->cuMemcpyDtoHAsync(to, from, bytes, stream), "cuMemcpyDtoHAsync");
}

Status Gpu::copy_from_host(CuPointer to, const std::byte* from, size_t bytes, CuStream stream) {
  const Current current(*this);
  return api_->check(api_->cuMemcpyHtoDAsync(to, from, bytes, stream), "cuMemcpyHtoDAsync");
}

}  // namespace hc
