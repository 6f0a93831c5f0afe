#include "engine/watch/stack_source.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <sstream>
#include <string_view>

#include "base/clock.h"
#include "base/status.h"

namespace hc {

namespace {

constexpr double kFirstByteS = 0.1;  // the thread has to be scheduled before it can answer
constexpr int kQuietMs = 20;         // without output: that was all
constexpr size_t kMaxBytes = 12000;  // a deep recursion says the same again and again

void (*handler_of(int signal))(int) {
  struct sigaction action{};
  if (::sigaction(signal, nullptr, &action) != 0) return nullptr;
  return action.sa_handler;  // shares its place with sa_sigaction
}

}  // namespace

void StackSource::watch(int signal, int fd, int thread, const std::string& libraries) {
  signal_ = signal;
  fd_ = fd;
  thread_ = thread;
  handler_ = handler_of(signal);
  for (size_t from = 0; from < libraries.size();) {
    const size_t end = std::min(libraries.find('\n', from), libraries.size());
    if (end > from) libraries_.push_back(libraries.substr(from, end - from));
    from = end + 1;
  }
  char here[4096];
  if (::getcwd(here, sizeof here)) folder_ = text_of(here, "/");
}

bool StackSource::is_library(std::string_view file) const {
  return file.starts_with('<') ||
         std::any_of(libraries_.begin(), libraries_.end(), [&](const std::string& l) { return file.starts_with(l); });
}

namespace {

struct Frame {
  std::string file, line, function;
};

// Lines of faulthandler, the innermost first: `  File "/home/me/train.py", line 12 in step`.
std::vector<Frame> frames_of(const std::string& stack) {
  constexpr std::string_view kFile = "  File \"", kLine = "\", line ", kIn = " in ";
  std::vector<Frame> frames;
  std::istringstream lines(stack);
  for (std::string text; std::getline(lines, text);) {
    const size_t line = text.rfind(kLine), in = text.rfind(kIn);
    if (!text.starts_with(kFile) || line == std::string::npos || in == std::string::npos || in < line) continue;
    const size_t number = line + kLine.size();
    frames.push_back({text.substr(kFile.size(), line - kFile.size()), text.substr(number, in - number),
                      text.substr(in + kIn.size())});
  }
  return frames;
}

// Not on a processor, and not in a sleep, a file or a socket: another thread is to wake it.
bool waits_for_a_thread(int thread) {
  std::ifstream now(text_of("/proc/self/task/", thread, "/syscall"));
  long number = -1;
  return now >> number && number == SYS_futex;
}

bool is_installed(std::string_view file) {
  return file.find("/site-packages/") != std::string_view::npos ||
         file.find("/dist-packages/") != std::string_view::npos;
}

}  // namespace

// This package, or a framework whose program has not ended, or another thread is what this stack waits for. The user's
// own code, or a library that it has called, works.
bool StackSource::waits_for(const std::string& stack, bool of_program) const {
  const std::vector<Frame> frames = frames_of(stack);
  if (frames.empty() || libraries_.size() < 2) return false;
  if (frames[0].file.ends_with("/threading.py") &&
      (frames[0].function == "join" || frames[0].function == "_wait_for_tstate_lock"))
    return true;
  for (const Frame& frame : frames) {
    if (frame.file.starts_with(libraries_[0])) return true;
    const bool is_pythons =
        frame.file.starts_with('<') || (frame.file.starts_with(libraries_[1]) && !is_installed(frame.file));
    if (!is_pythons) return of_program && is_library(frame.file);
  }
  return false;
}

std::string StackSource::own_line_in(const std::string& stack) const {
  for (const Frame& frame : frames_of(stack)) {
    if (is_library(frame.file)) continue;
    const bool is_here = !folder_.empty() && frame.file.starts_with(folder_);
    return frame.file.substr(is_here ? folder_.size() : 0) + ":" + frame.line;
  }
  return "";
}

StackSource::Standing StackSource::look(const std::vector<int>& threads) {
  if (thread_ == 0) return {true, ""};
  const bool has_ended = ::syscall(SYS_tgkill, ::getpid(), thread_, 0) != 0;  // it has called init() for others
  const bool is_one = has_ended || std::find(threads.begin(), threads.end(), thread_) != threads.end();
  if (fd_ < 0) return {is_one, ""};
  const bool of_program = std::find(threads.begin(), threads.end(), 0) != threads.end();
  const bool in_program = of_program && waits_for_a_thread(thread_);  // before a signal wakes it
  const std::string stack = take();
  Standing standing;
  standing.is_still = is_one || in_program || waits_for(stack, of_program);
  if (has_ended || !is_one)
    for (const int thread : threads)
      if (thread && standing.where.empty()) standing.where = own_line_in(take_of(thread));
  if (standing.where.empty()) standing.where = own_line_in(stack);  // a library's thread waits for this one
  return standing;
}

std::string StackSource::take_of(int thread) {
  if (fd_ < 0) return "(its stack is not available: HOROCLONE_STALL_STACKS=0, or no signal was free)";
  // Raising a signal that somebody else handles now, or nobody, could end the program.
  const auto handler = handler_of(signal_);
  if (handler != handler_ || handler == SIG_DFL || handler == SIG_IGN || handler == nullptr)
    return "(its stack is not available: the program took over the signal that asks for it)";
  char stale[4096];
  while (::read(fd_, stale, sizeof stale) > 0) {
  }
  if (::syscall(SYS_tgkill, ::getpid(), thread, signal_) != 0)
    return "(its stack is not available: the thread that called init() has ended)";
  std::string text = read_until_quiet();
  if (text.empty()) return "(its stack is not available: its main thread blocks signals or waits in the kernel)";
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

std::string StackSource::read_until_quiet() {
  std::string text;
  const Deadline deadline = Deadline::in(kFirstByteS);
  while (text.size() < kMaxBytes) {
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
