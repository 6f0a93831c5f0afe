// The rules of the agreement, one by one; random schedules are in test_negotiation_schedules.cc.
#include <doctest/doctest.h>

#include "tests/agreement/negotiation_samples.h"

using namespace hc;
using namespace hc::samples;

namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Two ranks announce; the only batch is returned.
PlanBatch agree_on(const Request& on_0, const Request& on_1) {
  Ranks ranks(options(2));
  ranks.say(0, {on_0});
  CHECK_FALSE(ranks.coordinator.anything_ready());
  ranks.say(1, {on_1});
  CHECK(ranks.coordinator.anything_ready());
  Plan plan = ranks.decide();
  REQUIRE(plan.batches.size() == 1);
  REQUIRE(plan.batches[0].entries.size() == 1);
  CHECK(ranks.coordinator.pending() == 0);
  // Whatever it was, the ranks go on.
  ranks.everybody_says({allreduce("after")});
  Plan next = ranks.decide();
  REQUIRE(next.batches.size() == 1);
  CHECK(next.batches[0].error == Code::kOk);
  return plan.batches[0];
}

template <class Change>
PlanBatch mismatch(Op op, Change change, std::vector<int64_t> shape = {4}) {
  Signature a = signature(op, shape), b = a;
  change(b);
  return agree_on(named("x", a), named("x", b));
}

}  // namespace

TEST_CASE("coordinator: what nothing can join is decided on at once, whatever the room") {
  std::vector<Request> small;
  for (int i = 0; i < 161; i++) {
    small.push_back(allreduce("s" + std::to_string(i)));
    small.back().signature.in_arena = true;
  }
  Request big = allreduce("big", {1 << 20}), other = big;
  big.signature.in_arena = other.signature.in_arena = true;
  other.name = "other";
  Ranks ranks(options(2));
  ranks.everybody_says(small);
  CHECK(ranks.decide(0).batches.empty());
  CHECK(ranks.decide(1).batches.size() == 161);
  ranks.everybody_says(small);
  CHECK(ranks.decide(1).batches.size() == 161);
  ranks.everybody_says(small);
  Plan plan = ranks.decide(1);
  CHECK(plan.batches.size() == 161);
  CHECK(ranks.plan_bytes <= 32);
  CHECK(plan.batches[160].id == 482);
  ranks.everybody_says({big, other, small[0], small[1]});
  CHECK(ranks.decide(1).batches.size() == 2);  // what is known comes first in a request list
  CHECK(ranks.decide(1).batches.size() == 1);
  CHECK(ranks.decide(1).batches.size() == 1);
  CHECK_FALSE(ranks.coordinator.anything_ready());
}

TEST_CASE("coordinator: nothing is ready before the last rank, order of readiness is order of execution") {
  Ranks ranks(options(3, 1024, 0));
  ranks.say(0, {allreduce("a"), allreduce("b"), allreduce("c")});
  ranks.say(1, {allreduce("c"), allreduce("b"), allreduce("a")});
  CHECK(ranks.decide().batches.empty());
  CHECK(ranks.coordinator.pending() == 3);
  ranks.say(2, {allreduce("b")});
  ranks.say(2, {allreduce("c"), allreduce("a")});
  Plan plan = ranks.decide();
  REQUIRE(plan.batches.size() == 3);
  CHECK(plan.batches[0].entries[0].name == "b");
  CHECK(plan.batches[1].entries[0].name == "c");
  CHECK(plan.batches[2].entries[0].name == "a");
  CHECK(plan.batches[0].id == 0);
  CHECK(plan.batches[2].id == 2);
  CHECK_FALSE(plan.batches[0].entries[0].assigned);  // it may never come again
  ranks.everybody_says({allreduce("b")});
  plan = ranks.decide();
  CHECK(plan.batches[0].entries[0].assigned);
  CHECK(plan.batches[0].entries[0].has_signature);
  CHECK(ranks.coordinator.pending() == 0);
}

