// Who can never go on, from what the ranks that wait tell; and what is said about it.
#include <doctest/doctest.h>

#include "agreement/coordinator.h"
#include "agreement/deadlock.h"

using namespace hc;

namespace {

const std::vector<int> kWorld = {0, 1, 2, 3}, kFirst = {0, 1}, kSecond = {1, 2};

std::span<const int> members(uint16_t set) {
  if (set == 0) return kWorld;
  if (set == 1) return kFirst;
  return set == 2 ? std::span<const int>(kSecond) : std::span<const int>();
}

Request named(const std::string& name) {
  Request request;
  request.name = name;
  return request;
}

AwaitedCall call(const std::string& name, uint16_t set = 0) {
  return {Op::kAllreduce, set, key_of_call(set, named(name)), -1, "allreduce '" + name + "'"};
}

AwaitedCall receive(int from) { return {Op::kReceive, 0, 0, from, "recv from rank " + std::to_string(from)}; }

WaitingRank waits_in(std::vector<AwaitedCall> calls, std::string where = "") {
  WaitingRank rank;
  for (const AwaitedCall& each : calls)
    if (!is_message(each.op)) rank.submitted.push_back(each.key);
  std::sort(rank.submitted.begin(), rank.submitted.end());
  rank.awaited = std::move(calls);
  rank.where = std::move(where);
  return rank;
}

WaitingRank joins(uint16_t set = 0) {
  WaitingRank rank;
  rank.awaited = {{Op::kJoin, set, 0, -1, "join"}};
  rank.joined = {set};
  return rank;
}

using InDeadlock = std::set<int>;

}  // namespace

TEST_CASE("deadlock: all wait, one of them for something else") {
  WaitingRanks ranks{{0, waits_in({call("loss")})}};
  for (int r = 1; r < 4; ++r) ranks[r] = waits_in({call("gradients")});
  CHECK(find_deadlock(ranks, members) == InDeadlock{0, 1, 2, 3});
  ranks.erase(2);  // it computes: it may call both
  CHECK(find_deadlock(ranks, members).empty());
}

TEST_CASE("deadlock: what all have called is about to end") {
  WaitingRanks ranks;
  for (int r = 0; r < 4; ++r) ranks[r] = waits_in({call("loss")});
  CHECK(find_deadlock(ranks, members).empty());
}

TEST_CASE("deadlock: what a rank has submitted and does not wait for helps the others") {
  WaitingRanks ranks{{0, waits_in({call("a", 1)})}, {1, waits_in({call("b", 1)})}};
  CHECK(find_deadlock(ranks, members) == InDeadlock{0, 1});
  ranks[1].submitted.push_back(call("a", 1).key);
  std::sort(ranks[1].submitted.begin(), ranks[1].submitted.end());
  CHECK(find_deadlock(ranks, members).empty());
}

TEST_CASE("deadlock: a circle through two process sets, and a rank that waits for it") {
  WaitingRanks ranks{{0, waits_in({call("a", 1)})}, {1, waits_in({call("b", 2)})}, {2, waits_in({call("c")})}};
  ranks[3] = waits_in({call("c")});
  CHECK(find_deadlock(ranks, members) == InDeadlock{0, 1, 2, 3});
  ranks.erase(3);
  CHECK(find_deadlock(ranks, members).empty());
}

TEST_CASE("deadlock: one of several threads may let a rank go on") {
  WaitingRanks ranks{{0, waits_in({call("a", 1), call("c", 1)})}, {1, waits_in({call("b", 1), call("c", 1)})}};
  CHECK(find_deadlock(ranks, members).empty());
}

TEST_CASE("deadlock: a rank that has joined is missed by nobody; its join misses the others") {
  WaitingRanks ranks{{0, joins()}, {1, waits_in({call("a")})}, {2, waits_in({call("b")})}, {3, waits_in({call("a")})}};
  CHECK(find_deadlock(ranks, members) == InDeadlock{0, 1, 2, 3});
  ranks[2] = waits_in({call("a")});
  CHECK(find_deadlock(ranks, members).empty());
  for (int r = 0; r < 4; ++r) ranks[r] = joins();
  CHECK(find_deadlock(ranks, members).empty());
}

