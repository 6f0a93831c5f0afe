// Where in a machine a process runs: its socket, NUMA node and L3 cache, read from a folder in the form of
// /sys/devices/system. Values only. Thread: any.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace hc {

inline constexpr const char* kSystemFolder = "/sys/devices/system";

// -1: unknown, or the process may run in several.
struct Locality {
  int socket = -1;
  int numa_node = -1;
  int l3 = -1;  // the lowest CPU number among those that share it
  bool operator==(const Locality&) const = default;
};

// "0-3,8" as the kernel writes lists of CPUs; empty where it is none.
std::vector<int> cpus_in_list(std::string_view list);
// The place of a process that may run on these CPUs. Looks at the surroundings of the first one only, since a machine
// may have thousands.
Locality locality_of_cpus(const std::string& folder, std::span<const int> cpus);

}  // namespace hc
