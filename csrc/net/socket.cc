#include "net/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace hc {
namespace {

constexpr int kBacklog = 1024;
constexpr size_t kMaxDescriptors = 4;
constexpr int kSmallBuffer = 256 << 10;  // against 64 KiB, the largest segment there is (loopback)

Status system_error(const std::string& what) {
  const int number = errno;
  if (number == EMFILE) {
    return error(Code::kInternal, what, ": too many open files in this process; raise `ulimit -n`");
  }
  return error(Code::kInternal, what, ": ", std::strerror(number));
}

Result<Fd> open_socket(int family) {
  Fd fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return system_error("socket");
  return fd;
}

// The length of an abstract address counts: the name is not NUL-terminated.
socklen_t unix_address(std::string_view name, sockaddr_un* to) {
  *to = {};
  to->sun_family = AF_UNIX;
  const size_t bytes = std::min(name.size(), sizeof(to->sun_path) - 1);
  std::memcpy(to->sun_path + 1, name.data(), bytes);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes);
}

bool tell_of(int fd, tcp_info* info) {
  socklen_t bytes = sizeof(*info);
  return ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &bytes) == 0;
}

void set_option(int fd, int level, int name, int value) { ::setsockopt(fd, level, name, &value, sizeof(value)); }

// Before connect or listen: the buffers and the segment size are settled with the first packet. Segments must fit a
// small buffer several times, or both sides wait for timers.
void tune_tcp(int fd, const TcpTuning& tuning) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  const int idle_s = std::max(1, static_cast<int>(tuning.keepalive_s / 2));
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, idle_s);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, idle_s / 3));
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT,
             std::max(1000, static_cast<int>(std::lround(tuning.keepalive_s * 1000))));
  if (tuning.buffer_bytes <= 0) return;
  set_option(fd, SOL_SOCKET, SO_SNDBUF, tuning.buffer_bytes);
  set_option(fd, SOL_SOCKET, SO_RCVBUF, tuning.buffer_bytes);
  if (tuning.buffer_bytes < kSmallBuffer)
    set_option(fd, IPPROTO_TCP, TCP_MAXSEG, std::max(536, tuning.buffer_bytes / 4));
}

// Position of `name` in a comma list, -1 when absent.
int position_in(const std::string& list, std::string_view name) {
  int position = 0;
  for (size_t from = 0; from <= list.size(); ++position) {
    size_t end = std::min(list.find(',', from), list.size());
    if (std::string_view(list).substr(from, end - from) == name) return position;
    from = end + 1;
  }
  return -1;
}

}  // namespace

void Fd::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

Address::Address(const sockaddr* from, socklen_t bytes) {
  std::memcpy(&storage_, from, std::min<size_t>(bytes, sizeof(storage_)));
}

Address Address::any(int family) {
  Address all;
  all.storage_.ss_family = static_cast<sa_family_t>(family);
  return all;
}

Result<Address> Address::from_bytes(std::span<const uint8_t> host, uint16_t port) {
  if (host.size() != 4 && host.size() != 16)
    return error(Code::kInvalidArgument, "an address of ", host.size(), " bytes");
  Address address = any(host.size() == 4 ? AF_INET : AF_INET6);
  void* to = host.size() == 4 ? static_cast<void*>(&reinterpret_cast<sockaddr_in&>(address.storage_).sin_addr)
                              : static_cast<void*>(&reinterpret_cast<sockaddr_in6&>(address.storage_).sin6_addr);
  std::memcpy(to, host.data(), host.size());
  address.set_port(port);
  return address;
}

Result<Address> Address::parse(const std::string& host, uint16_t port) {
  uint8_t bytes[16];
  if (inet_pton(AF_INET, host.c_str(), bytes) == 1) return from_bytes({bytes, 4}, port);
  if (inet_pton(AF_INET6, host.c_str(), bytes) == 1) return from_bytes({bytes, 16}, port);
  return error(Code::kInvalidArgument, "'", host, "' is no numeric address");
}

uint16_t Address::port() const {
  return ntohs(family() == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(storage_).sin6_port
                                    : reinterpret_cast<const sockaddr_in&>(storage_).sin_port);
}

void Address::set_port(uint16_t port) {
  if (family() == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(storage_).sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in&>(storage_).sin_port = htons(port);
  }
}

std::span<const uint8_t> Address::host_bytes() const {
  if (family() == AF_INET6) {
    return {reinterpret_cast<const uint8_t*>(&reinterpret_cast<const sockaddr_in6&>(storage_).sin6_addr), 16};
  }
  return {reinterpret_cast<const uint8_t*>(&reinterpret_cast<const sockaddr_in&>(storage_).sin_addr), 4};
}

bool Address::is_loopback() const {
  if (family() == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(storage_).sin6_addr);
  return host_bytes()[0] == 127;
}

