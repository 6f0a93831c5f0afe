// The lock that decides which thread makes progress: at any time one, either hc-engine or a thread that waits for a
// handle. A waiting thread has precedence: it would only block, so it does the work itself and saves two thread
// wake-ups (37 us each where measured).
//
// Thread: any.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

#include "base/mutex.h"

namespace hc {

class HC_CAPABILITY("progress lock") ProgressLock {
 public:
  // A waiting thread's attempt. True: it holds the lock now and must call release().
  bool try_acquire() HC_TRY_ACQUIRE(true) {
    MutexLock lock(mu_);
    if (held_ || stopping_ || needed()) return false;
    held_ = true;
    return true;
  }
  // For a thread that needs the engine without waiting for an operation. It goes before waiting threads, in the order
  // of need(): call need(), then try_acquire_at_need() until it succeeds. The holder checks needed() in each iteration
  // and releases the lock. Works after stop() too, to look at what is left.
  using Ticket = uint64_t;
  Ticket need() { return tickets_.fetch_add(1, std::memory_order_seq_cst); }
  bool needed() const { return tickets_.load(std::memory_order_seq_cst) != served_.load(std::memory_order_seq_cst); }
  bool try_acquire_at_need(Ticket ticket) HC_TRY_ACQUIRE(true) {
    MutexLock lock(mu_);
    if (held_ || ticket != served_) return false;
    held_ = true;
    served_.fetch_add(1, std::memory_order_seq_cst);
    return true;
  }
  // Sleeps until the progress lock is free for this thread, `over()` holds, or the time is up. Its holder calls
  // changed() after it finished operations.
  template <class Over>
  void wait_until_free(std::chrono::milliseconds limit, std::optional<Ticket> ticket, Over&& over) {
    wanting_.fetch_add(1);
    // hc-engine lets go within an iteration when it sees that: not worth a sleep and a wake-up.
    for (int look = 0; look < 50; ++look) {
      if (is_free(ticket) || over()) {
        wanting_.fetch_sub(1);
        return;
      }
      ::sched_yield();
    }
    MutexLock lock(mu_);
    changed_.wait_for(mu_, limit, [&] { return is_free(ticket) || over(); });
    wanting_.fetch_sub(1);
  }
  enum class Outcome { kAcquired, kBusy, kStopping };
  // hc-engine: gets the lock when no waiter has or wants it; waits for that, but not longer than `limit`.
  Outcome acquire_for_engine(std::chrono::milliseconds limit) {
    MutexLock lock(mu_);
    parked_ = true;
    changed_.wait_for(mu_, limit, [&] { return stopping_ || (!held_ && !wanted()); });
    parked_ = false;
    if (stopping_) return Outcome::kStopping;
    if (held_ || wanted()) return Outcome::kBusy;
    held_ = true;
    return Outcome::kAcquired;
  }
  // engine_needed: work is left that hc-engine should take up now. Else it is not disturbed: in a loop of blocking
  // calls a wake-up after each of them would cost more than the calls.
  void release(bool engine_needed) HC_RELEASE() {
    gave_up();  // for the analysis, which does not know held_
    MutexLock lock(mu_);
    held_ = false;
    if ((parked_ && engine_needed) || wanting_.load() > 0) changed_.notify_all();
  }
  // Some operation is done: a thread that waits for it without the lock should look.
  void changed() {
    if (wanting_.load() == 0) return;
    MutexLock lock(mu_);
    changed_.notify_all();
  }
  // Tells the analysis what it cannot see: that acquire_for_engine() has given it the lock.
  void assume_held() const HC_ASSERT_CAPABILITY(this) {}
  bool is_held() const { return held_.load(std::memory_order_seq_cst); }
  bool wanted() const { return wanting_.load(std::memory_order_relaxed) > 0 || needed(); }
  // From now on no thread gets the lock; a holder may go on.
  void stop() {
    MutexLock lock(mu_);
    stopping_ = true;
    changed_.notify_all();
  }

 private:
  void gave_up() HC_RELEASE() HC_NO_THREAD_SAFETY_ANALYSIS {}
  bool is_free(std::optional<Ticket> ticket) const {
    if (held_.load()) return false;
    return ticket ? *ticket == served_.load() : !stopping_.load() && !needed();
  }

  Mutex mu_;  // never held while stepping; the next three are set under it
  std::atomic<bool> held_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<Ticket> served_{0};           // whose need is next; those below have had the lock
  std::atomic<Ticket> tickets_{0};          // as many as ever needed it
  bool parked_ HC_GUARDED_BY(mu_) = false;  // hc-engine waits in acquire_for_engine
  std::atomic<int> wanting_{0};             // threads in wait_until_free
  CondVar changed_;
};

}  // namespace hc
