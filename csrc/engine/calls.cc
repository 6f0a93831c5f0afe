#include "engine/calls.h"

#include <thread>

#include "agreement/deadlock.h"
#include "base/nvtx.h"
#include "base/quoted.h"
#include "base/thread.h"

namespace hc {

namespace {
// A rank of another process set, say, may have said something.
constexpr int kCallsWithoutALook = 256;
constexpr double kLookS = 0.05;
// What a thread that has other things to do copies or reduces at most, when it starts an operation.
constexpr size_t kFirstStepBytes = 64 * kKiB;
// A larger round may go in halves, in which the others wait for this rank a second time.
constexpr size_t kRestLongBytes = 16 * kKiB;
constexpr std::chrono::seconds kOtherWorldsEnd{1};  // all of them have, unless a machine is very busy

size_t bytes_of(const Submission& s) {
  size_t bytes = 0;
  for (const Submission::Tensor& t : s.tensors) bytes += hc::bytes_of(t);
  return bytes;
}

// Tells who looks for deadlocks that a thread waits.
class Awaits {
 public:
  explicit Awaits(Operation::Traces::Awaited& awaited) : awaited_(awaited) {
    awaited_.thread.store(thread_id(), std::memory_order_relaxed);
    awaited_.threads.fetch_add(1, std::memory_order_relaxed);
  }
  ~Awaits() {
    awaited_.left.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
    awaited_.threads.fetch_sub(1, std::memory_order_relaxed);
  }
  Awaits(const Awaits&) = delete;
  Awaits& operator=(const Awaits&) = delete;

