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
#include <mutex>

namespace hc {

class DriveGate {
 public:
  // A waiter's try; true: it drives now and must leave().
  bool try_enter() {
    std::lock_guard lock(mu_);
    if (driven_) return false;
    driven_ = true;
    return true;
  }
  // Sleeps until the gate is free, `over()` holds, or the time is up. The driver calls changed() after it finished
  // operations.
  template <class Over>
  void wait_turn(std::chrono::milliseconds limit, Over&& over) {
    wanting_.fetch_add(1);
    // hc-engine leaves within a turn when it sees that: not worth a sleep and a wake-up.
    for (int turn = 0; turn < 50; ++turn) {
      if (!driven_.load(std::memory_order_relaxed) || over()) {
        wanting_.fetch_sub(1);
        return;
      }
      ::sched_yield();
    }
    std::unique_lock lock(mu_);
    changed_.wait_for(lock, limit, [&] { return !driven_ || over(); });
    wanting_.fetch_sub(1);
  }
  enum class Turn { kDrives, kBusy, kStopping };
  // hc-engine: drives when no waiter does or wants to; waits for that, but not longer than `limit`.
  Turn enter_engine(std::chrono::milliseconds limit) {
    std::unique_lock lock(mu_);
    parked_ = true;
    changed_.wait_for(lock, limit, [&] { return stopping_ || (!driven_ && wanting_.load() == 0); });
    parked_ = false;
    if (stopping_) return Turn::kStopping;
    if (driven_ || wanting_.load() > 0) return Turn::kBusy;
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
  bool wanted() const { return wanting_.load(std::memory_order_relaxed) > 0; }
  void stop() {
    std::lock_guard lock(mu_);
    stopping_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mu_;                    // guards the three below; never held while stepping
  std::atomic<bool> driven_{false};  // written under the mutex
  bool parked_ = false;              // hc-engine waits in enter_engine
  bool stopping_ = false;
  std::atomic<int> wanting_{0};
  std::condition_variable changed_;
};

}  // namespace hc
