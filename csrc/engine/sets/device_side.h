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
#include "engine/gpu/launch_order.h"
#include "engine/iteration.h"
#include "engine/sets/batch_runner.h"
#include "engine/sets/persistent_buckets.h"

namespace hc {

class DeviceSide {
 public:
  DeviceSide(Context& context, GpuContext& gpu, LaunchOrder& order, const Members& members, const Group& group,
             PersistentBuckets& buckets)
      : context_(context), gpu_(gpu), order_(order), members_(members), group_(group), buckets_(buckets) {}

  DeviceGroup* group() { return device_.get(); }  // null: nothing of the set has been on a GPU
  bool is_used() const { return device_ != nullptr; }

  // The set's next batch lies in device memory: it starts when the set's launch ticket comes up.
  void put_on_device(BatchRunner& runner);
  void batch_over();

  // Before a set of buckets in device memory is declared.
  Status prepare_buckets();
  // Whether declared buckets can be persistent as far as this rank knows.
  bool may_be_persistent(const BucketSet& buckets) const;
  // Tells NCCL of the buckets' memory, on every rank of the set at the same place.
  void register_buckets(std::shared_ptr<const BucketSet> buckets);
  // NCCL knows some; the same on every rank.
  bool has_registered() const { return !registered_.empty(); }
  // This rank needs them no more. NCCL forgets them when every rank says so: a bit for each that it knows, in the order
  // in which it was told; then, with what all ranks have said.
  void drop_buckets(const BucketSet& buckets);
  int64_t dropped() const;
  Status forget_dropped(int64_t on_all_ranks);
  // Puts a bucket into the CUDA graph into which `from` is captured.
  Result<GpuEventPtr> capture(const Task& task, CuStream from);

  // This rank has filled a bucket.
  void make_ready(Operation* op, size_t flag);
  bool has_ready() const { return !ready_.empty() || launching_; }
  bool waits_for_ticket() const { return !ready_.empty(); }
  // This rank has no bucket under way, and the others know of every one that it may still have to begin.
  bool may_leave();
  // What rank 0 gives no ticket to, because a rank has left the persistent plans: to be announced. Asks that this be
  // called again where it cannot tell yet.
  std::vector<Operation*> take_back(const SharedSegment& shared_segment, Iteration* now);
  // The buckets with the next launch tickets, one group of them: starts it; null: none, or it is not over yet. Not ok:
  // the GPU has failed.
  Result<std::unique_ptr<BatchRunner>> launch(const Tuning& tuning, Timeline* timeline, Iteration* now);

  // Buckets that this rank has filled so long ago and not every rank has.
  struct Late {
    std::string what;
    double waited_s;
    std::vector<int> missing;  // group ranks
  };
  std::vector<Late> late(TimePoint now, double patience_s) const;
  // The bucket whose launch ticket has come up before this rank has filled it; empty: none. of_leader: rank 0 has.
  struct Awaited {
    std::string name;
    bool of_leader = false;
  };
  Awaited awaited_bucket() const;

  bool has_flights() const { return device_ && device_->has_flights(); }
  double oldest_flight_s(TimePoint now) { return device_ ? device_->oldest_flight_s(now) : 0; }
  Status check() { return device_ ? device_->check() : Status::ok(); }
  void abort();
  void close();

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
    int misfits = 0;                  // how often rank 0 itself had to wait because it has gone ahead
  };
  struct Registered {
    std::shared_ptr<const BucketSet> buckets;
    bool dropped = false;
  };
  void tell();
  bool is_leader() const { return context_.rank() == 0; }
  void note_round(const Operation& op, size_t flag);
  bool may_start(const Ready& ready);
  void give_tickets();
  void give_next_step();
  void withdraw(Iteration* now);
  void note_withdrawal();
  void look_for_misfit(Iteration* now);
  // The group with the next tickets, in their order; empty: not all of it is ready. Null: this rank had joined when
  // rank 0 did not know that yet, and gives the identity element.
  std::vector<Operation*> take_group(std::vector<BucketId>* ids);
  std::unique_ptr<BatchRunner> runner_of(std::vector<Operation*> operations, const std::vector<BucketId>& ids,
                                         const Tuning& tuning, Timeline* timeline);

  Context& context_;
  GpuContext& gpu_;
  LaunchOrder& order_;
  const Members& members_;
  const Group& group_;
  PersistentBuckets& buckets_;
  std::unique_ptr<DeviceGroup> device_;
  std::vector<Ready> ready_;
  std::map<size_t, TimePoint> filled_;  // by flag: when this rank last filled the bucket
  std::unique_ptr<BatchRunner> launching_;
  size_t launching_tickets_ = 0;
  std::map<int, Rounds> rounds_;  // rank 0, by set of buckets
  uint64_t withdrawn_ = 0;        // LaunchTickets::times_withdrawn, as far as it is noted here
  bool leader_stopped_ = false;   // seen once: its last tickets are here with the next look
  std::vector<Registered> registered_;
  std::string told_;  // DeviceGroup::reason, once it has been told
};

}  // namespace hc
