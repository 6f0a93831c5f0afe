// Who drives, how it waits, and how everything ends. The rule that keeps waiting cheap and never lost:
//   a thread sleeps only after it has (1) set its asleep word, (2) looked at every source of work once more;
//   whoever makes work for a rank (3) makes it visible, (4) looks at that rank's asleep word and rings its doorbell.
// Both sides use sequentially consistent fences between their two halves (Mesh::set_asleep, Mesh::wake).
#include <poll.h>

#include <algorithm>
#include <new>

#include "agreement/frames.h"
#include "engine/engine.h"
#include "engine/progress/idle.h"

namespace hc {

namespace {

constexpr std::chrono::milliseconds kBusyLook{5};  // how often hc-engine looks whether a waiter has left the gate
constexpr int kDeviceLookMs = 1;                   // how often a copy or NCCL's start is looked at
constexpr int kSliceMs = 50;                       // a waiter looks up (deadline, another waiter) at least this often

}  // namespace

Engine::~Engine() {
  if (connected_.load()) (void)shutdown(0);
  end_thread();
  notifier_.stop();
}

// ---- waiting
// ----------------------------------------------------------------------------------------------------------

bool Engine::poll(int64_t handle) {
  Operation* op = handles_.find(handle);
  return !op || op->done.load(std::memory_order_acquire);
}

Operation* Engine::finished(int64_t handle) {
  Operation* op = handles_.find(handle);
  return op && op->done.load(std::memory_order_acquire) ? op : nullptr;
}

Status Engine::wait(int64_t handle, double timeout_s, bool* done) {
  Operation* op = handles_.find(handle);
  *done = true;
  if (!op) return error(Code::kInvalidArgument, "handle ", handle, " is unknown or was released");
  if (!op->done.load(std::memory_order_acquire)) {
    const Deadline deadline = Deadline::in(timeout_s < 0 ? 1e9 : timeout_s);
    *done = drive_until([op] { return op->done.load(std::memory_order_acquire); }, true, deadline);
    if (!*done) return Status::ok();
  }
  return op->status;
}

bool Engine::drive_until(const Over& over, bool shared, const Deadline& deadline) {
  while (true) {
    if (shared && over()) return true;
    bool entered = true;
    if (shared)
      entered = gate_.try_enter();
    else
      enter_gate();
    if (entered) {
      try {
        drive(over, deadline);
      } catch (const std::exception& e) {
        fail_after(e);
      }
      const bool is_over = over();
      rest_after_driving();
      leave_gate();
      if (is_over) return true;
    } else {
      if (sleepers_.load(std::memory_order_seq_cst) > 0) mesh_->wake_self();  // the driver may sleep: it must hand over
      const int ms = std::min(kSliceMs, deadline.remaining_ms());
      gate_.wait_turn(std::chrono::milliseconds(ms), std::nullopt, over);
    }
    if (deadline.passed()) return shared && over();
  }
}

// Whoever drives leaves at its next turn, though what it waits for may never come.
void Engine::enter_gate() {
  const DriveGate::Ticket ticket = gate_.need();
  while (!gate_.try_enter_at_need(ticket)) {
    if (sleepers_.load(std::memory_order_seq_cst) > 0) mesh_->wake_self();
    gate_.wait_turn(std::chrono::milliseconds(kSliceMs), ticket, [] { return false; });
  }
}

void Engine::leave_gate() { gate_.leave(outstanding() > 0 || has_incoming_.load(std::memory_order_seq_cst)); }

void Engine::drive(const Over& over, const Deadline& deadline) {
  mesh_->set_asleep(Sleep::kAwake);
  Idle idle(spin_pauses_, config_.yield_us);
  while (!over() && !gate_.needed() && !stopping_.load(std::memory_order_relaxed)) {
    if (step()) {
      idle.reset();
      continue;
    }
    if (idle.pause()) continue;
    check_timers();
    if (deadline.passed()) return;
    mesh_->set_asleep(Sleep::kAsleepWaiting);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (!step() && !over() && !gate_.needed())
      sleep_on_mesh(longest_sleep_us(std::min(kSliceMs, deadline.remaining_ms())));
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    mesh_->set_asleep(Sleep::kAwake);
    bool moved = false;
    poll_mesh(&moved);
    idle.reset();
  }
}

// hc-engine, if it sleeps, takes over the watch: the asleep word must again say so, and what arrived in between be
// seen.
void Engine::rest_after_driving() {
  if (!engine_sleeps_.load(std::memory_order_seq_cst) || stopping_.load()) return;
  const bool waiting = outstanding() > 0 || device_in_flight();  // what flies is watched: a rank may die, NCCL fail
  mesh_->set_asleep(waiting ? Sleep::kAsleepWaiting : Sleep::kAsleepIdle);
  // What a peer has said since the last step rang no doorbell, and nothing of this rank need wait for it.
  const bool news = mesh_->progress_shared() || mesh_->has_frames();
  if (!waiting && !news && !has_incoming_.load(std::memory_order_seq_cst)) return;
  if (step() || untimed_sleep_.load() || next_gathered_ != TimePoint::max()) mesh_->wake_self();
}

void Engine::sleep_on_mesh(int64_t us) {
  counters_.sleeps.fetch_add(1, std::memory_order_relaxed);
  pollfd watched{mesh_->wait_fd(), POLLIN, 0};
  const timespec limit{us / 1000000, us % 1000000 * 1000};
  (void)::ppoll(&watched, 1, us < 0 ? nullptr : &limit, nullptr);
}

void Engine::run() {
  if (!config_.thread_affinity.empty()) {
    auto cpu = cpu_of_local_rank(config_.thread_affinity, mesh_->local_rank());
    const int one[] = {cpu.is_ok() ? cpu.value() : 0};
    Status set = cpu.is_ok() ? set_allowed_cpus(one) : cpu.status();
    if (!set.is_ok()) log_.warning("HOROCLONE_THREAD_AFFINITY: ", set.text());
  }
  while (true) {
    const DriveGate::Turn turn = gate_.enter_engine(kBusyLook);
    if (turn == DriveGate::Turn::kStopping) return;
    int64_t sleep_us = static_cast<int64_t>(timer_s_ * 1e6) + 1000;
    if (turn == DriveGate::Turn::kDrives) {
      try {
        sleep_us = work_until_idle();
      } catch (const std::exception& e) {
        fail_after(e);
        sleep_us = 0;
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
      }
      leave_gate();
    } else {
      // A waiter drives. Watch the mesh, so that it need not wake this thread when it leaves (rest_after_driving).
      untimed_sleep_.store(false);
      engine_sleeps_.store(true, std::memory_order_seq_cst);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      if (!gate_.driven()) sleep_us = 0;  // it has left, and may not have seen that this thread was to sleep
    }
    if (sleep_us != 0) sleep_on_mesh(sleep_us);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    engine_sleeps_.store(false, std::memory_order_seq_cst);
  }
}

// hc-engine, driving: works until there is nothing to do for a while or a waiter wants to drive, then prepares to
// sleep. Returns for how many us it may: 0 when something came up at the last look, -1 until it is woken.
int64_t Engine::work_until_idle() {
  mesh_->set_asleep(Sleep::kAwake);
  bool moved = false;
  poll_mesh(&moved);
  Idle idle(spin_pauses_, config_.yield_us);
  may_fill_ = true;
  unsigned looks = 0;
  while (!gate_.wanted() && !stopping_.load()) {
    if (step()) {
      idle.reset();
    } else if (fills_) {
      ++looks % 8 == 0 ? static_cast<void>(::sched_yield()) : pause_cpu();  // who submits may be without a core
    } else if (outstanding() == 0 || !idle.pause()) {
      break;
    }
  }
  may_fill_ = false;
  check_timers();
  const bool waiting = outstanding() > 0 || device_in_flight();
  const bool hands_over = gate_.wanted();
  if (!hands_over) mesh_->set_asleep(waiting ? Sleep::kAsleepWaiting : Sleep::kAsleepIdle);
  untimed_sleep_.store(!waiting && !hands_over);
  engine_sleeps_.store(true, std::memory_order_seq_cst);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  if (hands_over) return kBusyLook / std::chrono::microseconds(1);  // who wanted to drive may find its operation done
  if (step()) return 0;
  return untimed_sleep_.load() ? -1 : longest_sleep_us(static_cast<int>(timer_s_ * 1000) + 1);
}

// limit_ms, or less when a gathering window closes before or something moves that rings no doorbell.
int64_t Engine::longest_sleep_us(int limit_ms) const {
  if (mesh_->moves_silently()) return kSilentLookUs;
  if (waits_on_device_) limit_ms = std::min(limit_ms, kDeviceLookMs);
  if (next_gathered_ == TimePoint::max()) return int64_t{1000} * limit_ms;
  const double left_ms = seconds_between(Clock::now(), next_gathered_) * 1000;
  return int64_t{1000} * std::clamp(static_cast<int>(left_ms) + 1, 1, std::max(1, limit_ms));
}

size_t Engine::outstanding() const {
  size_t n = messages_.outstanding() + device_turns_.kept_back();
  for (const auto& [id, set] : sets_) n += set->outstanding();
  return n;
}

void Engine::poll_mesh(bool* moved) {
  std::vector<Loss> losses;
  Status polled = mesh_->poll(0, moved, &losses);
  if (losses.empty() && polled.is_ok()) return;
  receive_frames(moved);  // a goodbye or the reason of its end may be among the peer's last words
  for (const Loss& loss : losses) {
    if (left_[loss.rank]) continue;
    fail_everything(Status(Code::kPeerLost,
                           text_of(mesh_->describe(loss.rank), " ", loss.reason,
                                   ". Its own output has the cause; the others stop because of it."),
                           loss.rank));
  }
  if (!polled.is_ok()) fail_everything(polled);
}

// ---- time
// -------------------------------------------------------------------------------------------------------------

void Engine::check_timers() {
  if (!device_failure_.is_ok()) blame_for_device(Clock::now());
  if (outstanding() == 0 && !device_in_flight()) {
    liveness_.rest();
    return;
  }
  const TimePoint now = Clock::now();
  if (now < next_timer_) return;
  next_timer_ = now + std::chrono::milliseconds(static_cast<int>(timer_s_ * 500));
  if (failed_.load()) return;
  check_device();
  if (failed_.load()) return;
  check_liveness(now);
  if (!config_.stall_check_disable) reveal_late(now);
  if (!config_.stall_check_disable && now >= next_stall_report_) report_stalls(now);
}

void Engine::check_liveness(TimePoint now) {
  std::vector<bool> waits(mesh_->size(), false);
  for (const auto& [id, set] : sets_) {
    const bool late = std::any_of(set->pending.begin(), set->pending.end(),
                                  [&](const Operation* op) {
                                    return seconds_between(op->submitted, now) >= config_.liveness_probe_s;
                                  }) ||
                      (set->device && set->device->oldest_flight_s(now) >= config_.liveness_probe_s);
    if (late)
      for (int r : set->ranks) waits[r] = true;
  }
  messages_.mark_awaited(now, config_.liveness_probe_s, &waits);
  messages_.links().each_late(now, config_.liveness_probe_s, [&](int peer) { waits[peer] = true; });
  for (int r = 0; r < mesh_->size(); ++r) waits[r] = waits[r] && r != mesh_->rank() && !left_[r];
  for (const Liveness::Action& action : liveness_.tick(now, waits)) {
    if (action.kind == Liveness::Action::kPing) {
      counters_.pings.fetch_add(1, std::memory_order_relaxed);
      frame_.clear();
      frame_.put(FrameKind::kPing);
      if (Status sent = send_frame(action.rank, true); !sent.is_ok()) return fail_everything(sent);
    } else if (action.kind == Liveness::Action::kWarn) {
      log_.warning(mesh_->describe(action.rank), " is not responding for ", static_cast<int>(action.silent_s),
                   " s (stopped? swapped out?); it counts as lost after ", config_.liveness_error_s, " s");
    } else {
      return fail_everything(Status(
          Code::kPeerLost,
          text_of(
              mesh_->describe(action.rank), " has not responded for ", static_cast<int>(action.silent_s),
              " s (stopped? swapped out? HOROCLONE_LIVENESS_ERROR_S or HOROVOD_GLOO_TIMEOUT_SECONDS sets the limit)"),
          action.rank));
    }
  }
}

// ---- ends
// -------------------------------------------------------------------------------------------------------------

void Engine::fail_everything(const Status& first_reason) {
  if (failed_.load()) return;
  const Status reason = with_words_of_device(first_reason);
  {
    std::lock_guard lock(submit_mu_);
    failure_ = reason;
  }
  failed_.store(true);
  log_.debug("failing every operation: ", reason.text());
  tell_everybody(reason);  // before transfers are withdrawn: a half-moved one breaks the channel to a peer that lives
  messages_.fail_all(reason);
  messages_.links().abort();
  device_turns_.clear();
  for (auto& [id, set] : sets_) {
    std::string during;
    if (set->runner) {
      const size_t n = set->runner->operations().size();
      during =
          text_of(" (batch ", set->runner->batch().id, ", ", n, n == 1 ? " operation" : " operations", ", under way)");
      set->runner.reset();
    }
    set->cut.clear();
    set->armed_runner.reset();
    set->armed.clear();
    if (set->device) set->device->abort();
    set->frozen_runs.clear();
    set->deferred_join = nullptr;
    set->queue.clear();
    while (!set->pending.empty()) {
      Operation* op = set->pending.back();
      complete(*set, op, reason.with(text_of(op->describe(), op->batch ? during : "")));
    }
  }
  save_record(reason.text());
}

// Out of memory, most likely. Nobody may wait for what this rank cannot finish any more.
void Engine::fail_after(const std::exception& thrown) {
  const bool is_memory = dynamic_cast<const std::bad_alloc*>(&thrown) != nullptr;
  fail_everything(Status(
      Code::kInternal,
      text_of(mesh_->describe(mesh_->rank()), is_memory ? " ran out of memory" : ": ", is_memory ? "" : thrown.what()),
      mesh_->rank()));
  if (!taken_.empty()) has_incoming_.store(true, std::memory_order_seq_cst);  // the next step fails the rest of them
}

void Engine::tell_everybody(const Status& reason) {
  frame_.clear();
  frame_.put(FrameKind::kAbort);
  frame_.put(reason.code());
  frame_.put(static_cast<int32_t>(reason.culprit()));
  frame_.put_text(reason.text());
  // Best effort: they may be gone, too. The culprit may live: one that was only stopped learns why it was given up.
  for (int r = 0; r < mesh_->size(); ++r)
    if (r != mesh_->rank() && !left_[r]) (void)send_frame(r, true);
}

void Engine::peer_left(int rank, const std::string& text) {
  left_[rank] = true;
  mesh_->expect_close(rank);
  if (departure_.empty()) departure_ = text_of(mesh_->describe(rank), " ", text);
  const std::string full = text_of(
      "Horovod has been shut down: ", mesh_->describe(rank), " ", text,
      ", so this operation can never complete. Do all ranks run the same number of steps? hvd.join() evens them out.");
  messages_.peer_left(rank, full);
  for (auto& [id, set] : sets_) {
    const int position = set->position_of(rank);
    if (position < 0 || set->group_rank < 0) continue;
    if (set->combiner) set->combiner->leave(Clock::now());
    if (set->coordinator)
      set->coordinator->leave(position, full);
    else if (set->needs(position))
      set->closed = Status(Code::kAborted, full, rank);
  }
}

void Engine::abort(const std::string& text) {
  if (!connected_.load()) return;
  {
    std::lock_guard lock(abort_mu_);
    abort_text_ = text;
  }
  has_abort_.store(true);
  mesh_->wake_self();
  // Make sure that it leaves this process even if it ends right after this call.
  drive_until([this] { return !has_abort_.load() || stopping_.load(); }, true, Deadline::in(1.0));
}

void Engine::break_off(int64_t handle, const std::string& text) {
  const Operation* op = handles_.find(handle);
  abort(text_of(mesh_->describe(mesh_->rank()), " ", text, op ? text_of(" during ", op->describe()) : ""));
}

void Engine::say_goodbye(double timeout_s) {
  frame_.clear();
  frame_.put(FrameKind::kGoodbye);
  // The first one to leave is the cause of the others' end: name it in each goodbye that follows.
  frame_.put_text(departure_.empty() ? "has shut down" : "has shut down after " + departure_);
  for (int r = 0; r < mesh_->size(); ++r)
    if (r != mesh_->rank() && !left_[r]) (void)send_frame(r, true);
  const Deadline deadline = Deadline::in(timeout_s);
  while (!deadline.passed()) {
    bool flushed = true, moved = false;
    for (int r = 0; r < mesh_->size(); ++r)
      if (r != mesh_->rank() && !left_[r]) flushed = flushed && mesh_->channel(r).flushed();
    if (flushed) return;
    std::vector<Loss> losses;
    if (!mesh_->poll(10, &moved, &losses).is_ok()) return;
    for (const Loss& loss : losses) left_[loss.rank] = true;
  }
}

void Engine::end_thread() {
  gate_.stop();
  if (!thread_.running()) return;
  // A peer may have rung for hc-engine and say_goodbye() have answered: the asleep word says kAwake then, upon which
  // wake_self() rings nothing, yet hc-engine sleeps.
  mesh_->set_asleep(Sleep::kAsleepWaiting);
  mesh_->wake_self();
  thread_.join();
}

// Operations that another thread submitted in the last moment.
void Engine::fail_latecomers() {
  incoming_.insert(incoming_.end(), taken_.begin() + static_cast<std::ptrdiff_t>(next_taken_), taken_.end());
  for (Operation* op : incoming_) {
    ProcessSet* set = find_set(op->process_set);
    if (is_message(op->signature().op)) {
      finish(op, failure_.with(op->describe()));
      continue;
    }
    set->adopt(op);
    complete(*set, op, failure_.with(op->describe()));
  }
  incoming_.clear();
}

Status Engine::shutdown(double timeout_s) {
  if (!connected_.load()) return Status::ok();
  const auto idle = [this] {
    return failed_.load() || !connected_.load() || (outstanding() == 0 && !has_incoming_.load());
  };
  (void)drive_until(idle, false, Deadline::in(timeout_s));
  enter_gate();
  if (!connected_.load()) {  // another thread has ended it meanwhile
    leave_gate();
    return Status::ok();
  }
  if (outstanding() > 0 && !failed_.load())
    fail_everything(Status(Code::kAborted,
                           text_of(mesh_->describe(mesh_->rank()), " shut down while ", outstanding(),
                                   " of its operations were still waiting for other ranks"),
                           mesh_->rank()));
  {
    std::lock_guard lock(submit_mu_);
    if (failure_.is_ok())
      failure_ = error(Code::kNotInitialized, "Horovod has been shut down; use hvd.init() to start it again.");
  }
  for (auto& [id, set] : sets_) set->thaw();
  say_goodbye(1.0);
  stopping_.store(true);
  connected_.store(false);
  // With the gate held, so that nobody steps the engine from here on: a step would answer the doorbell that is to end
  // hc-engine's sleep, or be under way while the mesh is closed.
  end_thread();
  fail_latecomers();
  leave_devices();
  leave_gate();
  notifier_.stop();
  timeline_.stop();
  mesh_->close();
  return Status::ok();
}

void Engine::after_fork_child() {
  connected_.store(false);
  thread_.forget();
  notifier_.forget();
  timeline_.forget();
  mesh_->after_fork_child();
}

}  // namespace hc
