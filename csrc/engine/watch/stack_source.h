// Gets the Python stack of this process's main thread without calling Python. The binding has faulthandler write it
// into a pipe when a private signal arrives (a C handler that needs no lock); this class raises the signal and reads
// the pipe.
//
// Thread: watch() before the engine connects; take() from the thread that makes progress. The binding keeps the
// descriptor.
#pragma once

#include <string>

namespace hc {

class StackSource {
 public:
  // signal: the one whose handler writes the stack. fd: the reading end of the pipe, non-blocking. thread: the kernel's
  // id of the thread.
  void watch(int signal, int fd, int thread);
  // The stack, or in parentheses the reason why there is none. Usually takes a millisecond, at most 0.15 s.
  std::string take();

 private:
  std::string read_until_quiet();
  int signal_ = 0, fd_ = -1, thread_ = 0;
  void (*handler_)(int) = nullptr;  // who handled the signal when watch() was called
};

}  // namespace hc
