// One process set on one rank. It leads operations through its parts: the negotiator agrees on a plan and the batch
// queue runs it; persistent buckets and the bypass need no plan; what does not lie in host memory is the
// backend's. Process sets share nothing, so none delays another.
//
// Thread: the thread that makes progress, or one that holds the progress lock. Owner: SetTable.
#pragma once

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine/context.h"
#include "engine/control/control_link.h"
#include "engine/intake/completion.h"
#include "engine/intake/intake.h"
#include "engine/iteration.h"
#include "engine/operation/backend.h"
#include "engine/sets/batch_queue.h"
#include "engine/sets/bypass.h"
#include "engine/sets/negotiator.h"
#include "engine/sets/pending.h"
#include "engine/sets/persistent_buckets.h"
#include "engine/threads/progress_lock.h"
#include "engine/tune/tuner.h"
#include "engine/watch/stall_watch.h"

namespace hc {

// The parts of the engine that every process set works with.
struct SetParts {
  Context& context;
  ControlLink& link;
  Intake& intake;
  Completion& completion;
  Timeline& timeline;
  Tuner& tuner;
  Backend& backend;
};

class ProcessSet {
 public:
  // total_pending: counts the pending operations of all process sets.
  ProcessSet(const SetParts& parts, std::shared_ptr<SetIntake> intake, size_t* total_pending);
  // Makes this rank's part of the shared memory usable, before any member uses it.
  Status prepare();

  const Members& members() const { return intake_->members; }
  const std::shared_ptr<SetIntake>& intake() const { return intake_; }
  const Pending& pending() const { return pending_; }
  SharedSegment* shared_segment() { return shared_.get(); }  // null: this rank shares memory with no other member
  bool is_on_one_node() const { return shared_ && shared_->size() == members().size(); }
  bool may_be_two_level() const { return may_be_two_level_; }
  SetBackend& backend() { return *backend_; }
  // For the backend.
  const SetParts& parts() const { return parts_; }
  const Group& group() const { return group_; }
  PersistentBuckets& buckets() { return buckets_; }
  const BatchQueue& batches() const { return batches_; }
  const Tuning& tuning() const { return tuning_; }
  Task task_of(const Operation& op) const;
  void announce(Operation* op);

  // Takes an operation that was submitted. It is started if it needs no message, else announced.
  void take(Operation* op);
  // Ends an operation that was submitted too late with `reason`.
  void refuse(Operation* op, const Status& reason);
  // Frames of other ranks: requests, a plan as it travels, what to show.
  Status take_requests(int from, const RequestList& requests) { return negotiator_->take(from, requests); }
  Status take_plan(int from, Plan plan, std::span<const uint8_t> frame);
  Status take_flush_frame(int from, uint8_t how) { return negotiator_->take_flush_frame(from, how); }
  Status take_buckets_left(int from, Reader* in);
  // Does what can be done now. An error ends the whole engine.
  Status step(Iteration* now);

  // Runs a small blocking call that repeats an earlier one: the calling thread, which holds the progress lock,
  // publishes it and takes the result, without an operation, a handle or an iteration of the engine. False: treat the
  // call like any other. True with a handle: other members are late, and the call has become an operation.
  bool repeat(const Submission& s, ProgressLock& progress_lock, int spin_pauses, int64_t* handle);

  // For declared buckets.
  using Capabilities = SetBackend::Capabilities;
  Status declare(int id, std::shared_ptr<const BucketSet> buckets, bool owned, Capabilities* mine);
  // Every rank has declared the same; what all are capable of, and have dropped.
  // Null: that was all.
  std::shared_ptr<SetBackend::Confirmation> confirm(int id, const Capabilities& all);
  void undeclare(int id);
  // The last that was declared, which not every rank has done.
  void take_back_declared(int id) {
    buckets_.take_back(id);
    parts_.intake.take_back_declared(*intake_, id);
  }

  // The settings in force; they change on every rank at the same plan.
  void set_tuning(const Tuning& tuning);
  void allow_bypass(bool allowed) { bypass_.allow(allowed && parts_.context.config.bypass); }
  void limit_bypass();

  // A rank has said goodbye; text: the error of what waits for it.
  Status peer_left(int rank, const std::string& text);
  // The same for a rank that sent plans indirectly, through others.
  Status parent_left(int rank, const std::string& text);
  // From now on this rank enters no persistent plan and no round of the bypass, because it joins or leaves.
  void leave_shared_rounds();
  // Ends what the ranks have agreed to refuse, before everything fails because a rank has died of that error.
  Status end_refused();
  // Ends all operations with `reason`; none succeeds any more. The backend has been aborted.
  void fail(const Status& reason);
  // Releases what the backend has when the engine shuts down; needs the other members.
  void close();
  void complete(Operation* op, Status status) {
    if (op == pending_.join()) intake_->join_pending.store(false, std::memory_order_release);
    pending_.remove(op);
    parts_.completion.finish(op, std::move(status));
  }
  // Ends pending operations with `reason`, because the set is removed.
  void end_pending(const Status& reason);
  // Wakes members that sleep and wait for what this rank has just published.
  void wake_readers() {
    if (shared_ && shared_->take_published()) wake_members();
  }

