// The timeline: events go into a bounded queue, thread hc-timeline writes them to a file (trace.h has the format); a
// listener in this process may have them as well, from a queue of its own. While both are off it costs the engine one
// relaxed load. The engine waits for neither: what does not fit into a queue is dropped and counted.
//
// Thread: start, stop from any; the others from any, mostly the thread that makes progress. Owner: the engine.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "agreement/coordinator.h"
#include "base/mutex.h"
#include "base/status.h"
#include "base/thread.h"
#include "engine/operation/operation.h"
#include "engine/record/trace.h"

namespace hc {

class Timeline {
 public:
  ~Timeline() { stop(); }
  // Opens the file and begins; a timeline that runs already ends first. `say` gets a warning when writing fails.
  Status start(const std::string& path, Trace::Origin origin, bool mark_cycles,
               std::function<void(const std::string&)> say);
  void stop();  // writes what is queued, ends the array, closes; nothing happens when it is off
  // From now on heard() has what happens, of the operations of `rank` only; until stop_listening().
  void listen(int rank);
  void stop_listening();
  // Waits for events and returns them, as event_line() writes them and, at the end, ["dropped",number] where some did
  // not fit. "" when nobody listens any more. Thread: one.
  std::string heard();
  // In a forked child: the thread and the file are the parent's. The child has one thread, and the lock may be held.
  void forget() HC_NO_THREAD_SAFETY_ANALYSIS;

  bool on() const { return on_.load(std::memory_order_relaxed); }
  bool marks_cycles() const { return mark_cycles_.load(std::memory_order_relaxed); }

  // Call these only while on().
  void announced(TraceKey key, int world_rank, TimePoint at) {
    push({TraceEvent::Kind::kAnnounced, std::move(key), world_rank, "", false, {}, at});
  }
  void agreed(TraceKey key, TimePoint at) { push({TraceEvent::Kind::kAgreed, std::move(key), -1, "", false, {}, at}); }
  void started(const Operation& op, const char* phase, bool of_operation, TimePoint at) {
    push({TraceEvent::Kind::kStarted, key_of(op), -1, phase, of_operation, {}, at});
  }
  // What runs these operations now; null entries are skipped.
  void phase(const std::vector<Operation*>& operations, const char* algorithm);
  void done(const Operation& op, const Status& status);
  void span(const std::string& name, TimePoint from, double seconds, const std::string& args) {
    push({TraceEvent::Kind::kSpan, {Op::kAllreduce, 0, name, 0}, -1, "", false, args, from, seconds});
  }
  void step(uint64_t number, TimePoint at) {
    push({TraceEvent::Kind::kStep, {Op::kAllreduce, 0, "", number}, -1, "", false, {}, at});
  }
  void cycle() { push({TraceEvent::Kind::kCycle, {}, -1, "", false, {}, Clock::now()}); }

  static TraceKey key_of(const Operation& op);

 private:
  void push(TraceEvent event);
  void write_until_stopped();
  bool write(const std::string& text);

  std::atomic<bool> on_{false}, mark_cycles_{false};
  Mutex running_mu_;  // one start or stop at a time
  NamedThread thread_ HC_GUARDED_BY(running_mu_);

  // Set by start() before the thread exists, then its own.
  int file_ = -1;
  std::string path_;
  Trace::Origin origin_;
  std::function<void(const std::string&)> say_;

  Mutex mu_;
  CondVar changed_;
  bool writes_ HC_GUARDED_BY(mu_) = false;
  std::vector<TraceEvent> queue_ HC_GUARDED_BY(mu_);
  uint64_t dropped_ HC_GUARDED_BY(mu_) = 0;
  bool stopping_ HC_GUARDED_BY(mu_) = false;

  CondVar has_heard_;
  bool listens_ HC_GUARDED_BY(mu_) = false;
  int listener_rank_ HC_GUARDED_BY(mu_) = -1;
  std::vector<TraceEvent> heard_ HC_GUARDED_BY(mu_);
  uint64_t missed_ HC_GUARDED_BY(mu_) = 0;
};

// Records what the coordinator of one process set sees.
class TimelineWatch final : public AgreementWatch {
 public:
  TimelineWatch(Timeline* timeline, uint16_t process_set, std::vector<int> world_rank)
      : timeline_(timeline), process_set_(process_set), world_rank_(std::move(world_rank)) {}
  bool on() const override { return timeline_->on(); }
  void announced(const Subject& s, int group_rank, TimePoint at) override {
    timeline_->announced(key_of(s), world_rank_[static_cast<size_t>(group_rank)], at);
  }
  void decided(const Subject& s) override { timeline_->agreed(key_of(s), Clock::now()); }

 private:
  TraceKey key_of(const Subject& s) const {
    return {s.op, process_set_, s.unnamed ? std::string() : std::string(s.name), s.unnamed ? s.sequence : 0};
  }
  Timeline* const timeline_;
  const uint16_t process_set_;
  const std::vector<int> world_rank_;
};

}  // namespace hc
