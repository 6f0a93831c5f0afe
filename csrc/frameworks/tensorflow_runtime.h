// The one pointer to the engine that the kernels of this library use. Python sets it after every init() and clears it
// before every shutdown(); a kernel holds it in place while it submits. Thread: any.
#pragma once

#include <mutex>
#include <shared_mutex>

#include "horoclone.h"

namespace hc::tensorflow {

class RuntimePointer {
 public:
  // The runtime cannot shut down while a Lease lives. It is null before init and after shutdown.
  class Lease {
   public:
    explicit Lease(RuntimePointer& owner) : lock_(owner.mu_), runtime_(owner.runtime_) {}
    hc_runtime* get() const { return runtime_; }

   private:
    std::shared_lock<std::shared_mutex> lock_;
    hc_runtime* runtime_;
  };

  Lease lease() { return Lease(*this); }
  // Returns when no lease of the former runtime is left.
  void set(hc_runtime* runtime) {
    std::lock_guard lock(mu_);
    runtime_ = runtime;
  }

 private:
  std::shared_mutex mu_;
  hc_runtime* runtime_ = nullptr;  // guarded by mu_
};

inline RuntimePointer& runtime_pointer() {
  static auto* pointer = new RuntimePointer;  // kernels may run while the process exits
  return *pointer;
}

}  // namespace hc::tensorflow
