// Who moves the data of tensors in device memory: NCCL, our kernels through memory that the ranks share, or host
// memory. To add one: a class like these, and in backend_selection.cc when the ranks choose it and what it needs.
//
// Thread: the thread that makes progress. Owner: a DeviceState.
#pragma once

#include <memory>

#include "collective/collective.h"

namespace hc {

class GpuBackend {
 public:
  virtual ~GpuBackend() = default;
  virtual const char* name() const = 0;  // as in HOROCLONE_GPU_OPERATIONS
  // Whether it does this task with our meaning. The same on every rank.
  virtual bool can(const Task& task) const = 0;
  // A task that it can do; pieces as in a host task, with device addresses.
  virtual std::unique_ptr<Collective> start(Task task) = 0;
  // kLaunches: a task is only enqueued, in the order of launches, and can be captured into a CUDA graph. kPlan: it also
  // takes the host's collectives, which run in the order of the plan.
  enum class Order { kLaunches, kPlan };
  virtual Order order() const = 0;
};

struct DeviceState;
// They outlive neither the state nor the group.
std::unique_ptr<GpuBackend> make_nccl_backend(DeviceState* device, const Group& group);    // nccl.cc, device_adasum.cc
std::unique_ptr<GpuBackend> make_peers_backend(DeviceState* device, const Group& group);   // peers.cc
std::unique_ptr<GpuBackend> make_staged_backend(DeviceState* device, const Group& group);  // staged.cc

}  // namespace hc
