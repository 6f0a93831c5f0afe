// Finds ranks that wait for one another in a circle: each stands in a call that another one of them has not made. What
// the ranks tell about themselves goes in; how an operation runs (by negotiation, through the bypass, from a persistent
// plan, as a message) makes no difference. PURE.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "agreement/negotiation.h"
#include "base/wire.h"

namespace hc {

// A call that a thread of the user stands in.
struct AwaitedCall {
  Op op = Op::kAllreduce;
  uint16_t process_set = 0;
  uint64_t key = 0;   // key_of_call
  int32_t peer = -1;  // a message: the other's world rank, -1: any
  std::string text;   // "allreduce 'loss'"
  // Of a circle through several worlds of one process: which world it is, and who takes part. Else empty.
  uint64_t world = 0;
  std::vector<int> members = {};
};

// A rank whose threads wait, and that has neither submitted nor completed anything for a while.
struct WaitingRank {
  double quiet_s = 0;
  std::vector<AwaitedCall> awaited;  // any of them may let the rank go on
  std::vector<uint64_t> submitted;   // keys of all that it has under way, sorted
  std::vector<uint64_t> joined;      // process sets in which it has joined (id_of_set)
  uint64_t version = 0;              // another one after everything that it submits or that ends
  bool polls = false;                // some are awaited by a loop that polls, and may work between
  bool has_looked = false;           // it was asked where it stands
  std::string where;                 // "train.py:12"; empty: not known
};
using WaitingRanks = std::map<int, WaitingRank>;  // by world rank

// World ranks of a process set; empty: there is no such set.
using MembersOf = std::function<std::span<const int>(uint16_t process_set)>;

// Equal on all ranks for one operation of one process set; not for messages.
uint64_t key_of_call(uint16_t process_set, const Request& request);

// A process set among those of several worlds; world 0: there is one only.
uint64_t id_of_set(uint64_t world, uint16_t process_set);

// Adds what a rank waits for in one of several worlds. rank_of: the rank in the common numbering of each rank of it.
void add_world(const WaitingRank& in_world, uint64_t world, std::span<const int> rank_of, WaitingRank* to);

// Whether the worlds together show these ranks to be stuck, and none of them shows a circle by itself.
bool is_between_worlds(const WaitingRanks& ranks, const std::set<int>& stuck);

// The ranks that can never go on, however the others behave. A rank that is not among `ranks` may still do anything.
std::set<int> find_deadlock(const WaitingRanks& ranks, const MembersOf& members_of);

// Who stands where in what, and why that probably is.
// In the text of a circle through several worlds.
inline constexpr std::string_view kBetweenWorlds =
    "A call of one process group is not answered by one of another, nor by one of hvd's.";
std::string describe_deadlock(const WaitingRanks& ranks, const std::set<int>& stuck, const MembersOf& members_of);

void encode(const WaitingRank& rank, Writer* out);
Status decode(Reader* in, WaitingRank* rank);

// "rank 3", "ranks 3,7-9"
std::string ranks_text(std::vector<int> ranks);

}  // namespace hc
