// Schedules checked without I/O: both ends of every pair list the same transfers, and a symbolic world, in which a
// send needs its receive (no buffering at all) and steps run in random order, always ends with the right sums.
#include <doctest/doctest.h>

#include <bit>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <vector>

#include "collective/channels/schedule.h"

namespace {

using namespace hc;

// An element as an expression: how often each rank's contribution is in it (three bits per rank), which element of
// the contribution, and how often it was scaled before and after.
struct Symbol {
  uint64_t ranks = 0;
  int64_t element = -1;  // -1: rubbish
  int pre = 0, post = 0;
  bool operator==(const Symbol&) const = default;
};
constexpr Symbol kRubbish{};

Symbol mine(int rank, int64_t element) { return {uint64_t{1} << (3 * rank), element, 0, 0}; }
uint64_t everybody(int size) {
  uint64_t all = 0;
  for (int r = 0; r < size; ++r) all |= uint64_t{1} << (3 * r);
  return all;
}

struct Actor {
  Schedule schedule;
  std::vector<Symbol> input, output, scratch;
  bool in_place = false;  // the input is the output
  std::vector<size_t> done;
  std::map<std::pair<int, bool>, std::deque<int>> flows;  // by peer and whether it sends
  std::deque<int> local;
  std::map<int, std::deque<std::pair<int, std::vector<Symbol>>>> staged;  // arrived, not yet reduced

  std::vector<Symbol>& memory(Place place) {
    if (place == Place::kScratch) return scratch;
    return place == Place::kOutput || in_place ? output : input;
  }
};

class SymbolicWorld {
 public:
  SymbolicWorld(std::vector<Actor> actors, size_t segment, unsigned seed)
      : actors_(std::move(actors)), segment_(segment), random_(seed) {
    for (Actor& a : actors_) {
      a.done.assign(a.schedule.steps.size(), 0);
      a.scratch.assign(a.schedule.scratch_count, kRubbish);
      for (size_t i = 0; i < a.schedule.steps.size(); ++i) {
        const Step& s = a.schedule.steps[i];
        REQUIRE(s.count > 0);
        for (int earlier : s.after) REQUIRE(earlier < static_cast<int>(i));
        REQUIRE(s.after_all.last < static_cast<int>(i));
        s.peer < 0 ? a.local.push_back(i) : a.flows[{s.peer, s.action == Action::kSend}].push_back(i);
      }
    }
  }

  // Random order until nothing more can happen; true when everything did.
  bool run() {
    for (bool any = true; any;) {
      any = false;
      std::vector<int> order(actors_.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), random_);
      for (int rank : order) {
        if (random_() % 3 == 0) {
          any = true;  // dawdles
          continue;
        }
        any |= local(actors_[rank]) | reduce_staged(actors_[rank]) | exchange(rank);
      }
      if (finished()) return true;
      if (!any) return false;
    }
    return finished();
  }
  std::vector<Actor>& actors() { return actors_; }

 private:
  size_t segments(const Step& s) const { return (s.count + segment_ - 1) / segment_; }
  bool finished() const {
    for (const Actor& a : actors_)
      for (size_t i = 0; i < a.done.size(); ++i)
        if (a.done[i] < segments(a.schedule.steps[i])) return false;
    return true;
  }
  bool may_begin(const Actor& a, int step, size_t index) const {
    const Step& s = a.schedule.steps[step];
    for (int e = s.after_all.first; e <= s.after_all.last; ++e)
      if (a.done[e] < segments(a.schedule.steps[e])) return false;
    for (int e : s.after)
      if (e >= 0 && a.done[e] < std::min(index + 1, segments(a.schedule.steps[e]))) return false;
    return true;
  }
  void for_segment(const Step& s, size_t index, const std::function<void(size_t)>& visit) const {
    for (size_t i = index * segment_; i < std::min(s.count, (index + 1) * segment_); ++i) visit(i);
  }

