// The table of algorithms: what it says is what runs, and the probe of init finds thresholds that all ranks share.
#include <doctest/doctest.h>

#include "collective/gpu/device_state.h"
#include "collective/selection.h"
#include "tests/mesh_world.h"
#include "tests/world.h"

using namespace hc;

TEST_CASE("selection: over channels the table's algorithm is made, on both sides of every edge") {
  const int n = 5;
  MemoryMesh mesh(n, 1);
  const Group group = group_on(mesh, first_ranks(n), 0);
  const Thresholds thresholds{.ring_from_bytes = 4096, .ranks = n};
  std::vector<float> data(1 << 18);
  for (const Selection& row : selection_table(Layout::kSeveralNodes, thresholds)) {
    CAPTURE(row.from_bytes);
    CAPTURE(name_of(row.op));
    if (row.algorithm == Algorithm::kAuto) continue;
    for (const size_t bytes : {row.from_bytes, row.from_bytes + 4}) {
      const size_t count = bytes / 4;
      Task task;
      task.op = row.op;
      task.ring_from_bytes = thresholds.ring_from_bytes;
      task.pieces = {{reinterpret_cast<std::byte*>(data.data()), reinterpret_cast<std::byte*>(data.data()), count}};
      task.counts = task.received_counts = {count, 0, 0, 0, 0};
      auto made = make_collective(task, group);
      REQUIRE_MESSAGE(made.is_ok(), made.status().text());
      CHECK(std::string(made.value()->algorithm()) == name_of(row.algorithm));
      if (row.op == Op::kAllreduce && row.from_bytes > 0) {
        task.pieces[0].count = (row.from_bytes - 4) / 4;
        CHECK(std::string(make_collective(task, group).value()->algorithm()) != name_of(row.algorithm));
      }
    }
  }
}

TEST_CASE("selection: rows are in order, start at nothing, and change where the thresholds say") {
  const Thresholds thresholds{.flat_bytes = 8192, .ring_from_bytes = 1 << 20};
  for (const Layout layout : {Layout::kOneNode, Layout::kSeveralNodes, Layout::kSeveralNodesOfSeveral}) {
    const auto table = selection_table(layout, thresholds);
    for (size_t i = 0; i < table.size(); ++i) {
      const bool first = i == 0 || table[i].op != table[i - 1].op;
      CHECK((table[i].from_bytes == 0) == first);
      if (!first) CHECK(table[i].from_bytes > table[i - 1].from_bytes);
      CHECK(select_algorithm(table[i].op, Reduce::kSum, table[i].from_bytes, layout, thresholds) == table[i].algorithm);
    }
  }
  CHECK(select_algorithm(Op::kAllreduce, Reduce::kSum, 8192, Layout::kOneNode, thresholds) == Algorithm::kSharedFlat);
  CHECK(select_algorithm(Op::kAllreduce, Reduce::kSum, 8193, Layout::kOneNode, thresholds) ==
        Algorithm::kSharedBlocked);
  CHECK(select_algorithm(Op::kAllreduce, Reduce::kSum, 1 << 19, Layout::kSeveralNodesOfSeveral, thresholds) ==
        Algorithm::kTwoLevel);
  CHECK(selection_json(thresholds)
            .find("{\"operation\":\"allreduce\",\"from_bytes\":8193,\"algorithm\":\"shm "
                  "blocks\"}") != std::string::npos);
}

TEST_CASE("selection: what a task demands is heard where it means something, and small ones leave two levels") {
  Task task;
  task.pieces = {{nullptr, nullptr, 1000}};  // 4,000 bytes
  task.ring_from_bytes = 4000;
  CHECK(choose_in_shared_memory(task) == Algorithm::kSharedFlat);
  CHECK(choose_between_nodes(task, 2) == Algorithm::kRing);
  task.ring_from_bytes = 4001;
  CHECK(choose_between_nodes(task, 2) == Algorithm::kRecursiveDoubling);
  task.algorithm = Algorithm::kRing;
  CHECK(choose_between_nodes(task, 2) == Algorithm::kRing);
  CHECK(choose_over_channels(task, 2) == Algorithm::kRing);
  CHECK(choose_in_shared_memory(task) == Algorithm::kSharedFlat);
  task.algorithm = Algorithm::kTwoLevel;
  CHECK(choose_between_nodes(task, 2) == Algorithm::kRecursiveDoubling);
  task.pieces[0].count = 4000;
  CHECK(choose_between_nodes(task, 2) == Algorithm::kTwoLevel);
  task.algorithm = Algorithm::kSharedInPlace;
  CHECK(choose_in_shared_memory(task) == Algorithm::kSharedInPlace);
  task.pieces.push_back(task.pieces[0]);
  CHECK(choose_in_shared_memory(task) == Algorithm::kSharedBlocked);
  task.algorithm = Algorithm::kSharedBlocked;
  task.pieces = {{nullptr, nullptr, 0}};
  CHECK(choose_in_shared_memory(task) == Algorithm::kSharedFlat);
  CHECK(select_for_block(4095, 4096) == Algorithm::kRecursiveDoubling);
  CHECK(select_for_block(4096, 4096) == Algorithm::kRing);
}

TEST_CASE("selection: ranks that give unequal parts choose alike") {
  const size_t large = 1 << 20;
  for (const Op op : {Op::kAllgather, Op::kReducescatter})
    for (const size_t rest : {size_t{0}, large}) {
      Task task;
      task.op = op;
      task.counts = {1, 2, 3, 4, 5 + rest};
      for (const size_t mine : task.counts) {
        task.pieces = {{nullptr, nullptr, mine}};
        CHECK(choose_between_nodes(task, 5) == (rest ? Algorithm::kRing : Algorithm::kCirculant));
      }
    }
}

