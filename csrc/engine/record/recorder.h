// The flight recorder keeps the last operations of this rank in fixed memory. It is always on, for the question that
// follows a hang or a failure: what did each rank submit? `horoclone debug` compares the ranks' records.
//
// Thread: agreed() and done() from the thread that makes progress. An operation that drops out of the ring while it is
// still pending is no longer updated.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "engine/operation/operation.h"
#include "engine/threads/submit_lock.h"

namespace hc {

class Recorder {
 public:
  static constexpr uint64_t kKept = 1000;
  static constexpr size_t kNameBytes = 96;
  static constexpr size_t kDimensions = 8;

  Recorder();
  struct Entry {
    const Signature& signature;
    std::string_view name;  // empty: unnamed
    uint16_t process_set;
    bool declared;
    TimePoint submitted;
    uint64_t call;  // its number among this rank's submissions to the process set, from 1
    uint64_t use;   // among those with its name (or its number among the unnamed ones)
  };
  // Returns the number of the record, from 1, which agreed() and done() take.
  uint64_t submitted(const Entry& entry) HC_REQUIRES(submit_lock);
  // at: of processor_ticks(); one reading serves a whole batch, and each operation needs two.
  void agreed(const Operation& op, uint64_t at) {
    Record& r = ring_[op.traces.record % kKept];
    if (!is_of(r, op.traces.record)) return;
    r.batch.store(op.batch, std::memory_order_relaxed);
    r.agreed.store(at, std::memory_order_relaxed);
  }
  void done(uint64_t record, Code code, uint64_t at) {
    Record& r = ring_[record % kKept];
    if (!is_of(r, record)) return;
    r.code.store(static_cast<uint8_t>(code), std::memory_order_relaxed);
    r.done.store(at, std::memory_order_relaxed);
  }
  uint64_t submissions() const HC_REQUIRES(submit_lock) { return submissions_; }
  std::string last_call() const HC_REQUIRES(submit_lock);  // "allreduce 'x', 12.3 s ago"
  // The records in the order of submission: a JSON array, one a line. Times are seconds before now.
  std::string json() const HC_REQUIRES(submit_lock);

 private:
  struct Call {  // what submit knew
    TimePoint submitted{};
    uint64_t call = 0, use = 0;
    int64_t shape[kDimensions] = {};
    uint64_t elements = 0;  // of all its tensors
    uint32_t tensors = 0;
    uint32_t name_hash = 0;  // of the whole name where only its ends are kept, else 0
    uint16_t process_set = 0;
    Op op = Op::kAllreduce;
    DType dtype = DType::kF32;
    Reduce reduce = Reduce::kSum;
    uint8_t dimensions = 0, name_bytes = 0;
    bool unnamed = false, declared = false;
    char name[kNameBytes];
  };
  struct Record {
    Call call;
    std::atomic<uint64_t> number{0};           // which submission it is of, from 1
    std::atomic<uint64_t> agreed{0}, done{0};  // ticks, 0: not yet
    std::atomic<uint32_t> batch{0};
    std::atomic<uint8_t> code{0};
  };
  static bool is_of(const Record& r, uint64_t record) {
    return r.number.load(std::memory_order_relaxed) == record && record != 0;
  }
  static void keep_name(std::string_view name, Call* to) {
    to->name_hash = 0;
    if (name.size() > kNameBytes) return keep_ends(name, to);
    std::ranges::copy(name, to->name);
    to->name_bytes = static_cast<uint8_t>(name.size());
  }
  static void keep_ends(std::string_view name, Call* to);
  std::string line_of(const Record& r, TimePoint now, double seconds_per_tick, uint64_t now_ticks) const;

  const std::unique_ptr<Record[]> ring_;
  uint64_t submissions_ HC_GUARDED_BY(submit_lock) = 0;
  // Two readings of both clocks tell how long a tick is.
  const TimePoint first_time_;
  const uint64_t first_ticks_;
};

}  // namespace hc
