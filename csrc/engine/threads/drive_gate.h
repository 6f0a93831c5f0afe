// Who steps the engine: at any time one thread, either hc-engine or a thread that waits for a handle. A waiter has
// precedence: it would only block, so it does the work itself and saves two thread wake-ups (37 us each where
// measured).
//
// Thread: any.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>

namespace hc {

class DriveGate {
 public:
  // A waiter's try; true: it drives now and must leave().
  bool try_enter() {
    std::lock_guard lock(mu_);
    if (driven_ || stopping_ || needed()) return false;
    driven_ = true;
    return true;
  }
  // Who needs the engine for something else than to wait for an operation comes before those that wait, and in the
  // order of need(): then try_enter_at_need() until it holds. A thread that drives looks at needed() on each turn and
  // leaves. Also after stop(), to look at what is left.
  using Ticket = uint64_t;
  Ticket need() { return tickets_.fetch_add(1, std::memory_order_seq_cst); }
  bool needed() const { return tickets_.load(std::memory_order_seq_cst) != served_.load(std::memory_order_seq_cst); }
  bool try_enter_at_need(Ticket ticket) {
    std::lock_guard lock(mu_);
    if (driven_ || ticket != served_) return false;
    driven_ = true;
    served_.fetch_add(1, std::memory_order_seq_cst);
    return true;
  }
  // Sleeps until the gate is free for this thread, `over()` holds, or the time is up. The driver calls changed() after
  // it finished operations.
  template <class Over>
  void wait_turn(std::chrono::milliseconds limit, std::optional<Ticket> ticket, Over&& over) {
    wanting_.fetch_add(1);
    // hc-engine leaves within a turn when it sees that: not worth a sleep and a wake-up.
    for (int turn = 0; turn < 50; ++turn) {
      if (is_free(ticket) || over()) {
        wanting_.fetch_sub(1);
        return;
      }
      ::sched_yield();
    }
    std::unique_lock lock(mu_);
    changed_.wait_for(lock, limit, [&] { return is_free(ticket) || over(); });
    wanting_.fetch_sub(1);
  }
  enum class Turn { kDrives, kBusy, kStopping };
  // hc-engine: drives when no waiter does or wants to; waits for that, but not longer than `limit`.
  Turn enter_engine(std::chrono::milliseconds limit) {
    std::unique_lock lock(mu_);
    parked_ = true;
    changed_.wait_for(lock, limit, [&] { return stopping_ || (!driven_ && !wanted()); });
    parked_ = false;
    if (stopping_) return Turn::kStopping;
    if (driven_ || wanted()) return Turn::kBusy;
    driven_ = true;
    return Turn::kDrives;
  }
  // engine_needed: work is left that hc-engine should take up now. Else it is not disturbed: in a loop of blocking
  // calls a wake-up after each of them would cost more than the calls.
  void leave(bool engine_needed) {
    std::lock_guard lock(mu_);
    driven_ = false;
    if ((parked_ && engine_needed) || wanting_.load() > 0) changed_.notify_all();
  }
  // Some operation is done: a thread that waits for it without driving should look.
  void changed() {
    if (wanting_.load() == 0) return;
    std::lock_guard lock(mu_);
    changed_.notify_all();
  }
  bool driven() const { return driven_.load(std::memory_order_seq_cst); }
  bool wanted() const { return wanting_.load(std::memory_order_relaxed) > 0 || needed(); }
  // From now on nobody drives but who is inside.
  void stop() {
    std::lock_guard lock(mu_);
    stopping_ = true;
    changed_.notify_all();
  }

 private:
  bool is_free(std::optional<Ticket> ticket) const {
    if (driven_.load()) return false;
    return ticket ? *ticket == served_.load() : !stopping_.load() && !needed();
  }

  std::mutex mu_;  // never held while stepping; guards `parked_` and what the next three are set to
  std::atomic<bool> driven_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<Ticket> served_{0};   // whose need is next; those below have entered
  std::atomic<Ticket> tickets_{0};  // as many as ever needed it
  bool parked_ = false;             // hc-engine waits in enter_engine
  std::atomic<int> wanting_{0};     // threads in wait_turn
  std::condition_variable changed_;
};

}  // namespace hc
