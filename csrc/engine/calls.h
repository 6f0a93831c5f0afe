// The calls on operations: submit, poll and wait, or all in one. Thread: any. Owner: the engine.
#pragma once

#include <string>

#include "engine/intake/intake.h"
#include "engine/operation/backend.h"
#include "engine/progress/progress_threads.h"
#include "engine/sets/set_table.h"

namespace hc {

class Calls {
 public:
  Calls(Context& context, Intake& intake, Backend& backend, SetTable& sets, Loop& loop, ProgressThreads& progress)
      : context_(context), intake_(intake), backend_(backend), sets_(sets), loop_(loop), progress_(progress) {}

  Status submit(const Submission& s, int64_t* handle);
  // Submits for a caller that waits immediately. *handle is 0 when the operation has already succeeded; then there is
  // nothing to wait for or to release.
  Status call(const Submission& s, int64_t* handle) { return begin_here(s, handle); }
  // Submits for a caller that goes on and waits later. A small operation makes its first steps here, on the calling
  // thread: hc-engine need not wake up for it if the caller waits before other ranks have come. *handle as from call().
  Status start(const Submission& s, int64_t* handle) { return begin_here(s, handle); }
  Status submit_declared(int process_set, BucketId bucket, const DeclaredCall& call, int64_t* handle);

  // True when done, failed or unknown.
  bool poll(int64_t handle);
  // Makes progress until the operation is done or timeout_s has passed (< 0: no limit). Returns the operation's own
  // status.
  Status wait(int64_t handle, double timeout_s, bool* done);
  // Makes progress for as long as something moves, but not for long. True when done, failed or unknown.
  bool advance(int64_t handle);
  // The operation behind a handle that is done; null when it is not, or unknown.
  Operation* finished(int64_t handle);

  // Submits, waits and releases. `end` is called now and then during the wait; when it returns an error, the wait ends
  // with that error.
  Status run(const Submission& s, const std::function<Status()>& end = nullptr);
  Status barrier(int process_set, const std::string& name);

 private:
  Status enqueue(const Submission& s, BucketId bucket, int64_t* handle, bool* captured = nullptr);
  Status submit_elsewhere(const BucketSet& set, int process_set, BucketId bucket, const DeclaredCall& call,
                          int64_t* handle);
  Status begin_here(const Submission& s, int64_t* handle);
  bool repeat(const Submission& s, int64_t* handle) HC_REQUIRES(progress_.progress_lock());
  bool takes_first_step(const Submission& s) const HC_REQUIRES(progress_.progress_lock());
  Status capture(const Submission& s, BucketId bucket, int64_t* handle);

  Context& context_;
  Intake& intake_;
  Backend& backend_;
  SetTable& sets_;
  Loop& loop_;
  ProgressThreads& progress_;
  // In a row, without an iteration of the engine.
  int calls_without_a_look_ HC_GUARDED_BY(progress_.progress_lock()) = 0;
};

}  // namespace hc
