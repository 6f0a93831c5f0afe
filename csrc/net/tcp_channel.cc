#include "net/tcp_channel.h"

#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cstring>

namespace hc {
namespace {

// The end of a large transfer that is copied: more than a receiver leaves unacknowledged for a while (two segments).
constexpr int kTailBytes = 64 << 10, kMaxTailBytes = 160 << 10;
constexpr size_t kDrainBytes = 256u << 10;
constexpr double kStuckS = 0.3;  // without a sign from the other side, while something was sent again
constexpr double kStuckRoundTrips = 3;

}  // namespace

TcpChannel::TcpChannel(int rank, std::string peer, Traffic* traffic, Sockets sockets)
    : FramedChannel(rank, std::move(peer), traffic, sockets.keys),
      fd_{std::move(sockets.control), std::move(sockets.data)},
      epoll_(sockets.epoll),
      token_(sockets.token) {
  settle();
}

IoResult TcpChannel::write(Line line, std::span<const iovec> parts) {
  const Fd& fd = fd_[static_cast<int>(line)];
  if (!fd) return {Io::kFailed, 0, EBADF};
  traffic()->syscalls.add(1);
  const IoResult result = send_parts(fd.get(), parts);
  if (remaker_ && result.bytes > 0) remaker_->watch();
  return result;
}

IoResult TcpChannel::read(Line line, std::span<const iovec> parts) {
  const int at = static_cast<int>(line);
  if (auto& drained = drained_[at]; !drained.empty()) {
    size_t moved = 0;
    for (const iovec& part : parts) {
      const size_t bytes = std::min(part.iov_len, drained.size() - drained_at_[at]);
      std::memcpy(part.iov_base, drained.data() + drained_at_[at], bytes);
      drained_at_[at] += bytes;
      moved += bytes;
    }
    if (drained_at_[at] == drained.size()) drained = {}, drained_at_[at] = 0;
    return {Io::kMoved, moved, 0};
  }
  const Fd& fd = fd_[at];
  if (!fd) return remaker_ ? IoResult{} : IoResult{Io::kFailed, 0, EBADF};
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

void TcpChannel::remake_with(Remaker* remaker) {
  remaker_ = remaker;
  int segment = 0;
  socklen_t bytes = sizeof(segment);
  if (::getsockopt(fd_[1].get(), IPPROTO_TCP, TCP_MAXSEG, &segment, &bytes) != 0) segment = 0;
  keep_sent(static_cast<size_t>(std::clamp(2 * segment + segment / 2, kTailBytes, kMaxTailBytes)));
}

bool TcpChannel::will_remake(Line line, const IoResult& how) {
  if (!remaker_) return false;
  remaker_->lost(rank(), line, how);
  return true;
}

void TcpChannel::stop(Line line) {
  if (!is_down(line)) take_down(line);
}

uint64_t TcpChannel::drain(Line line) {
  const int at = static_cast<int>(line);
  auto& drained = drained_[at];
  while (fd_[at]) {
    const size_t before = drained.size();
    drained.resize(before + kDrainBytes);
    const iovec part{drained.data() + before, kDrainBytes};
    const IoResult result = receive_parts(fd_[at].get(), {&part, 1});
    drained.resize(before + result.bytes);
    if (result.what != Io::kMoved) fd_[at].reset();
  }
  registered_[at] = 0;
  return taken(line) + drained.size() - drained_at_[at];
}

Status TcpChannel::resume(Line line, Fd connection, uint64_t received) {
  HC_TRY(go_on(line, received));
  const int at = static_cast<int>(line);
  fd_[at] = std::move(connection);
  registered_[at] = 0;
  traffic()->remade.add(1);
  note_life();
  settle();
  return Status::ok();
}

uint64_t TcpChannel::unacknowledged(Line line) {
  int bytes = 0;
  traffic()->syscalls.add(1);
  if (::ioctl(fd_[static_cast<int>(line)].get(), SIOCOUTQ, &bytes) != 0 || bytes < 0) return ~uint64_t{0};
  return static_cast<uint64_t>(bytes);
}

bool TcpChannel::is_stuck(Line line) const {
  tcp_info info{};
  socklen_t bytes = sizeof(info);
  if (::getsockopt(fd_[static_cast<int>(line)].get(), IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return false;
  if (info.tcpi_retransmits == 0 && info.tcpi_probes == 0) return false;
  return info.tcpi_last_ack_recv / 1e3 >= std::max(kStuckS, kStuckRoundTrips * info.tcpi_rtt / 1e6);
}

Address TcpChannel::own_address(Line line) const {
  auto own = local_address(fd_[static_cast<int>(line)].get());
  return own.is_ok() ? own.value() : Address();
}

// Closing with unread bytes would send a reset, which may overtake what the peer has yet to read.
void TcpChannel::close() {
  remaker_ = nullptr;
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
  remaker_ = nullptr;
  epoll_ = -1;
  for (Fd& fd : fd_) fd.reset();
}

}  // namespace hc
