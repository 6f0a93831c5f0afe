// The members of a process set. A value, constant for the life of the set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace hc {

inline constexpr uint16_t kMessageStream = 0xffff;  // Tag::process_set of payloads; no process set has this number

struct Members {
  uint16_t id = 0;
  uint64_t generation = 0;
  std::vector<int> ranks;  // world ranks, ascending; the position of one is its group rank
  int group_rank = -1;     // this rank's; -1: it is no member

  // `ranks` in any order; me: this rank's world rank.
  static Members of(uint16_t id, uint64_t generation, std::vector<int> ranks, int me) {
    std::sort(ranks.begin(), ranks.end());
    Members members{id, generation, std::move(ranks), -1};
    members.group_rank = members.position_of(me);
    return members;
  }
  // In front of a message about them; nothing for the set of all ranks.
  std::string prefix() const { return id ? "process set " + std::to_string(id) + ": " : ""; }
  // Behind "rank 9".
  std::string no_member_text() const {
    return id ? " is not a member of process set " + std::to_string(id)
              : " is not one of the job's " + std::to_string(size()) + " ranks";
  }
  int size() const { return static_cast<int>(ranks.size()); }
  bool has_me() const { return group_rank >= 0; }
  int coordinator_rank() const { return ranks[0]; }  // world rank
  // The group rank of a world rank; -1 when it is no member.
  int position_of(int world_rank) const {
    const auto at = std::lower_bound(ranks.begin(), ranks.end(), world_rank);
    return at != ranks.end() && *at == world_rank ? static_cast<int>(at - ranks.begin()) : -1;
  }
};

}  // namespace hc