std::string Address::text() const {
  if (family() != AF_INET && family() != AF_INET6) return "unix socket";
  char host[INET6_ADDRSTRLEN] = "?";
  const auto& six = reinterpret_cast<const sockaddr_in6&>(storage_).sin6_addr;
  if (family() == AF_INET6 && IN6_IS_ADDR_V4MAPPED(&six)) {  // how an IPv4 peer looks to a dual-stack listener
    inet_ntop(AF_INET, six.s6_addr + 12, host, sizeof(host));
    return text_of(host, ":", port());
  }
  inet_ntop(family(), host_bytes().data(), host, sizeof(host));
  return family() == AF_INET6 ? text_of("[", host, "]:", port()) : text_of(host, ":", port());
}

Result<std::vector<NetworkInterface>> network_interfaces(const std::string& wanted) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return system_error("getifaddrs");
  std::vector<std::pair<int, NetworkInterface>> found;  // with its place in the order
  std::string names;
  for (const ifaddrs* at = list; at; at = at->ifa_next) {
    if (!at->ifa_addr || !(at->ifa_flags & IFF_UP)) continue;
    const int family = at->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    Address address(at->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(at->ifa_addr)->sin6_addr))
      continue;
    if (position_in(names, at->ifa_name) < 0) names += (names.empty() ? "" : ",") + std::string(at->ifa_name);
    int place = wanted.empty() ? (address.is_loopback() ? 2 : 0) : 2 * position_in(wanted, at->ifa_name);
    if (place >= 0) found.push_back({place + (family == AF_INET6), {at->ifa_name, address}});
  }
  freeifaddrs(list);
  if (found.empty() && !wanted.empty()) {
    return error(Code::kInvalidArgument, "no interface of '", wanted,
                 "' is up; this host has: ", names.empty() ? "none" : names,
                 ". Name one of them where this one was named: HOROCLONE_NETWORK_INTERFACES, HOROVOD_GLOO_IFACE "
                 "or --network-interfaces");
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<NetworkInterface> all;
  for (auto& [place, one] : found) all.push_back(std::move(one));
  return all;
}

Result<Fd> listen_tcp(const Address& at, const TcpTuning& tuning) {
  auto fd = open_socket(at.family());
  if (!fd.is_ok()) return fd.status();
  tune_tcp(fd.value().get(), tuning);
  if (at.family() == AF_INET6) set_option(fd.value().get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (::bind(fd.value().get(), at.raw(), at.raw_bytes()) != 0 || ::listen(fd.value().get(), kBacklog) != 0) {
    return system_error("listen on " + at.text());
  }
  return fd.take();
}

Result<Address> local_address(int fd) {
  sockaddr_storage at{};
  socklen_t bytes = sizeof(at);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&at), &bytes) != 0) return system_error("getsockname");
  return Address(reinterpret_cast<sockaddr*>(&at), bytes);
}

Result<Fd> start_connect(const Address& to, const TcpTuning& tuning) {
  auto fd = open_socket(to.family());
  if (!fd.is_ok()) return fd.status();
  tune_tcp(fd.value().get(), tuning);
  // EINTR means the same as EINPROGRESS: the attempt goes on.
  if (::connect(fd.value().get(), to.raw(), to.raw_bytes()) != 0 && errno != EINPROGRESS && errno != EINTR) {
    return error(errno == ECONNREFUSED ? Code::kPeerLost : Code::kInternal, std::strerror(errno));
  }
  return fd.take();
}

int take_socket_error(int fd) {
  int number = 0;
  socklen_t bytes = sizeof(number);
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &number, &bytes) != 0) return errno;
  return number;
}

double round_trip_s(int fd) {
  tcp_info info{};
  return tell_of(fd, &info) ? info.tcpi_rtt / 1e6 : 0;
}

double unheard_s(int fd) {
  tcp_info info{};
  if (!tell_of(fd, &info) || (info.tcpi_retransmits == 0 && info.tcpi_probes == 0)) return 0;
  return info.tcpi_last_ack_recv / 1e3;
}

bool send_at_measured_rate(int fd) {
  static constexpr char kName[] = "bbr";
  return ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kName, sizeof(kName) - 1) == 0;
}

Result<Fd> listen_unix(std::string_view name) {
  auto fd = open_socket(AF_UNIX);
  if (!fd.is_ok()) return fd.status();
  sockaddr_un at;
  socklen_t bytes = unix_address(name, &at);
  if (::bind(fd.value().get(), reinterpret_cast<sockaddr*>(&at), bytes) != 0 ||
      ::listen(fd.value().get(), kBacklog) != 0) {
    return system_error("listen on a unix socket");
  }
  return fd.take();
}

