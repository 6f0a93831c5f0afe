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
constexpr double kSoonUpS = 0.2, kRemakeRoundTrips = 10;  // a line that is down so long may stay so

}  // namespace

TcpChannel::TcpChannel(int rank, std::string peer, Traffic* traffic, Sockets sockets)
    : FramedChannel(rank, std::move(peer), traffic, sockets.keys),
      fd_{std::move(sockets.control), std::move(sockets.data)},
      epoll_(sockets.epoll),
      token_(sockets.token) {
  settle();
}

IoResult TcpChannel::write(Line line, std::span<const iovec> parts) {
  IoResult result{Io::kFailed, 0, EBADF};
  if (line == Line::kData && parallel_) {
    result = parallel_->write(parts);
  } else if (const Fd& fd = fd_[static_cast<int>(line)]; fd) {
    traffic()->syscalls.add(1);
    result = send_parts(fd.get(), parts);
  }
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
  if (line == Line::kControl || reads_first()) {
    if (!fd_[at]) return remaker_ ? IoResult{} : IoResult{Io::kFailed, 0, EBADF};
    traffic()->syscalls.add(1);
    const IoResult result = receive_parts(fd_[at].get(), parts);
    if (line == Line::kControl || result.what != Io::kEnded) return result;
    if (!parallel_ && remaker_) spread(remaker_->take_offered(rank()));
    if (!parallel_) return result;
    first_ended_ = true;
    parallel_->read_from(taken(Line::kData));
  }
  if (!parallel_) return remaker_ ? IoResult{} : IoResult{Io::kFailed, 0, EBADF};
  const IoResult result = parallel_->read(parts);
  // Who leaves closes all of them, after a goodbye.
  const bool is_cut = result.what == Io::kWouldBlock && parallel_->has_lost_some() && !close_expected();
  return is_cut ? IoResult{Io::kEnded, 0, 0} : result;
}

void TcpChannel::spread(std::vector<Fd> connections) {
  // The peer must hear of it; where the first one has failed the others go, and it is made again.
  if (connections.empty() || ::shutdown(fd_[1].get(), SHUT_WR) != 0) return;
  parallel_ = std::make_unique<ParallelStream>(std::move(connections), traffic(), written(Line::kData));
  settle();
}

// Level-triggered: a line that is ended, full or failed leaves the set, or it would wake its sleeper for ever.
void TcpChannel::settle() {
  const bool is_good = failure().is_ok() && !is_down(Line::kData);
  if (parallel_ && is_good) parallel_->flush();
  if (epoll_ < 0) return;
  if (parallel_) {
    const bool reads = wants_read(Line::kData) && !reads_first();
    parallel_->settle(epoll_, token_, reads, wants_write(Line::kData), is_good);
  }
  for (int i = 0; i < 2; ++i) {
    if (!fd_[i]) continue;
    const Line line = static_cast<Line>(i);
    const bool is_control = line == Line::kControl;
    const uint32_t wanted = (wants_read(line) && (is_control || reads_first()) ? uint32_t{EPOLLIN} : 0) |
                            (wants_write(line) && (is_control || !parallel_) ? uint32_t{EPOLLOUT} : 0);
    traffic()->syscalls.add(register_events(epoll_, fd_[i], token_, wanted, &registered_[i]));
  }
}

void TcpChannel::remake_with(Remaker* remaker) {
  remaker_ = remaker;
  round_trip_s_ = hc::round_trip_s(fd_[1].get());
  int segment = 0;
  socklen_t bytes = sizeof(segment);
  if (::getsockopt(fd_[1].get(), IPPROTO_TCP, TCP_MAXSEG, &segment, &bytes) != 0) segment = 0;
  keep_sent(static_cast<size_t>(std::clamp(2 * segment + segment / 2, kTailBytes, kMaxTailBytes)),
            kSoonUpS + kRemakeRoundTrips * round_trip_s_);
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
    if (result.what == Io::kMoved) continue;
    if (line == Line::kData) first_ended_ |= result.what == Io::kEnded;
    fd_[at].reset();
  }
  if (line == Line::kData) {
    // Without the first one's end the peer has no acknowledgement of what follows it, and sends that again.
    if (first_ended_ && !parallel_ && remaker_)
      if (auto offered = remaker_->take_offered(rank()); !offered.empty())
        parallel_ = std::make_unique<ParallelStream>(std::move(offered), traffic());
    if (parallel_ && first_ended_) {
      parallel_->read_from(taken(line) + drained.size() - drained_at_[at]);
      parallel_->drain(&drained);
    }
    parallel_.reset();
    first_ended_ = false;
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
  const bool is_parallel = line == Line::kData && parallel_;
  Fd& fd = fd_[static_cast<int>(line)];
  int bytes = 0;
  if (fd) {
    traffic()->syscalls.add(1);
    if (::ioctl(fd.get(), SIOCOUTQ, &bytes) != 0 || bytes < 0) return ~uint64_t{0};
    if (!is_parallel) return static_cast<uint64_t>(bytes);
    // Until the peer has ended its direction it may not have taken the others.
    if (bytes > 0 || !first_ended_) return static_cast<uint64_t>(bytes) + parallel_->written();
    fd.reset();
  }
  return is_parallel ? parallel_->unacknowledged() : ~uint64_t{0};
}

// Of several connections one is held up by a lost packet now and then; all are by a cut.
bool TcpChannel::is_stuck(Line line) const {
  const Fd& fd = fd_[static_cast<int>(line)];
  double s = fd ? hc::unheard_s(fd.get()) : 0;
  if (line == Line::kData && parallel_) s = std::max(s, parallel_->unheard_s());
  return s > 0 && s >= std::max(kStuckS, kStuckRoundTrips * hc::round_trip_s(descriptor(line)));
}

int TcpChannel::descriptor(Line line) const {
  const Fd& fd = fd_[static_cast<int>(line)];
  return fd || line == Line::kControl || !parallel_ ? fd.get() : parallel_->connections().front().get();
}

Address TcpChannel::own_address(Line line) const {
  auto own = local_address(descriptor(line));
  return own.is_ok() ? own.value() : Address();
}

// Closing with unread bytes would send a reset, which may overtake what the peer has yet to read.
void TcpChannel::close_one(Fd* fd) {
  if (!*fd) return;
  ::shutdown(fd->get(), SHUT_WR);
  std::byte waste[4096];
  const iovec part{waste, sizeof(waste)};
  for (int attempt = 0; attempt < 1024 && receive_parts(fd->get(), {&part, 1}).what == Io::kMoved; ++attempt) {
  }
  fd->reset();
}

void TcpChannel::close() {
  remaker_ = nullptr;
  for (Fd& fd : fd_) close_one(&fd);
  if (parallel_) {
    for (Fd& fd : parallel_->connections()) close_one(&fd);
    parallel_.reset();
  }
  registered_[0] = registered_[1] = 0;
  epoll_ = -1;
}

void TcpChannel::abandon() {
  remaker_ = nullptr;
  epoll_ = -1;
  for (Fd& fd : fd_) fd.reset();
  parallel_.reset();
}

}  // namespace hc
