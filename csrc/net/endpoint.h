// What a rank tells the others about itself before they connect: which host it is on and where it listens. (mesh.cc
// chooses the network interfaces, socket.cc lists them.) It travels through a launcher's store, so it is parsed as
// untrusted input. Values only. Thread: any.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/topology.h"
#include "net/socket.h"

namespace hc {

inline constexpr size_t kMaxEndpointBytes = 4096;
inline constexpr size_t kMaxAddresses = 64;
inline constexpr size_t kMaxSettings = 16;

// Two processes with equal values can connect over an abstract unix socket and share memory.
struct HostIdentity {
  std::string boot_id;
  uint64_t network_namespace = 0;
  uint32_t uid = 0;
  std::string label;  // MeshOptions::node
  bool same_network(const HostIdentity& o) const {
    return boot_id == o.boot_id && network_namespace == o.network_namespace;
  }
  bool operator==(const HostIdentity&) const = default;
  static HostIdentity of_this_process(const std::string& label);
};

struct Endpoint {
  HostIdentity identity;
  std::string host_name;
  int32_t pid = 0;
  Locality locality;
  uint64_t arena_bytes = 0;                     // 0: it shares no memory
  uint64_t room_bytes = 0;                      // address space that it has for the arenas of others
  std::string unix_name;                        // abstract
  std::string fabric_protocol, fabric_address;  // of libfabric, both empty without
  std::string fabric_problem;                   // why it was asked for and is not there
  std::vector<Address> addresses;
  std::vector<std::pair<std::string, std::string>> settings;  // MeshOptions::must_agree

  void set_fabric_problem(const std::string& text);  // as much of it as may be told
  std::string encode() const;
  static Result<Endpoint> decode(const std::string& bytes);
};

std::string this_host_name();
// Where `own` may reach `other`: another host's loopback would be its own.
std::vector<Address> dialable(const HostIdentity& own, const Endpoint& other);

}  // namespace hc
