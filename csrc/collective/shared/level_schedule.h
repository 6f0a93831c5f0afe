// What each member does in a collective that moves every byte over a link between groups as few times as possible: sums
// go up from the finest groups, of which each member holds a share, and results come down the same way, so that of each
// group one member reads what another group holds, and the rest read it from there. PURE: positions are elements of a
// block that lies in every member's buffer, and nothing is moved here. For S groups of a level an allreduce of B bytes
// moves 2 (S - 1) B over the links between them, which is the least that is possible.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/levels.h"

namespace hc {

// Part of a block, and the member in whose buffer it lies.
struct LevelShare {
  size_t begin = 0, end = 0;
  int holder = -1;
};

struct LevelStep {
  size_t begin = 0, end = 0;
  std::vector<int> sources;  // whose buffers are read there, in the order of the sum; several only in a reduction
};

// One stage of one member. The others may read what it writes as soon as the whole stage is done.
struct LevelStage {
  enum class Kind : uint8_t { kReduce, kCopy, kDeliver };
  Kind kind = Kind::kCopy;
  bool first = false, last = false;  // of the reductions
  std::vector<LevelStep> steps;      // kReduce, kCopy: into my own buffer; kDeliver: to my result
  std::vector<int> sources;          // all whose buffers are read, but for mine: they must have done the stage before
};

// Stage 0 of every collective, in which members fill their buffers, is not in the list.
inline constexpr size_t kMaxLevelStages = 2 * kMaxLevels + 2;

class LevelSchedule {
 public:
  // unit: steps begin and end at multiples of it, as far as possible.
  static LevelSchedule allreduce(const Levels& levels, int members, size_t count, size_t unit);
  // given: what members have before the first stage, ascending, without gaps. Broadcast: all of it at the root;
  // allgather: a slot of each member.
  static LevelSchedule distribution(const Levels& levels, int members, const std::vector<LevelShare>& given,
                                    size_t unit);
  std::vector<LevelStage> stages_of(int member) const;

 private:
  using Shares = std::vector<LevelShare>;
  LevelSchedule(const Levels& levels, int members) : levels_(levels), members_(members) {}
  int level_count() const { return static_cast<int>(levels_.group.size()) + 1; }  // the last is the whole machine
  int group_of(int level, int member) const;
  void divide(size_t count, size_t unit, const Shares& given);
  Shares divide_group(int level, int group, size_t count, size_t unit, const Shares& given) const;
  std::vector<int> children(int level, int group) const;

  Levels levels_;
  int members_;
  bool reduces_ = false;
  std::vector<std::vector<Shares>> shares_;  // [level + 1][group]: who holds what of the group; [0]: of each member
};

// A larger number of elements whose schedule serves this one as well, cut at the end: an eighth more at most, so that
// few schedules serve all sizes.
size_t schedule_size(size_t count);

// Bytes that cross from one domain to another in each direction, when members read each other's buffers: [from][to].
// `domain`: of each member, such as its socket.
std::vector<std::vector<size_t>> bytes_between(const LevelSchedule& schedule, const std::vector<int>& domain,
                                               size_t item);

}  // namespace hc
