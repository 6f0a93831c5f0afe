#include "net/interface_watch.h"

#include <ifaddrs.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstddef>

namespace hc {
namespace {

constexpr size_t kNewsBytes = 32u << 10;  // as netlink(7) advises

// One that was accepted by a listener for IPv6 has its IPv4 address within such a one.
std::string key_of(const Address& address) {
  auto bytes = address.host_bytes();
  if (address.family() == AF_INET6 &&
      IN6_IS_ADDR_V4MAPPED(&reinterpret_cast<const sockaddr_in6*>(address.raw())->sin6_addr))
    bytes = bytes.last(4);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

InterfaceWatch::InterfaceWatch() {
  Fd opened(::socket(AF_NETLINK, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, NETLINK_ROUTE));
  sockaddr_nl links{};
  links.nl_family = AF_NETLINK;
  links.nl_groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR;
  if (!opened || ::bind(opened.get(), reinterpret_cast<const sockaddr*>(&links), sizeof(links)) != 0) return;
  socket_ = std::move(opened);
  learn_addresses();
}

// Some kinds lose their addresses when they go down: what was known stays.
void InterfaceWatch::learn_addresses() {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return;
  for (const ifaddrs* at = all; at; at = at->ifa_next) {
    const int family = at->ifa_addr ? at->ifa_addr->sa_family : AF_UNSPEC;
    if (family != AF_INET && family != AF_INET6) continue;
    const Address address(at->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    number_[key_of(address)] = static_cast<int>(::if_nametoindex(at->ifa_name));
  }
  ::freeifaddrs(all);
}

void InterfaceWatch::take_news() {
  if (!socket_) return;
  alignas(nlmsghdr) std::byte news[kNewsBytes];
  bool is_new = false;
  for (;;) {
    const ssize_t bytes = ::recv(socket_.get(), news, sizeof(news), 0);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0 && errno == ENOBUFS) {  // some news is lost: nothing is known any more
      down_.clear();
      continue;
    }
    if (bytes <= 0) break;
    auto left = static_cast<unsigned>(bytes);
    for (const auto* one = reinterpret_cast<const nlmsghdr*>(news); NLMSG_OK(one, left); one = NLMSG_NEXT(one, left)) {
      is_new |= one->nlmsg_type == RTM_NEWADDR;
      if (one->nlmsg_type != RTM_NEWLINK && one->nlmsg_type != RTM_DELLINK) continue;
      const auto* about = static_cast<const ifinfomsg*>(NLMSG_DATA(one));
      const bool runs = one->nlmsg_type == RTM_NEWLINK && (about->ifi_flags & IFF_RUNNING);
      if (runs) {
        down_.erase(about->ifi_index);
        continue;
      }
      const auto [known, is_first] = down_.try_emplace(about->ifi_index, Clock::now());
      if (!is_first && !(about->ifi_flags & IFF_UP)) known->second = Clock::now();
    }
  }
  if (is_new) learn_addresses();
}

bool InterfaceWatch::went_down(const Address& own, TimePoint since) const {
  const auto found = number_.find(key_of(own));
  const auto down = found == number_.end() ? down_.end() : down_.find(found->second);
  return down != down_.end() && down->second > since;
}

bool InterfaceWatch::lead_to(const Address& to) const {
  const Fd probe(::socket(to.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));  // connect() sends nothing
  if (!probe || ::connect(probe.get(), to.raw(), to.raw_bytes()) != 0) return false;
  auto own = local_address(probe.get());
  return own.is_ok() && !went_down(own.value(), {});
}

}  // namespace hc
