#include "base/topology.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <optional>

namespace hc {
namespace {

constexpr int kMaxCpu = 1 << 16;

std::optional<int> number_in(std::string_view text) {
  int value = -1;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc() || end != text.data() + text.size() || value < 0) return {};
  return value;
}

std::string line_of(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

bool lie_in(std::span<const int> cpus, const std::vector<int>& sorted) {
  return std::all_of(cpus.begin(), cpus.end(),
                     [&](int cpu) { return std::binary_search(sorted.begin(), sorted.end(), cpu); });
}

int socket_of(const std::string& cpu, std::span<const int> cpus) {
  std::vector<int> members = cpus_in_list(line_of(cpu + "/topology/package_cpus_list"));
  if (members.empty()) members = cpus_in_list(line_of(cpu + "/topology/core_siblings_list"));  // before Linux 5.4
  return lie_in(cpus, members) ? number_in(line_of(cpu + "/topology/physical_package_id")).value_or(-1) : -1;
}

int l3_of(const std::string& cpu, std::span<const int> cpus) {
  for (int i = 0; i < 16; ++i) {
    const std::string cache = cpu + "/cache/index" + std::to_string(i);
    const std::string level = line_of(cache + "/level");
    if (level.empty()) break;
    if (level != "3") continue;
    const std::vector<int> members = cpus_in_list(line_of(cache + "/shared_cpu_list"));
    return !members.empty() && lie_in(cpus, members) ? members.front() : -1;
  }
  return -1;
}

// Nodes may have gaps in their numbers, and nodes without CPUs.
int numa_node_of(const std::string& folder, std::span<const int> cpus) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder + "/node", ignored)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("node")) continue;
    const auto node = number_in(std::string_view(name).substr(4));
    if (node && lie_in(cpus, cpus_in_list(line_of(entry.path().string() + "/cpulist")))) return *node;
  }
  return -1;
}

}  // namespace

std::vector<int> cpus_in_list(std::string_view list) {
  std::vector<int> cpus;
  while (!list.empty()) {
    const size_t comma = std::min(list.find(','), list.size());
    const std::string_view range = list.substr(0, comma);
    list.remove_prefix(std::min(comma + 1, list.size()));
    const size_t dash = std::min(range.find('-'), range.size());
    const auto first = number_in(range.substr(0, dash));
    const auto last = dash == range.size() ? first : number_in(range.substr(dash + 1));
    if (!first || !last || *last < *first || *last > kMaxCpu) return {};
    for (int cpu = *first; cpu <= *last; ++cpu) cpus.push_back(cpu);
  }
  std::sort(cpus.begin(), cpus.end());
  return cpus;
}

Locality locality_of_cpus(const std::string& folder, std::span<const int> cpus) {
  if (cpus.empty()) return {};
  const std::string cpu = folder + "/cpu/cpu" + std::to_string(cpus.front());
  return {socket_of(cpu, cpus), numa_node_of(folder, cpus), l3_of(cpu, cpus)};
}

}  // namespace hc
