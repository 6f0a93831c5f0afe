// A framework's side of a GPU, on the fakes of CUDA and NCCL (tests/fakes): no GPU takes part. One object per rank:
// it has made the context, has a stream of its own, and holds tensors in "device memory".
#pragma once

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <list>
#include <map>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "device/cuda_api.h"
#include "tests/world.h"

namespace hc {

// With HC_FAKE_HIP=1 the same tests run on the fakes of AMD's libraries.
inline const bool kIsHip = std::getenv("HC_FAKE_HIP") != nullptr;
inline const std::string kCudaFake = kIsHip ? HC_FAKES "/libamdhip64.so" : HC_FAKES "/libcuda.so.1";
inline const std::string kNcclFake = kIsHip ? HC_FAKES "/librccl.so" : HC_FAKES "/libnccl.so.2";
inline const std::string kNvrtcFake = kIsHip ? HC_FAKES "/libhiprtc.so" : HC_FAKES "/libnvrtc.so.13";

inline Settings gpu_settings(Settings more = {}) {
  Settings all = {{"HOROCLONE_CUDA_LIBRARY", kCudaFake},
                  {"HOROCLONE_NCCL_LIBRARY", kNcclFake},
                  {"HOROCLONE_NVRTC_LIBRARY", kNvrtcFake},
                  {"HOROCLONE_KERNEL_CACHE", "off"}};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

using Variables = std::map<std::string, std::string>;

// Sets variables that the fakes read, for a scope in which no other thread runs at its ends.
class FakeEnvironment {
 public:
  explicit FakeEnvironment(Variables values) : values_(std::move(values)) {
    for (const auto& [name, value] : values_) ::setenv(name.c_str(), value.c_str(), 1);
  }
  ~FakeEnvironment() {
    for (const auto& [name, value] : values_) ::unsetenv(name.c_str());
  }

 private:
  const Variables values_;
};

inline std::shared_ptr<const CudaApi> cuda_fake() {
  auto api = CudaApi::load(kCudaFake);
  CHECK_MESSAGE(api.is_ok(), api.status().text());
  return api.take();
}
inline int fake_count(const char* what, int device = 0) {
  using Count = int (*)(const char*, int);
  return reinterpret_cast<Count>(cuda_fake()->library->symbol("hc_fake_count"))(what, device);
}

inline int fake_registered(const char* what) {
  const auto library = Library::open(kNcclFake).take();
  return reinterpret_cast<int (*)(const char*)>(library->symbol("hc_fake_registered"))(what);
}

// Launched ever, by kind: see the fake.
inline int fake_collectives(int kind) {
  const auto library = Library::open(kNcclFake).take();
  return reinterpret_cast<int (*)(int)>(library->symbol("hc_fake_collectives"))(kind);
}

// Of communicators, that NCCL has given.
inline int fake_ids() {
  const auto library = Library::open(kNcclFake).take();
  return reinterpret_cast<int (*)()>(library->symbol("hc_fake_ids"))();
}

inline int fake_communicators() {
  const auto library = Library::open(kNcclFake).take();
  return reinterpret_cast<int (*)()>(library->symbol("hc_fake_communicators"))();
}

class FrameworkOnGpu {
 public:
  explicit FrameworkOnGpu(int device) : device(device), api_(cuda_fake()) {
    (void)api_->cuDevicePrimaryCtxRetain(&context_, device);
    (void)api_->cuCtxSetCurrent(context_);
    (void)api_->cuStreamCreateWithPriority(&stream, kCuStreamNonBlocking, 0);
  }
  ~FrameworkOnGpu() {  // perhaps on a thread that has no context: without one the stream is not waited for
    CuContext before = nullptr;
    (void)api_->cuCtxGetCurrent(&before);
    (void)api_->cuCtxSetCurrent(context_);
    synchronize();
    for (const auto at : memory_) (void)api_->cuMemFree(at);
    (void)api_->cuStreamDestroy(stream);
    (void)api_->cuCtxSetCurrent(before);
    (void)api_->cuDevicePrimaryCtxRelease(device);
  }
  FrameworkOnGpu(const FrameworkOnGpu&) = delete;

  void* memory(size_t bytes) {
    CuPointer at = 0;
    CHECK(api_->cuMemAlloc(&at, std::max<size_t>(bytes, 1)) == kCuSuccess);
    memory_.push_back(at);
    return reinterpret_cast<void*>(at);
  }
  // A tensor with these values, which are there when the stream has come so far.
  template <class T>
  T* tensor(const std::vector<T>& values) {
    auto* at = static_cast<T*>(memory(values.size() * sizeof(T)));
    write(at, values);
    return at;
  }
  template <class T>
  void write(T* to, const std::vector<T>& values) {
    const auto bytes = std::as_bytes(std::span(values));
    const auto& source = sources_.emplace_back(bytes.begin(), bytes.end());  // lives until the stream has read it
    CHECK(api_->cuMemcpyHtoDAsync(reinterpret_cast<CuPointer>(to), source.data(), source.size(), stream) == kCuSuccess);
  }
  template <class T>
  std::vector<T> read(const T* from, size_t count) {
    std::vector<T> values(count);
    CHECK(api_->cuMemcpyDtoHAsync(values.data(), reinterpret_cast<CuPointer>(from), count * sizeof(T), stream) ==
          kCuSuccess);
    synchronize();
    return values;
  }
  void synchronize() {
    using Synchronize = int (*)(CuStream);
    (void)reinterpret_cast<Synchronize>(api_->library->symbol("cuStreamSynchronize"))(stream);
  }
  // The stream goes on once `opened` is true.
  void wait_until(const std::atomic<bool>* opened) {
    using Job = void (*)(void*);
    using Enqueue = int (*)(CuStream, Job, void*, Job);
    const Job wait = [](void* gate) {
      while (!static_cast<std::atomic<bool>*>(gate)->load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    CHECK(call<Enqueue>("hc_fake_enqueue")(stream, wait, const_cast<std::atomic<bool>*>(opened), [](void*) {}) == 0);
  }
  bool busy() { return api_->cuStreamQuery(stream) == kCuNotReady; }

  // What the stream is given between these two goes into a graph, which replay() then gives it as often as wanted.
  void begin_capture() {
    using Begin = int (*)(CuStream, int);
    CHECK(call<Begin>("cuStreamBeginCapture_v2")(stream, 0) == kCuSuccess);
  }
  void* end_capture() {
    using End = int (*)(CuStream, void**);
    using Instantiate = int (*)(void**, void*, unsigned long long);
    void *graph = nullptr, *executable = nullptr;
    CHECK(call<End>("cuStreamEndCapture")(stream, &graph) == kCuSuccess);
    CHECK(call<Instantiate>("cuGraphInstantiateWithFlags")(&executable, graph, 0) == kCuSuccess);
    CHECK(call<int (*)(void*)>("cuGraphDestroy")(graph) == kCuSuccess);
    return executable;
  }
  void replay(void* executable) {
    CHECK(call<int (*)(void*, CuStream)>("cuGraphLaunch")(executable, stream) == kCuSuccess);
  }
  void drop(void* executable) { CHECK(call<int (*)(void*)>("cuGraphExecDestroy")(executable) == kCuSuccess); }

  // What every submission on this device says.
  void place(Submission* s) const {
    s->place.is_host = false;
    s->place.index = device;
    s->stream = stream;
  }

  const int device;
  CuStream stream = nullptr;

 private:
  template <class Function>
  Function call(const char* name) const {
    return reinterpret_cast<Function>(api_->library->symbol(name));
  }

  std::shared_ptr<const CudaApi> api_;
  CuContext context_ = nullptr;
  std::vector<CuPointer> memory_;
  std::list<std::vector<std::byte>> sources_;
};

// Submits one tensor of `shape`; `out` null: the core owns the result.
inline Status submit_gpu(Engine& engine, const FrameworkOnGpu& gpu, Op op, const std::string& name, const void* in,
                         void* out, std::vector<int64_t> shape, DType dtype, int64_t* handle,
                         const std::function<void(Submission&)>& adjust = {}) {
  Submission s;
  s.op = op;
  s.name = name;
  gpu.place(&s);
  const Submission::Tensor tensor{in, out, shape, dtype};
  s.tensors = {&tensor, 1};
  if (adjust) adjust(s);
  return engine.submit(s, handle);
}

// As a framework's join does that has a GPU.
inline Status join(Engine& engine, const FrameworkOnGpu& gpu) {
  Submission s;
  s.op = Op::kJoin;
  gpu.place(&s);
  return perform(engine, s);
}

// Waits until it is enqueued and makes the framework's stream wait for it. Keeps the handle.
inline Status enqueued(Engine& engine, const FrameworkOnGpu& gpu, int64_t handle) {
  bool done = false;
  Status outcome = engine.wait(handle, 30, &done);
  if (outcome.is_ok() && !done) outcome = error(Code::kTimeout, "not enqueued within 30 s");
  return outcome.is_ok() ? engine.stream_wait(handle, gpu.stream) : outcome;
}

}  // namespace hc
