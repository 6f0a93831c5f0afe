// The tree of request lists: its shape, one request aggregator's rules, and engines that talk through it. Random
// schedules through random trees are in test_negotiation_schedules.cc.
#include <doctest/doctest.h>

#include <latch>
#include <set>

#include "agreement/request_aggregator.h"
#include "tests/agreement/negotiation_samples.h"
#include "tests/locked_checks.h"
#include "tests/world.h"

using namespace hc;
using namespace hc::samples;

namespace {

// Ranks 0, 1 on the first node, 2, 3 on the second, ...; each leader has one leader below it.
std::shared_ptr<const ControlTree> chain_of_pairs(int ranks) {
  std::vector<int> node;
  for (int r = 0; r < ranks; r++) node.push_back(r / 2);
  return ControlTree::make(node, 1);
}

Plan plan_of(Op op, PlanEntry entry) {
  Plan plan;
  plan.batches.emplace_back().op = op;
  plan.batches[0].entries.push_back(std::move(entry));
  return plan;
}

// Cache id 0 stands for allreduce.x from now on.
void teach(RequestAggregator* aggregator) {
  PlanEntry e;
  e.cache_id = 0;
  e.name = "x";
  e.assigned = e.has_signature = true;
  aggregator->pass(plan_of(Op::kAllreduce, e));
}

RequestList cache_ids_of(int rank, std::vector<uint32_t> cache_ids) {
  RequestList b;
  b.rank = rank;
  for (uint32_t s : cache_ids) b.cached.push_back({s, 0});
  return b;
}

}  // namespace

TEST_CASE("control tree: every rank is reached once, parents are lower, the fan-out holds") {
  for (int ranks : {2, 3, 9, 64, 1000})
    for (int per_node : {1, 3, 8})
      for (int fanout : {1, 2, 8}) {
        std::vector<int> node;
        for (int r = 0; r < ranks; r++) node.push_back(r / per_node);
        const ControlTree tree(node, fanout);
        std::set<int> below;
        for (int r = 0; r < ranks; r++) {
          int leaders = 0, sizes = 1;
          for (int c : tree.children(r)) {
            REQUIRE(tree.parent(c) == r);
            REQUIRE(c > r);
            leaders += node[static_cast<size_t>(c)] != node[static_cast<size_t>(r)];
            sizes += static_cast<int>(tree.subtree(c).size());
            REQUIRE(tree.child_towards(r, c) == c);
          }
          REQUIRE(leaders <= fanout);
          REQUIRE(sizes == static_cast<int>(tree.subtree(r).size()));
          REQUIRE(tree.is_below(r, 0));
        }
        for (int r : tree.subtree(0)) below.insert(r);
        REQUIRE(static_cast<int>(below.size()) == ranks);
      }
  CHECK(ControlTree::make(std::vector<int>{0, 0, 0}, 8) == nullptr);     // one node
  CHECK(ControlTree::make(std::vector<int>{0, 1, 2}, 8) == nullptr);     // one level
  CHECK(ControlTree::make(std::vector<int>{0, 0, 1, 1}, 0) == nullptr);  // switched off
  CHECK(chain_of_pairs(8)->depth() == 4);
}

TEST_CASE("request aggregator: what all below have announced alike goes up once, and nothing before") {
  RequestAggregator c({chain_of_pairs(6), 2, 0, 0});
  teach(&c);
  REQUIRE(c.take(cache_ids_of(2, {0}), {}).is_ok());
  REQUIRE(c.take(cache_ids_of(3, {0}), {}).is_ok());
  CHECK_FALSE(c.has_news());
  CHECK(c.held() == 1);
  RequestList below = cache_ids_of(4, {0});
  below.whole = true;
  below.last = 5;
  REQUIRE(c.take(below, {}).is_ok());
  const std::vector<RequestList> up = c.collect();
  REQUIRE(up.size() == 1);
  CHECK(up[0].whole);
  CHECK(up[0].rank == 2);
  CHECK(up[0].last == 5);
  CHECK(up[0].cached.size() == 1);
  CHECK(c.held() == 0);
}

TEST_CASE("request aggregator: what is announced differently, or asked for, goes up as each rank said it") {
  RequestAggregator c({chain_of_pairs(4), 2, 0, 0});
  TimePoint now{};
  REQUIRE(c.take(request_list(3, {allreduce("y", {4})}), now).is_ok());
  CHECK_FALSE(c.has_news());
  REQUIRE(c.take(request_list(2, {allreduce("y", {5})}), now + std::chrono::seconds(3)).is_ok());
  std::vector<RequestList> up = c.collect();
  REQUIRE(up.size() == 2);
  CHECK(up[0].rank == 3);
  CHECK_FALSE(up[0].whole);
  CHECK(up[0].held_us == 3000000);
  CHECK(up[1].rank == 2);
  CHECK(up[1].fresh[0].signature.tensors[0].shape[0] == 5);

  teach(&c);
  REQUIRE(c.take(cache_ids_of(3, {0}), now).is_ok());
  c.flush_held(now);
  up = c.collect();
  REQUIRE(up.size() == 1);
  CHECK(up[0].rank == 3);
  REQUIRE(c.take(cache_ids_of(2, {0}), now).is_ok());
  CHECK(c.has_news());
}