  bool local(Actor& a) {
    if (a.local.empty() || !may_begin(a, a.local.front(), a.done[a.local.front()])) return false;
    const int step = a.local.front();
    const Step& s = a.schedule.steps[step];
    for_segment(s, a.done[step], [&](size_t i) {
      if (s.action == Action::kGate) return;
      Symbol v = a.memory(s.from.place).at(s.from.first + i);
      v.pre += s.prescale;
      v.post += s.finish;
      a.memory(s.to.place).at(s.to.first + i) = v;
    });
    if (++a.done[step] == segments(s)) a.local.pop_front();
    return true;
  }

  // One segment to somebody who has the matching receive in front, if both may. What a receive will overwrite is
  // spoilt as soon as it may begin: a channel may write at any time from then on.
  bool exchange(int rank) {
    bool any = false;
    Actor& a = actors_[rank];
    for (auto& [key, steps] : a.flows) {
      if (steps.empty()) continue;
      const int step = steps.front();
      const Step& s = a.schedule.steps[step];
      if (!key.second) {
        if (s.action == Action::kReceive && may_begin(a, step, a.done[step]))
          for_segment(s, a.done[step], [&](size_t i) { a.memory(s.to.place).at(s.to.first + i) = kRubbish; });
        continue;
      }
      Actor& b = actors_[key.first];
      auto& opposite = b.flows[{rank, false}];
      if (!may_begin(a, step, a.done[step])) continue;
      REQUIRE_FALSE(opposite.empty());
      if (deliver(a, step, b, opposite, rank)) {
        any = true;
        if (++a.done[step] == segments(s)) steps.pop_front();
      }
    }
    return any;
  }
  bool deliver(Actor& a, int step, Actor& b, std::deque<int>& opposite, int rank) {
    const Step& s = a.schedule.steps[step];
    const int other = opposite.front();
    const Step& r = b.schedule.steps[other];
    REQUIRE(s.count == r.count);
    std::vector<Symbol> values;
    for_segment(s, a.done[step], [&](size_t i) { values.push_back(a.memory(s.from.place).at(s.from.first + i)); });
    if (r.action == Action::kReduce) {
      auto& staged = b.staged[rank];
      if (staged.size() >= 2) return false;
      staged.push_back({other, values});
      size_t& arrived = arrived_[{&b, other}];
      if (++arrived == segments(r)) opposite.pop_front();
      return true;
    }
    if (!may_begin(b, other, b.done[other])) return false;
    size_t n = 0;
    for_segment(r, b.done[other], [&](size_t i) { b.memory(r.to.place).at(r.to.first + i) = values[n++]; });
    if (++b.done[other] == segments(r)) opposite.pop_front();
    return true;
  }
  bool reduce_staged(Actor& a) {
    bool any = false;
    for (auto& [peer, staged] : a.staged) {
      if (staged.empty()) continue;
      const auto [step, values] = staged.front();
      const Step& s = a.schedule.steps[step];
      if (!may_begin(a, step, a.done[step])) continue;
      size_t n = 0;
      for_segment(s, a.done[step], [&](size_t i) {
        const Symbol in = values[n++], own = a.memory(s.from.place).at(s.from.first + i);
        const bool sane = in.element >= 0 && in.element == own.element && in.pre == own.pre && !in.post && !own.post;
        a.memory(s.to.place).at(s.to.first + i) =
            sane ? Symbol{in.ranks + own.ranks, in.element, in.pre, s.finish} : kRubbish;
      });
      ++a.done[step];
      staged.pop_front();
      any = true;
    }
    return any;
  }

  std::vector<Actor> actors_;
  const size_t segment_;
  std::mt19937 random_;
  std::map<std::pair<Actor*, int>, size_t> arrived_;
};

void check_pairs(const std::vector<Actor>& actors) {
  auto lengths = [&](int rank, int peer, bool sends) {
    std::vector<size_t> counts;
    for (const Step& s : actors[rank].schedule.steps)
      if (s.peer == peer && (s.action == Action::kSend) == sends) counts.push_back(s.count);
    return counts;
  };
  for (int a = 0; a < static_cast<int>(actors.size()); ++a)
    for (int b = 0; b < static_cast<int>(actors.size()); ++b) REQUIRE(lengths(a, b, true) == lengths(b, a, false));
}

