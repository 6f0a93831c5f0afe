// The inter-node stage: who carries which stripe, and that blocks flow only as far as released, finish in order, are
// scaled once and end with the same bits on every node.
#include <doctest/doctest.h>

#include "collective/channels/striped_allreduce.h"
#include "tests/collective/memory_channel.h"

// A StripeRange names only what a test is about.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace {

using namespace hc;

Group group_with_nodes(MemoryMesh& mesh, const std::vector<int>& node, int rank) {
  Group g{.rank = rank, .size = static_cast<int>(node.size()), .world_rank = {}, .node = node, .channel = {}};
  for (int p = 0; p < g.size; ++p) {
    g.world_rank.push_back(p);
    g.channel.push_back(p == rank || node[p] == node[rank] ? nullptr : mesh.link(rank, p));
  }
  return g;
}

TEST_CASE("stripes: one owner per node, agreed by all, whatever the layout") {
  for (const std::vector<int>& node :
       {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 1}, {5, 5, 5, 2, 2, 7, 7, 7}, {0}, {0, 0}, {0, 1, 2}}) {
    MemoryMesh mesh(static_cast<int>(node.size()), 1);
    std::vector<std::vector<int>> owners(node.size());
    for (int r = 0; r < static_cast<int>(node.size()); ++r) {
      const Stripe stripe = stripe_of(group_with_nodes(mesh, node, r));
      if (stripe.index >= stripe.stripes) {
        CHECK(stripe.positions.empty());
        continue;
      }
      CHECK(std::count(stripe.positions.begin(), stripe.positions.end(), r) == 1);
      for (size_t i = 0; i < stripe.positions.size(); ++i)
        for (size_t j = 0; j < i; ++j) CHECK(node[stripe.positions[i]] != node[stripe.positions[j]]);
      if (owners[stripe.index].empty()) owners[stripe.index] = stripe.positions;
      CHECK(owners[stripe.index] == stripe.positions);
    }
  }
  MemoryMesh mesh(8, 1);
  const Stripe last = stripe_of(group_with_nodes(mesh, {5, 5, 5, 2, 2, 7, 7, 7}, 7));
  CHECK(last.stripes == 2);
  CHECK(last.positions.empty());
  const Stripe second = stripe_of(group_with_nodes(mesh, {5, 5, 5, 2, 2, 7, 7, 7}, 4));
  CHECK(second.positions == std::vector<int>{1, 4, 6});
}

// All stripes of nodes x local ranks; every rank's range is released bit by bit at its own pace.
void check_stripes(int nodes, int local, size_t count, size_t block) {
  CAPTURE(nodes);
  CAPTURE(count);
  CAPTURE(block);
  const int n = nodes * local;
  std::vector<int> node(n);
  for (int r = 0; r < n; ++r) node[r] = r / local;
  MemoryMesh mesh(n, static_cast<unsigned>(n + count), 512);
  std::vector<std::vector<float>> data(n, std::vector<float>(count, -1000.0f));  // not yet the node's sum
  std::vector<std::unique_ptr<StripedAllreduce>> live;
  for (int r = 0; r < n; ++r) {
    const Group group = group_with_nodes(mesh, node, r);
    StripeRange range{.data = reinterpret_cast<std::byte*>(data[r].data()),
                      .count = count,
                      .block_count = block,
                      .segment_bytes = 256};
    range.scale.post = 0.5;
    auto made = make_striped_allreduce(range, group, stripe_of(group).positions);
    REQUIRE_MESSAGE(made.is_ok(), made.status().text());
    live.push_back(made.take());
  }
  const float sum = 0.5f * nodes * (nodes + 1) / 2;
  std::vector<size_t> released(n, 0), finished(n, 0);
  std::vector<bool> done(n, false);
  for (int i = 0; i < 200000 && std::count(done.begin(), done.end(), false); ++i) {
    const int r = static_cast<int>(mesh.random() % n);
    if (mesh.random() % 4 == 0 && released[r] < count) {
      const size_t more = std::min(count - released[r], 1 + mesh.random() % (1 + count / 5));
      for (size_t k = 0; k < more; ++k) data[r][released[r]++] = static_cast<float>(node[r] + 1);
      live[r]->release(released[r]);
    }
    bool moved = false;
    const Progress p = live[r]->step(&moved);
    REQUIRE(p != Progress::kFailed);
    done[r] = p == Progress::kDone;
    const size_t now = live[r]->finished();
    REQUIRE(now >= finished[r]);
    for (; finished[r] < now; ++finished[r]) REQUIRE(data[r][finished[r]] == sum);
    size_t least = count;
    for (int peer : stripe_of(group_with_nodes(mesh, node, r)).positions) least = std::min(least, released[peer]);
    REQUIRE(now <= least);
  }
  for (int r = 0; r < n; ++r) {
    REQUIRE(done[r]);
    REQUIRE(live[r]->finished() == count);
    REQUIRE(data[r] == std::vector<float>(count, sum));
  }
  live.clear();
  REQUIRE(mesh.quiet());
}

