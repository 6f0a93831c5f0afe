// What one process set does on GPUs: the group that moves the data, batches on device memory, and persistent buckets.
// Rank 0 gives their launch tickets, all that are ready in one group: when all ranks have filled them or, in a job
// whose steps hold nothing else on GPUs, as soon as it has itself; NCCL then waits for the others. Where such steps are
// alike it gives those of the next step before it is there itself (docs/decisions/gpu-launch-order.md).
//
// Thread: the thread that makes progress, or one that holds the progress lock. Owner: a process set.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "collective/gpu/device_group.h"
#include "engine/gpu/device_batch.h"
#include "engine/gpu/gpu_context.h"
#include "engine/gpu/known_buckets.h"
#include "engine/sets/process_set.h"

namespace hc {

class DeviceSide final : public SetBackend {
 public:
  DeviceSide(GpuContext& gpu, ProcessSet& set)
      : context_(set.parts().context),
        gpu_(gpu),
        order_(gpu.launch_order()),
        set_(set),
        members_(set.members()),
        group_(set.group()),
        buckets_(set.buckets()),
        known_(context_, members_) {}

  void take_batch(BatchRunner& runner) override;
  void batch_over() override;

  Status declare(const BucketSet& buckets, bool owned, bool may_persist, Capabilities* mine) override;
  std::shared_ptr<Confirmation> confirm(std::shared_ptr<const BucketSet> buckets, const Capabilities& all) override;
  void undeclare(const BucketSet& buckets) override;
  Status capture(const Submission& s, BucketId bucket, int64_t* handle) override;

  void make_ready(Operation* op, size_t flag) override;
  bool has_ready() const override { return !ready_.empty() || launching_; }
  bool may_leave() override;
  void step(Iteration* now) override;

  std::vector<Late> late(TimePoint now, double patience_s) const override;
  bool has_flights() const override { return device_ && device_->has_flights(); }
  double oldest_flight_s(TimePoint now) override { return device_ ? device_->oldest_flight_s(now) : 0; }
  std::string under_way(TimePoint now, double older_than_s, double* longest_s) override {
    return device_ ? device_->under_way(now, older_than_s, longest_s) : "";
  }
  Status check(const Status& closed) override;
  void note_failure() override;
  void abort() override;
  void await_abort(const Deadline& limit) override {
    if (device_) device_->await_abort(limit);
  }
  void close() override;

 private:
  struct Ready {
    Operation* op;
    size_t flag;
    bool has_ticket = false;  // rank 0
  };
  // How far rank 0 is in a step of a set of buckets, and how many steps had nothing else on GPUs between them.
  struct Rounds {
    size_t filled = 0;
    uint64_t others = 0;  // LaunchOrder::others, when the step began
    int alone = 0;
    std::vector<LaunchTicket> order;  // in which rank 0 has filled them, with_next: at about the same time
    TimePoint group_began{};          // when it has filled the first of the newest group of these
    bool is_ahead = false;            // all tickets of this step were given before it began
    int mispredictions = 0;           // how often rank 0 itself had to wait because it has gone ahead
  };
  void tell();
  // Whether declared buckets can be persistent as far as this rank knows.
  bool may_be_persistent(const BucketSet& buckets) const;
  // This rank still has to launch something.
  bool has_launches() const;
  // The bucket whose launch ticket has come up before this rank has filled it; empty: none. of_leader: rank 0 has.
  struct Awaited {
    std::string name;
    bool of_leader = false;
  };
  Awaited awaited_bucket() const;
  Status check_order() const;
  bool is_leader() const { return context_.rank() == 0; }
  void note_round(const Operation& op, size_t flag);
  bool may_start(const Ready& ready);
  void give_tickets();
  void give_next_step();
  void withdraw(Iteration* now);
  void note_withdrawal();
  void look_for_misprediction(Iteration* now);
  // What rank 0 gives no ticket to, because a rank has left the persistent plans: to be announced. Asks that this be
  // called again where it cannot tell yet.
  std::vector<Operation*> take_back(const SharedSegment& shared_segment, Iteration* now);
  // The buckets with the next launch tickets, one group of them: starts it; null: none, or it is not over yet. Not ok:
  // the GPU has failed.
  Result<std::unique_ptr<BatchRunner>> launch(Iteration* now);
  // The group with the next tickets, in their order; empty: not all of it is ready. Null: this rank had joined when
  // rank 0 did not know that yet, and gives the identity element.
  std::vector<Operation*> take_group(std::vector<BucketId>* ids);
  std::unique_ptr<BatchRunner> runner_of(std::vector<Operation*> operations, const std::vector<BucketId>& ids);

  Context& context_;
  GpuContext& gpu_;
  LaunchOrder& order_;
  ProcessSet& set_;
  const Members& members_;
  const Group& group_;
  PersistentBuckets& buckets_;
  std::unique_ptr<DeviceGroup> device_;  // null: nothing of the set has been on a GPU
  std::vector<Ready> ready_;
  std::map<size_t, TimePoint> filled_;  // by flag: when this rank last filled the bucket
  std::unique_ptr<BatchRunner> launching_;
  size_t launching_tickets_ = 0;
  std::map<int, Rounds> rounds_;  // rank 0, by set of buckets
  uint64_t withdrawn_ = 0;        // LaunchTickets::times_withdrawn, as far as it is noted here
  bool leader_stopped_ = false;   // seen once: its last tickets are here with the next look
  KnownBuckets known_;
  std::string told_;  // DeviceGroup::reason, once it has been told
};

}  // namespace hc
