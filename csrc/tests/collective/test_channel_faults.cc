// Collectives over links that break half-way, a peer that leaves early, and tasks that cannot work.
#include <doctest/doctest.h>

#include "collective/selection.h"
#include "tests/mesh_world.h"

// A Task names only what a test is about.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace {

using namespace hc;

TEST_CASE("a link that breaks half-way names the rank and the step") {
  for (Algorithm a : {Algorithm::kRing, Algorithm::kRecursiveDoubling, Algorithm::kCirculant})
    for (size_t after : {0u, 100u, 1000u, 3000u}) {
      const std::vector<int> members{4, 7, 9};  // world ranks differ from positions
      MemoryMesh mesh(10, static_cast<unsigned>(after), 64);
      std::vector<std::vector<float>> data(3, std::vector<float>(1500, 1.0f));
      Live live;
      for (int r = 0; r < 3; ++r) {
        Task task{.algorithm = a, .segment_bytes = 128};
        auto* p = reinterpret_cast<std::byte*>(data[r].data());
        task.pieces = {{p, p, data[r].size()}};
        live.push_back(made(task, group_on(mesh, members, r)));
      }
      // Position 1 (rank 7) receives from position 0 (rank 4) with each algorithm.
      mesh.link(7, 4)->break_after(after);
      std::vector<Progress> state(3, Progress::kPending);
      for (auto& c : live) (void)c->start();
      for (int i = 0; i < 20000 && state[1] == Progress::kPending; ++i)
        for (int r = 0; r < 3; ++r) {
          bool moved = false;
          if (state[r] == Progress::kPending) state[r] = live[r]->step(&moved);
        }
      REQUIRE(state[1] == Progress::kFailed);
      const Status& status = live[1]->status();
      CAPTURE(status.text());
      CHECK(status.code() == Code::kPeerLost);
      CHECK(status.culprit() == 4);
      CHECK(status.text().find(text_of(name_of(a), " step ")) == 0);
      CHECK(status.text().find(a == Algorithm::kRecursiveDoubling ? " of 3: " : " of 4: ") != std::string::npos);
      CHECK(status.text().find(" rank 4: the link broke") != std::string::npos);
      bool moved = false;
      CHECK(live[1]->step(&moved) == Progress::kFailed);  // and stays so
      live.clear();                                       // with transfers in flight
      for (int x : members)
        for (int y : members)
          if (x != y) CHECK(mesh.link(x, y)->posted() == 0);
    }
}

TEST_CASE("a peer that leaves after its last byte fails nobody") {
  MemoryMesh mesh(2, 1, 4096);
  Live live;
  for (int r = 0; r < 2; ++r) live.push_back(made({.op = Op::kBarrier}, group_on(mesh, first_ranks(2), r)));
  bool moved = false;
  (void)live[0]->start();
  for (int i = 0; i < 100; ++i) (void)live[0]->step(&moved);
  Progress p = live[1]->start();
  for (int i = 0; i < 100 && p == Progress::kPending; ++i) p = live[1]->step(&moved);
  REQUIRE(p == Progress::kDone);
  mesh.link(0, 1)->break_after(1);  // the last byte, and in the same moment the peer is gone
  p = Progress::kPending;
  for (int i = 0; i < 100 && p == Progress::kPending; ++i) p = live[0]->step(&moved);
  CHECK(p == Progress::kDone);
}

TEST_CASE("what cannot work is refused before anything moves") {
  MemoryMesh mesh(2, 1);
  const Group group = group_on(mesh, first_ranks(2), 0);
  std::vector<float> data(8);
  auto* p = reinterpret_cast<std::byte*>(data.data());
  auto code = [&](Task t) { return make_channel_collective(std::move(t), group).status().code(); };
  CHECK(code({.reduce = Reduce::kAdasum, .pieces = {{p, p, 8}}}) == Code::kUnsupported);
  CHECK(code({.pieces = {{p, p + 4, 4}}}) == Code::kInvalidArgument);
  CHECK(code({.pieces = {{nullptr, p, 4}}}) == Code::kInvalidArgument);
  CHECK(code({.pieces = {{p, p, 4}}, .algorithm = Algorithm::kSharedFlat}) == Code::kUnsupported);
  CHECK(code({.op = Op::kBroadcast, .root = 2, .pieces = {{p, p, 4}}}) == Code::kInvalidArgument);
  CHECK(code({.op = Op::kBroadcast, .scale = {.pre = 2}, .pieces = {{p, p, 4}}}) == Code::kInvalidArgument);
  CHECK(code({.op = Op::kAllgather, .pieces = {{p, p, 1}}, .counts = {1}}) == Code::kInvalidArgument);
  CHECK(code({.op = Op::kAlltoall, .pieces = {{p, p, 2}}, .counts = {1, 1}, .received_counts = {2, 1}}) ==
        Code::kInvalidArgument);
  CHECK(code({.op = Op::kJoin, .pieces = {{p, p, 1}}}) == Code::kUnsupported);
  Group broken = group;
  broken.channel[1] = nullptr;
  auto missing = make_channel_collective({.op = Op::kBarrier}, broken);
  CHECK(missing.status().code() == Code::kInternal);
  CHECK(missing.status().culprit() == 1);
}

}  // namespace
