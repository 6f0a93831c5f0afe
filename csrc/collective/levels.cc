#include "collective/levels.h"

#include <algorithm>
#include <array>
#include <map>

namespace hc {
namespace {

using Partition = std::vector<int>;

constexpr size_t kChunkBytes = 16u << 10;  // of a partial sum: all of them stay in the L2 cache

int groups_in(const Partition& p) { return p.empty() ? 0 : *std::max_element(p.begin(), p.end()) + 1; }

// keys: what the members of one group have in common.
Partition partition_by(const std::vector<std::array<int, 3>>& keys) {
  std::map<std::array<int, 3>, int> numbers;
  Partition found;
  for (const auto& key : keys)
    found.push_back(numbers.try_emplace(key, static_cast<int>(numbers.size())).first->second);
  return found;
}

}  // namespace

Levels levels_of(std::span<const Locality> places) {
  const auto known = [&](int Locality::* what) {
    return std::none_of(places.begin(), places.end(), [&](const Locality& p) { return p.*what < 0; });
  };
  const bool nodes = known(&Locality::numa_node), caches = nodes && known(&Locality::l3);
  if (!known(&Locality::socket)) return {};
  std::vector<std::array<int, 3>> socket, node, cache;
  for (const Locality& p : places) {
    socket.push_back({p.socket, 0, 0});
    node.push_back({p.socket, nodes ? p.numa_node : 0, 0});
    cache.push_back({p.socket, nodes ? p.numa_node : 0, caches ? p.l3 : 0});
  }
  Levels levels;
  int within = 1;  // groups of the next coarser level
  // Virtual machines may show sockets that they do not have; a node's memory is equally far from all of its CPUs.
  const auto same = [&](const Locality& p) { return p.numa_node == places.front().numa_node; };
  if (nodes && std::all_of(places.begin(), places.end(), same)) return levels;
  for (const auto* keys : {&socket, &node, &cache}) {
    Partition found = partition_by(*keys);
    const int groups = groups_in(found);
    if (groups == within || groups == static_cast<int>(places.size())) continue;
    within = groups;
    levels.group.insert(levels.group.begin(), std::move(found));
  }
  return levels;
}

void reduce_by_levels(const Levels& levels, DType dtype, Reduce op, std::span<std::byte* const> destinations,
                      std::span<const std::byte* const> sources, size_t count, const Scale& scale) {
  if (levels.flat()) return reduce(dtype, op, destinations, sources, count, scale);
  const size_t item = size_of(dtype), chunk = std::max<size_t>(1, kChunkBytes / item);
  std::vector<std::vector<std::byte>> sums(levels.group.size());
  for (size_t l = 0; l < sums.size(); ++l)
    sums[l].resize(static_cast<size_t>(groups_in(levels.group[l])) * std::min(chunk, count) * item);
  for (size_t at = 0; at < count; at += chunk) {
    const size_t some = std::min(chunk, count - at);
    // `from` holds what is to be summed, `member` a rank of each.
    std::vector<const std::byte*> from(sources.begin(), sources.end());
    std::vector<size_t> member(sources.size());
    for (size_t m = 0; m < member.size(); ++m) member[m] = m, from[m] += at * item;
    double pre = scale.pre;
    for (size_t l = 0; l < levels.group.size(); ++l, pre = 1.0) {
      const auto groups = static_cast<size_t>(groups_in(levels.group[l]));
      std::vector<const std::byte*> next;
      std::vector<size_t> next_member;
      for (size_t g = 0; g < groups; ++g) {
        std::vector<const std::byte*> mine;
        size_t first = 0;
        for (size_t i = 0; i < from.size(); ++i) {
          if (levels.group[l][member[i]] != static_cast<int>(g)) continue;
          if (mine.empty()) first = member[i];
          mine.push_back(from[i]);
        }
        std::byte* const sum[] = {sums[l].data() + g * some * item};
        reduce(dtype, op, sum, mine, some, Scale{pre, 1.0, 1});
        next.push_back(sum[0]);
        next_member.push_back(first);
      }
      from = std::move(next);
      member = std::move(next_member);
    }
    std::vector<std::byte*> to(destinations.begin(), destinations.end());
    for (std::byte*& d : to) d += at * item;
    reduce(dtype, op, to, from, some, Scale{1.0, scale.post, scale.divisor});
  }
}

}  // namespace hc