SymbolicWorld ended(std::vector<Actor> actors, size_t segment, unsigned seed) {
  check_pairs(actors);
  SymbolicWorld world(std::move(actors), segment, seed);
  REQUIRE(world.run());
  return world;
}

Actor actor_with_input(Schedule schedule, int rank, size_t in, size_t out, bool in_place = false) {
  Actor a;
  a.schedule = std::move(schedule);
  a.in_place = in_place;
  auto& input = in_place ? a.output : a.input;
  a.output.assign(in_place ? std::max(in, out) : out, kRubbish);
  if (!in_place) input.assign(in, kRubbish);
  for (size_t i = 0; i < in; ++i) input[i] = mine(rank, static_cast<int64_t>(i));
  return a;
}

std::vector<size_t> uneven(int size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<size_t> counts(size);
  for (size_t& c : counts) c = random() % 4 == 0 ? 0 : random() % 9;
  return counts;
}
size_t before(const std::vector<size_t>& counts, int rank) {
  size_t n = 0;
  for (int i = 0; i < rank; ++i) n += counts[i];
  return n;
}

TEST_CASE("chunks cover the buffer in order") {
  for (size_t count : {0u, 1u, 5u, 16u, 1000u, 100003u})
    for (int n = 1; n <= 17; ++n) {
      CHECK(chunk_begin(count, n, 0) == 0);
      CHECK(chunk_begin(count, n, n) == count);
      for (int c = 0; c < n; ++c) CHECK(chunk_begin(count, n, c) <= chunk_begin(count, n, c + 1));
    }
}

// Powers of two with their neighbours, and some numbers between them.
constexpr int kSizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17};

TEST_CASE("every allreduce schedule sums each rank exactly once, scales once and never deadlocks") {
  for (auto plan : {plan_ring_allreduce, plan_recursive_doubling, plan_circulant_allreduce})
    for (int n : kSizes)
      for (size_t count : {size_t{0}, size_t{1}, size_t(n - 1), size_t(3 * n + 2)})
        for (int variant = 0; variant < 5; ++variant) {
          CAPTURE(n);
          CAPTURE(count);
          CAPTURE(variant);
          AllreduceShape shape{.size = n, .count = count};
          shape.in_place = variant == 1 || variant == 3 || variant == 4;
          shape.load = variant == 4 ? Load::kGate : variant >= 2 ? Load::kCopy : Load::kNone;
          shape.pack = variant == 2;
          shape.divisible = count % 2;
          std::vector<Actor> actors;
          for (int r = 0; r < n; ++r) {
            shape.rank = r;
            actors.push_back(actor_with_input(plan(shape), r, count, count, shape.in_place));
          }
          const unsigned seed = n * 100 + count + variant;
          SymbolicWorld world = ended(std::move(actors), 1 + count % 3, seed);
          const int pre = world.actors()[0].output.empty() ? 0 : world.actors()[0].output[0].pre;
          if (count && shape.load == Load::kCopy) CHECK(pre == 1);
          for (Actor& a : world.actors())
            for (size_t i = 0; i < count; ++i) {
              const Symbol wanted{everybody(n), static_cast<int64_t>(i), pre, 1};
              REQUIRE(a.output[i] == wanted);
              if (!shape.in_place) REQUIRE(a.input[i] == mine(&a - world.actors().data(), i));
            }
        }
}

TEST_CASE("the order of summation is the same on every rank") {
  // One expression tree per element: ring chunk c starts at rank c+1; recursive doubling keeps the lower ranks first.
  for (int n = 2; n <= 17; ++n)
    for (int r = 0; r < n; ++r) {
      const Schedule ring = plan_ring_allreduce({.rank = r, .size = n, .count = 17u * n});
      for (const Step& s : ring.steps)
        if (s.action == Action::kReduce) {
          CHECK(s.incoming_first);
          CHECK(s.finish == (s.round == n - 1));
        }
      const Schedule doubling = plan_recursive_doubling({.rank = r, .size = n, .count = 3});
      for (const Step& s : doubling.steps)
        if (s.action == Action::kReduce) CHECK(s.incoming_first == (s.peer < r));
    }
}

