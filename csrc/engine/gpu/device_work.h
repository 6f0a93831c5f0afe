// The GPU part of an operation: when its input is ready, when its result will be, and results that the core owns.
#pragma once

#include <memory>
#include <vector>

#include "device/gpu.h"
#include "engine/operation/operation.h"

namespace hc {

struct DeviceWork final : BackendWork {
  int index() const override { return gpu->index(); }
  CuEvent ready_event() const { return ready ? ready->get() : ready_given; }

  std::shared_ptr<Gpu> gpu;
  GpuEventPtr ready;              // recorded on the producer's stream at submit, or
  CuEvent ready_given = nullptr;  // the caller's own, which lives until the operation is done
  GpuEventPtr done;               // behind the operation, on the process set's stream
  std::vector<GpuMemoryPtr> results;
};

// Null: its tensors lie in host memory.
inline DeviceWork* work_of(const Operation* op) { return static_cast<DeviceWork*>(op->work.get()); }

}  // namespace hc