TEST_CASE("coordinator: decide gives at most `room` batches") {
  Ranks ranks(options(1, 1024, 0));
  ranks.say(0, {allreduce("a"), allreduce("b"), allreduce("c")});
  CHECK(ranks.decide(0).batches.empty());
  CHECK(ranks.decide(2).batches.size() == 2);
  CHECK(ranks.coordinator.anything_ready());
  CHECK(ranks.decide(2).batches.size() == 1);
  CHECK_FALSE(ranks.coordinator.anything_ready());
}

TEST_CASE("coordinator: what comes a second time is a cache id from then on, in both directions") {
  Ranks ranks(options(2));
  std::vector<Request> step;
  for (int i = 0; i < 161; i++) step.push_back(allreduce("layer" + std::to_string(i) + ".weight", {64, 64}));
  ranks.everybody_says(step);
  size_t first_plan = ranks.decide().batches.size();
  ranks.everybody_says(step);
  CHECK(ranks.decide().batches.size() == first_plan);
  for (int i = 0; i < 3; i++) {
    CHECK(ranks.say(0, step) + ranks.say(1, step) <= 128);
    Plan plan = ranks.decide();
    CHECK(plan.batches.size() == first_plan);
    CHECK(ranks.plan_bytes <= 128);
    for (const PlanBatch& b : plan.batches)
      for (const PlanEntry& e : b.entries) {
        CHECK_FALSE(e.assigned);
        CHECK(e.name.empty());
        CHECK(e.cache_id < 161);
      }
  }
}

TEST_CASE("coordinator: names that never come again leave nothing behind") {
  Ranks ranks(options(2));
  for (int i = 0; i < 6000; i++) {  // more than the 4,096 that are remembered
    ranks.everybody_says({allreduce("metric_" + std::to_string(i))});
    ranks.decide();
    ranks.said.clear();
  }
  CHECK(ranks.cache[0].size() == 0);
  for (int i = 0; i < 2; i++) {
    ranks.everybody_says({allreduce("loss")});
    ranks.decide();
  }
  CHECK(ranks.cache[0].size() == 1);
}

TEST_CASE("coordinator: allreduces with one key are fused up to the limit, over others in between") {
  Ranks ranks(options(1, 1024, 64));
  ranks.say(0, {allreduce("a", {8}), allreduce("h", {4}, DType::kF16), allreduce("b", {4}),
                named("g", signature(Op::kAllgather, {2})), allreduce("big", {100}), allreduce("c", {4}),
                allreduce("d", {1})});
  Plan plan = ranks.decide();
  auto names = [&](size_t b) {
    std::string all;
    for (const PlanEntry& e : plan.batches[b].entries) all += e.name + " ";
    return all;
  };
  REQUIRE(plan.batches.size() == 5);
  CHECK(names(0) == "a b c ");  // 32 + 16 + 16 bytes
  CHECK(names(1) == "h ");
  CHECK(names(2) == "g ");
  CHECK(names(3) == "big ");
  CHECK(names(4) == "d ");
}

TEST_CASE("coordinator: reduce, scales and device are part of the fusion key") {
  Ranks ranks(options(1));
  Signature s = signature(Op::kAllreduce, {4});
  std::vector<Request> list = {named("0", s), named("1", s)};
  Signature t = s;
  t.reduce = Reduce::kMax;
  list.push_back(named("2", t));
  t = s;
  t.prescale = 0.5;
  list.push_back(named("3", t));
  t = s;
  t.postscale = 0.5;
  list.push_back(named("4", t));
  t = s;
  t.device = 1;
  list.push_back(named("5", t));
  t = s;
  t.reduce = Reduce::kAdasum;
  list.push_back(named("6", t));
  list.push_back(named("7", t));
  ranks.say(0, list);
  Plan plan = ranks.decide();
  REQUIRE(plan.batches.size() == 7);
  CHECK(plan.batches[0].entries.size() == 2);
}

