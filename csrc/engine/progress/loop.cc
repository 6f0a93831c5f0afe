#include "engine/progress/loop.h"

#include <algorithm>
#include <new>

namespace hc {

namespace {
constexpr unsigned kLooksAtSockets = 1024;  // iterations between two, where all ranks share memory
constexpr double kAbortEndsS = 3;           // for all of the backend's work to end
// A rank that raises an error may have finished all that it had submitted: the others may still be about to.
constexpr double kQuietS = 0.05;  // nothing is under way, and nothing has moved for so long
constexpr double kFinishS = 1;    // however much moves
}  // namespace

void Loop::start() {
  const Config& config = parts_.context.config;
  timer_s_ = std::min({0.5, config.liveness_probe_s / Liveness::kTicksInProbe, config.stall_check_s / 2});
  next_timer_ = Clock::now();
}

// ---- one iteration

bool Loop::step(bool may_coalesce) {
  last_ = Iteration{};
  last_.may_coalesce = may_coalesce;
  last_.looks_soon = parts_.backend.has_failed() || (watches_flights_.load(std::memory_order_relaxed) && in_flight());
  try {
    Status done = advance();
    if (done.is_ok() && is_told()) done = finish_before(*told_);
    if (!done.is_ok()) {
      fail(done);
      last_.moved = true;
    }
  } catch (const std::exception& e) {
    fail_after(e);
    last_.moved = true;
  }
  return last_.moved;
}

Status Loop::finish_before(const Told& told) {
  const TimePoint now = Clock::now();
  if (last_.moved) moved_at_ = now;
  const bool rests = outstanding() == 0 || seconds_between(moved_at_, now) >= kQuietS;
  if ((rests && !is_under_way()) || told.limit.passed()) return told.reason;
  last_.looks_soon = true;
  return Status::ok();
}

// Something that all of its ranks have agreed on: one that has finished has finished that, too, and this one will.
bool Loop::is_under_way() {
  return in_flight() || parts_.messages.are_moving() ||
         std::any_of(parts_.sets.mine().begin(), parts_.sets.mine().end(),
                     [](const ProcessSet* set) { return !set->batches().is_idle(); });
}

Status Loop::advance() {
  Mesh& mesh = *parts_.context.mesh;
  Counters::add_locked(parts_.context.counters.steps);
  if (!mesh.all_shared() || ++iterations_ % kLooksAtSockets == 0) HC_TRY(poll());
  if (has_abort_.load(std::memory_order_acquire)) {
    MutexLock lock(abort_mu_);
    has_abort_.store(false);
    return Status(Code::kAborted, std::exchange(abort_text_, ""), mesh.rank());
  }
  // Before what is submitted: a notice is about what was there before.
  if (parts_.seat.has_news() && !parts_.context.has_failed()) HC_TRY(hear_worlds());
  if (parts_.intake.has_news()) take_submitted();
  HC_TRY(receive());
  if (parts_.backend.take_tickets()) last_.moved = true;
  for (ProcessSet* set : parts_.sets.mine()) HC_TRY(set->step(&last_));
  if (parts_.backend.kept_back()) pass_tickets_on();
  if (parts_.messages.outstanding() == 0) return Status::ok();
  HC_TRY(parts_.messages.step(&last_.moved));
  last_.looks_soon = last_.looks_soon || parts_.messages.looks_soon();
  if (parts_.backend.kept_back()) pass_tickets_on();  // those that messages of rank 0 have asked for
  return Status::ok();
}

void Loop::take_submitted() {
  RankMetrics& rank_metrics = parts_.context.rank_metrics;
  parts_.intake.take();
  while (Operation* op = parts_.intake.next()) {
    last_.moved = true;
    const uint64_t submitted = rank_metrics.at(op->submitted);
    op->traces.is_counted = true;
    rank_metrics.began(submitted);
    if (op->name_record && rank_metrics.repeats(op->name_record->seen(), op->bucket.set >= 0, submitted) &&
        parts_.timeline.on())
      parts_.timeline.step(rank_metrics.steps(), op->submitted);
    if (!is_message(op->signature().op)) {
      parts_.sets.find(op->process_set)->take(op);
    } else if (parts_.context.has_failed()) {
      parts_.completion.finish(op, parts_.intake.failure().with(op->describe()));
    } else if (Status sent = parts_.messages.submit(op); !sent.is_ok()) {
      fail(sent);
    }
  }
}

// Shared-memory rings move here; sockets move in poll(). A broken channel is reported there, after its last frames.
// After a failure, too: frames that nobody takes would wake this rank again and again.
Status Loop::receive_frames() {
  Mesh& mesh = *parts_.context.mesh;
  for (int r = 0; r < mesh.size(); ++r) {
    if (r == mesh.rank()) continue;
    while (mesh.channel(r).receive(&received_)) {
      last_.moved = true;
      parts_.link.count_received(r, received_.size());
      HC_TRY(handle_frame(r, received_));
    }
  }
  return Status::ok();
}

Status Loop::handle_frame(int from, std::span<const uint8_t> frame) {
  Reader in(frame);
  const auto kind = in.get<FrameKind>();
  const bool has_failed = parts_.context.has_failed();
  if (has_failed && kind != FrameKind::kGoodbye) return Status::ok();
  const auto checked = [&](const Status& status) {
    return status.is_ok() ? status : status.with(text_of("control frame from ", parts_.context.mesh->describe(from)));
  };
  switch (kind) {
    case FrameKind::kRequests:
      return checked(take_requests(from, &in));
    case FrameKind::kPlan:
      return checked(take_plan(from, &in, frame));
    case FrameKind::kFlushHeld:
      return checked(take_flush_frame(from, &in));
    case FrameKind::kBucketsLeft:
      return checked(take_buckets_left(from, &in));
    case FrameKind::kMessage:
    case FrameKind::kMessageWanted:
    case FrameKind::kMessageTaken:
    case FrameKind::kMessageRefused:
    case FrameKind::kMessageWithdrawn:
    case FrameKind::kLinkId:
      return checked(parts_.messages.handle(from, kind, &in));
    case FrameKind::kGoodbye:
      if (!told_ && !has_failed) return peer_left(from, in.get_text());
      parts_.link.note_left(from, in.get_text());
      return Status::ok();
    case FrameKind::kEnding:
      parts_.link.note_ending(from);
      return Status::ok();
    case FrameKind::kParentLeft:
      return checked(take_parent_left(&in));
    case FrameKind::kAbort: {
      const auto code = in.get<Code>();
      const auto culprit = in.get<int32_t>();
      const bool has_finished = in.get<uint8_t>() != 0;
      for (ProcessSet* set : parts_.sets.mine()) HC_TRY(set->end_refused());
      const Status reason(code == Code::kOk ? Code::kAborted : code, in.get_text(), culprit);
      if (!has_finished || reason.code() != Code::kAborted) return reason;
      if (!told_) told_ = {reason, Deadline::in(kFinishS)};
      moved_at_ = Clock::now();
      return Status::ok();
    }
    case FrameKind::kPing:
      parts_.link.begin(FrameKind::kPong);
      return checked(parts_.link.send(from, false));
    case FrameKind::kPong:
      return parts_.peers.take_pong(from);
    case FrameKind::kIsHeard:
      return checked(parts_.peers.take_question(from, &in));
    case FrameKind::kHeard:
      return checked(parts_.peers.take_witness(&in));
    case FrameKind::kDeviceAsk:
    case FrameKind::kLaunchTicket:
    case FrameKind::kMessageAsk:
      return checked(parts_.backend.take_frame(kind, from, &in));
    case FrameKind::kStackRequest:
      return checked(parts_.stalls.answer(from, in.get<uint8_t>() != 0, {pending(), launched(Clock::now(), 0)}));
    case FrameKind::kStackReply:
      parts_.stalls.take_answer(from, in.get_text());
      return Status::ok();
    case FrameKind::kWaiting:
      HC_TRY(parts_.deadlocks.take_report(from, &in, members_of_set()));
      return follow_deadlock();
    case FrameKind::kDeadlock:
      HC_TRY(checked(parts_.deadlocks.take_notice(&in)));
      return follow_deadlock();
    case FrameKind::kWaitingInWorlds:
      return follow_worlds(parts_.between_worlds.take_report(from, &in, members_of_set()));
    case FrameKind::kDeadlockOfWorlds:
      return follow_worlds(checked(parts_.between_worlds.take_notice(&in)));
    case FrameKind::kClockAsk:
    case FrameKind::kClockAnswer:
      return checked(parts_.clock.take_frame(kind, from, &in));
  }
  return checked(error(Code::kInternal, "unknown control frame ", static_cast<int>(kind)));
}

Status Loop::take_requests(int from, Reader* in) {
  while (in->ok() && in->remaining() > 0) {
    RequestList requests;
    HC_TRY(decode(in, &requests));
    ProcessSet* set = parts_.sets.find(requests.process_set);
    if (!set || !set->members().has_me() || requests.generation != parts_.context.generation) continue;
    HC_TRY(set->take_requests(from, requests));
  }
  return Status::ok();
}

Status Loop::take_plan(int from, Reader* in, std::span<const uint8_t> frame) {
  Plan plan;
  HC_TRY(decode(in, &plan));
  ProcessSet* set = parts_.sets.find(plan.process_set);
  if (!set || !set->members().has_me() || plan.generation != parts_.context.generation) return Status::ok();
  return set->take_plan(from, std::move(plan), frame);
}

Status Loop::take_flush_frame(int from, Reader* in) {
  ProcessSet* set = parts_.sets.find(in->get<uint16_t>());
  const auto how = in->get<uint8_t>();
  if (!in->ok()) return error(Code::kInternal, "a frame about held requests is broken");
  return set && set->members().has_me() ? set->take_flush_frame(from, how) : Status::ok();
}

Status Loop::take_buckets_left(int from, Reader* in) {
  ProcessSet* set = parts_.sets.find(in->get<uint16_t>());
  return set && set->members().has_me() ? set->take_buckets_left(from, in) : Status::ok();
}

Status Loop::take_parent_left(Reader* in) {
  ProcessSet* set = parts_.sets.find(in->get<uint16_t>());
  const auto rank = in->get<int32_t>();
  const std::string text = in->get_text();
  if (!in->ok()) return error(Code::kInternal, "a frame about who has left is broken");
  return set && set->members().has_me() ? set->parent_left(rank, text) : Status::ok();
}

// ---- sockets and peers

Status Loop::poll() {
  std::vector<Loss> losses;
  Mesh& mesh = *parts_.context.mesh;
  Status polled = mesh.poll(0, &last_.moved, &losses);
  if (losses.empty() && polled.is_ok()) return Status::ok();
  HC_TRY(receive());  // a goodbye or the reason of its end may be among the peer's last words
  if (is_told()) return polled;
  for (const Loss& loss : losses)
    if (!parts_.link.has_left(loss.rank))
      return Status(Code::kPeerLost,
                    text_of(mesh.describe(loss.rank), " ", loss.reason,
                            ". Its own output or its launcher's report has the cause; the others stop because of it."),
                    loss.rank);
  return polled;
}

Status Loop::peer_left(int rank, const std::string& text) {
  parts_.link.note_left(rank, text);
  const std::string full = text_of(
      "Horovod has been shut down: ", parts_.context.mesh->describe(rank), " ", text,
      ", so this operation can never complete. Did it leave early (sys.exit), or has it fewer steps than others? "
      "hvd.join() evens them out.");
  parts_.messages.peer_left(rank, full);
  for (ProcessSet* set : parts_.sets.mine()) HC_TRY(set->peer_left(rank, full));
  return Status::ok();
}

// ---- the backend

// On rank 0, tickets that travel in shared memory. In the same iteration in which they were given: it may be the last
// one for a while.
void Loop::pass_tickets_on() {
  if (!parts_.backend.pass_on()) last_.looks_soon = true;
  parts_.sets.world().wake_readers();
}

bool Loop::launched_in_flight() {
  if (parts_.context.has_failed()) return false;
  const TimePoint now = Clock::now();
  if (parts_.backend.oldest_flight_s(now) > 0) return true;
  return std::any_of(parts_.sets.mine().begin(), parts_.sets.mine().end(),
                     [&](ProcessSet* set) { return set->backend().oldest_flight_s(now) > 0; });
}

bool Loop::has_flights() const {
  if (parts_.context.has_failed()) return false;
  return parts_.backend.has_flights() || std::any_of(parts_.sets.mine().begin(), parts_.sets.mine().end(),
                                                     [](ProcessSet* set) { return set->backend().has_flights(); });
}

// ---- time

void Loop::blame_backend() {
  if (Status blamed = parts_.backend.blame(Clock::now()); !blamed.is_ok()) fail(blamed);
}

// What others were told that this rank waits for is over.
void Loop::rest() {
  if ((parts_.deadlocks.has_told() || parts_.seat.shows_something()) && !parts_.context.has_failed())
    if (Status looked = look_for_deadlock(Clock::now()); !looked.is_ok()) fail(looked);
  parts_.peers.rest();
}

void Loop::run_timers(TimePoint now) {
  next_timer_ = now + std::chrono::milliseconds(static_cast<int>(timer_s_ * 1000));
  parts_.intake.beat();
  if (parts_.context.has_failed()) return;
  if (Status checked = check_late(now); !checked.is_ok()) fail(checked);
}

Status Loop::check_late(TimePoint now) {
  if (parts_.context.mesh->look_at_processes()) HC_TRY(poll());
  if (parts_.backend.in_use()) HC_TRY(check_backends());
  const Config& config = parts_.context.config;
  std::vector<bool> waits(static_cast<size_t>(parts_.context.mesh->size()), false);
  for (ProcessSet* set : parts_.sets.mine()) set->mark_awaited(now, &waits);
  parts_.messages.mark_awaited(now, config.liveness_probe_s, &waits);
  parts_.backend.mark_awaited(now, config.liveness_probe_s, &waits);
  HC_TRY(parts_.peers.check(now, std::move(waits)));
  if (config.stall_check_disable) return Status::ok();
  for (ProcessSet* set : parts_.sets.mine()) HC_TRY(set->flush_held_requests_if_late(now));
  measure_stall(now);
  HC_TRY(check_deadlock(now));
  return parts_.stalls.is_due(now) ? report_stalls(now) : Status::ok();
}

Status Loop::check_backends() {
  parts_.backend.note_failure();
  for (ProcessSet* set : parts_.sets.mine())
    if (!parts_.backend.has_failed()) HC_TRY(set->check_backend());
  return Status::ok();
}

MembersOf Loop::members_of_set() const {
  return [this](uint16_t id) {
    const ProcessSet* set = parts_.sets.find(id);
    return set ? std::span<const int>(set->members().ranks) : std::span<const int>();
  };
}

Status Loop::check_deadlock(TimePoint now) {
  if (const auto ended = parts_.deadlocks.messages_to_end(now))
    parts_.messages.end_deadlock(ended->stuck, Status(Code::kMismatch, ended->text));
  HC_TRY(look_for_deadlock(now));
  HC_TRY(follow_deadlock());
  return look_between_worlds(now);
}

Status Loop::look_for_deadlock(TimePoint now) {
  const std::vector<const Operation*> all = pending();
  HC_TRY(parts_.deadlocks.look(now, all, members_of_set()));
  if (parts_.seat.has_company()) parts_.seat.show(parts_.deadlocks.shown(now, all, members_of_set()));
  return Status::ok();
}

// Ranks wait for one another. First every operation of theirs is to become known to its coordinator, which later can
// end it on all ranks that have announced it.
Status Loop::follow_deadlock() {
  while (const auto notice = parts_.deadlocks.next_notice()) {
    const bool is_stuck = notice->stuck.contains(parts_.context.rank());
    for (ProcessSet* set : parts_.sets.mine()) {
      HC_TRY(set->flush_held_requests(is_stuck));
      if (!notice->text.empty()) set->end_deadlock(notice->stuck, notice->text);
    }
    if (is_stuck) HC_TRY(look_for_deadlock(Clock::now()));
  }
  return Status::ok();
}

Status Loop::hear_worlds() {
  last_.moved = true;
  for (DeadlockNotice& notice : parts_.seat.take_news()) {
    if (notice.is_abort) return Status(Code::kAborted, notice.text, parts_.context.rank());
    parts_.deadlocks.take_notice_of_worlds(std::move(notice));
    HC_TRY(follow_deadlock());
  }
  return look_between_worlds(Clock::now());
}

Status Loop::look_between_worlds(TimePoint now) {
  return follow_worlds(parts_.between_worlds.look(now, parts_.seat.gather(now)));
}

Status Loop::follow_worlds(const Status& looked) {
  if (looked.code() == Code::kAborted) parts_.seat.pass_on({parts_.between_worlds.stuck(), looked.text(), true});
  HC_TRY(looked);
  while (auto notice = parts_.between_worlds.next_notice()) {
    const bool is_stuck = notice->stuck.contains(parts_.context.rank());
    parts_.seat.pass_on(*notice);
    parts_.deadlocks.take_notice_of_worlds(std::move(*notice));
    HC_TRY(follow_deadlock());
    if (is_stuck) HC_TRY(look_between_worlds(Clock::now()));
  }
  return Status::ok();
}

Stalls Loop::find_stalls(TimePoint now) const {
  Stalls stalls;
  const bool asked = parts_.stalls.was_asked(now);
  for (const ProcessSet* set : parts_.sets.mine()) set->find_stalls(now, asked, &stalls);
  const double patience_s = parts_.context.config.stall_check_s;
  stalls.lines += parts_.messages.stalled(now, patience_s, &stalls.longest_s, &stalls.late);
  if (asked) return stalls;
  const std::string launched = parts_.backend.under_way(now, patience_s, &stalls.longest_s);
  if (launched.empty()) return stalls;
  stalls.lines += text_of("\n  on the GPU of rank ", parts_.context.rank(), ", ", launched);
  std::vector<bool> waits(static_cast<size_t>(parts_.context.mesh->size()), false);
  parts_.backend.mark_awaited(now, patience_s, &waits);
  for (int r = 0; r < parts_.context.mesh->size(); ++r)
    if (waits[static_cast<size_t>(r)]) stalls.late.insert(r);
  return stalls;
}

std::string Loop::launched(TimePoint now, double older_than_s) const {
  double longest_s = 0;
  std::string text = parts_.backend.under_way(now, older_than_s, &longest_s);
  for (ProcessSet* set : parts_.sets.mine())
    if (const std::string one = set->backend().under_way(now, older_than_s, &longest_s); !one.empty())
      text += (text.empty() ? "" : "; ") + one;
  return text;
}

Status Loop::report_stalls(TimePoint now) {
  if ((parts_.deadlocks.is_said() || parts_.between_worlds.is_said()) && parts_.context.config.stall_shutdown_s <= 0)
    return Status::ok();
  Stalls stalls = find_stalls(now);
  HC_TRY(parts_.stalls.report(now, std::move(stalls), {pending(), launched(now, 0)}));
  if (parts_.stalls.awaits_answers()) next_timer_ = now + StallWatch::kAnswerMs;
  return Status::ok();
}

// What this rank itself has waited for too long, and for whom, where it is one that knows.
void Loop::measure_stall(TimePoint now) {
  const Operation* oldest = nullptr;
  for (const Operation* op : pending())
    if (!oldest || op->submitted < oldest->submitted) oldest = op;
  const double patience_s = parts_.context.config.stall_check_s;
  const bool is_late = oldest && seconds_between(oldest->submitted, now) >= patience_s;
  const std::string what = is_late ? oldest->describe() : launched(now, patience_s);
  if (what.empty()) return;
  const Stalls stalls = find_stalls(now);
  parts_.context.rank_metrics.stall(what, {stalls.late.begin(), stalls.late.end()});
}

std::vector<const Operation*> Loop::pending() const {
  std::vector<const Operation*> all;
  for (const ProcessSet* set : parts_.sets.mine())
    all.insert(all.end(), set->pending().all().begin(), set->pending().all().end());
  all.insert(all.end(), parts_.messages.operations().begin(), parts_.messages.operations().end());
  return all;
}

// ---- ends

void Loop::abort(const std::string& text) {
  MutexLock lock(abort_mu_);
  abort_text_ = text;
  has_abort_.store(true);
}

void Loop::fail(const Status& first_reason) {
  Context& context = parts_.context;
  if (context.has_failed()) return;
  const Status reason = with_failure_of_backend(told_ ? told_->reason : first_reason);
  const bool has_finished = outstanding() == 0 && !in_flight();
  parts_.intake.refuse(reason);
  context.failed.store(true);
  parts_.seat.leave();
  context.log.debug("failing every operation: ", reason.text());
  // Before transfers are withdrawn: a half-moved one breaks the channel to a peer that lives.
  parts_.link.tell_failure(reason, has_finished);
  parts_.messages.fail_all(reason);
  // All at once, since one may wait for another; then their end, as tensors are their owners' again behind it.
  parts_.backend.abort();
  for (ProcessSet* set : parts_.sets.mine()) set->backend().abort();
  const Deadline limit = Deadline::in(kAbortEndsS);
  parts_.backend.await_abort(limit);
  for (ProcessSet* set : parts_.sets.mine()) set->backend().await_abort(limit);
  for (ProcessSet* set : parts_.sets.mine()) set->fail(reason);
  parts_.records.save(reason.text());
}

Status Loop::with_failure_of_backend(const Status& reason) {
  if (!parts_.backend.in_use()) return reason;
  for (ProcessSet* set : parts_.sets.mine()) set->backend().note_failure();
  parts_.backend.note_failure();
  return parts_.backend.with_failure(reason);
}

void Loop::fail_after(const std::exception& thrown) {
  const bool is_memory = dynamic_cast<const std::bad_alloc*>(&thrown) != nullptr;
  fail(Status(Code::kInternal,
              text_of(parts_.context.me(), is_memory ? " ran out of memory" : ": ", is_memory ? "" : thrown.what()),
              parts_.context.rank()));
  parts_.intake.look_again();  // the next step fails the rest of them
}

void Loop::fail_latecomers() {
  const Status failure = parts_.intake.failure();
  for (Operation* op : parts_.intake.take_all()) {
    if (is_message(op->signature().op))
      parts_.completion.finish(op, failure.with(op->describe()));
    else
      parts_.sets.find(op->process_set)->refuse(op, failure);
  }
}

}  // namespace hc