Result<Fd> connect_unix(std::string_view name) {
  auto fd = open_socket(AF_UNIX);
  if (!fd.is_ok()) return fd.status();
  sockaddr_un to;
  socklen_t bytes = unix_address(name, &to);
  int result;
  do result = ::connect(fd.value().get(), reinterpret_cast<sockaddr*>(&to), bytes);
  while (result != 0 && errno == EINTR);
  if (result != 0) {  // the caller tells "gone" from "busy"
    return error(errno == ECONNREFUSED ? Code::kPeerLost : Code::kInternal, "unix socket: ", std::strerror(errno));
  }
  return fd.take();
}

Fd accept_one(int listener, Address* from, int* error_number) {
  *error_number = 0;
  for (;;) {
    sockaddr_storage at{};
    socklen_t bytes = sizeof(at);
    int fd = ::accept4(listener, reinterpret_cast<sockaddr*>(&at), &bytes, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
      if (from) *from = Address(reinterpret_cast<sockaddr*>(&at), bytes);
      return Fd(fd);
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) *error_number = errno;
    return Fd();
  }
}

Result<PeerCredentials> peer_credentials(int unix_socket) {
  ucred who{};
  socklen_t bytes = sizeof(who);
  if (::getsockopt(unix_socket, SOL_SOCKET, SO_PEERCRED, &who, &bytes) != 0) return system_error("SO_PEERCRED");
  return PeerCredentials{who.pid, who.uid};
}

// SO_PEERPIDFD names the very process of the socket; pidfd_open could, in theory, meet a reused number.
Fd open_peer_pidfd(int unix_socket, pid_t pid) {
  if (pid <= 0) return Fd();
  int fd = -1;
  socklen_t bytes = sizeof(fd);
  if (::getsockopt(unix_socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &bytes) == 0) return Fd(fd);
#ifdef SYS_pidfd_open
  return Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#else
  return Fd();
#endif
}

namespace {

IoResult io_result(ssize_t moved, bool reading) {
  if (moved > 0) return {Io::kMoved, static_cast<size_t>(moved), 0};
  if (moved == 0) return {reading ? Io::kEnded : Io::kWouldBlock, 0, 0};
  if (errno == EAGAIN || errno == EWOULDBLOCK) return {Io::kWouldBlock, 0, 0};
  return {Io::kFailed, 0, errno};
}

template <class Call>
ssize_t uninterrupted(Call call) {
  ssize_t result;
  do result = call();
  while (result < 0 && errno == EINTR);
  return result;
}

}  // namespace

int register_events(int epoll, const Fd& fd, uint64_t token, uint32_t wanted, uint32_t* registered) {
  if (!fd || wanted == *registered) return 0;
  epoll_event event{};
  event.events = wanted;
  event.data.u64 = token;
  const int how = wanted == 0 ? EPOLL_CTL_DEL : *registered == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  if (::epoll_ctl(epoll, how, fd.get(), &event) == 0) *registered = wanted;
  return 1;
}

IoResult send_parts(int fd, std::span<const iovec> parts) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  return io_result(uninterrupted([&] { return ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT); }), false);
}

IoResult receive_parts(int fd, std::span<const iovec> parts) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  return io_result(uninterrupted([&] { return ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC); }), true);
}

IoResult send_descriptors(int fd, std::span<const uint8_t> bytes, std::span<const int> fds) {
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  iovec part{const_cast<uint8_t*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part, message.msg_iovlen = 1;
  message.msg_control = control, message.msg_controllen = CMSG_SPACE(fds.size_bytes());
  cmsghdr* head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET, head->cmsg_type = SCM_RIGHTS, head->cmsg_len = CMSG_LEN(fds.size_bytes());
  std::memcpy(CMSG_DATA(head), fds.data(), fds.size_bytes());
  IoResult result =
      io_result(uninterrupted([&] { return ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT); }), false);
  if (result.what == Io::kMoved && result.bytes != bytes.size()) return {Io::kFailed, 0, EMSGSIZE};
  return result;
}

IoResult receive_descriptors(int fd, std::span<uint8_t> bytes, std::span<Fd> fds) {
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part, message.msg_iovlen = 1;
  message.msg_control = control, message.msg_controllen = sizeof(control);
  IoResult result =
      io_result(uninterrupted([&] { return ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC); }), true);
  if (result.what != Io::kMoved) return result;
  size_t count = 0;
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= head->cmsg_len; at += sizeof(int)) {
      int one;
      std::memcpy(&one, CMSG_DATA(head) + at, sizeof(int));
      Fd owned(one);
      if (count < fds.size()) fds[count] = std::move(owned);
      ++count;
    }
  }
  if (result.bytes != bytes.size() || count != fds.size() || (message.msg_flags & MSG_CTRUNC)) {
    for (Fd& one : fds) one.reset();
    return {Io::kFailed, 0, (message.msg_flags & MSG_CTRUNC) ? EMFILE : EBADMSG};
  }
  return result;
}

}  // namespace hc
