// Brings the ranks of a job together: accepts and dials connections, authenticates each (net/handshake.h), swaps the
// shared memory of local pairs. The lower rank of a pair listens, the higher one dials. Strangers cost a bounded number
// of half-open connections and never hold up a real rank; every wait ends at the deadline.
//
// Thread: the one that calls Mesh::connect. Owner: the mesh, for the length of that call.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "net/endpoint.h"
#include "net/handshake.h"
#include "net/listeners.h"
#include "net/mesh.h"
#include "net/socket.h"

namespace hc {

// Limits of unauthenticated connections at one time; beyond them the oldest is closed. There are more for each expected
// rank, because it tries several addresses of this host at once.
inline constexpr size_t kMaxHalfOpen = 64, kMaxHalfOpenPerRank = 4;
inline constexpr double kHelloDeadlineS = 5;  // for a stranger to become a rank

// What two local ranks exchange: descriptors of arena and doorbell.
struct SharedEnds {
  Fd arena, doorbell;
  uint64_t arena_bytes = 0;
};

// The authenticated connections to one peer: either `local` with `ends`, or control and data.
struct PeerLinks {
  Fd local, control, data;
  SharedEnds ends;
  std::string address;  // of the control connection
};

struct BootstrapInput {
  const MeshMembers* members = nullptr;
  const std::vector<Endpoint>* endpoints = nullptr;
  std::vector<bool> shares;  // by rank: this pair uses shared memory
  Listeners* listeners = nullptr;
  int arena_fd = -1, doorbell_fd = -1;
  uint64_t arena_bytes = 0;
  TcpTuning tuning;
};

// By rank; the entry of the own rank is empty.
Result<std::vector<PeerLinks>> bootstrap(const BootstrapInput& input);

}  // namespace hc