 private:
  Operation::Traces::Awaited& awaited_;
};
}  // namespace

Status Calls::submit(const Submission& s, int64_t* handle) {
  HC_TRY(context_.check_connected());
  return enqueue(s, {}, handle);
}

Status Calls::enqueue(const Submission& s, BucketId bucket, int64_t* handle, bool* captured) {
  const nvtx::Range range([&] { return text_of("submit ", name_of(s.op), " ", in_quotes(s.name)); });
  std::unique_ptr<BackendWork> work;
  if (!s.place.is_host) {
    auto prepared = backend_.prepare(s, captured);
    HC_TRY(prepared.status(), name_of(s.op), " ", in_quotes(s.name), ": rank ", context_.rank());
    if (captured && *captured) return Status::ok();
    work = prepared.take();
  }
  HC_TRY(intake_.queue(s, bucket, std::move(work), handle));
  progress_.set_may_rest_long(false);
  if (!s.will_wait) progress_.wake_sleepers();
  return Status::ok();
}

Status Calls::submit_declared(int process_set, BucketId bucket, const DeclaredCall& call, int64_t* handle) {
  HC_TRY(context_.check_connected());
  std::shared_ptr<const BucketSet> elsewhere;
  HC_TRY(intake_.queue_declared(process_set, bucket, call.priority, handle, &elsewhere));
  progress_.set_may_rest_long(false);
  if (elsewhere) return submit_elsewhere(*elsewhere, process_set, bucket, call, handle);
  progress_.wake_sleepers();
  return Status::ok();
}

Status Calls::submit_elsewhere(const BucketSet& set, int process_set, BucketId bucket, const DeclaredCall& call,
                               int64_t* handle) {
  Submission::Tensor tensor{};
  const Submission s = set.submission_of(process_set, bucket.index, call, &tensor);
  bool captured = false;
  HC_TRY(enqueue(s, bucket, handle, &captured));
  return captured ? capture(s, bucket, handle) : Status::ok();
}

// A step that a framework captures into a graph: the bucket goes into the graph on this thread. Nothing is agreed on,
// for nothing runs: the ranks must capture, and later replay, the same things in the same order. The progress lock is
// held for the time of the call, because a backend may want one thread at a time.
Status Calls::capture(const Submission& s, BucketId bucket, int64_t* handle) {
  const ProgressThreads::Hold held(progress_);
  ProcessSet* set = sets_.find(s.process_set);
  Status captured = set ? set->backend().capture(s, bucket, handle)
                        : error(Code::kInvalidArgument, "process set ", s.process_set, " was removed");
  return captured.is_ok() ? captured : captured.with("capture of allreduce " + in_quotes(s.name));
}

Status Calls::begin_here(const Submission& s, int64_t* handle) {
  *handle = 0;
  if (!s.place.is_host || s.done || !context_.connected.load(std::memory_order_acquire) || !progress_.try_lock())
    return submit(s, handle);
  if (++calls_without_a_look_ >= kCallsWithoutALook) {  // the engine's iteration, which sees what peers say
    calls_without_a_look_ = 0;
    progress_.unlock();
    return submit(s, handle);
  }
  bool begun = false;
  Status queued;
  try {
    begun = repeat(s, handle);
    if (begun && *handle != 0) progress_.set_may_rest_long(bytes_of(s) < kRestLongBytes);
    if (!begun && takes_first_step(s)) {
      begun = true;
      progress_.set_may_rest_long(is_message(s.op));
      queued = intake_.queue(s, {}, nullptr, handle);
      if (queued.is_ok()) loop_.step();
    }
  } catch (const std::exception& e) {  // perhaps in a round that the others wait for
    loop_.fail_after(e);
    progress_.unlock();
    throw;
  }
  if (begun && *handle != 0 && s.will_wait) {
    progress_.progress_lock().release(loop_.has_news());  // the caller waits for it at once
    return Status::ok();
  }
  // Else whoever sleeps has said so, and it still says so.
  if (begun && (*handle != 0 || context_.mesh->is_awake())) progress_.rest();
  progress_.unlock();
  return begun ? queued : submit(s, handle);
}

// What else is under way the step moves, too: nothing, or small messages.
bool Calls::takes_first_step(const Submission& s) const {
  if (s.will_wait || loop_.has_news()) return false;
  if (loop_.outstanding() != 0 && !(is_message(s.op) && progress_.may_rest_long())) return false;
  return bytes_of(s) <= kFirstStepBytes;
}

bool Calls::repeat(const Submission& s, int64_t* handle) {
  ProcessSet* set = sets_.find(s.process_set);
  return set && (s.will_wait || bytes_of(s) <= kFirstStepBytes) && loop_.outstanding() == 0 && !loop_.has_abort() &&
         !loop_.has_word_of_worlds() && set->repeat(s, progress_.progress_lock(), progress_.spin_pauses(), handle);
}

bool Calls::poll(int64_t handle) {
  Operation* op = intake_.handles().find(handle);
  if (!op || op->done.load(std::memory_order_acquire)) return true;
  if (progress_.may_rest_long() && progress_.try_lock()) {  // nobody else may look for a while
    loop_.step();
    progress_.rest();
    progress_.unlock();
    op = intake_.handles().find(handle);
    if (!op || op->done.load(std::memory_order_acquire)) return true;
  }
  op->note_poll(Clock::now());
  return false;
}

bool Calls::advance(int64_t handle) {
  Operation* op = intake_.handles().find(handle);
  return !op || progress_.while_it_moves(op->done);
}

Operation* Calls::finished(int64_t handle) {
  Operation* op = intake_.handles().find(handle);
  return op && op->done.load(std::memory_order_acquire) ? op : nullptr;
}

Status Calls::wait(int64_t handle, double timeout_s, bool* done) {
  Operation* op = intake_.handles().find(handle);
  *done = true;
  if (!op) return error(Code::kInvalidArgument, "handle ", handle, " is unknown or was released");
  if (!op->done.load(std::memory_order_acquire)) {
    const TimePoint now = Clock::now();
    const Deadline deadline = Deadline::after(now, timeout_s < 0 ? 1e9 : timeout_s);
    RankMetrics::Waiting waiting(context_.rank_metrics, now);
    const Awaits awaits(op->traces.awaited);
    *done = progress_.until(op->done, deadline, &waiting);
    waiting.over(op->traces.started.load(std::memory_order_relaxed), *done ? op->traces.ended : 0);
    if (!*done) return Status::ok();
  }
  // Each world ends its part of the circle by itself: who goes on at once could meet a call that is about to end.
  if (op->status.code() == Code::kMismatch && op->status.text().find(kBetweenWorlds) != std::string::npos)
    std::this_thread::sleep_for(kOtherWorldsEnd);
  return op->status;
}

Status Calls::run(const Submission& s, const std::function<Status()>& end) {
  int64_t handle = 0;
  HC_TRY(submit(s, &handle));
  bool done = false;
  Status outcome;
  while (!done && outcome.is_ok()) {
    outcome = wait(handle, end ? kLookS : -1, &done);
    if (!done && outcome.is_ok()) outcome = end();
  }
  intake_.handles().release(handle);
  return outcome;
}

Status Calls::barrier(int process_set, const std::string& name) {
  Submission s;
  s.op = Op::kBarrier;
  s.process_set = process_set;
  s.name = name;
  s.will_wait = true;
  return run(s);
}

}  // namespace hc
