// Groups on an in-memory mesh and the loop that steps their collectives in one thread, for the tests of collectives.
#pragma once

#include <doctest/doctest.h>

#include <numeric>

#include "collective/collective.h"
#include "tests/collective/memory_channel.h"

namespace hc {

inline Group group_on(MemoryMesh& mesh, const std::vector<int>& members, int rank) {
  Group g{.rank = rank, .size = static_cast<int>(members.size()), .world_rank = members, .node = {}, .channel = {}};
  for (int m : members) {
    g.node.push_back(m);
    g.channel.push_back(m == members[rank] ? nullptr : mesh.link(members[rank], m));
  }
  return g;
}
inline std::vector<int> first_ranks(int n) {
  std::vector<int> members(n);
  std::iota(members.begin(), members.end(), 0);
  return members;
}

using Live = std::vector<std::unique_ptr<Collective>>;

inline std::unique_ptr<Collective> made(Task task, const Group& group) {
  auto result = make_channel_collective(std::move(task), group);
  REQUIRE_MESSAGE(result.is_ok(), result.status().text());
  return result.take();
}

// Steps all in random order until all are done; some start late. False after far too many idle rounds.
inline bool run_all(Live& live, std::mt19937& random) {
  std::vector<int> state(live.size(), 0);  // 0 not started, 1 running, 2 done
  size_t left = live.size();
  for (int idle = 0; left > 0 && idle < 20000; ++idle) {
    const size_t i = random() % live.size();
    if (state[i] == 2) continue;
    bool moved = false;
    const Progress p = state[i] ? live[i]->step(&moved) : live[i]->start();
    REQUIRE_MESSAGE(p != Progress::kFailed, live[i]->status().text());
    if (moved || state[i] == 0) idle = 0;
    state[i] = p == Progress::kDone ? 2 : 1;
    left -= p == Progress::kDone;
  }
  return left == 0;
}

}  // namespace hc