TEST_CASE("coordinator: a group is one entry; with one dtype it fuses, with two it stays alone") {
  Ranks ranks(options(2));
  Signature group = signature(Op::kAllreduce, {4});
  group.tensors.push_back({DType::kF32, {2, 2}});
  Signature mixed = group;
  mixed.tensors[1].dtype = DType::kF64;
  ranks.everybody_says({named("group", group), named("mixed", mixed), allreduce("x")});
  Plan plan = ranks.decide();
  REQUIRE(plan.batches.size() == 2);
  CHECK(plan.batches[0].entries.size() == 2);
  CHECK(plan.batches[1].entries[0].name == "mixed");
}

TEST_CASE("coordinator: in-arena entries are batches of their own, if they are in the arena on every rank") {
  Ranks ranks(options(2));
  Signature arena = signature(Op::kAllreduce, {4});
  arena.in_arena = true;
  ranks.say(0, {named("both", arena), named("one", arena), allreduce("none")});
  ranks.say(1, {named("both", arena), allreduce("one"), allreduce("none")});
  Plan plan = ranks.decide();
  REQUIRE(plan.batches.size() == 2);
  CHECK(plan.batches[0].in_arena);
  CHECK(plan.batches[0].entries.size() == 1);
  CHECK_FALSE(plan.batches[1].in_arena);
  CHECK(plan.batches[1].entries.size() == 2);
}

TEST_CASE("coordinator: rows of allgather, reducescatter and alltoall") {
  Signature gather_0 = signature(Op::kAllgather, {3, 2}), gather_1 = signature(Op::kAllgather, {0, 2});
  gather_0.tensors.push_back({DType::kI64, {7}});
  gather_1.tensors.push_back({DType::kI64, {9}});
  CHECK(agree_on(named("g", gather_0), named("g", gather_1)).rows == std::vector<int64_t>{3, 0, 7, 9});
  CHECK(agree_on(named("r", signature(Op::kReducescatter, {5, 2})), named("r", signature(Op::kReducescatter, {5, 2})))
            .rows == std::vector<int64_t>{3, 2});
  Signature send_0 = signature(Op::kAlltoall, {5}), send_1 = signature(Op::kAlltoall, {4});
  send_0.splits = {1, 4};
  CHECK(agree_on(named("t", send_0), named("t", send_1)).rows == std::vector<int64_t>{1, 4, 2, 2});
}

TEST_CASE("coordinator: a dtype mismatch names ranks, types and the likely cause, and blames the minority") {
  CoordinatorOptions o = options(3);
  o.world_rank = {4, 6, 8};
  Ranks ranks(o);
  ranks.say(0, {allreduce("layer3.weight", {512, 512})});
  ranks.say(1, {allreduce("layer3.weight", {512, 512})});
  ranks.say(2, {allreduce("layer3.weight", {512, 512}, DType::kF16)});
  PlanBatch b = ranks.decide().batches.at(0);
  CHECK(b.error == Code::kMismatch);
  CHECK(b.error_text ==
        "allreduce 'layer3.weight': rank 8 announced float16[512,512], rank 4 announced float32[512,512]. "
        "Mismatched data types. Every rank must submit one name with one dtype and shape; is mixed "
        "precision on for rank 8 only?");
  CHECK(b.entries.at(0).name == "layer3.weight");
  CHECK(b.entries.at(0).failed_on.empty());
  ranks.say(0, {allreduce("x", {2})});
  ranks.say(1, {allreduce("x", {3})});
  ranks.say(2, {allreduce("x", {3})});
  CHECK(has(ranks.decide().batches.at(0).error_text, "rank 4 announced float32[2], rank 6 announced float32[3]"));
  // Of two neither is the odd one.
  b = agree_on(named("x", signature(Op::kAllreduce, {4})), named("x", signature(Op::kAllreduce, {5})));
  CHECK(has(b.error_text, "announced float32[5] and rank 0 announced float32[4]. Mismatched"));
  CHECK(has(b.error_text, "do the ranks run different models or batch sizes?"));
}

