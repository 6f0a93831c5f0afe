#include "net/process.h"

#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "base/status.h"

namespace hc {
namespace {

// PF_EXITING, PF_DUMPCORE and PF_SIGNALED of the kernel's sched.h: the thread does not return to its program.
constexpr unsigned long kNeverReturns = 0x4 | 0x200 | 0x400;

struct Thread {
  char state = 0;
  unsigned long flags = 0;
};

// proc(5). The name, in parentheses, may hold anything.
std::optional<Thread> read_thread(const std::string& folder) {
  std::ifstream file(folder + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(") ");
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream rest(line.substr(name_end + 2));
  Thread found;
  long parent, group, session, terminal, foreground;
  rest >> found.state >> parent >> group >> session >> terminal >> foreground >> found.flags;
  return rest ? std::optional(found) : std::nullopt;
}

// The first thread may have ended by itself while others go on.
bool all_threads_end(const std::string& process) {
  std::error_code failed;
  std::filesystem::directory_iterator threads(process + "/task", failed);
  for (; !failed && threads != std::filesystem::directory_iterator(); threads.increment(failed))
    if (const auto one = read_thread(threads->path()); one && !(one->flags & kNeverReturns)) return false;
  return !failed;
}

}  // namespace

ProcessState state_of_process(pid_t pid) {
  if (pid <= 0) return ProcessState::kUnknown;
  const std::string process = text_of("/proc/", pid);
  const auto first = read_thread(process);
  if (!first) return ProcessState::kUnknown;
  if ((first->flags & kNeverReturns) && all_threads_end(process)) return ProcessState::kEnds;
  return first->state == 'T' ? ProcessState::kStopped : ProcessState::kRuns;
}

}  // namespace hc
