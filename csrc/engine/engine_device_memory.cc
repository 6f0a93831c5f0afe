// Buckets in memory of NCCL's own, which it is told of when they are declared: it then need not copy their data through
// buffers of its own.
#include <algorithm>

#include "engine/engine.h"

namespace hc {

// device_mu_ held.
Result<std::shared_ptr<const NcclApi>> Engine::nccl_of_memory(const Gpu& gpu) {
  if (!memory_nccl_) {
    auto loaded = NcclApi::load(config_.nccl_library, config_.nccl_folders, gpu.api().version);
    HC_TRY(loaded.status());
    memory_nccl_ = loaded.take();
  }
  if (memory_nccl_->registration() == NcclApi::Registration::kNone)
    return error(Code::kUnsupported, "NCCL ", nccl_version_text(memory_nccl_->version), " in ", memory_nccl_->file,
                 " cannot be told of memory in advance; ", nccl_version_text(kNcclRegisters), " and newer can");
  return memory_nccl_;
}

Result<std::shared_ptr<Memory>> Engine::allocate_on_device(int device_index, size_t bytes) {
  if (!connected_.load()) return error(Code::kNotInitialized, "Horovod has not been initialized; use hvd.init().");
  if (!config_.gpu_register) return error(Code::kUnsupported, "HOROCLONE_GPU_REGISTER is off");
  if (config_.gpu_operations == "host" || config_.gpu_operations == "peers")
    return error(Code::kUnsupported, "HOROCLONE_GPU_OPERATIONS is ", config_.gpu_operations);
  auto adopted = adopt_gpu(device_index);
  HC_TRY(adopted.status());
  const std::shared_ptr<Gpu> gpu = adopted.take();
  std::lock_guard lock(device_mu_);
  auto loaded = nccl_of_memory(*gpu);
  HC_TRY(loaded.status());
  const std::shared_ptr<const NcclApi> nccl = loaded.take();
  void* at = nullptr;
  {
    const Gpu::Current current(*gpu);
    HC_TRY(nccl->check(nccl->ncclMemAlloc(&at, std::max<size_t>(bytes, 1)), "ncclMemAlloc", nullptr));
  }
  auto made = Memory::make_foreign(static_cast<std::byte*>(at), bytes, [gpu, nccl, at] {
    const Gpu::Current current(*gpu);
    (void)nccl->ncclMemFree(at);
  });
  std::erase_if(gpu_memory_, [](const auto& entry) { return entry.second.expired(); });
  gpu_memory_[made->data()] = made;
  return made;
}

// Whether all buckets begin with memory of allocate_on_device, each with its own; they then own it.
bool Engine::find_memory(BucketSet* buckets) {
  std::lock_guard lock(device_mu_);
  for (const BucketSet::Bucket& b : buckets->buckets) {
    const auto at = gpu_memory_.find(b.data);
    auto memory = at == gpu_memory_.end() ? nullptr : at->second.lock();
    if (!memory) break;
    buckets->memory.push_back(std::move(memory));
  }
  if (buckets->memory.size() == buckets->buckets.size()) return true;
  buckets->memory.clear();
  return false;
}

// Gate held, on every rank of the set at the same place. What NCCL does not take works as any other memory does.
void Engine::register_buckets(ProcessSet& set, const BucketSet& buckets) {
  for (const auto& memory : buckets.memory) {
    const Status told = set.device->register_memory(memory->data(), memory->bytes(), memory);
    if (told.is_ok()) continue;
    log_.warning("process set ", set.id, ": NCCL does not register the buckets: ", told.text(),
                 ". HOROCLONE_GPU_REGISTER=0 goes without");
    return;
  }
  if (!buckets.memory.empty())
    log_.debug("process set ", set.id, ": NCCL knows ", buckets.memory.size(), " buckets in advance");
}

}  // namespace hc