TEST_CASE("coordinator: each kind of mismatch has its own text") {
  auto shape = [](std::vector<int64_t> to) { return [to](Signature& s) { s.tensors[0].shape = to; }; };
  PlanBatch b = mismatch(Op::kAllreduce, shape({5}));
  CHECK(b.error == Code::kMismatch);
  CHECK(has(b.error_text, "Mismatched allreduce tensor shapes"));
  CHECK(has(mismatch(Op::kAllreduce, shape({4, 1})).error_text, "Mismatched allreduce tensor shapes"));
  CHECK(has(mismatch(Op::kBroadcast, shape({5})).error_text, "Mismatched broadcast tensor shapes"));
  CHECK(has(mismatch(Op::kReducescatter, shape({5})).error_text, "Mismatched reducescatter tensor shapes"));
  CHECK(mismatch(Op::kAllgather, shape({5, 2}), {4, 2}).error == Code::kOk);
  CHECK(has(mismatch(Op::kAllgather, shape({4, 3}), {4, 2}).error_text, "Mismatched allgather tensor shapes"));
  CHECK(has(mismatch(Op::kAllgather, shape({4}), {4, 2}).error_text, "Mismatched allgather tensor shapes"));
  CHECK(mismatch(Op::kAlltoall, shape({6, 2}), {4, 2}).error == Code::kOk);
  CHECK(has(mismatch(Op::kAlltoall, shape({4, 3}), {4, 2}).error_text, "Mismatched alltoall tensor shapes"));
  CHECK(
      has(mismatch(Op::kAllreduce, [](Signature& s) { s.reduce = Reduce::kMax; }).error_text, "reduce operation Max"));
  CHECK(has(mismatch(Op::kAllreduce, [](Signature& s) { s.prescale = 2; }).error_text,
            "Mismatched prescale and/or postscale"));
  CHECK(has(mismatch(Op::kAllreduce, [](Signature& s) { s.postscale = 2; }).error_text,
            "Mismatched prescale and/or postscale"));
  b = mismatch(Op::kAllreduce, [](Signature& s) { s.left_out = 2; });
  CHECK(has(b.error_text, "that of 3 steps after the last common one, having left out 2"));
  CHECK(has(b.error_text, "Mismatched steps"));
  CHECK(has(mismatch(Op::kBroadcast, [](Signature& s) { s.root = 1; }).error_text, "Mismatched broadcast root ranks"));
  CHECK(mismatch(Op::kAllreduce, [](Signature& s) { s.root = 1; }).error == Code::kOk);
  CHECK(has(mismatch(Op::kAllgather, [](Signature& s) { s.device = 1; }).error_text, "CPU/GPU device selection"));
  CHECK(has(mismatch(Op::kAllreduce, [](Signature& s) { s.tensors.push_back(s.tensors[0]); }).error_text,
            "tensor counts"));
  b = agree_on(unnamed(17, signature(Op::kAllreduce, {4})), unnamed(17, signature(Op::kAllreduce, {5})));
  CHECK(has(b.error_text, "allreduce 'noname.17'"));
  CHECK(b.entries[0].unnamed);
  CHECK(b.entries[0].sequence == 17);
}

