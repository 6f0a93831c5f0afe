// The pool of operations and their handles: handle = serial number << 20 | place in the pool.
#include "engine/operation/operation.h"

#include <algorithm>

#include "base/quoted.h"
#include "base/thread.h"

namespace hc {

namespace {
// What the serial numbers of the next pool begin behind: handles of two lives of the runtime in one process differ, so
// that one kept from the first is unknown to the second. 256 lives, 2^34 operations each.
int64_t next_first_serial() {
  static std::atomic<int64_t> pools{0};
  return (pools.fetch_add(1, std::memory_order_relaxed) & 0xff) << 34;
}
}  // namespace

Handles::Handles() : serial_(next_first_serial()) {}

std::string Operation::describe() const {
  const Signature& s = request.signature;
  if (is_message(s.op))
    return text_of(name_of(s.op), s.op == Op::kSend ? " to " : " from ",
                   s.root < 0 ? std::string("any rank") : text_of("rank ", s.root), " (tag ", request.sequence, ")");
  if (request.name.empty()) return text_of(name_of(s.op), " no. ", request.sequence, " (unnamed)");
  return text_of(name_of(s.op), " ", in_quotes(request.name));
}

void Operation::note_poll(TimePoint now) {
  Traces::Polled& polled = traces.polled;
  const int64_t ticks = now.time_since_epoch().count();
  const TimePoint last{Clock::duration(polled.last.exchange(ticks, std::memory_order_relaxed))};
  if (seconds_between(last, now) >= kPollsWithinS) polled.since.store(ticks, std::memory_order_relaxed);
  if (traces.awaited.threads.load(std::memory_order_relaxed) == 0)
    traces.awaited.thread.store(thread_id(), std::memory_order_relaxed);
}

uint64_t Operation::bytes() const {
  const Signature& s = request.signature;
  if (first_dimension.empty()) return bytes_of(s);
  uint64_t sum = 0;
  for (size_t i = 0; i < std::min(s.tensors.size(), first_dimension.size()); ++i) {
    uint64_t row = size_of(s.tensors[i].dtype);
    for (size_t d = 1; d < s.tensors[i].shape.size(); ++d) row *= static_cast<uint64_t>(s.tensors[i].shape[d]);
    sum += row * static_cast<uint64_t>(first_dimension[i]);
  }
  return sum;
}

Operation* Handles::acquire() {
  MutexLock lock(mu_);
  uint32_t place;
  if (!free_.empty()) {
    place = free_.back();
    free_.pop_back();
  } else {
    place = static_cast<uint32_t>(pool_.size());
    if (place >= kMaxPooled) return nullptr;
    pool_.push_back(std::make_unique<Operation>());
    pooled_.store(pool_.size(), std::memory_order_relaxed);
  }
  Operation* op = pool_[place].get();
  op->handle = (++serial_ << kPlaceBits) | place;
  op->released = false;
  op->done.store(false, std::memory_order_relaxed);
  return op;
}

void Handles::release(int64_t handle) {
  std::unique_ptr<BackendWork> work;  // ends behind the lock: a driver may be slow to take memory back
  MutexLock lock(mu_);
  const auto place = static_cast<size_t>(handle & kPlaceMask);
  if (handle <= 0 || place >= pool_.size()) return;
  Operation* op = pool_[place].get();
  if (op->handle != handle || op->released) return;
  op->released = true;
  if (op->done.load(std::memory_order_acquire)) work = recycle(op);
}

bool Handles::release_if_succeeded(int64_t handle) {
  std::unique_ptr<BackendWork> work;
  MutexLock lock(mu_);
  const auto place = static_cast<size_t>(handle & kPlaceMask);
  if (handle <= 0 || place >= pool_.size()) return false;
  Operation* op = pool_[place].get();
  if (op->handle != handle || op->released || !op->done.load(std::memory_order_acquire) || !op->status.is_ok())
    return false;
  work = recycle(op);
  return true;
}

size_t Handles::live() const {
  MutexLock lock(mu_);
  return pool_.size() - free_.size();
}

std::unique_ptr<BackendWork> Handles::recycle(Operation* op) {
  free_.push_back(static_cast<uint32_t>(op->handle & kPlaceMask));
  op->handle = 0;
  op->in.clear();
  op->out.clear();
  op->awaited.clear();
  op->results.clear();
  op->first_dimension.clear();
  op->rows_from.clear();
  op->received.reset();
  op->results_in_work = false;
  op->source = -1;
  op->status = Status::ok();
  op->name_record = nullptr;
  op->tell = {};
  op->cache_id = kNoCacheId;
  op->bucket = {};
  op->batch = 0;
  op->traces.is_counted = false;
  op->traces.started.store(0, std::memory_order_relaxed);
  op->traces.ended = 0;
  op->join_rank = -1;
  op->traces.awaited.thread.store(0, std::memory_order_relaxed);
  op->traces.awaited.left.store(0, std::memory_order_relaxed);
  op->traces.polled.since.store(0, std::memory_order_relaxed);
  op->traces.polled.last.store(0, std::memory_order_relaxed);
  return std::move(op->work);
}

}  // namespace hc
