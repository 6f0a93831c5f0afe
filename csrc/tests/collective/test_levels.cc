// Levels of a machine: how ranks are grouped, what crosses the links between sockets, and the results of what runs so.
#include <doctest/doctest.h>

#include <deque>
#include <functional>
#include <random>

#include "collective/selection.h"
#include "collective/shared/level_schedule.h"
#include "collective/shared/shared.h"
#include "tests/made_up_machine.h"
#include "tests/mesh_world.h"

using namespace hc;

namespace {

constexpr MachineShape kTwoXeons{.sockets = 2, .nodes = 1, .caches = 1, .cpus = 96};
constexpr MachineShape kTwoEpycs{.sockets = 2, .nodes = 4, .caches = 3, .cpus = 8};

// The first `ranks` CPUs, with as many on each socket.
std::vector<Locality> spread(const MachineShape& shape, int ranks) {
  std::vector<Locality> places;
  for (int r = 0; r < ranks; ++r) {
    const int socket = r * shape.sockets / ranks;
    const int within = r - (socket * ranks + shape.sockets - 1) / shape.sockets;
    places.push_back(shape.place_of(socket * shape.cpus_of_socket() + within));
  }
  return places;
}

std::vector<int> sockets_of(const std::vector<Locality>& places) {
  std::vector<int> found;
  for (const Locality& p : places) found.push_back(p.socket);
  return found;
}

size_t all_of(const std::vector<std::vector<size_t>>& bytes) {
  size_t sum = 0;
  for (const auto& row : bytes)
    for (size_t b : row) sum += b;
  return sum;
}

// The shared memory of ranks at these places, all in this thread.
class OneMachine {
 public:
  explicit OneMachine(const std::vector<Locality>& places) : n_(static_cast<int>(places.size())) {
    for (int m = 0; m < n_; ++m) {
      auto arena = Arena::create(kMinArenaBytes);
      REQUIRE_MESSAGE(arena.is_ok(), arena.status().text());
      arenas_.push_back(arena.take());
    }
    for (int m = 0; m < n_; ++m) {
      segments_.push_back(std::make_unique<SharedSegment>(arenas_, first_ranks(n_), m, 0, levels_of(places)));
      REQUIRE(segments_.back()->prepare().is_ok());
    }
  }
  std::byte* allocate(int member, size_t bytes) {
    auto block = arenas_[static_cast<size_t>(member)]->allocate(bytes);
    REQUIRE(block.is_ok());
    return block.value();
  }
  // Runs one operation on all members at once; make gives each its task. Returns the algorithm's name.
  std::string run(std::mt19937& random, const std::function<Task(int)>& make) {
    Live live;
    for (int m = 0; m < n_; ++m) {
      Group& group = groups_.emplace_back(
          Group{.rank = m, .size = n_, .world_rank = first_ranks(n_), .node = std::vector<int>(n_, 0), .channel = {}});
      group.shared_segment = segments_[static_cast<size_t>(m)].get();
      auto made = make_collective(make(m), group);
      REQUIRE_MESSAGE(made.is_ok(), made.status().text());
      live.push_back(made.take());
    }
    const std::string name = live[0]->algorithm();
    CHECK(run_all(live, random));
    return name;
  }
  int size() const { return n_; }

 private:
  const int n_;
  std::vector<std::shared_ptr<Arena>> arenas_;
  std::vector<std::unique_ptr<SharedSegment>> segments_;
  std::deque<Group> groups_;
};

Task task_on(Op op, std::vector<float>& in, std::vector<float>& out) {
  Task task;
  task.op = op;
  task.pieces = {{reinterpret_cast<std::byte*>(in.data()), reinterpret_cast<std::byte*>(out.data()), in.size()}};
  return task;
}

std::vector<std::vector<float>> noise(int members, size_t count, std::mt19937& random) {
  std::vector<std::vector<float>> data(static_cast<size_t>(members), std::vector<float>(count));
  std::uniform_real_distribution<float> some(-1, 1);
  for (auto& one : data)
    for (float& x : one) x = some(random);
  return data;
}

// Ranks in every kind of place: uneven sockets, mixed up, a node with one rank.
std::vector<std::vector<Locality>> placements() {
  const MachineShape small{.sockets = 2, .nodes = 2, .caches = 2, .cpus = 2};
  std::vector<std::vector<Locality>> all;
  for (std::vector<int> cpus : {std::vector<int>{0, 1, 8, 9},
                                {0, 8, 1, 9, 2},
                                {0, 1, 2, 3, 4, 8},
                                {0, 2, 4, 6, 8, 10},
                                {15, 0, 14, 1, 13, 2, 12, 3, 11, 4},
                                {0, 1, 2, 3, 4, 5, 6, 7}}) {
    all.emplace_back();
    for (int cpu : cpus) all.back().push_back(small.place_of(cpu));
  }
  return all;
}

}  // namespace

