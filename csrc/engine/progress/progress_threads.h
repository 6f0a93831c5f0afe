// Who makes progress, how it waits, and how it is woken. At any time one thread has the progress lock: one that waits
// for an operation, else hc-engine, which sleeps in poll(2) on the mesh. The rule that keeps waiting cheap and never
// lost:
//   a thread sleeps only after it has (1) set its asleep word, (2) looked at every source of work once more;
//   whoever makes work for a rank (3) makes it visible, (4) looks at that rank's asleep word and rings its doorbell.
// Both sides use sequentially consistent fences between their two halves (Mesh::set_asleep, Mesh::wake).
//
// Thread: any. Owner: the engine.
#pragma once

#include <atomic>
#include <functional>

#include "base/clock.h"
#include "base/thread.h"
#include "engine/context.h"
#include "engine/progress/loop.h"
#include "engine/threads/progress_lock.h"

namespace hc {

class ProgressThreads {
 public:
  ProgressThreads(Context& context, Loop& loop, ProgressLock& progress_lock)
      : context_(context), loop_(loop), progress_lock_(progress_lock) {}
  // The mesh is connected: hc-engine begins.
  Status start();
  int spin_pauses() const { return spin_pauses_; }
  ProgressLock& progress_lock() HC_RETURN_CAPABILITY(progress_lock_) { return progress_lock_; }

  // What a thread waits for: a flag, or whatever a function returns. Keeps a reference to it.
  class Over {
   public:
    Over(const std::atomic<bool>& done) : done_(&done) {}
    Over(const std::function<bool()>& is_over) : is_over_(&is_over) {}
    bool operator()() const { return done_ ? done_->load(std::memory_order_acquire) : (*is_over_)(); }

   private:
    const std::atomic<bool>* done_ = nullptr;
    const std::function<bool()>* is_over_ = nullptr;
  };
  // Makes progress, or lets another thread make it, until over() is true or the deadline passes. Returns over(), which
  // may be called from any thread. waiting: is told once this takes longer than a moment.
  bool until(const Over& over, const Deadline& deadline, RankMetrics::Waiting* waiting = nullptr);
  // The same, but `over` is called only while this thread holds the progress lock. It goes before the threads that wait
  // for operations.
  bool until_under_lock(const Over& over, const Deadline& deadline);
  // Makes progress until over() is true, nothing has moved for as long as a thread yields before it sleeps, or some
  // time has passed: the caller has something else to do, for which it may not have a core of its own. Returns over().
  bool while_it_moves(const Over& over);
  // Wakes whoever sleeps on the mesh: something was submitted, and nobody waits for it at once.
  void wake_sleepers() {
    if (sleepers_.load(std::memory_order_seq_cst) > 0) context_.mesh->wake_self();
  }

  // Takes the progress lock, for a caller that needs the engine's state without making progress. It goes before the
  // threads that wait for operations.
  void lock() HC_ACQUIRE(progress_lock_);
  void unlock() HC_RELEASE(progress_lock_) { progress_lock_.release(loop_.outstanding() > 0 || loop_.has_news()); }
  // The same for a short call of a waiting thread. False: another thread holds the lock or needs it.
  bool try_lock() HC_TRY_ACQUIRE(true, progress_lock_) { return progress_lock_.try_acquire(); }
  // After progress was made under the lock: hc-engine, if it sleeps, takes over the watch.
  void rest() HC_REQUIRES(progress_lock_);
  // Of what is under way: all was begun by threads that are likely to wait for it soon, and other ranks can end theirs
  // without a further step of this one, unless they ring for it. Then hc-engine is left asleep. Set under the progress
  // lock; false from any thread.
  bool may_rest_long() const { return may_rest_long_.load(std::memory_order_seq_cst); }
  // Whoever queues something calls this with false behind it, which this looks for behind its own store.
  void set_may_rest_long(bool may) {
    if (may_rest_long() == may) return;
    may_rest_long_.store(may, std::memory_order_seq_cst);
    if (may && loop_.has_news()) may_rest_long_.store(false, std::memory_order_seq_cst);
  }
  class HC_SCOPED_CAPABILITY Hold {
   public:
    explicit Hold(ProgressThreads& progress) HC_ACQUIRE(progress.progress_lock_) : progress_(progress) {
      progress_.lock();
    }
    ~Hold() HC_RELEASE() { progress_.unlock(); }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    ProgressThreads& progress_;
  };

  // Ends hc-engine. Call it with the progress lock held, so that no thread makes progress from here on: it would
  // consume the ring of the doorbell that ends hc-engine's sleep, or still run while the mesh is closed.
  void end_thread();
  void forget();  // in a forked child

 private:
  void run();  // hc-engine
  int64_t work_until_idle() HC_REQUIRES(progress_lock_);
  void work(const Over& over, const Deadline& deadline, RankMetrics::Waiting* waiting = nullptr)
      HC_REQUIRES(progress_lock_);
  int64_t longest_sleep_us(int limit_ms) HC_REQUIRES(progress_lock_);
  void sleep(int64_t us);

  Context& context_;
  Loop& loop_;
  ProgressLock& progress_lock_;
  NamedThread thread_;
  int spin_pauses_ = 0;
  int backend_looks_ HC_GUARDED_BY(progress_lock_) = 0;  // sleeps since the backend has moved last
  int wait_fd_ = -1;                                     // Mesh::wait_fd, once connected
  std::atomic<int> sleepers_{0};                         // threads in poll(2) on the mesh
  std::atomic<bool> untimed_sleep_{false};               // hc-engine sleeps without a time limit
  std::atomic<bool> engine_sleeps_{false};
  std::atomic<bool> may_rest_long_{false};
};

}  // namespace hc
