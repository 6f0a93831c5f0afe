// A batch of a plan whose tensors lie in device memory: what BatchRunner does differently for it. Before the first
// task the ranks agree on who moves the data and the set's stream waits for the tensors; the last task is followed by
// the event that everybody who reads the results waits for. Nothing here waits for the device.
//
// Thread: the thread that makes progress. Owner: a BatchRunner.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "collective/gpu/device_group.h"
#include "engine/operation/batch_backend.h"
#include "engine/operation/memory_pressure.h"

namespace hc {

class DeviceBatch final : public BatchBackend {
 public:
  // For the identity elements of a rank that has joined, in their order: its own buckets, where NCCL wants the same
  // memory of all ranks; null: any other.
  struct StandIns {
    std::vector<std::byte*> at;
    GpuEventPtr free;  // behind what the caller may still read there
  };
  // may_launch: whether this batch has the next launch ticket (launch_tickets.h).
  DeviceBatch(DeviceGroup* group, Tag tag, MemoryPressure* pressure, std::function<bool()> may_launch,
              StandIns stand_ins = {})
      : group_(*group),
        tag_(tag),
        may_launch_(std::move(may_launch)),
        pressure_(*pressure),
        stand_ins_(std::move(stand_ins)) {}

  Progress begin(const std::vector<Operation*>& operations, bool* moved) override;
  const Status& status() const override { return status_; }
  const Status& outcome() const override { return group_.refusal(); }
  Result<std::unique_ptr<Collective>> make_collective(Task task) override {
    return group_.make_collective(std::move(task));
  }
  Result<std::byte*> result_memory(Operation* op, size_t tensor, size_t bytes) override;
  Result<std::byte*> identity(DType dtype, Reduce reduce, size_t count) override;
  bool may_get_memory() override;
  bool is_waiting() const override { return waits_ && pressure_.times_given() == given_ && !until_.passed(); }
  Status finish(const std::vector<Operation*>& operations) override;

 private:
  Status await_inputs(const std::vector<Operation*>& operations);

  DeviceGroup& group_;
  const Tag tag_;
  const std::function<bool()> may_launch_;
  MemoryPressure& pressure_;
  const StandIns stand_ins_;
  size_t next_stand_in_ = 0;
  bool waits_ = false;  // for memory
  uint64_t given_ = 0;  // how often some had been given by then
  Deadline until_ = Deadline::in(0);
  bool begun_ = false, set_up_ = false;
  std::unique_ptr<Collective> setup_;
  GpuEventPtr input_;               // see DeviceGroup::Flight
  std::vector<GpuMemoryPtr> held_;  // until the batch's end on the device
  std::vector<std::shared_ptr<Memory>> held_on_host_;
  Status status_;
};

}  // namespace hc