TEST_CASE("levels: those that tell nothing are left out") {
  CHECK(levels_of(spread(kTwoXeons, 2)).flat());
  CHECK(levels_of(spread(kTwoXeons, 8)).group == std::vector<std::vector<int>>{{0, 0, 0, 0, 1, 1, 1, 1}});
  CHECK(levels_of(spread(kTwoXeons, 192)).group.size() == 1);
  CHECK(levels_of(spread(kTwoEpycs, 192)).group.size() == 3);
  CHECK(levels_of(spread({.sockets = 1, .nodes = 1, .caches = 4, .cpus = 8}, 32)).flat());  // one node
  CHECK(levels_of(spread({.sockets = 1, .nodes = 2, .caches = 1, .cpus = 8}, 16)).group.size() == 1);
  CHECK(levels_of({}).flat());
  const std::vector<Locality> one_node{{0, 0, 0}, {0, 0, 0}, {1, 0, 2}, {1, 0, 2}};  // as virtual machines show it
  CHECK(levels_of(one_node).flat());
}

TEST_CASE("levels: an unknown place counts as near all others") {
  auto places = spread(kTwoEpycs, 96);
  places[3].l3 = -1;
  CHECK(levels_of(places).group.size() == 2);
  places[5].numa_node = -1;
  CHECK(levels_of(places).group.size() == 1);
  places[7].socket = -1;
  CHECK(levels_of(places).flat());
}

TEST_CASE("levels: in an allreduce of 8 to 192 ranks the link between two sockets carries the least that is possible") {
  constexpr size_t count = 128u << 10, bytes = count * 4;
  for (const MachineShape& shape : {kTwoXeons, kTwoEpycs})
    for (int ranks = 8; ranks <= 192; ranks += ranks < 16 ? 1 : 44) {
      CAPTURE(ranks);
      const auto places = spread(shape, ranks);
      const auto socket = sockets_of(places);
      const auto levelled =
          bytes_between(LevelSchedule::allreduce(levels_of(places), ranks, count, 16), socket, sizeof(float));
      CHECK(levelled[0][1] == bytes);
      CHECK(levelled[1][0] == bytes);
      const auto flat = bytes_between(LevelSchedule::allreduce({}, ranks, count, 16), socket, sizeof(float));
      CHECK(all_of(flat) > bytes * static_cast<size_t>(ranks) * 9 / 10);
    }
}

TEST_CASE("levels: between NUMA nodes and between caches, too, and with ranks on uneven sockets") {
  constexpr size_t count = 96u << 10, bytes = count * 4;
  const auto places = spread(kTwoEpycs, 192);
  const auto schedule = LevelSchedule::allreduce(levels_of(places), 192, count, 16);
  std::vector<int> node, cache;
  for (const Locality& p : places) node.push_back(p.numa_node), cache.push_back(p.l3 / 8);
  // S groups within each of G larger ones: 2 (S - 1) of the buffer each.
  CHECK(all_of(bytes_between(schedule, node, 4)) == 2 * bytes * (1 + 2 * 3));
  CHECK(all_of(bytes_between(schedule, cache, 4)) == 2 * bytes * (1 + 2 * 3 + 8 * 2));
  for (const auto& some : placements()) {
    if (levels_of(some).flat() || some.back().socket == some.front().socket) continue;
    const auto n = static_cast<int>(some.size());
    const auto crossing = bytes_between(LevelSchedule::allreduce(levels_of(some), n, count, 16), sockets_of(some), 4);
    if (sockets_of(some) == std::vector<int>(some.size(), 0)) continue;
    CHECK(crossing[0][1] == bytes);
    CHECK(crossing[1][0] == bytes);
  }
}

TEST_CASE("levels: a broadcast and an allgather cross the link once") {
  constexpr size_t count = 128u << 10;
  for (int ranks : {8, 96, 192}) {
    const auto places = spread(kTwoEpycs, ranks);
    const auto socket = sockets_of(places);
    const auto broadcast = bytes_between(
        LevelSchedule::distribution(levels_of(places), ranks, {{0, count, ranks - 1}}, 16), socket, sizeof(float));
    CHECK(broadcast[0][1] == 0);
    CHECK(broadcast[1][0] == count * 4);
    std::vector<LevelShare> slots;
    for (int m = 0; m < ranks; ++m)
      slots.push_back({static_cast<size_t>(m) * 640, static_cast<size_t>(m + 1) * 640, m});
    const auto gathered = bytes_between(LevelSchedule::distribution(levels_of(places), ranks, slots, 16), socket, 4);
    CHECK(gathered[0][1] == static_cast<size_t>(ranks) / 2 * 640 * 4);
    CHECK(gathered[1][0] == gathered[0][1]);
  }
}

