#include "engine/progress/progress_threads.h"

#include <poll.h>

#include <algorithm>

#include "engine/threads/idle.h"

namespace hc {

namespace {

constexpr std::chrono::milliseconds kBusyLook{5};  // how often hc-engine looks whether a waiter has left
constexpr std::chrono::milliseconds kHandOver{1};
constexpr double kBesideS = 0.5e-3;  // for which a thread helps that has something else to do
// How often the backend's work is looked at: at first as often as the kernel's timers allow, then ever more rarely.
constexpr int64_t kBackendLookUs = 50, kRareBackendLookUs = 1000;
constexpr int kSliceMs = 50;  // a waiter looks up (deadline, another waiter) at least this often
constexpr int kMoment = 64;   // iterations, a few microseconds, before a wait is told of

}  // namespace

Status ProgressThreads::start() {
  const Config& config = context_.config;
  // With more ranks than cores whoever waits is in the way of those it waits for.
  const bool crowded = context_.mesh->local_size() > static_cast<int>(allowed_cpus().size());
  spin_pauses_ = crowded && !config.given.contains("SPIN_PAUSES") ? 0 : config.spin_pauses;
  wait_fd_ = context_.mesh->wait_fd();
  return thread_.start("hc-engine", [this] { run(); });
}

// ---- threads that wait

bool ProgressThreads::until(const Over& over, const Deadline& deadline, RankMetrics::Waiting* waiting) {
  while (true) {
    if (over()) return true;
    if (progress_lock_.try_acquire()) {
      work(over, deadline, waiting);
      const bool is_over = over();
      rest();
      unlock();
      if (is_over) return true;
    } else {
      if (waiting) waiting->tell();
      wake_sleepers();  // who has the lock may sleep: it must hand over
      const int ms = std::min(kSliceMs, deadline.remaining_ms());
      progress_lock_.wait_until_free(std::chrono::milliseconds(ms), std::nullopt, over);
    }
    if (deadline.passed()) return over();
  }
}

bool ProgressThreads::until_under_lock(const Over& over, const Deadline& deadline) {
  while (true) {
    lock();
    work(over, deadline);
    const bool is_over = over();
    rest();
    unlock();
    if (is_over) return true;
    if (deadline.passed()) return false;
  }
}

bool ProgressThreads::while_it_moves(const Over& over) {
  if (over()) return true;
  if (!progress_lock_.try_acquire()) {
    wake_sleepers();
    progress_lock_.wait_until_free(kHandOver, std::nullopt, over);
    if (over() || !progress_lock_.try_acquire()) return over();
  }
  try {
    context_.mesh->set_asleep(Sleep::kAwake);
    Idle idle(spin_pauses_, context_.config.yield_us);
    const Deadline deadline = Deadline::in(kBesideS);
    while (!over() && !progress_lock_.needed() && !context_.stopping.load(std::memory_order_relaxed)) {
      if (loop_.step())
        idle.reset();
      else if (!idle.pause())
        break;
      if (deadline.passed()) break;
    }
  } catch (const std::exception& e) {
    loop_.fail_after(e);
  }
  rest();
  unlock();
  return over();
}

// Whoever makes progress leaves at its next iteration, though what it waits for may never come.
void ProgressThreads::lock() {
  const ProgressLock::Ticket ticket = progress_lock_.need();
  while (!progress_lock_.try_acquire_at_need(ticket)) {
    wake_sleepers();
    progress_lock_.wait_until_free(std::chrono::milliseconds(kSliceMs), ticket, [] { return false; });
  }
}

void ProgressThreads::work(const Over& over, const Deadline& deadline, RankMetrics::Waiting* waiting) try {
  context_.mesh->set_asleep(Sleep::kAwake);
  Idle idle(spin_pauses_, context_.config.yield_us);
  int iterations = 0;
  while (!over() && !progress_lock_.needed() && !context_.stopping.load(std::memory_order_relaxed)) {
    if (waiting && ++iterations == kMoment) waiting->tell();
    if (loop_.step()) {
      idle.reset();
      backend_looks_ = 0;
      continue;
    }
    if (idle.pause()) continue;
    if (waiting) waiting->tell();
    loop_.check_timers();
    if (deadline.passed()) return;
    context_.mesh->set_asleep(Sleep::kAsleepWaiting);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (!loop_.step() && !over() && !progress_lock_.needed()) {
      context_.mesh->wake_those_with_work();
      sleep(longest_sleep_us(std::min(kSliceMs, deadline.remaining_ms())));
    }
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    context_.mesh->set_asleep(Sleep::kAwake);
    loop_.poll_mesh();
    idle.reset();
  }
} catch (const std::exception& e) {
  loop_.fail_after(e);
}

// The asleep word must again say that hc-engine sleeps, and what arrived in between be seen.
void ProgressThreads::rest() {
  if (!engine_sleeps_.load(std::memory_order_seq_cst) || context_.stopping.load()) return;
  Mesh& mesh = *context_.mesh;
  // What flies is watched: a rank may die, the backend fail.
  const bool waiting = loop_.outstanding() > 0 || loop_.may_be_in_flight();
  const bool hurries = waiting && !(may_rest_long() && !untimed_sleep_.load());
  mesh.set_asleep(hurries ? Sleep::kAsleepWaiting : waiting ? Sleep::kAsleepBegun : Sleep::kAsleepIdle);
  // What a peer has said since the last step rang no doorbell, and nothing of this rank need wait for it.
  const bool news = mesh.progress_shared() || mesh.has_frames() || loop_.is_told();
  if (!hurries && !news && !loop_.has_news()) return;
  const bool moved = loop_.step();
  const Iteration& last = loop_.last();
  if (moved || untimed_sleep_.load() || last.looks_soon || mesh.moves_silently() ||
      last.next_batch_due != TimePoint::max())
    mesh.wake_self();
}

// ---- hc-engine

void ProgressThreads::run() {
  loop_.enter_thread();
  const std::string& affinity = context_.config.thread_affinity;
  if (!affinity.empty()) {
    auto cpu = cpu_of_local_rank(affinity, context_.mesh->local_rank());
    const int one[] = {cpu.is_ok() ? cpu.value() : 0};
    Status set = cpu.is_ok() ? set_allowed_cpus(one) : cpu.status();
    if (!set.is_ok()) context_.log.warning("HOROCLONE_THREAD_AFFINITY: ", set.text());
  }
  while (true) {
    const ProgressLock::Outcome outcome = progress_lock_.acquire_for_engine(kBusyLook);
    if (outcome == ProgressLock::Outcome::kStopping) return;
    int64_t sleep_us = static_cast<int64_t>(loop_.timer_s() * 1e6) + 1000;
    if (outcome == ProgressLock::Outcome::kAcquired) {
      progress_lock_.assume_held();
      try {
        sleep_us = work_until_idle();
      } catch (const std::exception& e) {
        loop_.fail_after(e);
        sleep_us = 0;
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
      }
      unlock();
    } else {
      // A waiter makes progress. Watch the mesh, so that it need not wake this thread when it leaves (rest).
      untimed_sleep_.store(false);
      engine_sleeps_.store(true, std::memory_order_seq_cst);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      if (!progress_lock_.is_held())
        sleep_us = 0;  // its holder has let go, and may not have seen that this thread was to sleep
    }
    if (sleep_us != 0) sleep(sleep_us);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    engine_sleeps_.store(false, std::memory_order_seq_cst);
  }
}

// Works until there is nothing to do for a while or a waiter wants the lock, then prepares to sleep. Returns for how
// many us it may: 0 when something came up at the last look, -1 until it is woken.
int64_t ProgressThreads::work_until_idle() {
  Mesh& mesh = *context_.mesh;
  mesh.set_asleep(Sleep::kAwake);
  loop_.poll_mesh();
  Idle idle(spin_pauses_, context_.config.yield_us);
  unsigned looks = 0;
  bool moved = false;
  while (!progress_lock_.wanted() && !context_.stopping.load()) {
    if (loop_.step(true)) {
      moved = true;
      idle.reset();
      backend_looks_ = 0;
    } else if (loop_.last().coalesces) {
      ++looks % 8 == 0 ? static_cast<void>(::sched_yield()) : pause_cpu();  // who submits may be without a core
    } else if (loop_.outstanding() == 0 || !idle.pause()) {
      break;
    }
  }
  loop_.check_timers();
  const bool waiting = loop_.outstanding() > 0 || loop_.in_flight();
  const bool hands_over = progress_lock_.wanted();
  if (!hands_over) mesh.set_asleep(waiting ? Sleep::kAsleepWaiting : Sleep::kAsleepIdle);
  // Who begins something without waking this thread counts on its timers: they end once nothing has moved for a while.
  untimed_sleep_.store(!waiting && !hands_over && !moved);
  engine_sleeps_.store(true, std::memory_order_seq_cst);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  if (hands_over) return kBusyLook / std::chrono::microseconds(1);  // who wanted the lock may find its operation done
  if (loop_.step()) return 0;
  return untimed_sleep_.load() ? -1 : longest_sleep_us(static_cast<int>(loop_.timer_s() * 1000) + 1);
}

void ProgressThreads::sleep(int64_t us) {
  Counters::add(context_.counters.sleeps);
  pollfd watched{wait_fd_, POLLIN, 0};
  const timespec limit{us / 1000000, us % 1000000 * 1000};
  (void)::ppoll(&watched, 1, us < 0 ? nullptr : &limit, nullptr);
}

// limit_ms, or less when a batching delay ends before or something moves that rings no doorbell.
int64_t ProgressThreads::longest_sleep_us(int limit_ms) {
  if (const int us = context_.mesh->silent_look_us(); us > 0) return us;
  const Iteration& last = loop_.last();
  if (last.looks_soon)
    return std::min({int64_t{1000} * limit_ms, kBackendLookUs << std::min(backend_looks_++, 8), kRareBackendLookUs});
  if (last.next_batch_due == TimePoint::max()) return int64_t{1000} * limit_ms;
  const double left_ms = seconds_between(Clock::now(), last.next_batch_due) * 1000;
  return int64_t{1000} * std::clamp(static_cast<int>(left_ms) + 1, 1, std::max(1, limit_ms));
}

void ProgressThreads::end_thread() {
  progress_lock_.stop();
  if (!thread_.running()) return;
  // A peer may have rung for hc-engine and the goodbye have answered: the asleep word says kAwake then, upon which
  // wake_self() rings nothing, yet hc-engine sleeps.
  context_.mesh->set_asleep(Sleep::kAsleepWaiting);
  context_.mesh->wake_self();
  thread_.join();
}

void ProgressThreads::forget() { thread_.forget(); }

}  // namespace hc