TEST_CASE("deadlock: messages") {
  WaitingRanks ranks{{0, waits_in({receive(1)})}, {1, waits_in({call("a", 1)})}};
  CHECK(find_deadlock(ranks, members) == InDeadlock{0, 1});
  ranks[0] = waits_in({receive(-1)});  // rank 2 or 3 may send
  CHECK(find_deadlock(ranks, members).empty());
  ranks[2] = waits_in({receive(0)});
  ranks[3] = waits_in({receive(0)});
  CHECK(find_deadlock(ranks, members) == InDeadlock{0, 1, 2, 3});
  CHECK(find_deadlock({{2, waits_in({receive(2)})}}, members) == InDeadlock{2});
}

TEST_CASE("deadlock: a process set that is not known here") {
  WaitingRanks ranks{{0, waits_in({call("a", 7)})}, {1, waits_in({call("b", 7)})}};
  CHECK(find_deadlock(ranks, members).empty());
}

TEST_CASE("deadlock: unnamed calls differ by kind and number") {
  Request first, second;
  second.sequence = 1;
  CHECK(key_of_call(0, first) != key_of_call(0, second));
  CHECK(key_of_call(0, first) != key_of_call(1, first));
  second.sequence = 0;
  second.signature.op = Op::kAllgather;
  CHECK(key_of_call(0, first) != key_of_call(0, second));
}

TEST_CASE("deadlock: the text has the calls, their lines and a reason") {
  WaitingRanks ranks{{0, waits_in({call("loss")}, "train.py:12")}};
  for (int r = 1; r < 4; ++r) ranks[r] = waits_in({call("gradients.1.0")}, "train.py:9");
  const std::string text = describe_deadlock(ranks, {0, 1, 2, 3}, members);
  CHECK(
      text.starts_with("rank 0 stands in allreduce 'loss' at train.py:12, ranks 1-3 in allreduce 'gradients.1.0' at "
                       "train.py:9: "));
  CHECK(text.find("Is the call at train.py:12 inside `if hvd.rank() == 0`?") != std::string::npos);
  CHECK(text.find("Have ranks 1-3 more batches than rank 0? (hvd.join() evens them out.)") != std::string::npos);
}

namespace {

// In one of two worlds; of world 2, rank r is rank rank_of[r] of world 1.
WaitingRank in_world(uint64_t world, std::vector<AwaitedCall> calls, const std::vector<int>& rank_of = {0, 1, 2}) {
  for (AwaitedCall& each : calls) each.members.assign(rank_of.size(), 0);
  for (AwaitedCall& each : calls)
    for (size_t i = 0; i < rank_of.size(); ++i) each.members[i] = static_cast<int>(i);
  WaitingRank rank;
  add_world(waits_in(std::move(calls)), world, rank_of, &rank);
  return rank;
}

}  // namespace

TEST_CASE("deadlock: a circle through two worlds") {
  WaitingRanks ranks{{0, in_world(1, {call("a")})}, {1, in_world(2, {call("a")}, {1, 0})}};
  CHECK(find_deadlock(ranks, members).empty());  // rank 2 may do anything in world 1
  ranks[2] = in_world(1, {call("a")});
  CHECK(find_deadlock(ranks, members) == InDeadlock{0, 1, 2});
  CHECK(is_between_worlds(ranks, {0, 1, 2}));
  const std::string text = describe_deadlock(ranks, {0, 1, 2}, members);
  CHECK(text.starts_with(
      "ranks 0,2 stand in allreduce 'a', rank 1 in allreduce 'a' of another process group of ranks 0,1: each waits"));
  CHECK(text.find("is not answered by one of another") != std::string::npos);
  ranks[1] = in_world(2, {call("a")}, {1, 0});
  add_world(waits_in({call("a")}), 1, kWorld, &ranks[1]);  // it has called it in world 1, too
  CHECK(find_deadlock(ranks, members).empty());
}

TEST_CASE("deadlock: one that a world sees by itself is left to it") {
  WaitingRanks ranks{{0, in_world(1, {call("a")}, {0, 1})}, {1, in_world(1, {call("b")}, {0, 1})}};
  CHECK_FALSE(is_between_worlds(ranks, find_deadlock(ranks, members)));
  ranks[2] = in_world(2, {call("c")});
  const std::set<int> stuck = find_deadlock(ranks, members);
  CHECK(stuck == InDeadlock{0, 1, 2});
  CHECK_FALSE(is_between_worlds(ranks, stuck));
}

