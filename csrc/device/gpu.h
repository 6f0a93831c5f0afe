// The GPU of this rank: events, scratch memory and streams on it, in the context that the framework made. Never makes a
// context itself: a device without one is not this rank's. Thread: any.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "device/cuda_api.h"
#include "device/gpu_kernels.h"

namespace hc {

class Gpu;

// A place in a stream. Goes back to its device's stock when the last one forgets it.
class GpuEvent {
 public:
  GpuEvent(std::shared_ptr<Gpu> gpu, CuEvent event) : gpu_(std::move(gpu)), event_(event) {}
  ~GpuEvent();
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;
  CuEvent get() const { return event_; }

 private:
  std::shared_ptr<Gpu> gpu_;
  CuEvent event_;
};
using GpuEventPtr = std::shared_ptr<GpuEvent>;

// A stream of the highest priority. Ends with its last owner; what it was given is done all the same.
class GpuStream {
 public:
  GpuStream(std::shared_ptr<Gpu> gpu, CuStream stream) : gpu_(std::move(gpu)), stream_(stream) {}
  ~GpuStream();
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;
  CuStream get() const { return stream_; }

 private:
  const std::shared_ptr<Gpu> gpu_;
  const CuStream stream_;
};
using GpuStreamPtr = std::shared_ptr<GpuStream>;

// Memory of the device for use on one stream, to whose end it goes back; or host memory that the device copies from and
// to fast, which goes back to the stock, and whoever gets it next waits for `last_use`.
class GpuMemory {
 public:
  enum class Kind { kPool, kDevice, kPinned };  // kDevice: of a device that has no pools
  GpuMemory(std::shared_ptr<Gpu> gpu, Kind kind, std::byte* data, size_t bytes, GpuStreamPtr stream = nullptr)
      : gpu_(std::move(gpu)), kind_(kind), data_(data), bytes_(bytes), stream_(std::move(stream)) {}
  ~GpuMemory();
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  std::byte* data() const { return data_; }
  CuPointer at() const { return cu_pointer(data_); }
  size_t bytes() const { return bytes_; }
  void used_until(GpuEventPtr event) { last_use_ = std::move(event); }  // of host memory
  // Another stream is the last that uses it: it goes back behind what that has been given. Nothing is left here.
  void give_back_behind(CuStream stream);

 private:
  std::shared_ptr<Gpu> gpu_;
  const Kind kind_;
  std::byte* data_;
  const size_t bytes_;
  const GpuStreamPtr stream_;
  GpuEventPtr last_use_;
};
using GpuMemoryPtr = std::shared_ptr<GpuMemory>;

class Gpu : public std::enable_shared_from_this<Gpu> {
 public:
  // Unsupported, with the reason, when the device does not exist or has no context that somebody made.
  static Result<std::shared_ptr<Gpu>> adopt(std::shared_ptr<const CudaApi> api, int index);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  const CudaApi& api() const { return *api_; }
  int index() const { return index_; }
  const CuUuid& uuid() const { return uuid_; }
  CuDevice device() const { return device_; }
  // Our kernels, loaded at the first call, which may take seconds; later ones give the same answer at once.
  Result<GpuKernels*> kernels(const KernelOptions& options);

  // Makes the context current for a scope, where it is not. Calls within it never disturb somebody who captures a
  // graph: none of them has to do with the streams that are captured, except where capture is meant. A scope within
  // another one costs no call of the driver.
  class Current {
   public:
    // kStreams: only what a stream is given, which disturbs no capture by itself: two calls of the driver are saved.
    enum class For { kAnything, kStreams };
    explicit Current(const Gpu& gpu, For what = For::kAnything);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Gpu& gpu_;
    const Gpu* const outer_;  // of the scope around this one, or null
    bool changed_ = false, exchanged_ = false;
    CuContext before_ = nullptr;    // current on the thread, outside of the scope
    int mode_ = kCuCaptureRelaxed;  // of the thread, outside of the scope
  };
  // The calling thread is the library's own: the context stays current there and nothing that it does disturbs a
  // capture, so that scopes cost no call of the driver after the first.
  static void own_this_thread();

  Result<GpuStreamPtr> make_stream();
  Result<GpuEventPtr> record(CuStream stream);  // behind everything in the stream so far
  Status wait(CuStream stream, CuEvent event);  // the stream does, not the caller
  Result<bool> passed(const GpuEvent& event);
  Result<bool> is_captured(CuStream stream);  // what it is given goes into a graph
  // For use on `stream` from now on.
  Result<GpuMemoryPtr> device_memory(size_t bytes, const GpuStreamPtr& stream);
  Result<GpuMemoryPtr> pinned_memory(size_t bytes);
  // Whether memory was wanted in vain since the last question.
  bool was_full() { return was_full_.exchange(false); }
  // What of its memory nobody uses goes back to the device, where the framework lacks some.
  void trim();
  // Gives all stock back to the device; what comes back from now on goes there at once. Ends a cycle of owners.
  void close();
  Status copy(CuPointer to, CuPointer from, size_t bytes, CuStream stream);
  Status copy_to_host(std::byte* to, CuPointer from, size_t bytes, CuStream stream);
  Status copy_from_host(CuPointer to, const std::byte* from, size_t bytes, CuStream stream);

  // Back to the driver or the stock, by GpuStream, GpuEvent and GpuMemory at their end.
  void end_stream(CuStream stream);
  void free_behind(CuStream stream, CuPointer memory);
  struct Block {
    std::byte* data = nullptr;
    size_t bytes = 0;
    GpuEventPtr last_use;  // null: nobody uses it any more
  };
  void give_back(CuEvent event);
  void give_back(GpuMemory::Kind kind, Block block);

 private:
  Gpu(std::shared_ptr<const CudaApi> api, int index) : api_(std::move(api)), index_(index) {}
  CuMemPool pool();                                                 // of device memory; null: the device has none
  Status refused(CuResult result, const char* call, size_t bytes);  // notes that memory was short
  Result<Block> take(GpuMemory::Kind kind, size_t bytes);
  CuResult allocate(GpuMemory::Kind kind, Block* block);
  void free(GpuMemory::Kind kind, const Block& block);
  bool is_idle(const Block& block, const Deadline& deadline);
  void drop_stock(GpuMemory::Kind kind, double limit_s);

  const std::shared_ptr<const CudaApi> api_;
  const int index_;
  CuDevice device_ = 0;
  CuContext context_ = nullptr;
  CuUuid uuid_{};
  std::atomic<bool> closed_{false}, was_full_{false};
  Mutex kernels_mu_;
  bool kernels_sought_ HC_GUARDED_BY(kernels_mu_) = false;
  Status no_kernels_ HC_GUARDED_BY(kernels_mu_);
  std::unique_ptr<GpuKernels> kernels_ HC_GUARDED_BY(kernels_mu_);
  Mutex mu_;
  std::vector<CuEvent> events_ HC_GUARDED_BY(mu_);
  std::map<GpuMemory::Kind, std::vector<Block>> stock_ HC_GUARDED_BY(mu_);
  CuMemPool pool_ HC_GUARDED_BY(mu_) = nullptr;
  bool pool_sought_ HC_GUARDED_BY(mu_) = false;
};

}  // namespace hc
