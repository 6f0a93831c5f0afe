#include "net/tcp_channel.h"

#include <sys/epoll.h>

namespace hc {

TcpChannel::TcpChannel(int rank, std::string peer, Traffic* traffic, Sockets sockets)
    : FramedChannel(rank, std::move(peer), traffic),
      fd_{std::move(sockets.control), std::move(sockets.data)},
      epoll_(sockets.epoll),
      token_(sockets.token) {
  settle();
}

IoResult TcpChannel::write(Line line, std::span<const iovec> parts) {
  const Fd& fd = fd_[static_cast<int>(line)];
  if (!fd) return {Io::kFailed, 0, EBADF};
  traffic()->syscalls.add(1);
  return send_parts(fd.get(), parts);
}

IoResult TcpChannel::read(Line line, std::span<const iovec> parts) {
  const Fd& fd = fd_[static_cast<int>(line)];
  if (!fd) return {Io::kFailed, 0, EBADF};
  traffic()->syscalls.add(1);
  return receive_parts(fd.get(), parts);
}

// Level-triggered: a line that is ended, full or failed leaves the set, or it would wake its sleeper for ever.
void TcpChannel::settle() {
  if (epoll_ < 0) return;
  for (int i = 0; i < 2; ++i) {
    if (!fd_[i]) continue;
    const Line line = static_cast<Line>(i);
    const uint32_t wanted = (wants_read(line) ? uint32_t{EPOLLIN} : 0) | (wants_write(line) ? uint32_t{EPOLLOUT} : 0);
    if (wanted == registered_[i]) continue;
    epoll_event event{};
    event.events = wanted;
    event.data.u64 = token_;
    const int how = wanted == 0 ? EPOLL_CTL_DEL : registered_[i] == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
    if (::epoll_ctl(epoll_, how, fd_[i].get(), &event) == 0) registered_[i] = wanted;
    traffic()->syscalls.add(1);
  }
}

// Closing with unread bytes would send a reset, which may overtake what the peer has yet to read.
void TcpChannel::close() {
  for (int i = 0; i < 2; ++i) {
    if (!fd_[i]) continue;
    ::shutdown(fd_[i].get(), SHUT_WR);
    std::byte waste[4096];
    const iovec part{waste, sizeof(waste)};
    for (int attempt = 0; attempt < 1024 && receive_parts(fd_[i].get(), {&part, 1}).what == Io::kMoved; ++attempt) {
    }
    fd_[i].reset();
    registered_[i] = 0;
  }
  epoll_ = -1;
}

void TcpChannel::abandon() {
  epoll_ = -1;
  for (Fd& fd : fd_) fd.reset();
}

}  // namespace hc