TEST_CASE("deadlock: what a rank has joined or receives in one world is not of another") {
  WaitingRank joined;
  add_world(joins(), 1, kWorld, &joined);
  joined.awaited[0].members = {0, 1};
  WaitingRanks ranks{{0, joined}, {1, in_world(2, {call("a")}, {0, 1})}};
  CHECK(find_deadlock(ranks, members) == InDeadlock{0, 1});  // a join in world 1 does nothing for world 2
  WaitingRank receives;
  add_world(waits_in({receive(0)}), 2, std::vector<int>{1, 0}, &receives);
  CHECK(receives.awaited[0].peer == 1);
}

TEST_CASE("deadlock: a report comes back as it was sent, and a broken one is refused") {
  WaitingRank rank = waits_in({call("a"), receive(3)}, "x.py:1");
  rank.quiet_s = 2.5;
  rank.joined = {4, 1ull << 40};
  rank.version = 7;
  rank.awaited[0].world = 9;
  rank.awaited[0].members = {2, 5};
  Writer frame;
  encode(rank, &frame);
  Reader whole(frame.bytes());
  WaitingRank back;
  REQUIRE(decode(&whole, &back).is_ok());
  CHECK(back.awaited.size() == 2);
  CHECK(back.awaited[1].peer == 3);
  CHECK(back.awaited[0].text == "allreduce 'a'");
  CHECK(back.submitted == rank.submitted);
  CHECK(back.joined == rank.joined);
  CHECK(back.where == "x.py:1");
  CHECK(back.version == 7);
  CHECK(back.awaited[0].world == 9);
  CHECK(back.awaited[0].members == std::vector<int>{2, 5});
  for (size_t bytes = 0; bytes < frame.size(); ++bytes) {
    Reader part(frame.bytes().first(bytes));
    WaitingRank broken;
    CHECK_FALSE(decode(&part, &broken).is_ok());
  }
}

TEST_CASE("deadlock: the coordinator ends what some of the ranks have announced, for these ranks only") {
  CoordinatorOptions options;
  options.size = 3;
  Coordinator coordinator(options);
  const auto announce = [&](int rank, const std::string& name) {
    RequestList list;
    list.rank = rank;
    list.fresh.push_back(named(name));
    list.fresh.back().signature.tensors = {{DType::kF32, {1}}};
    REQUIRE(coordinator.take(list, {}).is_ok());
  };
  announce(0, "a");
  announce(1, "b");
  announce(2, "c");  // waits for 0 and 1, but is not stuck itself
  coordinator.end_deadlock({0, 1}, "why");
  const Plan plan = coordinator.decide(8);
  REQUIRE(plan.batches.size() == 2);
  CHECK(plan.batches[0].error == Code::kMismatch);
  CHECK(plan.batches[0].error_text == "allreduce 'a': why");
  CHECK(plan.batches[0].entries[0].failed_on == std::vector<int>{0});
  CHECK(plan.batches[1].entries[0].failed_on == std::vector<int>{1});
  CHECK(coordinator.pending() == 1);
  for (int rank = 0; rank < 3; ++rank)
    for (const char* name : {"a", "b"}) announce(rank, name);
  CHECK(coordinator.decide(8).batches.size() >= 1);  // both names work again
  CHECK(coordinator.pending() == 1);
}

TEST_CASE("deadlock: a join that cannot end fails, and the rank takes part again") {
  CoordinatorOptions options;
  options.size = 2;
  Coordinator coordinator(options);
  RequestList list;
  list.joined = true;
  REQUIRE(coordinator.take(list, {}).is_ok());
  coordinator.end_deadlock({0, 1}, "why");
  const Plan plan = coordinator.decide(8);
  REQUIRE(plan.batches.size() == 1);
  CHECK(plan.batches[0].op == Op::kJoin);
  CHECK(plan.batches[0].error == Code::kMismatch);
  CHECK(plan.batches[0].error_text == "join: why");
  REQUIRE(coordinator.take(list, {}).is_ok());  // it may join again
}
