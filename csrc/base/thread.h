// A named thread with an owner, and the CPUs that a thread may use. The owner of a NamedThread makes its body return
// (by a flag or a closed descriptor) before join() or the destructor waits for it. Thread: the owner calls start and
// join.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"

namespace hc {

class NamedThread {
 public:
  NamedThread() = default;
  ~NamedThread() { join(); }
  NamedThread(NamedThread&& other) noexcept = default;
  NamedThread& operator=(NamedThread&& other) noexcept {
    join();
    thread_ = std::move(other.thread_);
    return *this;
  }

  // name: at most 15 characters (the kernel's limit), as in "hc-engine". Every signal is blocked in the new
  // thread, so that Ctrl-C and the launcher's SIGTERM reach the program's own threads. Joins an earlier one
  // first.
  Status start(const std::string& name, std::function<void()> body);
  void join();
  bool running() const { return thread_.joinable(); }
  // Nobody waits for it; what its body works with, it owns.
  void detach() { thread_.detach(); }
  // In a forked child the thread does not exist: forget it without joining.
  void forget();

 private:
  std::thread thread_;
};

// The kernel's number of the calling thread.
int thread_id();
// CPU numbers that the calling thread may run on, ascending.
std::vector<int> allowed_cpus();
// Restricts (or widens, as far as the container allows) the calling thread.
Status set_allowed_cpus(std::span<const int> cpus);
// The entry for this local rank of "2,5,8", a list with one CPU number for each local rank.
Result<int> cpu_of_local_rank(const std::string& list, int local_rank);

}  // namespace hc
