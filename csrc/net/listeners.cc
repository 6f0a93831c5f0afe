#include "net/listeners.h"

#include <cstdio>

#include "base/sha256.h"

namespace hc {

Status open_listeners(const std::string& wanted, const TcpTuning& tuning, Listeners* listeners, Endpoint* endpoint) {
  uint8_t name[16];
  HC_TRY(random_bytes(name));
  endpoint->unix_name = "horoclone-";
  for (uint8_t byte : name) {
    char hex[3];
    std::snprintf(hex, sizeof(hex), "%02x", byte);
    endpoint->unix_name += hex;
  }
  auto local = listen_unix(endpoint->unix_name);
  if (!local.is_ok()) return local.status();
  listeners->unix_socket = local.take();

  auto interfaces = network_interfaces(wanted);
  if (!interfaces.is_ok()) return interfaces.status();
  // A chosen interface means: nowhere else. Otherwise one socket serves every address, IPv6 ones where the kernel has
  // them.
  uint16_t port = 0;
  bool six = true;
  if (wanted.empty() && !interfaces.value().empty()) {  // else other ranks of this machine come through memory
    auto fd = listen_tcp(Address::any(AF_INET6), tuning);
    if (!fd.is_ok()) six = false, fd = listen_tcp(Address::any(AF_INET), tuning);
    if (!fd.is_ok()) return fd.status();
    auto at = local_address(fd.value().get());
    if (!at.is_ok()) return at.status();
    port = at.value().port();
    listeners->tcp.push_back(fd.take());
  }
  for (NetworkInterface& one : interfaces.value()) {
    if (endpoint->addresses.size() == kMaxAddresses || (!six && one.address.family() == AF_INET6)) continue;
    if (port == 0) {
      one.address.set_port(0);
      auto fd = listen_tcp(one.address, tuning);
      if (!fd.is_ok()) return fd.status().with("network interface " + one.name);
      auto at = local_address(fd.value().get());
      if (!at.is_ok()) return at.status();
      endpoint->addresses.push_back(at.take());
      listeners->tcp.push_back(fd.take());
    } else {
      one.address.set_port(port);
      endpoint->addresses.push_back(one.address);
    }
  }
  return Status::ok();
}

}  // namespace hc
