// Ranks that wait for one another: the calls end with an error on every rank, and the engines go on.
#include <doctest/doctest.h>

#include <barrier>
#include <functional>
#include <map>
#include <numeric>
#include <thread>

#include "base/quoted.h"
#include "tests/world.h"

using namespace hc;

namespace {

const Settings kSoon = {{"HOROCLONE_DEADLOCK_TIME_SECONDS", "0.4"}, {"HOROCLONE_LOG_LEVEL", "error"}};

Status call(Engine& engine, const std::string& name, const std::function<void(Submission&)>& adjust = {},
            Op op = Op::kAllreduce) {
  const std::vector<float> in = {1, 2};
  std::vector<float> out(2);
  int64_t handle = 0;
  HC_TRY(submit<float>(engine, op, name, in, &out, {2}, &handle, adjust));
  const Status outcome = finish(engine, handle);
  if (handle) engine.release(handle);
  return outcome;
}

void check_is_deadlock(const Status& status) {
  CHECK_MESSAGE(status.code() == Code::kMismatch, status.text());
  CHECK(status.text().find("none can go on") != std::string::npos);
}

void check_goes_on(Engine& engine) {
  for (int i = 0; i < 40; ++i) REQUIRE(call(engine, i % 2 ? "" : "after").is_ok());
}

// bypass: also while the ranks call it, which they do in shared memory only.
void in_turn(const Settings& more, const std::vector<std::string>& nodes, bool bypass = false) {
  Settings settings = kSoon;
  settings.insert(settings.end(), more.begin(), more.end());
  World world(4, settings);
  if (!nodes.empty()) world.on_nodes(nodes);
  const Status ended = world.each([&](Engine& engine, int rank) {
    for (int i = 0; i < 40; ++i) REQUIRE(call(engine, "loop", [](Submission& s) { s.will_wait = true; }).is_ok());
    check_is_deadlock(call(engine, rank == 0 ? "loss" : "gradients"));
    check_goes_on(engine);
    if (!bypass) return;
    check_is_deadlock(call(engine, rank == 0 ? "" : "loop", [](Submission& s) { s.will_wait = true; }));
    check_goes_on(engine);
  });
  CHECK_MESSAGE(ended.is_ok(), ended.text());
}

}  // namespace

TEST_CASE("deadlock: in shared memory, the bypass included") { in_turn({}, {}, true); }

TEST_CASE("deadlock: between nodes") { in_turn({}, {"a", "b", "c", "d"}); }

TEST_CASE("deadlock: through a tree of ranks that combine requests") {
  in_turn({{"HOROCLONE_CONTROL_FANOUT", "1"}}, {"a", "b", "c", "d"});
}

TEST_CASE("deadlock: two process sets that cross") {
  const Status ended = World(3, kSoon).each([&](Engine& engine, int rank) {
    int first = 0, second = 0;
    REQUIRE(engine.add_process_set({0, 1}, &first).is_ok());
    REQUIRE(engine.add_process_set({1, 2}, &second).is_ok());
    const auto in = [](int set) { return [set](Submission& s) { s.process_set = set; }; };
    if (rank == 0) check_is_deadlock(call(engine, "a", in(first)));
    if (rank == 1) check_is_deadlock(call(engine, "b", in(second)));
    if (rank == 2) check_is_deadlock(call(engine, "c"));
    check_goes_on(engine);
    if (rank != 2) CHECK(call(engine, "a", in(first)).is_ok());
    if (rank != 0) CHECK(call(engine, "b", in(second)).is_ok());
  });
  CHECK_MESSAGE(ended.is_ok(), ended.text());
}

TEST_CASE("deadlock: join, barrier and messages") {
  const Status ended = World(2, kSoon).each([&](Engine& engine, int rank) {
    if (rank == 0)
      check_is_deadlock(call(engine, "", [](Submission& s) { s.root = 1; }, Op::kReceive));
    else
      check_is_deadlock(call(engine, "", {}, Op::kBarrier));
    check_goes_on(engine);
    if (rank == 0)
      check_is_deadlock(call(engine, "", {}, Op::kJoin));
    else
      check_is_deadlock(call(engine, "", [](Submission& s) { s.root = 0; }, Op::kReceive));
    check_goes_on(engine);
  });
  CHECK_MESSAGE(ended.is_ok(), ended.text());
}

