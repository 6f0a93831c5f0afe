// Thin, typed system calls for sockets: every descriptor is non-blocking and close-on-exec, no call raises SIGPIPE or
// gives up on EINTR. Nothing here waits. Thread: any; an Fd belongs to one owner.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/settings_table.h"
#include "base/status.h"

namespace hc {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~Fd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

// An IPv4 or IPv6 address with its port.
class Address {
 public:
  Address() = default;
  Address(const sockaddr* from, socklen_t bytes);
  static Address any(int family);
  // 4 or 16 bytes in network order.
  static Result<Address> from_bytes(std::span<const uint8_t> host, uint16_t port);
  static Result<Address> parse(const std::string& host, uint16_t port);  // numeric
  int family() const { return storage_.ss_family; }
  uint16_t port() const;
  void set_port(uint16_t port);
  std::span<const uint8_t> host_bytes() const;
  bool is_loopback() const;
  std::string text() const;  // "10.0.0.2:41233", "[fd00::1]:41233"
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t raw_bytes() const { return family() == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in); }

 private:
  sockaddr_storage storage_{};
};

struct NetworkInterface {
  std::string name;
  Address address;
};
// Addresses of the interfaces that are up, IPv4 before IPv6, loopback last; `wanted` (comma list) restricts and orders
// them.
Result<std::vector<NetworkInterface>> network_interfaces(const std::string& wanted);

struct TcpTuning {
  double keepalive_s = defaults::keepalive_s;  // a peer silent for so long is given up (keep-alive and user timeout)
  int buffer_bytes = 0;                        // 0: the kernel's own choice
};
// Accepted sockets inherit the tuning. Port 0: the kernel chooses.
Result<Fd> listen_tcp(const Address& at, const TcpTuning& tuning);
Result<Address> local_address(int fd);
// The connection may still be in progress (PeerLost: it was refused at once). Once the socket is writable,
// take_socket_error() says how it ended.
Result<Fd> start_connect(const Address& to, const TcpTuning& tuning);
int take_socket_error(int fd);
// What the kernel has measured on a TCP connection; 0: nothing.
double round_trip_s(int fd);
// How long the kernel has heard nothing while it sends something again and again; 0: it does not.
double unheard_s(int fd);
// Has the kernel send at the rate that it measures (BBR) rather than halve it at each lost packet. False: it may not.
bool send_at_measured_rate(int fd);

// Abstract unix sockets: no file, gone with the last descriptor.
Result<Fd> listen_unix(std::string_view name);
Result<Fd> connect_unix(std::string_view name);

// An empty Fd with *error_number 0 means that no connection waits. `from` may be null.
Fd accept_one(int listener, Address* from, int* error_number);

struct PeerCredentials {
  pid_t pid = 0;  // 0: lives in a process namespace that we cannot see into
  uid_t uid = 0;
};
Result<PeerCredentials> peer_credentials(int unix_socket);
// A descriptor that becomes readable when the process at the other end has ended; empty where the kernel has none.
Fd open_peer_pidfd(int unix_socket, pid_t pid);

// Has a level-triggered epoll set report these events with the token; 0: none, not even errors. *registered: what it
// reports now. Returns the number of system calls.
int register_events(int epoll, const Fd& fd, uint64_t token, uint32_t wanted, uint32_t* registered);

enum class Io : uint8_t { kMoved, kWouldBlock, kEnded, kFailed };
struct IoResult {
  Io what = Io::kWouldBlock;
  size_t bytes = 0;
  int error_number = 0;  // kFailed
};
IoResult send_parts(int fd, std::span<const iovec> parts);
IoResult receive_parts(int fd, std::span<const iovec> parts);
// One message with descriptors beside it (SCM_RIGHTS). Sent whole or not at all. On receipt `fds` come close-on-exec; a
// message with another size or another number of descriptors is kFailed and the descriptors are closed.
IoResult send_descriptors(int fd, std::span<const uint8_t> message, std::span<const int> fds);
IoResult receive_descriptors(int fd, std::span<uint8_t> message, std::span<Fd> fds);

}  // namespace hc
