// One iteration of the engine, and its end: takes what was submitted, exchanges frames with the other ranks, lets every
// part that has work go on, and checks timers. A part that cannot go on returns an error, with which the whole engine
// fails here, once. A lost connection is noticed here, too.
//
// Thread: the thread that makes progress (step() catches exceptions), or one that holds the progress lock; abort() from
// any. Owner: the engine.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "engine/context.h"
#include "engine/control/control_link.h"
#include "engine/intake/completion.h"
#include "engine/intake/intake.h"
#include "engine/iteration.h"
#include "engine/operation/backend.h"
#include "engine/point_to_point/messages.h"
#include "engine/record/timeline.h"
#include "engine/sets/set_table.h"
#include "engine/watch/clock_offset.h"
#include "engine/watch/deadlock_watch.h"
#include "engine/watch/peer_watch.h"
#include "engine/watch/stall_watch.h"

namespace hc {

class Loop {
 public:
  struct Parts {
    Context& context;
    ControlLink& link;
    Intake& intake;
    Completion& completion;
    FlightRecords& records;
    Backend& backend;
    SetTable& sets;
    Messages& messages;
    StallWatch& stalls;
    DeadlockWatch& deadlocks;
    DeadlockWatch& between_worlds;
    WorldSeat& seat;
    PeerWatch& peers;
    ClockOffset& clock;
    Timeline& timeline;
  };
  explicit Loop(const Parts& parts) : parts_(parts) {}
  // The mesh is connected and the world's set is made.
  void start();

  // True when something has moved. may_coalesce: no thread waits and none is about to sleep, so requests may be held
  // back.
  bool step(bool may_coalesce = false);
  // What the last step has found.
  const Iteration& last() const { return last_; }
  size_t outstanding() const {
    return parts_.sets.pending() + parts_.messages.outstanding() + parts_.backend.kept_back();
  }
  // Something that the backend has launched has not ended yet. Also forgets what has ended.
  bool in_flight() { return parts_.backend.in_use() && launched_in_flight(); }
  // The same without a look there: what has ended meanwhile still counts.
  bool may_be_in_flight() const { return parts_.backend.in_use() && has_flights(); }
  void enter_thread() { parts_.backend.enter_thread(); }
  // From now on somebody waits for the end of what was launched.
  void watch_flights() { watches_flights_.store(true); }
  // Something waits to be taken from submission.
  bool has_news() const { return parts_.intake.has_news() || parts_.seat.has_news(); }
  // Another world of this process has something to tell.
  bool has_word_of_worlds() const { return parts_.seat.has_news(); }
  // Reads and writes sockets.
  void poll_mesh() {
    if (Status polled = poll(); !polled.is_ok()) fail(polled);
  }
  void check_timers() {
    if (parts_.backend.has_failed()) blame_backend();
    if (outstanding() == 0 && !in_flight()) return rest();
    if (const TimePoint now = Clock::now(); now >= next_timer_) run_timers(now);
  }
  double timer_s() const { return timer_s_; }

  // Any thread: the next step fails everything with this text.
  void abort(const std::string& text);
  // A peer has said why all must end, and this rank is about to.
  bool is_told() const { return told_.has_value() && !parts_.context.has_failed(); }
  bool has_abort() const { return has_abort_.load(std::memory_order_relaxed); }

  // Ends every operation with `reason`, here and, as far as they can be reached, on all ranks. Only the first call
  // counts.
  void fail(const Status& reason);
  // Fails after an exception, most likely out of memory, so that no rank waits for what this rank cannot finish any
  // more.
  void fail_after(const std::exception& thrown);
  // Ends operations that were submitted while the engine failed.
  void fail_latecomers();

 private:
  // Why all must end, as a peer has said, and when at the latest.
  struct Told {
    Status reason;
    Deadline limit;
  };
  Status advance();
  // `told`'s reason once what it comes behind is over.
  Status finish_before(const Told& told);
  bool is_under_way();
  void blame_backend();
  void run_timers(TimePoint now);
  void rest();
  bool launched_in_flight();
  bool has_flights() const;
  void take_submitted();
  void measure_stall(TimePoint now);
  Stalls find_stalls(TimePoint now) const;
  // On GPUs, by all process sets and messages, at least so long ago.
  std::string launched(TimePoint now, double older_than_s) const;
  Status receive() {
    if (parts_.context.mesh->progress_shared()) last_.moved = true;
    return parts_.context.mesh->has_frames() ? receive_frames() : Status::ok();
  }
  Status receive_frames();
  Status handle_frame(int from, std::span<const uint8_t> frame);
  Status take_requests(int from, Reader* in);
  Status take_plan(int from, Reader* in, std::span<const uint8_t> frame);
  Status take_flush_frame(int from, Reader* in);
  Status take_buckets_left(int from, Reader* in);
  Status poll();
  Status check_late(TimePoint now);
  Status check_backends();
  Status report_stalls(TimePoint now);
  MembersOf members_of_set() const;
  Status check_deadlock(TimePoint now);
  Status follow_deadlock();
  Status look_for_deadlock(TimePoint now);
  Status hear_worlds();
  Status look_between_worlds(TimePoint now);
  Status follow_worlds(const Status& looked);
  Status peer_left(int rank, const std::string& text);
  Status take_parent_left(Reader* in);
  void pass_tickets_on();
  std::vector<const Operation*> pending() const;
  Status with_failure_of_backend(const Status& reason);

  const Parts parts_;
  Iteration last_;
  double timer_s_ = 1;
  unsigned iterations_ = 0;
  TimePoint next_timer_{}, moved_at_{};
  std::optional<Told> told_;
  std::vector<uint8_t> received_;
  Mutex abort_mu_;
  std::string abort_text_ HC_GUARDED_BY(abort_mu_);
  std::atomic<bool> has_abort_{false}, watches_flights_{false};
};

}  // namespace hc