TEST_CASE("a ring and a circulant graph move no more than 2(n-1)/n of the buffer, in their number of rounds") {
  for (int n = 2; n <= 17; ++n)
    for (int r = 0; r < n; ++r) {
      const size_t count = 1600u * n;
      for (auto plan : {plan_ring_allreduce, plan_circulant_allreduce}) {
        const Schedule s = plan({.rank = r, .size = n, .count = count, .divisible = false});
        const bool ring = plan == plan_ring_allreduce;
        const int rounds = ring ? n - 1 : std::bit_width(static_cast<unsigned>(n - 1));
        size_t sent = 0, messages = 0;
        for (const Step& step : s.steps) {
          sent += step.action == Action::kSend ? step.count : 0;
          messages += step.action == Action::kSend;
        }
        CHECK(sent == 2 * (n - 1) * (count / n));
        CHECK(s.rounds == 2 * rounds);
        if (!ring) CHECK(messages <= 4u * rounds);  // a run of chunks is cut once at most, behind the last chunk
      }
    }
}

TEST_CASE("a broadcast reaches everybody from every root") {
  for (int n : kSizes)
    for (int root = 0; root < n; ++root)
      for (bool in_place : {false, true}) {
        std::vector<Actor> actors;
        for (int r = 0; r < n; ++r) {
          BroadcastShape shape{.rank = r, .size = n, .root = root, .count = 7, .in_place = in_place};
          actors.push_back(actor_with_input(plan_broadcast(shape), r, 7, 7, in_place));
        }
        SymbolicWorld world = ended(std::move(actors), 2, n * 20 + root);
        for (Actor& a : world.actors())
          for (int i = 0; i < 7; ++i) REQUIRE(a.output[i] == mine(root, i));
      }
}

TEST_CASE("an allgather of unequal parts concatenates them") {
  for (int n : kSizes)
    for (int variant = 0; variant < 4; ++variant) {
      const bool in_place = variant % 2;
      const auto plan = variant < 2 ? plan_ring_allgather : plan_circulant_allgather;
      const auto counts = uneven(n, n);
      const size_t total = before(counts, n);
      std::vector<Actor> actors;
      for (int r = 0; r < n; ++r) {
        Actor a = actor_with_input(plan(r, counts, in_place), r, counts[r], total);
        if (in_place) std::copy(a.input.begin(), a.input.end(), a.output.begin() + before(counts, r));
        actors.push_back(std::move(a));
      }
      SymbolicWorld world = ended(std::move(actors), 2, n);
      for (Actor& a : world.actors())
        for (int r = 0; r < n; ++r)
          for (size_t i = 0; i < counts[r]; ++i) REQUIRE(a.output[before(counts, r) + i] == mine(r, i));
    }
}

TEST_CASE("a reducescatter of unequal slices leaves each rank its sum") {
  for (int n : kSizes)
    for (int round = 0; round < 8; ++round)
      for (bool copies : {false, true}) {
        const auto counts = uneven(n, 31 * n + round / 2);
        const auto plan = round % 2 ? plan_circulant_reducescatter : plan_ring_reducescatter;
        const size_t total = before(counts, n);
        std::vector<Actor> actors;
        for (int r = 0; r < n; ++r) {
          Schedule s = plan(r, counts, copies ? Load::kCopy : Load::kNone);
          actors.push_back(actor_with_input(std::move(s), r, total, counts[r], copies));
        }
        SymbolicWorld world = ended(std::move(actors), 2, n + round);
        for (int r = 0; r < n; ++r)
          for (size_t i = 0; i < counts[r]; ++i) {
            const Symbol got = world.actors()[r].output[i];
            REQUIRE(got.ranks == everybody(n));
            REQUIRE(got.element == static_cast<int64_t>(before(counts, r) + i));
            REQUIRE(got.post == 1);
            REQUIRE(got.pre == (copies || n == 1));
          }
      }
}