TEST_CASE("coordinator: what no rank may ask for is refused on every rank") {
  auto alike = [](const Signature& s) { return agree_on(named("x", s), named("x", s)); };
  for (Op op : {Op::kAllgather, Op::kReducescatter, Op::kAlltoall})
    CHECK(has(alike(signature(op, {})).error_text, "Process-set rank zero tried to"));
  CHECK(alike(signature(Op::kAllgather, {})).error == Code::kMismatch);
  CHECK(alike(signature(Op::kAllreduce, {})).error == Code::kOk);
  Signature s = signature(Op::kReducescatter, {4});
  s.reduce = Reduce::kMin;
  CHECK(has(alike(s).error_text, "Reducescatter currently only supports AVERAGE and SUM"));
  s = signature(Op::kAllreduce, {4}, DType::kBool);
  CHECK(alike(s).error == Code::kOk);
  s.reduce = Reduce::kAverage;
  CHECK(alike(s).error == Code::kInvalidArgument);
  s = signature(Op::kBroadcast, {4});
  s.root = 2;
  CHECK(alike(s).error == Code::kInvalidArgument);
  s = signature(Op::kAlltoall, {3});
  CHECK(alike(s).error == Code::kInvalidArgument);  // 3 rows for 2 ranks
  s.splits = {1, 1, 1};
  CHECK(alike(s).error == Code::kInvalidArgument);
  s.splits = {2, 2};
  CHECK(alike(s).error == Code::kInvalidArgument);
  s.splits = {1, 1};
  CHECK(alike(s).error == Code::kOk);
}

TEST_CASE("coordinator: a known operation that changes on one rank fails, and works again when all follow") {
  Ranks ranks(options(2));
  Request small = allreduce("x", {4}), large = allreduce("x", {8});
  for (int i = 0; i < 2; i++) {
    ranks.everybody_says({small});
    CHECK(ranks.decide().batches.at(0).error == Code::kOk);
  }
  ranks.say(0, {large});
  ranks.say(1, {small});
  CHECK(ranks.decide().batches.at(0).error == Code::kMismatch);
  ranks.say(0, {large});  // a cache id again: still not what rank 1 has
  ranks.say(1, {small});
  CHECK(ranks.decide().batches.at(0).error == Code::kMismatch);
  ranks.everybody_says({large});
  CHECK(ranks.decide().batches.at(0).error == Code::kOk);
}

TEST_CASE("coordinator: one name for two operations fails as soon as no rank can complete either") {
  Ranks ranks(options(3));
  ranks.say(0, {allreduce("x")});
  ranks.say(1, {named("x", signature(Op::kAllgather, {4}))});
  CHECK_FALSE(ranks.coordinator.anything_ready());  // rank 2 may still do either
  ranks.say(2, {allreduce("x")});
  Plan plan = ranks.decide();
  REQUIRE(plan.batches.size() == 2);
  CHECK(plan.batches[0].op == Op::kAllreduce);
  CHECK(plan.batches[0].entries[0].failed_on == std::vector<int32_t>{0, 2});
  CHECK(plan.batches[1].op == Op::kAllgather);
  CHECK(plan.batches[1].entries[0].failed_on == std::vector<int32_t>{1});
  for (const PlanBatch& b : plan.batches) {
    CHECK(b.error == Code::kMismatch);
    CHECK(has(b.error_text, "rank 0 announced allreduce and rank 1 announced allgather. Mismatched operations"));
  }
  CHECK(ranks.coordinator.pending() == 0);
}

TEST_CASE("coordinator: one name for two operations at a time is legal when every rank does both") {
  Ranks ranks(options(2));
  Request gather = named("x", signature(Op::kAllgather, {4}));
  ranks.say(0, {allreduce("x"), gather});
  ranks.say(1, {gather});
  ranks.say(1, {allreduce("x")});
  Plan plan = ranks.decide();
  REQUIRE(plan.batches.size() == 2);
  CHECK(plan.batches[0].error == Code::kOk);
  CHECK(plan.batches[1].error == Code::kOk);
}

TEST_CASE("coordinator: the cache's capacity is kept, names without a cache id work all the same") {
  Ranks ranks(options(2, 3));
  std::vector<Request> step;
  for (int i = 0; i < 6; i++) step.push_back(allreduce("t" + std::to_string(i)));
  for (int round = 0; round < 3; round++) {
    ranks.everybody_says(step);
    size_t with_cache_id = 0, entries = 0;
    for (const PlanBatch& b : ranks.decide().batches)
      for (const PlanEntry& e : b.entries) {
        entries++;
        with_cache_id += e.cache_id != kNoCacheId;
        CHECK((e.cache_id != kNoCacheId || !e.name.empty()));
      }
    CHECK(entries == 6);
    CHECK(with_cache_id == (round == 0 ? 0 : 3));
  }
  CHECK(ranks.cache[0].size() == 3);
}