TEST_CASE("levels: no member sums much more than its part") {
  for (const MachineShape& shape : {kTwoXeons, kTwoEpycs}) {
    constexpr size_t count = 128u << 10;
    const auto schedule = LevelSchedule::allreduce(levels_of(spread(shape, 192)), 192, count, 16);
    for (int m = 0; m < 192; ++m) {
      size_t last = 0;
      for (const LevelStage& stage : schedule.stages_of(m))
        for (const LevelStep& step : stage.steps) last += stage.last ? step.end - step.begin : 0;
      CHECK(last <= 2 * count / 192);
    }
  }
}

TEST_CASE("levels: an allreduce gives all ranks the bits of reduce_by_levels, whichever way it goes") {
  std::mt19937 random(7);
  for (const auto& places : placements()) {
    OneMachine machine(places);
    const int n = machine.size();
    const Levels levels = levels_of(places);
    for (size_t count : {size_t{1}, size_t{37}, size_t{3000}, size_t{20001}, size_t{70000}}) {
      CAPTURE(count);
      auto in = noise(n, count, random);
      std::vector<std::vector<float>> out(in.size(), std::vector<float>(count));
      std::vector<float> expected(count);
      std::vector<const std::byte*> sources;
      for (auto& one : in) sources.push_back(reinterpret_cast<std::byte*>(one.data()));
      std::byte* const to[] = {reinterpret_cast<std::byte*>(expected.data())};
      const Scale scale{0.7, 1.0 / n, 1};
      reduce_by_levels(levels, DType::kF32, Reduce::kSum, to, sources, count, scale);
      const std::string way = machine.run(random, [&](int m) {
        Task task = task_on(Op::kAllreduce, in[static_cast<size_t>(m)], out[static_cast<size_t>(m)]);
        task.scale = scale;
        task.segment_bytes = 4096;
        return task;
      });
      CHECK(way == (count <= 4096 ? "shm flat" : levels.flat() ? "shm blocks" : "shm levels"));
      for (const auto& one : out) CHECK(one == expected);
      std::vector<std::byte*> placed;
      for (int m = 0; m < n; ++m) {
        placed.push_back(machine.allocate(m, count * 4));
        std::memcpy(placed.back(), in[static_cast<size_t>(m)].data(), count * 4);
      }
      for (int again = 0; again < 2; ++again) {
        if (again)
          for (int m = 0; m < n; ++m)
            std::memcpy(placed[static_cast<size_t>(m)], sources[static_cast<size_t>(m)], count * 4);
        machine.run(random, [&](int m) {
          Task task;
          task.op = Op::kAllreduce;
          task.algorithm = Algorithm::kSharedInPlace;
          task.scale = scale;
          task.pieces = {{placed[static_cast<size_t>(m)], placed[static_cast<size_t>(m)], count}};
          return task;
        });
        for (std::byte* one : placed) CHECK(std::memcmp(one, expected.data(), count * 4) == 0);
      }
      // Between the levelled ones, operations that use the same buffers in another way.
      std::vector<std::vector<float>> slice(in.size(), std::vector<float>(count));
      machine.run(random, [&](int m) {
        Task task = task_on(Op::kReducescatter, in[static_cast<size_t>(m)], slice[static_cast<size_t>(m)]);
        task.scale = scale;
        task.segment_bytes = 4096;
        task.counts.assign(in.size(), 0);
        task.counts[1] = count;
        return task;
      });
      CHECK(slice[1] == expected);
    }
  }
}

TEST_CASE("levels: broadcasts and allgathers bring everything to everybody") {
  std::mt19937 random(11);
  for (const auto& places : placements()) {
    OneMachine machine(places);
    const int n = machine.size();
    for (int root : {0, n - 1})
      for (size_t count : {size_t{5000}, size_t{33333}}) {
        auto data = noise(n, count, random);
        const auto from_root = data[static_cast<size_t>(root)];
        machine.run(random, [&](int m) {
          Task task = task_on(Op::kBroadcast, data[static_cast<size_t>(m)], data[static_cast<size_t>(m)]);
          task.root = root;
          task.segment_bytes = 4096;
          return task;
        });
        for (const auto& one : data) CHECK(one == from_root);
      }
    std::vector<size_t> counts;
    for (int m = 0; m < n; ++m) counts.push_back(m == 1 ? 0 : 5000 + 777 * static_cast<size_t>(m));
    std::vector<std::vector<float>> in;
    std::vector<float> expected;
    for (size_t c : counts) {
      in.push_back(noise(1, c, random)[0]);
      expected.insert(expected.end(), in.back().begin(), in.back().end());
    }
    std::vector<std::vector<float>> out(in.size(), std::vector<float>(expected.size()));
    const std::string way = machine.run(random, [&](int m) {
      Task task = task_on(Op::kAllgather, in[static_cast<size_t>(m)], out[static_cast<size_t>(m)]);
      task.counts = counts;
      task.segment_bytes = 4096;
      return task;
    });
    CHECK(way == (levels_of(places).flat() ? "shm blocks" : "shm levels"));
    for (const auto& one : out) CHECK(one == expected);
  }
}
