// Freezing after two equal steps, and getting out of a frozen plan: all ranks run a batch, or none.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>

#include "engine/frozen_plan.h"

using namespace hc;

namespace {

PlanBatch batch(std::vector<uint32_t> slots, bool in_arena = true) {
  PlanBatch b;
  b.in_arena = in_arena;
  for (uint32_t slot : slots) b.entries.emplace_back().slot = slot;
  return b;
}

FrozenPlan frozen_plan() {
  FrozenPlan plan({4, 5, 6});
  for (int step = 0; step < 2; step++) {
    plan.observe(batch({6}));
    plan.observe(batch({4, 5}));
  }
  REQUIRE(plan.frozen());
  return plan;
}

}  // namespace

TEST_CASE("frozen plan: two equal steps in a row freeze it, other operations in between do not matter") {
  FrozenPlan plan({6, 5, 4});
  CHECK_FALSE(plan.observe(batch({6})));
  CHECK_FALSE(plan.observe(batch({9})));
  CHECK_FALSE(plan.observe(batch({4, 5})));
  CHECK_FALSE(plan.observe(batch({6})));
  PlanBatch barrier;
  barrier.op = Op::kBarrier;
  CHECK_FALSE(plan.observe(barrier));
  CHECK(plan.observe(batch({4, 5})));
  REQUIRE(plan.order().size() == 2);
  CHECK(plan.order()[0].slots == std::vector<uint32_t>{6});
  CHECK(plan.order()[1].slots == std::vector<uint32_t>{4, 5});
  CHECK(plan.order()[1].in_arena);
}

TEST_CASE("frozen plan: another order, composition, lane, a mixture, an error, a new signature or a join start over") {
  auto freezes_after = [](std::vector<PlanBatch> odd) {
    FrozenPlan plan({4, 5});
    plan.observe(batch({4}));
    plan.observe(batch({5}));
    for (const PlanBatch& b : odd) plan.observe(b);
    return plan.observe(batch({4})) || plan.observe(batch({5}));
  };
  CHECK(freezes_after({}));
  CHECK(freezes_after({batch({9})}));
  CHECK_FALSE(freezes_after({batch({5}), batch({4})}));
  CHECK_FALSE(freezes_after({batch({4, 5})}));
  CHECK_FALSE(freezes_after({batch({4}, false), batch({5})}));
  CHECK_FALSE(freezes_after({batch({4, 9}), batch({5})}));
  CHECK_FALSE(freezes_after({batch({4})}));  // twice in a step
  PlanBatch failed = batch({4});
  failed.error = Code::kMismatch;
  CHECK_FALSE(freezes_after({failed}));
  PlanBatch changed = batch({4});
  changed.entries[0].assigned = true;
  CHECK_FALSE(freezes_after({changed, batch({5})}));
  PlanBatch join;
  join.op = Op::kJoin;
  CHECK_FALSE(freezes_after({join}));
}

TEST_CASE("frozen plan: a place is ready when all its buckets are submitted, step after step") {
  FrozenPlan plan = frozen_plan();
  CHECK_FALSE(plan.ready(0));
  CHECK(plan.submit(4));
  CHECK_FALSE(plan.submit(4));  // again before it ran
  CHECK_FALSE(plan.submit(9));
  CHECK_FALSE(plan.ready(1));
  CHECK(plan.submit(5));
  CHECK(plan.ready(1));
  CHECK(plan.submit(6));
  CHECK(plan.ready(0));
  CHECK_FALSE(plan.ready(2));
  CHECK(plan.submit(6));
  CHECK(plan.ready(2));
  CHECK_FALSE(plan.ready(3));
  CHECK_FALSE(plan.observe(batch({6})));
}

TEST_CASE("frozen plan: thawing hands back what was submitted in vain and starts the next generation") {
  FrozenPlan plan = frozen_plan();
  for (uint32_t slot : {6, 4, 5, 6, 4}) CHECK(plan.submit(slot));
  // Step 0 ran, of step 1 only the first batch.
  CHECK(plan.thaw(3) == std::vector<uint32_t>{4});
  CHECK_FALSE(plan.frozen());
  CHECK(plan.generation() == 1);
  CHECK_FALSE(plan.submit(4));
  for (int step = 0; step < 2; step++) {
    CHECK_FALSE(plan.observe(batch({6})));
    CHECK(plan.observe(batch({4, 5})) == (step == 1));
  }
  CHECK(plan.submit(5));
  CHECK(plan.thaw(0) == std::vector<uint32_t>{5});
}

TEST_CASE("arrival word: the last arrival and a break exclude each other, whatever the order of events") {
  using Verdict = ArrivalWord::Verdict;
  std::mt19937_64 random(5);
  int ran = 0, broke = 0;
  for (int round = 0; round < 20000; round++) {
    const int size = 2 + static_cast<int>(random() % 4);
    uint32_t generation = static_cast<uint32_t>(random() % 3 == 0 ? 0x7fffffu : random() % 100);
    ArrivalWord word(random() % 2 == 0 ? 0 : static_cast<uint64_t>((2 * generation - 1) & 0xffffffu) << 40 | 17);
    uint64_t step = 0;
    std::vector<bool> arrived(static_cast<size_t>(size), false), refused = arrived;
    for (int event = 0; event < 3 * size; event++) {
      size_t r = random() % static_cast<size_t>(size);
      if (random() % 8 == 0) {
        if (auto next = word.broken(generation, step, size)) word = *next;
      } else if (!arrived[r] && !refused[r]) {
        auto next = word.arrive(generation);
        (next ? arrived : refused)[r] = true;
        if (next) word = *next;
      }
    }
    bool all = std::count(arrived.begin(), arrived.end(), true) == size;
    bool any_refused = std::count(refused.begin(), refused.end(), true) != 0;
    if (all) REQUIRE((word.verdict(generation, step, size) == Verdict::kRuns));
    if (any_refused) REQUIRE((word.verdict(generation, step, size) == Verdict::kBroken));
    bool any = std::count(arrived.begin(), arrived.end(), true) != 0;
    if (any && !all) REQUIRE((word.verdict(generation, step, size) != Verdict::kRuns));
    ran += all;
    broke += any_refused;
    // A break of the next step does not take this one back.
    if (!all) continue;
    if (auto next = word.broken(generation, step + 1, size)) word = *next;
    REQUIRE((word.verdict(generation, step, size) == Verdict::kRuns));
    REQUIRE((word.verdict(generation, step + 1, size) == Verdict::kBroken));
    REQUIRE_FALSE(word.arrive(generation).has_value());
    auto anew = word.arrive(generation + 1);
    REQUIRE(anew.has_value());
    REQUIRE((anew->verdict(generation + 1, 0, size) == Verdict::kWaiting));
  }
  CHECK(ran > 1000);
  CHECK(broke > 1000);
}
