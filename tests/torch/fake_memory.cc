// Lets torch's CPU tensors lie in the device memory of CUDA's fake: an allocator that takes memory there while it is
// switched on. So what torch allocates by itself (DDP's and FSDP's buffers, what kernels give) is on the "GPU", too.
// Built and loaded by tests/torch/test_gpu_fake_features.py. Thread: any.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>

namespace {

std::atomic<bool> on{false};
std::mutex mu;
std::map<uintptr_t, size_t> taken;  // guarded by mu
void* context = nullptr;
c10::Allocator* before = nullptr;
int (*push)(void*), (*pop)(void**), (*take)(uint64_t*, size_t), (*give)(uint64_t);

void* allocate_there(size_t bytes) {
  void* popped = nullptr;
  uint64_t at = 0;
  if (push(context) != 0 || take(&at, bytes) != 0 || pop(&popped) != 0) std::abort();
  std::lock_guard lock(mu);
  taken[at] = bytes;
  return reinterpret_cast<void*>(at);
}

void release(void* at) {
  {
    std::lock_guard lock(mu);
    if (!taken.erase(reinterpret_cast<uintptr_t>(at))) return before->raw_deallocate(at);
  }
  void* popped = nullptr;
  if (push(context) != 0 || give(reinterpret_cast<uint64_t>(at)) != 0 || pop(&popped) != 0) std::abort();
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = !on || bytes == 0 ? before->raw_allocate(bytes) : allocate_there(bytes);
    return {at, at, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void fake_memory_start(void* cuda, void* in_context) {
  context = in_context;
  push = reinterpret_cast<int (*)(void*)>(dlsym(cuda, "cuCtxPushCurrent_v2"));
  pop = reinterpret_cast<int (*)(void**)>(dlsym(cuda, "cuCtxPopCurrent_v2"));
  take = reinterpret_cast<int (*)(uint64_t*, size_t)>(dlsym(cuda, "cuMemAlloc_v2"));
  give = reinterpret_cast<int (*)(uint64_t)>(dlsym(cuda, "cuMemFree_v2"));
  before = c10::GetCPUAllocator();
  c10::SetCPUAllocator(new Memory, 255);
}
EXPORT void fake_memory_switch(int to) { on = to != 0; }
EXPORT int fake_memory_holds(const void* at) {
  std::lock_guard lock(mu);
  auto next = taken.upper_bound(reinterpret_cast<uintptr_t>(at));
  return next != taken.begin() && reinterpret_cast<uintptr_t>(at) < std::prev(next)->first + std::prev(next)->second;
}