  // process_set_reports.cc
  void find_stalls(TimePoint now, bool asked, Stalls* stalls) const;  // asked: see StallWatch
  Status flush_held_requests_if_late(TimePoint now);
  // Ranks wait for one another for ever. So that coordinators know what is awaited, ranks in between pass on what they
  // hold, and a rank that is stuck itself (steps_back) enters nothing without a message any more.
  Status flush_held_requests(bool steps_back);
  // Coordinator: what these world ranks wait for from one another fails.
  void end_deadlock(const std::set<int>& stuck, const std::string& text);
  void mark_awaited(TimePoint now, std::vector<bool>* waits);
  Status check_backend() { return backend_->check(closed_); }
  std::string describe(TimePoint now) const;

 private:
  struct Arrival {  // a persistent bucket, or a round of the bypass
    Arrival(Operation* op, PersistentCollective* bucket) : op(op), collective(bucket), bytes(bucket->bytes()) {}
    Arrival(Operation* op, std::unique_ptr<ArrivalCollective> entered)
        : op(op), collective(entered.get()), round(std::move(entered)) {}
    Operation* op;
    ArrivalCollective* collective;
    size_t bytes = 0;                          // of a bucket
    std::unique_ptr<ArrivalCollective> round;  // of the bypass, which is used once
  };
  bool is_reachable() const { return !parts_.context.has_failed() && closed_.is_ok(); }
  bool enter_bucket(Operation* op);
  bool persists_between_nodes(const BucketSet& set) const;
  void leave_buckets(int only = -1);
  bool enter_bypass(Operation* op);
  Result<Task> bypass_task_of(Operation* op) const;
  void keep_repeat(const Operation& op, const BypassKey& key, const Task& task);
  bool may_repeat() const;
  Operation* make_late(const Submission& s, NameRecord* record, uint64_t number, uint64_t use);
  Status decide(Iteration* now);
  void adopt(Plan plan);
  Operation* match(Op op, const PlanEntry& entry);
  Status begin_batch(PlanBatch batch);
  Status run_batches(Iteration* now);
  void finish_batch();
  void end_after_close(Iteration* now);
  Status run_arrivals(Iteration* now);
  void note_batch(TimePoint planned);
  void note_arrival(TimePoint submitted, const ArrivalCollective::Arrival& arrival) {
    if (arrival.last < 0)
      intake_->stragglers.last_was(members().group_rank, 0);  // nobody was missing when this rank came
    else
      intake_->stragglers.last_was(arrival.last, std::max(0.0, seconds_between(submitted, arrival.at)));
  }
  uint64_t moment_of_arrival(TimePoint submitted, const ArrivalCollective::Arrival& arrival) const {
    return parts_.context.rank_metrics.at(arrival.last < 0 ? submitted : arrival.at);
  }
  void measure_repeat(Op op, uint64_t bytes, std::string_view name, NameRecord* record, TimePoint submitted,
                      const ArrivalCollective::Arrival& arrival, uint64_t ticks);
  // Bookkeeping for an operation that ran without a plan, because the ranks' arrival was the agreement.
  void note_persistent(Operation* op, const ArrivalCollective& run) {
    note_arrival(op->submitted, run.arrival());
    op->traces.started.store(moment_of_arrival(op->submitted, run.arrival()), std::memory_order_relaxed);
    if (parts_.timeline.on()) show_persistent(*op, run);
  }
  void show_persistent(const Operation& op, const ArrivalCollective& run);
  void wake_members();

  const SetParts parts_;
  const std::shared_ptr<SetIntake> intake_;
  Group group_;
  std::unique_ptr<SharedSegment> shared_;
  bool may_be_two_level_ = false;  // several nodes: allreduce in shared memory within each, over channels between
  Pending pending_;
  std::unique_ptr<Negotiator> negotiator_;  // null: this rank is no member
  PersistentBuckets buckets_;
  Bypass bypass_;
  std::vector<Arrival> arrivals_;
  Operation* deferred_join_ = nullptr;  // waits until arrivals_ is empty
  BatchQueue batches_;
  const std::unique_ptr<SetBackend> backend_;
  Tuning tuning_;                 // in force for the plans that come
  uint64_t tuning_revision_ = 0;  // of Tuner, when tuning_ was its newest
  Status closed_;                 // not ok: every operation from now on fails with it (a member has left)
  Operation repeating_;           // stands in NameRecord::pending for a call under way in repeat()
};

}  // namespace hc
