// The operations of one process set that were taken from submission and are not done. Finds the operation that an entry
// of a plan refers to, by the number of an unnamed operation or by its cache id.
//
// Thread: the thread that makes progress. Owner: a process set.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "engine/operation/operation.h"

namespace hc {

class Pending {
 public:
  // total: counts the pending operations of all process sets.
  explicit Pending(size_t* total) : total_(*total) {}

  const std::vector<Operation*>& all() const { return all_; }  // in no order
  size_t size() const { return all_.size(); }
  Operation* join() const { return join_; }  // this rank's join, while it is pending

  void add(Operation* op) {
    op->pending_at = all_.size();
    all_.push_back(op);
    ++total_;
  }
  void remove(Operation* op);
  // `op` is about to be announced with the cache id that it has (Operation::cache_id).
  void expect(Operation* op);
  void expect_join(Operation* op) { join_ = op; }

  // Null: this rank did not submit it.
  Operation* unnamed(Op op, uint64_t sequence) const;
  Operation* by_cache_id(uint32_t cache_id) const {
    return cache_id < by_cache_id_.size() ? by_cache_id_[cache_id] : nullptr;
  }
  // The unnamed operation with this number will never be announced: the window need not start before the next one.
  void pass_over(Op op, uint64_t sequence);

 private:
  struct Window {  // unnamed operations of one kind by sequence number
    uint64_t base = 0;
    std::deque<Operation*> operations;
  };
  size_t& total_;
  std::vector<Operation*> all_;  // Operation::pending_at is the place of each
  Operation* join_ = nullptr;
  std::array<Window, kOpCount> windows_;
  std::vector<Operation*> by_cache_id_;
};

}  // namespace hc
