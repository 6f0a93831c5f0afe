#include "engine/watch/stack_source.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>

#include "base/clock.h"

namespace hc {

namespace {

constexpr double kFirstByteS = 0.1;   // the thread has to be scheduled before it can answer
constexpr int kQuietMs = 20;          // nothing for so long: that was all
constexpr size_t kMostBytes = 12000;  // a deep recursion says the same again and again

void (*handler_of(int signal))(int) {
  struct sigaction action{};
  if (::sigaction(signal, nullptr, &action) != 0) return nullptr;
  return action.sa_handler;  // shares its place with sa_sigaction
}

}  // namespace

void StackSource::watch(int signal, int fd, int thread) {
  signal_ = signal;
  fd_ = fd;
  thread_ = thread;
  handler_ = handler_of(signal);
}

std::string StackSource::take() {
  if (fd_ < 0) return "(its stack is not available: HOROCLONE_STALL_STACKS=0, or no signal was free)";
  // Raising a signal that somebody else handles now, or nobody, could end the program.
  const auto handler = handler_of(signal_);
  if (handler != handler_ || handler == SIG_DFL || handler == SIG_IGN || handler == nullptr)
    return "(its stack is not available: the program took over the signal that asks for it)";
  char stale[4096];
  while (::read(fd_, stale, sizeof stale) > 0) {
  }
  if (::syscall(SYS_tgkill, ::getpid(), thread_, signal_) != 0)
    return "(its stack is not available: the thread that called init() has ended)";
  std::string text = read_until_quiet();
  if (text.empty()) return "(its stack is not available: its main thread blocks signals or waits in the kernel)";
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

std::string StackSource::read_until_quiet() {
  std::string text;
  const Deadline deadline = Deadline::in(kFirstByteS);
  while (text.size() < kMostBytes) {
    pollfd watched{fd_, POLLIN, 0};
    const bool ready = ::poll(&watched, 1, text.empty() ? deadline.remaining_ms() : kQuietMs) > 0;
    char part[4096];
    const ssize_t n = ready ? ::read(fd_, part, sizeof part) : 0;
    if (n > 0) {
      text.append(part, static_cast<size_t>(n));
    } else if (!text.empty() || deadline.passed()) {
      break;
    }
  }
  return text;
}

}  // namespace hc
