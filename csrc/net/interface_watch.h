// Which network interfaces of this host have gone down: a cable that is pulled out, a card that is switched off. The
// kernel tells at once, where TCP would only send again and wait. Without effect where it does not tell (a sandbox),
// and silent about what happens behind a switch. Thread: one at a time.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "base/clock.h"
#include "net/socket.h"

namespace hc {

class InterfaceWatch {
 public:
  InterfaceWatch();
  // Readable when there is news; -1: the kernel tells nothing.
  int fd() const { return socket_.get(); }
  void take_news();
  bool some_are_down() const { return !down_.empty(); }
  // Whether the interface with this address has gone down since then. (That it is up again is told late, up to a second
  // after it carries packets.)
  bool went_down(const Address& own, TimePoint since) const;
  // Whether packets to this address would leave by one that is not down.
  bool lead_to(const Address& to) const;

 private:
  void learn_addresses();

  Fd socket_;                                    // NETLINK_ROUTE
  std::unordered_map<std::string, int> number_;  // of the interface, by the bytes of its address
  std::unordered_map<int, TimePoint> down_;      // since when
};

}  // namespace hc
