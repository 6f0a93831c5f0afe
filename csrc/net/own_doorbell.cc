#include "net/own_doorbell.h"

#include <sys/eventfd.h>
#include <unistd.h>

namespace hc {

bool OwnDoorbell::open() {
  fd_ = Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd_) return false;
  number_.store(fd_.get());
  return true;
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
