// Gets the Python stack of this process's main thread without calling Python. The binding has faulthandler write it
// into a pipe when a private signal arrives (a C handler that needs no lock); this class raises the signal and reads
// the pipe.
//
// Thread: watch() before the engine connects; take() from the thread that makes progress. The binding keeps the
// descriptor.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace hc {

class StackSource {
 public:
  // signal: the one whose handler writes the stack. fd: the reading end of the pipe, non-blocking; -1: no stacks.
  // thread: the kernel's id of the thread. libraries: folders whose code is nobody's own, apart by newlines; the first
  // is this package, the second Python's.
  void watch(int signal, int fd, int thread, const std::string& libraries);
  // The stack, or in parentheses the reason why there is none. Usually takes a millisecond, at most 0.15 s.
  std::string take() { return take_of(thread_); }
  // Whether the program stands still while these of its threads (0: a framework's program) stand in calls: the thread
  // of watch() is one of them or waits for them. where: the line of the user's code, "train.py:12"; empty: not known.
  struct Standing {
    bool is_still = false;
    std::string where;
  };
  Standing look(const std::vector<int>& threads);

 private:
  std::string take_of(int thread);
  bool is_library(std::string_view file) const;
  bool waits_for(const std::string& stack, bool of_program) const;
  std::string own_line_in(const std::string& stack) const;
  std::string read_until_quiet();
  std::vector<std::string> libraries_;
  std::string folder_;  // of the user's paths: the current one
  int signal_ = 0, fd_ = -1, thread_ = 0;
  void (*handler_)(int) = nullptr;  // who handled the signal when watch() was called
};

}  // namespace hc