TEST_CASE("request aggregator: a rank whose announcement a plan did not end is not waited for again") {
  RequestAggregator c({chain_of_pairs(4), 2, 0, 0});
  teach(&c);
  // Both went up one by one; a plan fails what rank 2 said only.
  REQUIRE(c.take(cache_ids_of(2, {0}), {}).is_ok());
  c.flush_held({});
  REQUIRE(c.take(cache_ids_of(3, {0}), {}).is_ok());
  (void)c.collect();
  PlanEntry failed;
  failed.cache_id = 0;
  failed.failed_on = {2};
  c.pass(plan_of(Op::kAllreduce, failed));
  REQUIRE(c.take(cache_ids_of(2, {0}), {}).is_ok());
  REQUIRE(c.has_news());
  CHECK(c.collect()[0].rank == 2);
}

TEST_CASE("coordinator: a request list that comes behind its rank's goodbye counts for those who are still there") {
  CoordinatorOptions o = options(4);
  o.tree = chain_of_pairs(4);
  Coordinator c(o);
  c.leave(3, "rank 3 has shut down");
  RequestList late = request_list(3, {allreduce("x")}), both = request_list(2, {allreduce("y")});
  both.whole = true;
  REQUIRE(c.take(late, {}).is_ok());
  CHECK_FALSE(c.anything_ready());
  REQUIRE(c.take(both, {}).is_ok());
  Plan plan = c.decide(9);
  REQUIRE(plan.batches.size() == 1);
  CHECK(plan.batches[0].error == Code::kAborted);
  CHECK(plan.batches[0].entries[0].failed_on == std::vector<int32_t>{2});
}

TEST_CASE("request aggregator: unknown ranks, repetitions and unknown cache ids are refused") {
  RequestAggregator c({chain_of_pairs(6), 2, 0, 0});
  teach(&c);
  CHECK_FALSE(c.take(cache_ids_of(0, {0}), {}).is_ok());
  CHECK_FALSE(c.take(cache_ids_of(77, {0}), {}).is_ok());
  CHECK_FALSE(c.take(cache_ids_of(3, {1}), {}).is_ok());
  CHECK(c.take(cache_ids_of(3, {0}), {}).is_ok());
  CHECK_FALSE(c.take(cache_ids_of(3, {0}), {}).is_ok());
}

namespace {

const Settings kChain = {{"HOROCLONE_CONTROL_FANOUT", "1"}};
const std::vector<std::string> kThreeNodes = {"a", "a", "b", "b", "c", "c"};

Status sum(Engine& engine, const std::string& name, int64_t elements, float* result = nullptr) {
  std::vector<float> in(static_cast<size_t>(elements), 1), out(in.size());
  int64_t handle = 0;
  HC_TRY(submit(engine, Op::kAllreduce, name, in, &out, {elements}, &handle));
  Status status = finish(engine, handle);
  engine.release(handle);
  if (result) *result = out[0];
  return status;
}

}  // namespace

TEST_CASE("control tree: engines of three nodes in a chain agree, err by name and join") {
  World world(6, kChain);
  CHECK_OK(world.on_nodes(kThreeNodes).each([](Engine& engine, int rank) {
    float result = 0;
    for (int i = 0; i < 30; i++) {
      CHECK_OK(sum(engine, "t" + std::to_string(i % 3), 8, &result));
      CHECK_LOCKED(result == 6);
    }
    const Status status = sum(engine, "odd", rank == 5 ? 4 : 3);
    CHECK_LOCKED(status.code() == Code::kMismatch);
    CHECK_LOCKED(status.text().find("rank 5 announced") != std::string::npos);
    CHECK_OK(sum(engine, "odd", 3));
    int set = 0;
    CHECK_OK(engine.add_process_set({1, 2, 3, 5}, &set));
    for (int i = 0; i < rank; i++) CHECK_OK(sum(engine, "uneven" + std::to_string(i), 2));
    CHECK_OK(perform(engine, Op::kJoin));
    CHECK_OK(sum(engine, "after", 2, &result));
    CHECK_LOCKED(result == 6);
  }));
}

TEST_CASE(
    "control tree: when a rank that passes request lists on leaves, the others' operations fail and do not hang") {
  for (int leaver : {2, 3, 5}) {
    CAPTURE(leaver);
    World world(6, kChain);
    std::latch heard(5);  // who leaves because it has heard of the first would be named by those that have not
    CHECK_OK(world.on_nodes(kThreeNodes).each([leaver, &heard](Engine& engine, int rank) {
      CHECK_OK(sum(engine, "together", 2));
      if (rank == leaver) return;
      const Status status = sum(engine, "without", 2);
      heard.arrive_and_wait();
      CHECK_LOCKED(status.code() == Code::kAborted);
      CHECK_LOCKED(status.text().find(text_of("rank ", leaver)) != std::string::npos);
    }));
  }
}
