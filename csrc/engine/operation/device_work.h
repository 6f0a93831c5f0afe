// The GPU part of an operation: when its input is ready, when its result will be, and results that the core owns.
// Written by submit, and by the thread that makes progress before the operation is done.
#pragma once

#include <memory>
#include <vector>

#include "device/gpu.h"

namespace hc {

struct DeviceWork {
  std::shared_ptr<Gpu> gpu;
  GpuEventPtr ready;              // recorded on the producer's stream at submit, or
  CuEvent ready_given = nullptr;  // the caller's own, which lives until the operation is done
  GpuEventPtr done;               // behind the operation, on the process set's stream
  std::vector<GpuMemoryPtr> results;
};

}  // namespace hc
