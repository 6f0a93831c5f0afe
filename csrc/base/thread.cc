#include "base/thread.h"

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <memory>
#include <new>
#include <string_view>
#include <system_error>

namespace hc {
namespace {

constexpr int kMaxCpus = 8192;  // the largest NR_CPUS of distribution kernels

struct CpuSetFree {
  void operator()(cpu_set_t* set) const { CPU_FREE(set); }
};
using CpuSet = std::unique_ptr<cpu_set_t, CpuSetFree>;

}  // namespace

Status NamedThread::start(const std::string& name, std::function<void()> body) {
  join();
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // inherited by the new thread
  Status status;
  try {
    const std::string cut = name.substr(0, 15);
    thread_ = std::thread([cut, body = std::move(body)] {
      pthread_setname_np(pthread_self(), cut.c_str());
      body();
    });
    pthread_setname_np(thread_.native_handle(), cut.c_str());  // whoever looks when this returns sees the name, too
  } catch (const std::system_error& problem) {
    status = error(Code::kInternal, "could not start thread ", name, ": ", problem.what(),
                   ". Is the limit on processes (ulimit -u, or the container's pids limit) reached?");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return status;
}

void NamedThread::join() {
  if (thread_.joinable()) thread_.join();
}

void NamedThread::forget() {
  // A std::thread that is destroyed joinable ends the process, and detaching one that lives in another
  // process is undefined; overwriting it with an empty one frees nothing that matters.
  ::new (static_cast<void*>(&thread_)) std::thread();
}

int thread_id() {
  static thread_local const int id = static_cast<int>(::syscall(SYS_gettid));
  return id;
}

std::vector<int> allowed_cpus() {
  CpuSet set(CPU_ALLOC(kMaxCpus));
  const size_t bytes = CPU_ALLOC_SIZE(kMaxCpus);
  std::vector<int> cpus;
  if (!set) return cpus;
  CPU_ZERO_S(bytes, set.get());
  if (sched_getaffinity(0, bytes, set.get()) != 0) return cpus;
  for (int cpu = 0; cpu < kMaxCpus; ++cpu)
    if (CPU_ISSET_S(static_cast<size_t>(cpu), bytes, set.get())) cpus.push_back(cpu);
  return cpus;
}

Status set_allowed_cpus(std::span<const int> cpus) {
  CpuSet set(CPU_ALLOC(kMaxCpus));
  const size_t bytes = CPU_ALLOC_SIZE(kMaxCpus);
  if (!set) return error(Code::kInternal, "no memory for a set of CPUs");
  CPU_ZERO_S(bytes, set.get());
  std::string listed;
  for (int cpu : cpus) {
    if (cpu < 0 || cpu >= kMaxCpus)
      return error(Code::kInvalidArgument, "CPU ", cpu, " is not between 0 and ", kMaxCpus - 1);
    CPU_SET_S(static_cast<size_t>(cpu), bytes, set.get());
    if (!listed.empty()) listed += ',';
    listed += std::to_string(cpu);
  }
  if (sched_setaffinity(0, bytes, set.get()) == 0) return {};
  return error(Code::kInvalidArgument, "this thread may not run on CPU ", listed, ": ", std::strerror(errno),
               ". Does the CPU exist, and does the container allow it?");
}

Result<int> cpu_of_local_rank(const std::string& list, int local_rank) {
  std::string_view rest = list;
  for (int position = 0;; ++position) {
    size_t comma = rest.find(',');
    std::string_view item = rest.substr(0, comma);
    while (!item.empty() && item.front() == ' ') item.remove_prefix(1);
    while (!item.empty() && item.back() == ' ') item.remove_suffix(1);
    int cpu = -1;
    auto [end, problem] = std::from_chars(item.data(), item.data() + item.size(), cpu);
    if (problem != std::errc() || end != item.data() + item.size() || cpu < 0)
      return error(Code::kInvalidArgument, "HOROCLONE_THREAD_AFFINITY='", list, "': entry ", position, " ('", item,
                   "') is not a CPU number; accepted is a comma-separated list with one for each local rank");
    if (position == local_rank) return cpu;
    if (comma == std::string_view::npos)
      return error(Code::kInvalidArgument, "HOROCLONE_THREAD_AFFINITY='", list, "' has ", position + 1,
                   " entries, local rank ", local_rank, " needs one more");
    rest.remove_prefix(comma + 1);
  }
}

}  // namespace hc