TEST_CASE("coordinator: unnamed operations match by number; a signature gets a cache id when it comes again") {
  Ranks ranks(options(2));
  std::vector<bool> has_cache_id;
  for (uint64_t i = 0; i < 4; i++) {
    ranks.everybody_says({unnamed(i, signature(Op::kAllreduce, {4}))});
    PlanEntry e = ranks.decide().batches.at(0).entries.at(0);
    CHECK(e.unnamed);
    CHECK(e.sequence == i);
    has_cache_id.push_back(e.cache_id != kNoCacheId);
  }
  CHECK(has_cache_id == std::vector<bool>{false, true, true, true});
  ranks.say(0, {unnamed(4, signature(Op::kAllreduce, {4}))});  // a cache id
  ranks.say(1, {unnamed(4, signature(Op::kAllreduce, {5}))});  // whole
  CHECK(ranks.decide().batches.at(0).error == Code::kMismatch);
  ranks.say(0, {unnamed(5, signature(Op::kAllreduce, {4})), unnamed(6, signature(Op::kAllreduce, {4}))});
  ranks.say(1, {unnamed(5, signature(Op::kAllreduce, {4}))});
  Plan plan = ranks.decide();
  REQUIRE(plan.batches.size() == 1);
  CHECK(plan.batches[0].entries.at(0).sequence == 5);
  CHECK(ranks.coordinator.pending() == 1);
}

TEST_CASE("coordinator: unnamed signatures take at most a quarter of the cache ids") {
  Ranks ranks(options(1, 16));
  uint64_t sequence = 0;
  for (int round = 0; round < 3; round++)
    for (int64_t n = 1; n <= 30; n++) {
      ranks.say(0, {unnamed(sequence++, signature(Op::kAllreduce, {n}))});
      ranks.decide();
      ranks.said.clear();
    }
  CHECK(ranks.cache[0].size() == 4);
  for (size_t kept : {size_t{4}, size_t{16}}) {
    for (int i = 0; i < 30; i++) ranks.say(0, {allreduce("t" + std::to_string(i))});
    ranks.decide();
    CHECK(ranks.cache[0].size() == kept);
  }
}

TEST_CASE("coordinator: a broken request list is an error, not a plan") {
  Ranks ranks(options(2));
  RequestList b;
  b.cached.push_back({0, 0});
  CHECK_FALSE(ranks.coordinator.take(b, {}).is_ok());  // unknown cache id
  b = request_list(5, {});
  CHECK_FALSE(ranks.coordinator.take(b, {}).is_ok());
  b = request_list(0, {});
  b.generation = 1;
  CHECK_FALSE(ranks.coordinator.take(b, {}).is_ok());
  b = request_list(0, {allreduce("x"), allreduce("x")});
  Status twice = ranks.coordinator.take(b, {});
  CHECK(has(twice.text(), "allreduce.x was announced twice"));
  ranks.say(1, {allreduce("x")});
  ranks.decide();
  b = request_list(0, {named("", signature(Op::kJoin, {}))});
  CHECK_FALSE(ranks.coordinator.take(b, {}).is_ok());
  b = request_list(0,
                   {unnamed(0, signature(Op::kAllreduce, {1})), unnamed(1ull << 40, signature(Op::kAllreduce, {1}))});
  CHECK_FALSE(ranks.coordinator.take(b, {}).is_ok());
}

TEST_CASE("coordinator: join: what a rank announced before it joined, it takes part in with its own data") {
  Ranks ranks(options(2));
  ranks.say(1, {allreduce("x")});
  ranks.say(1, {}, true);
  ranks.say(0, {allreduce("x")});
  const Plan plan = ranks.decide();
  REQUIRE(plan.batches.size() == 1);
  CHECK_FALSE(plan.batches[0].entries.at(0).with_joined);
}

