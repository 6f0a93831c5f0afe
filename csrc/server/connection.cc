#include "server/connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/clock.h"
#include "net/dialer.h"

namespace hc {
namespace {

constexpr int kDialPollMs = 10;

bool is_unix_socket(const Fd& fd) {
  int domain = AF_UNSPEC;
  socklen_t bytes = sizeof(domain);
  return ::getsockopt(fd.get(), SOL_SOCKET, SO_DOMAIN, &domain, &bytes) == 0 && domain == AF_UNIX;
}

}  // namespace

Connection::Connection(Fd fd, std::string peer)
    : fd_(std::move(fd)), peer_(std::move(peer)), has_sums_(!is_unix_socket(fd_)) {}

Result<std::unique_ptr<Connection>> Connection::dial(const Credentials& credentials, int32_t from, const Target& target,
                                                     double timeout_s) {
  const HostIdentity own = HostIdentity::of_this_process(target.endpoint.identity.label);
  Dialer::Target where;
  if (own == target.endpoint.identity) {
    where.unix_name = target.endpoint.unix_name;
  } else {
    where.addresses = dialable(own, target.endpoint);
  }
  const std::string who =
      text_of("server ", target.index, " (", target.endpoint.host_name, ", pid ", target.endpoint.pid, ")");
  Dialer dialer(&credentials, {from, target.index, target.generation, Purpose::kData}, std::move(where),
                Dialer::Pace{});
  const Deadline deadline = Deadline::in(timeout_s);
  while (!dialer.done()) {
    if (Status status = dialer.step(Clock::now()); !status.is_ok())
      return Status(Code::kPeerLost, text_of("cannot connect to ", who, ": ", status.text()));
    if (dialer.done()) break;
    if (deadline.passed())
      return error(Code::kTimeout, "no connection to ", who, " within ", timeout_s, " s: ", dialer.tried());
    std::vector<pollfd> set;
    dialer.add_to(&set);
    ::poll(set.data(), set.size(), std::min(kDialPollMs, deadline.remaining_ms()));
  }
  return std::make_unique<Connection>(dialer.take(), who);
}

Result<std::unique_ptr<Connection>> Connection::welcome(Fd fd, std::string from, const Credentials& credentials,
                                                        int32_t index, uint64_t generation, double timeout_s) {
  int32_t who = -1;
  Handshake handshake = Handshake::accept(&credentials, generation, [&](const Claim& claim) {
    if (claim.to != index) return Verdict::kNotThisRank;
    who = claim.from;
    return Verdict::kWelcome;
  });
  const Deadline deadline = Deadline::in(timeout_s);
  for (;;) {
    const Handshake::State state = handshake.step(fd.get());
    if (state == Handshake::State::kDone) break;
    if (state == Handshake::State::kFailed) return handshake.status().with(from);
    if (deadline.passed()) return error(Code::kTimeout, from, ": no handshake within ", timeout_s, " s");
    pollfd one{fd.get(), handshake.events(), 0};
    ::poll(&one, 1, deadline.remaining_ms());
  }
  const std::string name = who >= kClientIndex ? text_of("worker rank ", who - kClientIndex, " (", from, ")")
                                               : text_of("server ", who, " (", from, ")");
  return std::make_unique<Connection>(std::move(fd), name);
}

Status Connection::wait(short events, double silence_s) const {
  pollfd one{fd_.get(), events, 0};
  const Deadline deadline = Deadline::in(std::max(0.0, silence_s));
  for (;;) {
    const int ready = ::poll(&one, 1, silence_s < 0 ? -1 : deadline.remaining_ms());
    if (ready > 0) return Status::ok();
    if (ready < 0 && errno != EINTR) return error(Code::kInternal, "poll: ", std::strerror(errno));
    if (silence_s >= 0 && deadline.passed())
      return error(Code::kTimeout, peer_, " has not answered for ", silence_s, " s");
  }
}

Status Connection::send(const FrameHeader& header, std::span<const uint8_t> first, std::span<const uint8_t> second,
                        double silence_s) {
  MutexLock lock(sending_);
  FrameHeader head = header;
  head.bytes = first.size() + second.size();
  if (has_sums_) {
    MemoryHash hash;
    hash.add(first.data(), first.size());
    hash.add(second.data(), second.size());
    head.sum = hash.finish();
  }
  head.guard = head.guard_of();
  iovec parts[3] = {{&head, sizeof(head)},
                    {const_cast<uint8_t*>(first.data()), first.size()},
                    {const_cast<uint8_t*>(second.data()), second.size()}};
  std::span<iovec> rest(parts);
  while (!rest.empty()) {
    if (rest[0].iov_len == 0) {
      rest = rest.subspan(1);
      continue;
    }
    const IoResult result = send_parts(fd_.get(), rest);
    if (result.what == Io::kWouldBlock) {
      HC_TRY(wait(POLLOUT, silence_s));
      continue;
    }
    if (result.what != Io::kMoved) return error(Code::kPeerLost, peer_, ": ", std::strerror(result.error_number));
    size_t moved = result.bytes;
    while (!rest.empty() && moved >= rest[0].iov_len) {
      moved -= rest[0].iov_len;
      rest = rest.subspan(1);
    }
    if (moved > 0) {
      rest[0].iov_base = static_cast<uint8_t*>(rest[0].iov_base) + moved;
      rest[0].iov_len -= moved;
    }
  }
  return Status::ok();
}

Status Connection::fill(void* to, size_t bytes, double silence_s) {
  auto* at = static_cast<uint8_t*>(to);
  while (bytes > 0) {
    const iovec part{at, bytes};
    const IoResult result = receive_parts(fd_.get(), {&part, 1});
    if (result.what == Io::kWouldBlock) {
      HC_TRY(wait(POLLIN, silence_s));
      continue;
    }
    if (result.what == Io::kEnded) return error(Code::kPeerLost, peer_, " has closed its connection");
    if (result.what == Io::kFailed) return error(Code::kPeerLost, peer_, ": ", std::strerror(result.error_number));
    at += result.bytes;
    bytes -= result.bytes;
  }
  return Status::ok();
}

Status Connection::receive(FrameHeader* header, Buffer* payload, double silence_s) {
  HC_TRY(wait(POLLIN, silence_s));  // an end counts as something to read
  HC_TRY(fill(header, sizeof(*header), kWithinFrameS));
  if (header->magic != kFrameMagic || header->verb >= Verb::kVerbs || header->bytes > kMaxPayload ||
      header->guard != header->guard_of())
    return error(Code::kPeerLost, peer_, " sent a malformed frame");
  HC_TRY(fill(payload->sized(header->bytes), header->bytes, kWithinFrameS));
  if (!has_sums_ || hash_of_bytes(payload->data(), header->bytes) == header->sum) return Status::ok();
  return error(Code::kPeerLost, peer_, " sent ", header->bytes,
               " bytes that were changed on their way. A network card, a switch or a proxy between the two hosts is "
               "faulty");
}

void Connection::shut() { ::shutdown(fd_.get(), SHUT_RDWR); }

}  // namespace hc
