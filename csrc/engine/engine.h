// The engine takes operations in any order, has them agreed on, runs them and completes their handles. This class only
// owns and connects the parts that do so. It is an object: four ranks can be four engines in one process.
//
// Threads: any. One at a time makes progress (ProgressThreads): one that waits for a handle, else hc-engine. Completion
// callbacks run on hc-notify.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/calls.h"
#include "engine/context.h"
#include "engine/control/control_link.h"
#include "engine/intake/completion.h"
#include "engine/intake/intake.h"
#include "engine/operation/backend.h"
#include "engine/operation/memory_pressure.h"
#include "engine/point_to_point/messages.h"
#include "engine/progress/loop.h"
#include "engine/progress/progress_threads.h"
#include "engine/record/timeline.h"
#include "engine/set_changes.h"
#include "engine/sets/set_table.h"
#include "engine/start_up.h"
#include "engine/threads/notifier.h"
#include "engine/threads/progress_lock.h"
#include "engine/tune/tuner.h"
#include "engine/watch/clock_offset.h"
#include "engine/watch/deadlock_watch.h"
#include "engine/watch/peer_watch.h"
#include "engine/watch/stack_source.h"
#include "engine/watch/stall_watch.h"

namespace hc {

class Engine {
 public:
  static Result<std::unique_ptr<Engine>> create(Config config);
  ~Engine();
  std::string endpoint() const { return context_.mesh->endpoint(); }
  Status connect(const MeshMembers& members);
  const Mesh& mesh() const { return *context_.mesh; }

  // Operations: see Calls.
  Status submit(const Submission& s, int64_t* handle) { return calls_.submit(s, handle); }
  Status call(const Submission& s, int64_t* handle) { return calls_.call(s, handle); }
  Status start(const Submission& s, int64_t* handle) { return calls_.start(s, handle); }
  bool poll(int64_t handle) { return calls_.poll(handle); }
  Status wait(int64_t handle, double timeout_s, bool* done) { return calls_.wait(handle, timeout_s, done); }
  bool advance(int64_t handle) { return calls_.advance(handle); }
  Operation* finished(int64_t handle) { return calls_.finished(handle); }
  void release(int64_t handle) { intake_.handles().release(handle); }
  bool release_if_succeeded(int64_t handle) { return intake_.handles().release_if_succeeded(handle); }
  // Results that do not lie in host memory: see Backend.
  Status stream_wait(int64_t handle, void* stream) {
    return backend_->wait_on_stream(finished(handle), handle, stream);
  }
  Status copy_result(int64_t handle, size_t i, void* to, size_t bytes, void* stream) {
    return backend_->copy_result(finished(handle), handle, i, to, bytes, stream);
  }

  // An optimizer's buckets and process sets: see SetChanges.
  Status declare(int process_set, BucketSet buckets, int* id) {
    return changes_.declare(process_set, std::move(buckets), id);
  }
  Status undeclare(int process_set, int id) { return changes_.undeclare(process_set, id); }
  Status submit_declared(int process_set, int set, int bucket, DeclaredCall call, int64_t* handle) {
    return calls_.submit_declared(process_set, {set, bucket}, call, handle);
  }
  Status add_process_set(std::vector<int> ranks, int* id) { return changes_.add(std::move(ranks), id); }
  Status remove_process_set(int id) { return changes_.remove(id); }
  // Size 0: there is no such set. rank: this one's place in it, -1 when it is no member.
  struct Place {
    int size = 0, rank = -1;
  };
  Place place_in(int process_set) const;

  // Shared memory of this rank; memory that the backend can be told of.
  Result<std::shared_ptr<Memory>> allocate(size_t bytes);
  Result<std::shared_ptr<Memory>> allocate_elsewhere(int index, size_t bytes) {
    return backend_->allocate(index, bytes);
  }
  MemoryPressure& memory_pressure() { return backend_->memory_pressure(); }
  void trim_memory() { backend_->trim_memory(); }
  bool shares_memory() const;  // all ranks of the world do

  void abort(const std::string& text);
  // abort() by a thread that waits for `handle` and cannot go on: "<this rank> <text> during <the operation>".
  void break_off(int64_t handle, const std::string& text);
  // This rank will only finish what it has begun; whether all others have said so, or have left.
  void say_ending();
  bool all_are_ending();
  // Collective: finishes what every rank has announced, says goodbye and stops the threads.
  Status shutdown(double timeout_s);
  void after_fork_child();

  // Reports, as JSON but for describe().
  std::string counters_json() const;
  std::string describe();
  std::string flight_record(const std::string& reason) { return intake_.flight_record(reason); }
  // Rank 0 writes the timeline, or every rank writes a file of its own.
  Status start_timeline(const std::string& path, bool mark_cycles);
  Status stop_timeline();
  // Adds a span `name` to the timeline, from a moment of the monotonic clock on; args: the members of a JSON object.
  // Does nothing when no timeline is written and nobody listens.
  void timeline_span(const std::string& name, double from_s, double seconds, const std::string& args);
  // The timeline's events, as text, for one listener in this process; see Timeline::heard(). shutdown() ends it.
  Status listen_to_timeline();
  std::string heard_of_timeline() { return timeline_.heard(); }
  // Before connect: the rank metrics lies in this file from then on (RankMetrics::share).
  Status share_rank_metrics(int fd, size_t offset, const std::string& program) {
    return context_.rank_metrics.share(fd, offset, program);
  }
  std::string rank_metrics() const { return context_.rank_metrics.copy(); }
  // Before connect: see StackSource.
  void watch_stack(int signal, int fd, int thread, const std::string& libraries) {
    stacks_.watch(signal, fd, thread, libraries);
  }

 private:
  explicit Engine(Config config);
  void start_configured_timeline();
  void measure_clock();
  void take_seat(const MeshMembers& members);
  void begin_page();
  void finish_operations(double timeout_s);

  // In order of construction: each part may use those above it.
  Context context_;
  ProgressLock progress_lock_;
  Notifier notifier_;
  Timeline timeline_;
  ControlLink link_;
  Tuner tuner_;
  Intake intake_;
  FlightRecords records_;
  Completion completion_;
  const std::unique_ptr<Backend> backend_;
  Messages messages_;
  SetTable sets_;
  StackSource stacks_;
  StallWatch stalls_;
  DeadlockWatch deadlocks_, between_worlds_;
  WorldSeat seat_;
  PeerWatch peers_;
  ClockOffset clock_;
  Loop loop_;
  ProgressThreads progress_;
  Calls calls_;
  SetChanges changes_;
  Selected selected_;
};

}  // namespace hc