TEST_CASE("selection: layouts, and what is decided before there is a task") {
  CHECK(layout_of(std::vector<int>{}) == Layout::kOneNode);
  CHECK(layout_of(std::vector<int>{3, 3}) == Layout::kOneNode);
  CHECK(layout_of(std::vector<int>{0, 2, 1}) == Layout::kSeveralNodes);
  CHECK(layout_of(std::vector<int>{0, 1, 0}) == Layout::kSeveralNodesOfSeveral);
  CHECK(in_place_pays(128 * kKiB, 2, false));
  CHECK_FALSE(in_place_pays(128 * kKiB - 1, 2, false));
  CHECK(in_place_pays(16 * kKiB, 1, true));
  CHECK(algorithm_in_plan(Op::kAllreduce, true) == Algorithm::kTwoLevel);
  CHECK(algorithm_in_plan(Op::kAllgather, true) == Algorithm::kAuto);
  CHECK(may_bypass(Op::kBarrier, Reduce::kSum, 0, 3, 0));
  CHECK(may_bypass(Op::kAllreduce, Reduce::kXor, 8, 3, 8));
  CHECK_FALSE(may_bypass(Op::kAllreduce, Reduce::kXor, 9, 3, 8));
  CHECK_FALSE(may_bypass(Op::kAllreduce, Reduce::kAdasum, 8, 3, 8));
  CHECK_FALSE(may_bypass(Op::kGather, Reduce::kSum, 8, 3, 8));
  CHECK(may_bypass(Op::kAllgather, Reduce::kSum, 4000, 2, 1000));
  CHECK_FALSE(may_bypass(Op::kAllgather, Reduce::kSum, 4001, 2, 1000));
  CHECK(may_bypass(Op::kAllreduce, Reduce::kSum, 64000, 2, 1000));
  CHECK(may_bypass(Op::kAllreduce, Reduce::kSum, 1 << 20, 2, 32 << 10));
  CHECK_FALSE(may_bypass(Op::kAllreduce, Reduce::kSum, (1 << 20) + 1, 2, 32 << 10));
  CHECK_FALSE(may_bypass(Op::kAllreduce, Reduce::kSum, 1, 2, 0));
  CHECK(most_fused_in_arenas(true, 4096) == 0);
  CHECK(most_fused_in_arenas(false, 4096) == 4095);
  CHECK(most_fused_in_arenas(false, 0) == 0);
}

TEST_CASE("selection: what each backend for GPUs can do, the same on every rank") {
  const Group group;
  DeviceState state;
  const auto nccl = make_nccl_backend(&state, group), peers = make_peers_backend(&state, group),
             staged = make_staged_backend(&state, group);
  Task task;
  CHECK(nccl->can(task));
  CHECK(peers->can(task));
  task.reduce = Reduce::kAdasum;
  CHECK_FALSE(nccl->can(task));  // without our kernels
  CHECK_FALSE(peers->can(task));
  CHECK(staged->can(task));
  state.kernels_everywhere = true;
  CHECK(nccl->can(task));
  task = {};
  task.op = Op::kScatter;
  CHECK_FALSE(peers->can(task));
  CHECK(staged->can(task));
  CHECK(nccl->order() == GpuBackend::Order::kLaunches);
  CHECK(peers->order() == GpuBackend::Order::kPlan);
  CHECK(staged->order() == GpuBackend::Order::kPlan);
}

TEST_CASE("selection: the probe ends with one threshold for all ranks, and what was given is not probed") {
  for (const std::string given : {"", "flat_bytes=8192", "fixed"}) {
    CAPTURE(given);
    std::vector<std::string> counters(3);
    const Status status = hc::World(3, {{"HOROCLONE_SELECTION", given}}).each([&](Engine& engine, int rank) {
      // A set that is made later has the same.
      int id = 0;
      REQUIRE(engine.add_process_set({0, 2}, &id).is_ok());
      counters[rank] = engine.counters_json();
    });
    REQUIRE_MESSAGE(status.is_ok(), status.text());
    const auto field = [&](int rank, const std::string& name) {
      const size_t at = counters[rank].find("\"" + name + "\":") + name.size() + 3;
      return counters[rank].substr(at, counters[rank].find_first_of(",}", at) - at);
    };
    for (int rank = 1; rank < 3; ++rank) {
      CHECK(field(rank, "flat_bytes") == field(0, "flat_bytes"));
      CHECK(field(rank, "selection") == field(0, "selection"));
    }
    CHECK(field(0, "selection") == (given.empty() ? "\"probe\"" : given == "fixed" ? "\"fixed\"" : "\"given\""));
    if (given == "fixed") CHECK(field(0, "flat_bytes") == "16384");
    if (given == "flat_bytes=8192") CHECK(field(0, "flat_bytes") == "8192");
  }
  for (const std::string bad : {"flat_bytes=", "flat_bytes=-1", "flat_bytes=33000", "quick"}) {
    const Status status = hc::World(2, {{"HOROCLONE_SELECTION", bad}}).each([](Engine&, int) {});
    CHECK_MESSAGE(status.text().find("HOROCLONE_SELECTION='" + bad + "' is not valid") != std::string::npos,
                  status.text());
  }
}
