// Opens the sockets on which a process can be reached and says where that is. Thread: the caller's.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "net/endpoint.h"
#include "net/socket.h"

namespace hc {

struct Listeners {
  Fd unix_socket;
  std::vector<Fd> tcp;
};

// An abstract unix socket and TCP on the interfaces (comma list; empty: every one that is up). Adds their names to
// `endpoint`.
Status open_listeners(const std::string& interfaces, const TcpTuning& tuning, Listeners* listeners, Endpoint* endpoint);

}  // namespace hc
