// Where a backend's memory is full, the framework's allocator may hold some that nobody uses, and the framework can be
// asked to give it back. Only its own threads can do that: the core says that it wants memory, and who waits for an
// operation sees that. Thread: any.
#pragma once

#include <atomic>
#include <cstdint>

namespace hc {

class MemoryPressure {
 public:
  // There is somebody who can.
  void offer() { offered_.store(true); }
  bool is_offered() const { return offered_.load(); }
  void want() { wanted_.store(true); }
  bool is_wanted() const { return wanted_.load(std::memory_order_relaxed); }
  // What could be given has been.
  void gave() {
    wanted_.store(false);
    given_.fetch_add(1);
  }
  uint64_t times_given() const { return given_.load(); }

 private:
  std::atomic<bool> offered_{false}, wanted_{false};
  std::atomic<uint64_t> given_{0};
};

}  // namespace hc