TEST_CASE("coordinator: join: a joined rank's identity element is not scaled, which nobody can heed on GPUs") {
  Ranks ranks(options(2));
  ranks.say(1, {}, true);
  for (Reduce reduce : {Reduce::kSum, Reduce::kAverage, Reduce::kAdasum, Reduce::kMin, Reduce::kMax, Reduce::kProduct,
                        Reduce::kAnd, Reduce::kOr, Reduce::kXor})
    for (bool device : {false, true})
      for (double prescale : {1.0, 0.5}) {
        Request x = allreduce("x", {4}, takes(reduce, DType::kF32) ? DType::kF32 : DType::kI32);
        x.signature.reduce = reduce;
        x.signature.prescale = prescale;
        x.signature.device = device;
        ranks.say(0, {x});
        const Plan plan = ranks.decide();
        REQUIRE(plan.batches.size() == 1);
        const bool refused = device && prescale != 1 && !has_zero_identity(reduce);
        CHECK(plan.batches[0].error == (refused ? Code::kUnsupported : Code::kOk));
        if (refused) CHECK(has(plan.batches[0].error_text, "with a prescale factor (0.5)"));
      }
}

TEST_CASE("coordinator: join: what comes behind it is not fused with what came before") {
  Ranks ranks(options(2));
  ranks.everybody_says({allreduce("before")});
  for (int rank : {0, 1}) ranks.say(rank, {}, true);
  ranks.everybody_says({allreduce("behind")});
  const Plan plan = ranks.decide();
  REQUIRE(plan.batches.size() == 3);
  CHECK(plan.batches[0].entries.size() == 1);
  CHECK(plan.batches[1].op == Op::kJoin);
}

TEST_CASE("coordinator: join: a joined rank counts for allreduce and barrier, and plans carry signatures") {
  Ranks ranks(options(2));
  for (int i = 0; i < 2; i++) {
    ranks.everybody_says({allreduce("x")});
    ranks.decide();
  }
  ranks.say(1, {}, true);
  CHECK_FALSE(ranks.coordinator.anything_ready());
  ranks.say(0, {allreduce("x"), allreduce("new"), unnamed(0, signature(Op::kAllreduce, {3})),
                named("b", signature(Op::kBarrier, {}))});
  Plan plan = ranks.decide();
  REQUIRE(plan.batches.size() == 2);
  REQUIRE(plan.batches[0].entries.size() == 3);
  for (const PlanEntry& e : plan.batches[0].entries) {
    CHECK(e.has_signature);
    CHECK(e.with_joined);
    CHECK(e.signature.tensors.size() == 1);
  }
  CHECK(plan.batches[1].op == Op::kBarrier);
  ranks.say(0, {}, true);
  plan = ranks.decide();
  REQUIRE(plan.batches.size() == 1);
  CHECK(plan.batches[0].op == Op::kJoin);
  CHECK(plan.batches[0].last_joined == 0);
  CHECK(plan.batches[0].error == Code::kOk);
  ranks.say(0, {allreduce("x")});  // and everybody counts again
  CHECK_FALSE(ranks.coordinator.anything_ready());
  ranks.say(1, {allreduce("x")});
  CHECK_FALSE(ranks.decide().batches.at(0).entries.at(0).has_signature);
}

TEST_CASE("coordinator: join: other operations fail instead of hanging, what all announced still runs") {
  for (Op op : {Op::kAllgather, Op::kBroadcast, Op::kAlltoall, Op::kReducescatter}) {
    Ranks ranks(options(3));
    ranks.say(0, {named("early", signature(op, {3}))});
    ranks.say(2, {named("early", signature(op, {3}))}, true);
    ranks.say(0, {named("x", signature(op, {3}))});
    CHECK_FALSE(ranks.coordinator.anything_ready());  // rank 1 would not know which x failed
    ranks.say(1, {named("x", signature(op, {3})), named("early", signature(op, {3}))});
    Plan plan = ranks.decide();
    REQUIRE(plan.batches.size() == 2);
    CHECK(plan.batches[0].error == Code::kUnsupported);
    CHECK(has(plan.batches[0].error_text, "is not supported with Join at this time."));
    CHECK(plan.batches[1].error == Code::kOk);
  }
}