TEST_CASE("striped allreduce: blocks follow what is released and finish in order") {
  for (int nodes : {1, 2, 3, 4})
    for (int local : {1, 2})
      for (size_t count : {0, 1, 5, 333, 1000})
        for (size_t block : {0, 1000, 100, 7}) check_stripes(nodes, local, count, block);
  check_stripes(2, 2, 40000, 17000);  // ring
}

TEST_CASE("striped allreduce: the setting says from which block size on it is a ring") {
  MemoryMesh mesh(2, 1);
  const std::vector<int> node{0, 1};
  const Group group = group_with_nodes(mesh, node, 0);
  std::vector<float> data(1000);
  for (const size_t ring_from : {size_t{0}, size_t{3999}, size_t{4000}, size_t{4001}, defaults::ring_threshold_bytes}) {
    StripeRange range{.data = reinterpret_cast<std::byte*>(data.data()), .count = data.size()};
    range.ring_from_bytes = ring_from;
    const auto made = make_striped_allreduce(range, group, stripe_of(group).positions).take();
    CHECK(std::string(made->schedule_name()) ==
          (ring_from <= 4000 ? "inter-node ring" : "inter-node recursive doubling"));
  }
}

TEST_CASE("striped allreduce: errors name the stage and the rank") {
  MemoryMesh mesh(4, 1);
  const std::vector<int> node{0, 0, 1, 1};
  const Group group = group_with_nodes(mesh, node, 1);
  std::vector<float> data(100000, 1.0f);
  StripeRange range{.data = reinterpret_cast<std::byte*>(data.data()), .count = data.size()};
  CHECK(make_striped_allreduce(range, group, std::vector<int>{0, 2}).status().code() == Code::kInternal);
  CHECK(make_striped_allreduce(range, group, std::vector<int>{1, 9}).status().code() == Code::kInternal);
  CHECK(make_striped_allreduce(range, group, std::vector<int>{1, 0}).status().culprit() ==
        0);  // no channel within a node
  StripeRange scaled = range;
  scaled.scale.pre = 2;
  CHECK(make_striped_allreduce(scaled, group, stripe_of(group).positions).status().code() == Code::kInvalidArgument);

  auto stripe = make_striped_allreduce(range, group, stripe_of(group).positions).take();
  std::vector<float> other(100000, 1.0f);
  StripeRange far = range;
  far.data = reinterpret_cast<std::byte*>(other.data());
  const Group group3 = group_with_nodes(mesh, node, 3);
  auto stripe3 = make_striped_allreduce(far, group3, stripe_of(group3).positions).take();
  stripe->release(data.size());
  stripe3->release(data.size());
  mesh.link(1, 3)->break_after(100000);
  Progress p = stripe->start();
  (void)stripe3->start();
  for (int i = 0; i < 100000 && p == Progress::kPending; ++i) {
    bool moved = false;
    p = stripe->step(&moved);
    (void)stripe3->step(&moved);
  }
  REQUIRE(p == Progress::kFailed);
  CAPTURE(stripe->status().text());
  CHECK(stripe->status().text().find("inter-node ring step 1 of 2: ") == 0);
  CHECK(stripe->status().culprit() == 3);
}

}  // namespace
