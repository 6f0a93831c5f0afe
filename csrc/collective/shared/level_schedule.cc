#include "collective/shared/level_schedule.h"

#include <algorithm>
#include <bit>

namespace hc {
namespace {

using Shares = std::vector<LevelShare>;

// Calls visit(begin, end, holders) for each range in which none of the lists changes its holder; [i]: the holder in
// list i, -1 where it has none.
template <class Visit>
void each_range(const std::vector<const Shares*>& lists, Visit&& visit) {
  std::vector<size_t> cuts;
  for (const Shares* list : lists)
    for (const LevelShare& s : *list) cuts.push_back(s.begin), cuts.push_back(s.end);
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  std::vector<size_t> at(lists.size(), 0);
  std::vector<int> holders(lists.size());
  for (size_t c = 0; c + 1 < cuts.size(); ++c) {
    for (size_t i = 0; i < lists.size(); ++i) {
      const Shares& list = *lists[i];
      while (at[i] < list.size() && list[at[i]].end <= cuts[c]) ++at[i];
      holders[i] = at[i] < list.size() && list[at[i]].begin <= cuts[c] ? list[at[i]].holder : -1;
    }
    visit(cuts[c], cuts[c + 1], holders);
  }
}

void add(Shares* shares, size_t begin, size_t end, int holder) {
  if (begin == end) return;
  if (!shares->empty() && shares->back().end == begin && shares->back().holder == holder)
    shares->back().end = end;
  else
    shares->push_back({begin, end, holder});
}

}  // namespace

int LevelSchedule::group_of(int level, int member) const {
  if (level < 0) return member;
  return level == level_count() - 1 ? 0 : levels_.group[static_cast<size_t>(level)][static_cast<size_t>(member)];
}

// In the order of their first members, which is that of sums.
std::vector<int> LevelSchedule::children(int level, int group) const {
  std::vector<int> found;
  for (int m = 0; m < members_; ++m) {
    const int child = group_of(level - 1, m);
    if (group_of(level, m) == group && std::find(found.begin(), found.end(), child) == found.end())
      found.push_back(child);
  }
  return found;
}

// Each range that the children hold in the same way is divided between them, by how many members they have, so that
// every member gets about as much to do. What is given stays where it is.
LevelSchedule::Shares LevelSchedule::divide_group(int level, int group, size_t count, size_t unit,
                                                  const Shares& given) const {
  const std::vector<int> kids = children(level, group);
  Shares whole{{0, count, -1}}, own, result;
  std::vector<const Shares*> lists;
  std::vector<size_t> weight_up_to{0};
  for (int kid : kids) {
    lists.push_back(&shares_[static_cast<size_t>(level)][static_cast<size_t>(kid)]);
    size_t weight = 0;
    for (int m = 0; m < members_; ++m) weight += group_of(level - 1, m) == kid;
    weight_up_to.push_back(weight_up_to.back() + weight);
  }
  for (const LevelShare& s : given)
    if (group_of(level, s.holder) == group) own.push_back(s);
  lists.push_back(&own);
  lists.push_back(&whole);
  each_range(lists, [&](size_t begin, size_t end, const std::vector<int>& holders) {
    if (holders[kids.size()] >= 0) return add(&result, begin, end, holders[kids.size()]);
    size_t from = begin;
    for (size_t i = 0; i < kids.size(); ++i) {
      size_t to = end;
      if (i + 1 < kids.size()) {
        const size_t units = (end - begin) * weight_up_to[i + 1] / weight_up_to.back() + unit / 2;
        to = std::min(end, begin + units / unit * unit);
      }
      add(&result, from, std::max(from, to), holders[i]);
      from = std::max(from, to);
    }
  });
  return result;
}

void LevelSchedule::divide(size_t count, size_t unit, const Shares& given) {
  shares_.resize(static_cast<size_t>(level_count()) + 1);
  for (int m = 0; m < members_; ++m) shares_[0].push_back({{0, count, m}});
  for (int level = 0; level < level_count(); ++level) {
    int groups = 0;
    for (int m = 0; m < members_; ++m) groups = std::max(groups, group_of(level, m) + 1);
    for (int g = 0; g < groups; ++g)
      shares_[static_cast<size_t>(level) + 1].push_back(divide_group(level, g, count, unit, given));
  }
}

LevelSchedule LevelSchedule::allreduce(const Levels& levels, int members, size_t count, size_t unit) {
  LevelSchedule schedule(levels, members);
  schedule.reduces_ = true;
  schedule.divide(count, unit, {});
  return schedule;
}

LevelSchedule LevelSchedule::distribution(const Levels& levels, int members, const std::vector<LevelShare>& given,
                                          size_t unit) {
  LevelSchedule schedule(levels, members);
  schedule.divide(given.empty() ? 0 : given.back().end, unit, given);
  // What is given to a member outside the machine's divisions lies there, whoever asks.
  schedule.shares_.back()[0] = given;
  return schedule;
}

std::vector<LevelStage> LevelSchedule::stages_of(int member) const {
  std::vector<LevelStage> stages;
  const int top = level_count() - 1;
  const auto of = [&](int level) -> const Shares& {
    return shares_[static_cast<size_t>(level + 1)][static_cast<size_t>(group_of(level, member))];
  };
  const auto finish = [&](LevelStage stage) {
    for (const LevelStep& step : stage.steps)
      for (int s : step.sources)
        if (s != member && std::find(stage.sources.begin(), stage.sources.end(), s) == stage.sources.end())
          stage.sources.push_back(s);
    stages.push_back(std::move(stage));
  };
  for (int level = 0; level <= top && reduces_; ++level) {
    LevelStage stage{LevelStage::Kind::kReduce, level == 0, level == top, {}, {}};
    std::vector<const Shares*> lists;
    for (int kid : children(level, group_of(level, member)))
      lists.push_back(&shares_[static_cast<size_t>(level)][static_cast<size_t>(kid)]);
    lists.push_back(&of(level));
    each_range(lists, [&](size_t begin, size_t end, std::vector<int> holders) {
      const int holder = holders.back();
      holders.pop_back();
      if (holder == member) stage.steps.push_back({begin, end, std::move(holders)});
    });
    finish(std::move(stage));
  }
  for (int level = top; level >= 1; --level) {
    LevelStage stage{LevelStage::Kind::kCopy, false, false, {}, {}};
    each_range({&of(level), &of(level - 1)}, [&](size_t begin, size_t end, const std::vector<int>& holders) {
      if (holders[1] == member && holders[0] != member) stage.steps.push_back({begin, end, {holders[0]}});
    });
    finish(std::move(stage));
  }
  LevelStage stage{LevelStage::Kind::kDeliver, false, false, {}, {}};
  for (const LevelShare& s : of(0)) stage.steps.push_back({s.begin, s.end, {s.holder}});
  finish(std::move(stage));
  return stages;
}

size_t schedule_size(size_t count) {
  if (count < 16) return count;
  const size_t step = std::bit_floor(count) / 8;
  return (count + step - 1) / step * step;
}

std::vector<std::vector<size_t>> bytes_between(const LevelSchedule& schedule, const std::vector<int>& domain,
                                               size_t item) {
  const auto domains = static_cast<size_t>(*std::max_element(domain.begin(), domain.end())) + 1;
  std::vector<std::vector<size_t>> bytes(domains, std::vector<size_t>(domains));
  for (size_t m = 0; m < domain.size(); ++m)
    for (const LevelStage& stage : schedule.stages_of(static_cast<int>(m)))
      for (const LevelStep& step : stage.steps)
        for (int s : step.sources) {
          const auto from = static_cast<size_t>(domain[static_cast<size_t>(s)]), to = static_cast<size_t>(domain[m]);
          if (from != to) bytes[from][to] += (step.end - step.begin) * item;
        }
  return bytes;
}

}  // namespace hc
