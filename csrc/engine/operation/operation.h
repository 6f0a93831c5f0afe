// One submitted operation, from submit to release. Objects are pooled and never freed while the engine lives, so that
// a stale handle finds a recycled object (and notices by its serial number) instead of freed memory.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "agreement/negotiation.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/nvtx.h"
#include "collective/shared/bypass_rounds.h"
#include "engine/operation/memory.h"
#include "engine/operation/submission.h"

namespace hc {

struct Operation;

// What a call that took the bypass leaves for its next repetition: all that is needed to enter another round.
struct Repeat {
  Signature signature;
  BypassKey key;
  Task task;  // with the tensor of that call
};

// The pending operation with this name, in one process set. A node of an unordered_map, so its address is stable.
struct NameRecord {
  std::atomic<Operation*> pending{nullptr};
  uint64_t uses = 0;  // submit lock
  int declared = 0;   // submit lock: buckets that hold this record, which then is kept
  // The thread that makes progress: see RankMetrics::repeats.
  uint64_t seen_in_step = 0;
  uint64_t* seen_of_loop = nullptr;  // of an operation in a loop: for all iterations; null: it is in none
  uint64_t* seen() { return seen_of_loop ? seen_of_loop : &seen_in_step; }
  // The thread that makes progress: the newest last.
  std::vector<std::unique_ptr<Repeat>> repeats;
};

// A backend's part of an operation (backend.h). Written by submit, and by the thread that makes progress before the
// operation is done.
struct BackendWork {
  virtual ~BackendWork() = default;
  virtual int index() const = 0;  // as Placement::index, of its results
};

struct Operation {
  static constexpr double kPollsWithinS = 2;  // between two looks of a loop that does nothing else
  // Set by submit, constant until done.
  int64_t handle = 0;
  uint16_t process_set = 0;
  Request request;
  std::vector<const std::byte*> in;  // per tensor
  std::vector<std::byte*> out;       // per tensor; null: the core owns the result
  std::vector<int64_t> awaited;      // alltoall: the rows from each rank that `out` has room for
  NameRecord* name_record = nullptr;
  BucketId bucket;                    // of a declared set
  std::unique_ptr<BackendWork> work;  // null: host memory
  TimePoint submitted;
  struct Traces {
    uint64_t record = 0;               // which of the flight recorder's
    bool is_counted = false;           // RankMetrics::began was called for it; the thread that makes progress
    std::atomic<uint64_t> started{0};  // a moment of RankMetrics, when its data began to move; 0: not yet
    uint64_t ended = 0;                // the same, when it was done, where it is counted; read after `done`
    struct Awaited {                   // by threads that stand in Calls::wait; they write
      std::atomic<int> threads{0};
      std::atomic<int> thread{0};    // the kernel's id of the last one to come
      std::atomic<int64_t> left{0};  // when the last one went, as of Clock: it waits in slices
    } awaited;
    struct Polled {  // by a loop of the program's own, which looks at least every kPollsWithin
      std::atomic<int64_t> since{0}, last{0};  // of its looks, the first and the last, as of Clock
    } polled;
  } traces;
  struct Callback {
    void (*call)(void*, int64_t, const Status&) = nullptr;
    void* context = nullptr;
  } tell;           // when it is done
  nvtx::Span span;  // from submit to done, for tools

  // The thread that makes progress only.
  uint32_t cache_id = kNoCacheId;
  size_t pending_at = 0;  // place in Pending::all
  uint32_t batch = 0;     // the batch that executes it, 0 before

  // Written by the thread that makes progress before `done`, read after it.
  Status status;
  std::vector<std::shared_ptr<Memory>> results;
  std::vector<int64_t> first_dimension;
  std::vector<int64_t> rows_from;
  bool results_in_work = false;        // the results that the core owns are the backend's
  std::optional<TensorMeta> received;  // scatter, receive: what came
  int source = -1;                     // receive: world rank of the sender
  int32_t join_rank = -1;
  std::atomic<bool> done{false};

  bool released = false;  // guarded by Handles' mutex

  // A thread waits for it, or has done so a moment ago, or a framework's program does until it is told.
  bool is_awaited(TimePoint now, double moment_s) const {
    return tell.call || traces.awaited.threads.load(std::memory_order_relaxed) > 0 ||
           seconds_since(traces.awaited.left, now) < moment_s;
  }
  // A loop of the program's own asks again and again whether it is done; it may do other work between.
  bool is_polled(TimePoint now) const {
    return seconds_since(traces.polled.last, now) < kPollsWithinS &&
           seconds_since(traces.polled.since, now) > kPollsWithinS;
  }
  // It was asked whether it is done, and is not.
  void note_poll(TimePoint now);
  const Signature& signature() const { return request.signature; }
  // Bytes of its tensors, or of its results where the core owns them and they exist.
  uint64_t bytes() const;
  static double seconds_since(const std::atomic<int64_t>& at, TimePoint now) {
    const int64_t then = at.load(std::memory_order_relaxed);
    return then == 0 ? 1e9 : seconds_between(TimePoint{Clock::duration(then)}, now);
  }
  // "allreduce 'layer1.weight'", "allgather no. 17 (unnamed)", "send to rank 3 (tag 0)"
  std::string describe() const;
};

// The pool, and the map from handle to operation. Any thread.
class Handles {
 public:
  Handles();
  Operation* acquire();  // a cleared operation with a fresh handle
  // Null: unknown or released.
  Operation* find(int64_t handle) {
    MutexLock lock(mu_);
    const auto place = static_cast<size_t>(handle & kPlaceMask);
    if (handle <= 0 || place >= pool_.size()) return nullptr;
    Operation* op = pool_[place].get();
    return op->handle == handle && !op->released ? op : nullptr;
  }
  void release(int64_t handle);               // recycled at once when done, else when it gets done
  bool release_if_succeeded(int64_t handle);  // false: it is not done, has failed, or is unknown
  // Some hundred thousand operations have been live at once: acquire() may soon find nothing.
  bool may_run_out() const { return pooled_.load(std::memory_order_relaxed) > kMaxPooled / 2; }
  // The thread that makes progress: sets `done`; the operation may be recycled at once.
  void finished(Operation* op) {
    std::unique_ptr<BackendWork> work;
    MutexLock lock(mu_);
    op->done.store(true, std::memory_order_release);
    if (op->released) work = recycle(op);
  }
  size_t live() const;

 private:
  static constexpr int kPlaceBits = 20;
  static constexpr size_t kMaxPooled = size_t{1} << kPlaceBits;
  static constexpr int64_t kPlaceMask = (int64_t{1} << kPlaceBits) - 1;
  [[nodiscard]] std::unique_ptr<BackendWork> recycle(Operation* op) HC_REQUIRES(mu_);  // gives what to end unlocked
  std::atomic<size_t> pooled_{0};                                                      // pool_.size()
  mutable Mutex mu_;
  std::vector<std::unique_ptr<Operation>> pool_ HC_GUARDED_BY(mu_);
  std::vector<uint32_t> free_ HC_GUARDED_BY(mu_);
  int64_t serial_ HC_GUARDED_BY(mu_);
};

}  // namespace hc