TEST_CASE("deadlock: a process set that only one rank makes") {
  const Status ended = World(2, kSoon).each([&](Engine& engine, int rank) {
    int id = 0;
    if (rank == 0)
      check_is_deadlock(engine.add_process_set({0, 1}, &id));
    else
      check_is_deadlock(call(engine, "x"));
    check_goes_on(engine);
    REQUIRE(engine.add_process_set({0, 1}, &id).is_ok());
    CHECK(id == 1);
    CHECK(call(engine, "x", [&](Submission& s) { s.process_set = id; }).is_ok());
  });
  CHECK_MESSAGE(ended.is_ok(), ended.text());
}

TEST_CASE("deadlock: persistent buckets step back") {
  const Status ended = World(2, kSoon).each([&](Engine& engine, int rank) {
    auto memory = engine.allocate(2 * sizeof(float));
    REQUIRE(memory.is_ok());
    const auto declare = [&](int* id) {
      BucketSet set;
      set.buckets.push_back({"bucket", memory.value()->data(), {2}, DType::kF32});
      return engine.declare(0, std::move(set), id);
    };
    int id = 0;
    REQUIRE(declare(&id).is_ok());
    const auto reduce = [&] {
      int64_t handle = 0;
      HC_TRY(engine.submit_declared(0, id, 0, {nullptr}, &handle));
      const Status outcome = finish(engine, handle);
      engine.release(handle);
      return outcome;
    };
    REQUIRE(reduce().is_ok());
    check_is_deadlock(rank == 0 ? call(engine, "loss") : reduce());
    for (int i = 0; i < 10; ++i) REQUIRE(reduce().is_ok());
    check_goes_on(engine);
  });
  CHECK_MESSAGE(ended.is_ok(), ended.text());
}

namespace {

// Two worlds of the same two processes, which are threads here: a rank of both is on the same node of the same process.
void in_two_worlds(const std::function<void(Engine& first, Engine& second, int rank)>& body, bool turned = false) {
  std::vector<Engine*> seconds(2, nullptr);
  std::barrier<> both(4);
  const std::vector<std::string> nodes = {"a", "b"}, other_way = {"b", "a"};
  World one(2, kSoon), two(2, kSoon);
  one.on_nodes(nodes);
  two.on_nodes(turned ? other_way : nodes);
  Status second_ended;
  std::thread second([&] {
    second_ended = two.each([&](Engine& engine, int rank) {
      seconds[static_cast<size_t>(turned ? 1 - rank : rank)] = &engine;
      both.arrive_and_wait();
      both.arrive_and_wait();
    });
  });
  const Status first_ended = one.each([&](Engine& engine, int rank) {
    both.arrive_and_wait();
    body(engine, *seconds[static_cast<size_t>(rank)], rank);
    both.arrive_and_wait();
  });
  second.join();
  CHECK_MESSAGE(first_ended.is_ok(), first_ended.text());
  CHECK_MESSAGE(second_ended.is_ok(), second_ended.text());
}

}  // namespace

TEST_CASE("deadlock: through two worlds of one process") {
  for (const bool turned : {false, true})
    in_two_worlds(
        [turned](Engine& first, Engine& second, int rank) {
          check_is_deadlock(call(rank == (turned ? 1 : 0) ? first : second, ""));
          check_goes_on(first);
          check_goes_on(second);
          if (turned) return;
          check_is_deadlock(rank == 0 ? call(
                                            first, "", [](Submission& s) { s.root = 1; }, Op::kReceive)
                                      : call(second, "", {}, Op::kJoin));
          check_goes_on(second);
          check_goes_on(first);
        },
        turned);
}

TEST_CASE("deadlock: one world alone, beside another one") {
  in_two_worlds([](Engine& first, Engine& second, int rank) {
    check_is_deadlock(call(second, rank == 0 ? "a" : "b"));
    check_goes_on(first);
    check_goes_on(second);
  });
}

TEST_CASE("deadlock: a rank that computes is waited for in two worlds, and by two threads") {
  in_two_worlds([](Engine& first, Engine& second, int rank) {
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    std::thread other([&] { CHECK(call(rank == 0 ? second : first, "a").is_ok()); });
    CHECK(call(rank == 0 ? first : second, "a").is_ok());
    other.join();
  });
}

TEST_CASE("names in texts: control characters are escaped, all else stays") {
  CHECK(in_quotes("layer.weight") == "'layer.weight'");
  CHECK(in_quotes("a\nb\x1b[2J\x7f") == "'a\\x0ab\\x1b[2J\\x7f'");
  CHECK(in_quotes("gr\xc3\xb6\xc3\x9f"
                  "e\xc2\x9b") ==
        "'gr\xc3\xb6\xc3\x9f"
        "e\\x9b'");
}
