// Where operations enter the engine: they are checked, filled in and queued here, and refused once the job has failed.
// Owns the submit lock, the handles, the queue of submitted operations, and the reason of a failure.
//
// Thread: any, except for take(), next(), look_again() and take_all(), which belong to the thread that makes progress.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/context.h"
#include "engine/intake/set_intake.h"
#include "engine/operation/operation.h"
#include "engine/operation/submission.h"
#include "engine/record/recorder.h"
#include "engine/threads/submit_lock.h"

namespace hc {

class Intake {
 public:
  explicit Intake(Context& context) : context_(context) {}
  Handles& handles() { return handles_; }
  const Handles& handles() const { return handles_; }
  Recorder& recorder() { return recorder_; }

  // Checks and queues an operation. work: the backend's part, null for tensors in host memory.
  Status queue(const Submission& s, BucketId bucket, std::unique_ptr<BackendWork> work, int64_t* handle);
  // Checks and makes an operation that is not queued, because its caller runs it itself.
  Result<Operation*> make(const Submission& s, BucketId bucket);
  // Queues a declared bucket, which was checked when it was declared. A bucket that does not lie in host memory is
  // not queued: *elsewhere is then its set of buckets, and the handle is 0.
  Status queue_declared(int process_set, BucketId bucket, int32_t priority, int64_t* handle,
                        std::shared_ptr<const BucketSet>* elsewhere);
  // Whether `s` is to be reduced where it lies, in this rank's arena.
  bool goes_in_place(const Submission& s, bool declared) const;
  void fill(Operation* op, const Submission& s, const Members& set) const;

  // Something waits to be taken.
  bool has_news() const { return has_news_.load(std::memory_order_seq_cst); }
  // Takes what has been submitted so far; next() returns one operation after the other, then null.
  void take() {
    if (!taken_.empty()) return;  // some are left after an exception
    SubmitLock lock(mu_);
    taken_.swap(incoming_);
    has_news_.store(false, std::memory_order_release);
  }
  Operation* next() {
    if (next_taken_ < taken_.size()) return taken_[next_taken_++];
    taken_.clear();
    next_taken_ = 0;
    return nullptr;
  }
  // After an exception: makes has_news() true again for what next() has not returned yet.
  void look_again() {
    if (!taken_.empty()) has_news_.store(true, std::memory_order_seq_cst);
  }
  // Every operation that next() has not returned.
  std::vector<Operation*> take_all();

  // From now on every submission is refused for this reason; later reasons are ignored.
  void refuse(const Status& reason);
  Status failure() const;

  void add(std::shared_ptr<SetIntake> set);
  void remove(int process_set);
  // Null: there is no such set.
  std::shared_ptr<SetIntake> find(int process_set) const;
  int declare(SetIntake& set, std::shared_ptr<const BucketSet> buckets) const;
  void undeclare(SetIntake& set, int id) const;
  bool is_pending(const SetIntake& set, int id) const;  // as SetIntake says
  void take_back_declared(SetIntake& set, int id) const;
  Operation* find_named(SetIntake& set, Op op, std::string_view name) const;
  void skip_sequence(SetIntake& set, Op op, uint64_t sequence) const;

  // This rank's last operations, as JSON.
  std::string flight_record(const std::string& reason) const;
  // Straggler statistics by process set, as the inner part of a JSON object.
  std::string stragglers_json() const;
  // Writes a sign of life into the metrics, with the ranks of the world that were waited for longest.
  void beat() const;
  // "allreduce 'x', 12.3 s ago"
  std::string last_call() const;

  // Of the submit lock, for callers that read or write several members of SetIntake together.
  Mutex& submit_mutex() const { return mu_; }

 private:
  Result<SetIntake*> check(const Submission& s) const HC_REQUIRES(submit_lock);
  Status failure_of(Op op, std::string_view name) const HC_REQUIRES(submit_lock);
  Status has_joined(Op op) const;
  void write_signature(const Submission& s, const Members& set, bool declared, Signature* to) const;
  SetIntake* find_locked(int process_set) const HC_REQUIRES(submit_lock) {
    const auto at = sets_.find(process_set);
    return at == sets_.end() ? nullptr : at->second.get();
  }
  Status is_pending(Op op, std::string_view name) const;
  int64_t enqueue(Operation* op, SetIntake& set, NameRecord* record) HC_REQUIRES(submit_lock);
  bool arena_holds(const Submission& s) const;

  Context& context_;
  Handles handles_;
  mutable Mutex mu_;  // the submit lock
  Recorder recorder_;
  std::map<int, std::shared_ptr<SetIntake>> sets_ HC_GUARDED_BY(submit_lock);
  std::vector<Operation*> incoming_ HC_GUARDED_BY(submit_lock);
  Status failure_ HC_GUARDED_BY(submit_lock);  // not ok: nothing is taken
  std::atomic<bool> has_news_{false};

  // The thread that makes progress.
  std::vector<Operation*> taken_;
  size_t next_taken_ = 0;  // index in it
};

}  // namespace hc
