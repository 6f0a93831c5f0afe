// The Python stack of this process's main thread, without calling Python: the binding has faulthandler write it into a
// pipe when a private signal arrives (a handler in C that needs no lock), and this raises the signal and reads the
// pipe.
//
// Thread: watch() before the engine connects; take() from the thread that makes progress. The descriptor stays the
// binding's.
#pragma once

#include <string>

namespace hc {

class StackSource {
 public:
  // signal: who writes the stack; fd: the pipe's end to read from, non-blocking; thread: the kernel's id of the thread.
  void watch(int signal, int fd, int thread);
  // The stack, or in parentheses why there is none. Takes a millisecond as a rule, 0.15 s at most.
  std::string take();

 private:
  std::string read_until_quiet();
  int signal_ = 0, fd_ = -1, thread_ = 0;
  void (*handler_)(int) = nullptr;  // who handled the signal when watch() was called
};

}  // namespace hc
