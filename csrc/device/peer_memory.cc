#include "device/peer_memory.h"

#include "base/sha256.h"

namespace hc {

namespace {

constexpr unsigned kPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

// Process ids repeat in containers; this does not.
Result<uint64_t> number_of_process() {
  static uint64_t number = 0;
  static const Status drawn = random_bytes({reinterpret_cast<uint8_t*>(&number), sizeof number});
  HC_TRY(drawn);
  return number;
}

}  // namespace

Result<std::unique_ptr<PeerMemory>> PeerMemory::create(std::shared_ptr<Gpu> gpu, size_t bytes) {
  std::unique_ptr<PeerMemory> made(new PeerMemory(std::move(gpu), bytes));
  auto process = number_of_process();
  HC_TRY(process.status());
  const CudaApi& cuda = made->gpu_->api();
  const Gpu::Current current(*made->gpu_);
  HC_TRY(cuda.check(cuda.cuMemAlloc(&made->own_, bytes), "cuMemAlloc"), bytes, " bytes for peers");
  made->handle_.process = process.value();
  made->handle_.address = made->own_;
  HC_TRY(cuda.check(cuda.cuIpcGetMemHandle(&made->handle_.ipc, made->own_), "cuIpcGetMemHandle"));
  return made;
}

PeerMemory::~PeerMemory() {
  if (abandoned_) return;
  close();
  const Gpu::Current current(*gpu_);
  if (own_) (void)gpu_->api().cuMemFree(own_);
}

Status PeerMemory::open(std::span<const PeerHandle> ranks) {
  const CudaApi& cuda = gpu_->api();
  const Gpu::Current current(*gpu_);
  for (size_t r = 0; r < ranks.size(); ++r) {
    CuPointer at = ranks[r].address;
    if (ranks[r].process != handle_.process) {
      HC_TRY(cuda.check(cuda.cuIpcOpenMemHandle(&at, ranks[r].ipc, kPeerAccess), "cuIpcOpenMemHandle"), "member ", r);
      mapped_.push_back(at);
    }
    at_.push_back(at);
  }
  return Status::ok();
}

void PeerMemory::close() {
  const Gpu::Current current(*gpu_);
  for (const CuPointer at : mapped_) (void)gpu_->api().cuIpcCloseMemHandle(at);
  mapped_.clear();
  at_.clear();
}

}  // namespace hc