TEST_CASE("coordinator: join completes what waited for the joiner, and in-arena is off meanwhile") {
  Ranks ranks(options(2));
  Signature arena = signature(Op::kAllreduce, {4});
  arena.in_arena = true;
  ranks.say(0, {named("x", arena)});
  ranks.say(1, {}, true);
  Plan plan = ranks.decide();
  REQUIRE(plan.batches.size() == 1);
  CHECK_FALSE(plan.batches[0].in_arena);
  RequestList b = request_list(1, {allreduce("y")});
  CHECK_FALSE(ranks.coordinator.take(b, {}).is_ok());
}

TEST_CASE("coordinator: leave fails what the rank has not announced, now and later; the rest completes") {
  Ranks ranks(options(3));
  ranks.say(0, {allreduce("a"), allreduce("b")});
  ranks.say(2, {allreduce("a")});
  ranks.coordinator.leave(2, "rank 2 has shut down");
  Plan plan = ranks.decide();
  REQUIRE(plan.batches.size() == 1);
  CHECK(plan.batches[0].error == Code::kAborted);
  CHECK(has(plan.batches[0].error_text, "allreduce 'b': rank 2 has shut down"));
  CHECK(plan.batches[0].entries[0].failed_on == std::vector<int32_t>{0});
  ranks.say(1, {allreduce("b"), allreduce("a")});
  plan = ranks.decide();
  REQUIRE(plan.batches.size() == 2);
  CHECK(plan.batches[0].error == Code::kAborted);
  CHECK(plan.batches[0].entries[0].failed_on == std::vector<int32_t>{1});
  CHECK(plan.batches[1].error == Code::kOk);
  CHECK(plan.batches[1].entries[0].name == "a");
  CHECK(ranks.coordinator.pending() == 0);
  ranks.say(0, {}, true);
  plan = ranks.decide();
  REQUIRE(plan.batches.size() == 1);
  CHECK(plan.batches[0].op == Op::kJoin);
  CHECK(plan.batches[0].error == Code::kAborted);
  CHECK(plan.batches[0].last_joined == -1);
  CHECK_FALSE(ranks.coordinator.take(request_list(2, {}), {}).is_ok());
}

TEST_CASE("coordinator: the stall report has names, ranks, time and a hint") {
  Ranks ranks(options(3));
  TimePoint start{};
  ranks.now = start;
  ranks.say(0, {allreduce("grad_7"), unnamed(0, signature(Op::kAllreduce, {1}))});
  ranks.now = start + std::chrono::seconds(10);
  ranks.say(1, {allreduce("grad_8"), unnamed(0, signature(Op::kAllgather, {1}))});
  ranks.say(0, {allreduce("other")});
  TimePoint now = start + std::chrono::seconds(30);
  std::vector<Stall> list = ranks.coordinator.stalled(now, 25);
  REQUIRE(list.size() == 2);
  CHECK(list[0].name == "allreduce.grad_7");
  CHECK(list[0].waited_s == doctest::Approx(30));
  CHECK(list[0].present == std::vector<int>{0});
  CHECK(list[0].missing == std::vector<int>{1, 2});
  CHECK(has(list[0].hint, "rank 1 waits in allreduce.grad_8 instead"));
  CHECK(has(list[0].hint, "counter"));
  CHECK(list[1].name == "allreduce.noname.0");
  CHECK(has(list[1].hint, "rank 1 waits in allgather.noname.0 instead"));
  list = ranks.coordinator.stalled(now, 5);
  REQUIRE(list.size() == 5);
  CHECK(list[4].name == "allreduce.other");
  CHECK(list[4].hint.empty());
  CHECK(ranks.coordinator.stalled(now, 60).empty());
}