TEST_CASE("an alltoall delivers every part") {
  for (int n : kSizes)
    for (bool copies : {false, true}) {
      std::vector<std::vector<size_t>> sent, received(n);
      for (int r = 0; r < n; ++r) sent.push_back(uneven(n, 100 * n + r));
      for (int r = 0; r < n; ++r)
        for (int p = 0; p < n; ++p) received[r].push_back(sent[p][r]);
      std::vector<Actor> actors;
      for (int r = 0; r < n; ++r) {
        AlltoallShape shape{
            .rank = r, .sent = sent[r], .received = received[r], .load = copies ? Load::kCopy : Load::kNone};
        actors.push_back(
            actor_with_input(plan_pairwise_alltoall(shape), r, before(sent[r], n), before(received[r], n), copies));
      }
      SymbolicWorld world = ended(std::move(actors), 2, n);
      for (int r = 0; r < n; ++r)
        for (int p = 0; p < n; ++p)
          for (size_t i = 0; i < received[r][p]; ++i)
            REQUIRE(world.actors()[r].output[before(received[r], p) + i] == mine(p, before(sent[p], r) + i));
    }
}

TEST_CASE("nobody leaves a barrier before everybody has come") {
  // What a rank knows when its schedule is done, following only completed receives and their senders' past.
  for (int n : kSizes) {
    std::vector<Actor> actors;
    for (int r = 0; r < n; ++r) actors.push_back(actor_with_input(plan_dissemination_barrier(r, n), r, 1, 0));
    ended(actors, 1, n);
    // Knowledge just before round k's send: all receives of earlier rounds, as `after` demands through the chain.
    std::vector<uint64_t> knows(n);
    for (int r = 0; r < n; ++r) knows[r] = uint64_t{1} << r;
    for (int round = 1; round <= actors[0].schedule.rounds; ++round) {
      std::vector<uint64_t> next = knows;
      for (int r = 0; r < n; ++r)
        for (const Step& s : actors[r].schedule.steps)
          if (s.action == Action::kReceive && s.round == round) next[r] |= knows[s.peer];
      knows = next;
    }
    for (int r = 0; r < n; ++r) {
      CHECK(knows[r] == (uint64_t{1} << n) - 1);
      int sent = -1, received = -1;
      for (int i = 0; i < static_cast<int>(actors[r].schedule.steps.size()); ++i) {
        const Step& s = actors[r].schedule.steps[i];
        if (s.action == Action::kReceive) {
          received = i;
          continue;
        }
        CHECK(s.after[0] == sent);
        CHECK(s.after[1] == received);
        sent = i;
      }
    }
  }
}

TEST_CASE("placed schedules, and parts of one, keep their own ranges and order") {
  const int n = 5;
  for (auto plan : {plan_ring_allreduce, plan_recursive_doubling, plan_circulant_allreduce})
    for (bool divided : {false, true}) {
      std::vector<Actor> actors;
      for (int r = 0; r < n; ++r) {
        const size_t count = divided ? 40 : 20;
        const Schedule one = plan({.rank = r, .size = n, .count = count, .load = Load::kGate, .in_place = true});
        std::vector<PlacedSchedule> parts;
        for (int i = 0; i < 2; ++i) {
          if (divided)
            parts.push_back({part_of(one, i, 2), 0});
          else
            parts.push_back({one, 20u * i});
        }
        std::vector<int> begin;
        Schedule whole = concatenate(parts, &begin);
        CHECK(begin == std::vector<int>{0, static_cast<int>(parts[0].schedule.steps.size())});
        actors.push_back(actor_with_input(std::move(whole), r, 40, 40, true));
      }
      SymbolicWorld world = ended(std::move(actors), 3, 1);
      for (Actor& a : world.actors())
        for (int i = 0; i < 40; ++i) REQUIRE(a.output[i] == Symbol{everybody(n), i, 0, 1});
    }
}

}  // namespace
