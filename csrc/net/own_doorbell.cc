#include "net/own_doorbell.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

namespace hc {

bool OwnDoorbell::open() {
  fd_ = Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd_) return false;
  number_.store(fd_.get());
  return true;
}

// A peer's Doorbell and this are the two halves of one agreement: each stores, then looks at what the other stores.
void OwnDoorbell::set_asleep(Sleep state) {
  const auto word = static_cast<uint32_t>(state);
  if (state == Sleep::kAwake) {
    asleep_->store(word, std::memory_order_relaxed);
    return;
  }
  asleep_->exchange(word, std::memory_order_seq_cst);
#ifndef __SANITIZE_THREAD__  // which does not know fences; there Doorbell uses a read-modify-write of this word
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

void OwnDoorbell::ring() {
  ring_pending_.store(1, std::memory_order_seq_cst);
  if (asleep_->exchange(static_cast<uint32_t>(Sleep::kAwake), std::memory_order_seq_cst) == 0) return;
  const int saved = errno;
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t written = ::write(number_.load(), &one, sizeof(one));
  errno = saved;
}

void OwnDoorbell::clear() {
  uint64_t count;
  [[maybe_unused]] ssize_t got = ::read(fd_.get(), &count, sizeof(count));
}

void OwnDoorbell::stay_readable() {
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t written = ::write(fd_.get(), &one, sizeof(one));
}

}  // namespace hc
