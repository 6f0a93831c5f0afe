// The GPU work of one process set: the group that moves the data, batches in device memory, and persistent buckets at
// which all members have arrived and which wait for their launch ticket.
//
// Thread: the thread that makes progress, or one that holds the progress lock. Owner: a process set.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collective/gpu/device_group.h"
#include "engine/gpu/gpu_desk.h"
#include "engine/gpu/launch_order.h"
#include "engine/iteration.h"
#include "engine/sets/batch_runner.h"

namespace hc {

class DeviceSide {
 public:
  DeviceSide(Context& context, GpuDesk& gpu, LaunchOrder& order, const Members& members, const Group& group)
      : context_(context), gpu_(gpu), order_(order), members_(members), group_(group) {}

  DeviceGroup* group() { return device_.get(); }  // null: nothing of the set has been on a GPU
  bool is_used() const { return device_ != nullptr; }

  // The set's next batch lies in device memory: it starts when the set's launch ticket comes up.
  void put_on_device(BatchRunner& runner);
  void batch_over();

  // Whether declared buckets can be persistent as far as this rank knows.
  bool may_be_persistent(const BucketSet& buckets) const;
  // Registers the buckets' memory with NCCL. Every rank of the set must call it at the same point.
  void register_buckets(const BucketSet& buckets);
  void forget_buckets(const BucketSet& buckets);
  // Puts a bucket into the CUDA graph into which `from` is captured.
  Result<GpuEventPtr> capture(const Task& task, CuStream from);

  // All members have arrived at this bucket.
  void make_ready(Operation* op, size_t flag);
  bool has_ready() const { return !ready_.empty() || launching_; }
  bool waits_for_ticket() const { return !ready_.empty(); }
  // Starts the ready bucket that has the next launch ticket. Null: there is none, or it has not finished. An error: the
  // GPU has failed.
  Result<std::unique_ptr<BatchRunner>> launch(const Tuning& tuning, Timeline* timeline, Iteration* now);

  double oldest_flight_s(TimePoint now) { return device_ ? device_->oldest_flight_s(now) : 0; }
  Status check() { return device_ ? device_->check() : Status::ok(); }
  void abort();
  void close();

 private:
  struct Ready {
    Operation* op;
    size_t flag;
  };
  std::unique_ptr<BatchRunner> runner_of(Operation* op, const Tuning& tuning, Timeline* timeline);

  Context& context_;
  GpuDesk& gpu_;
  LaunchOrder& order_;
  const Members& members_;
  const Group& group_;
  std::unique_ptr<DeviceGroup> device_;
  std::vector<Ready> ready_;
  std::unique_ptr<BatchRunner> launching_;
  std::string told_;  // DeviceGroup::reason, once it has been logged
};

}  // namespace hc
