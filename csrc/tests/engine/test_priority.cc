// Priorities and parts: what is urgent overtakes, in the same order on every rank, and no bit of a result changes.
#include <doctest/doctest.h>

#include <bit>
#include <chrono>
#include <mutex>
#include <random>
#include <thread>

#include "collective/channels/schedule.h"
#include "tests/agreement/negotiation_samples.h"
#include "tests/locked_checks.h"
#include "tests/sanitized.h"
#include "tests/world.h"

using namespace hc;
using namespace hc::samples;

namespace {

Request urgent(const std::string& name, int32_t priority, int64_t elements = 4) {
  Request r = allreduce(name, {elements});
  r.signature.priority = priority;
  return r;
}

CoordinatorOptions in_parts(size_t part_bytes, size_t fusion_bytes = 0) {
  CoordinatorOptions o = options(2, 1024, fusion_bytes);
  o.part_bytes = part_bytes;
  return o;
}

// "big/0 small big/1 ..": what the next plans do, one batch at a time, until nothing is ready.
std::string all_of(Ranks& ranks, std::vector<std::string>* names) {
  std::string text;
  while (ranks.coordinator.anything_ready()) {
    Plan plan = ranks.decide(1);
    CHECK_OK(ranks.status);
    for (const PlanBatch& b : plan.batches) {
      names->resize(std::max<size_t>(names->size(), b.id + 1));
      if (b.part.index == 0)
        for (const PlanEntry& e : b.entries) (*names)[b.id] += e.name;
      text += (text.empty() ? "" : " ") + (*names)[b.part.count > 1 ? b.part.first : b.id];
      if (b.part.count > 1) text += "/" + std::to_string(b.part.index);
    }
  }
  return text;
}
std::string all_of(Ranks& ranks) {
  std::vector<std::string> names;
  return all_of(ranks, &names);
}

// The order in which operations ended on one rank.
struct Ended {
  std::mutex mutex;
  std::vector<int64_t> handles;
};
void note_end(void* context, int64_t handle, const Status&) {
  auto* ended = static_cast<Ended*>(context);
  std::lock_guard lock(ended->mutex);
  ended->handles.push_back(handle);
}

std::vector<float> noise(int rank, int64_t count, unsigned seed) {
  std::mt19937 random(seed * 131 + static_cast<unsigned>(rank));
  std::uniform_real_distribution<float> between(-1, 1);
  std::vector<float> v(static_cast<size_t>(count));
  for (float& x : v) x = between(random);
  return v;
}

constexpr int64_t kLengths[] = {1, 5, 257, 4099, 40000, 100003};

// The bits of several sums on rank 0, with `settings`; the lengths one by one, and two in one group.
std::vector<uint32_t> sums(int size, Settings settings, bool nodes) {
  World world(size, std::move(settings));
  if (nodes) world.on_nodes({"a", "a", "b", "b"});
  std::vector<uint32_t> bits;
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    unsigned seed = 0;
    for (int64_t n : kLengths) {
      auto v = noise(rank, n, ++seed), w = noise(rank, 2 * n, seed + 100), far = v;
      const auto scaled = [](Submission& s) {
        s.priority = 3;
        s.reduce = Reduce::kAverage;
        s.prescale = 0.3;
      };
      int64_t h[3] = {};
      CHECK_OK(submit(engine, Op::kAllreduce, "v", v, &v, {n}, &h[0], scaled));
      CHECK_OK(submit(engine, Op::kAllreduce, "far", v, &far, {n}, &h[1], [](Submission& s) { s.priority = -7; }));
      const std::vector<int64_t> shape = {n};
      const Submission::Tensor two[] = {{w.data(), w.data(), shape, DType::kF32},
                                        {w.data() + n, w.data() + n, shape, DType::kF32}};
      CHECK_OK(submit(engine, Op::kAllreduce, "group", w, &w, {2 * n}, &h[2], [&](Submission& s) { s.tensors = two; }));
      for (int64_t handle : h) {
        CHECK_OK(finish(engine, handle));
        engine.release(handle);
      }
      if (rank != 0) continue;
      for (const auto* one : {&v, &w, &far})
        for (float x : *one) bits.push_back(std::bit_cast<uint32_t>(x));
    }
  }));
  return bits;
}

}  // namespace

TEST_CASE("coordinator: the most urgent first, among equals the first that was ready") {
  Ranks ranks(in_parts(0));
  ranks.everybody_says({urgent("a", 0), urgent("b", -1), urgent("c", 5), urgent("d", 5), urgent("e", 2)});
  CHECK(all_of(ranks) == "c d e a b");
  // Nothing overtakes a join: it is about what was announced before.
  ranks.say(0, {urgent("x", 1)});
  ranks.say(1, {urgent("x", 1)}, true);
  ranks.say(0, {}, true);
  ranks.everybody_says({urgent("y", 9)});
  Plan plan = ranks.decide();
  REQUIRE(plan.batches.size() == 3);
  CHECK(plan.batches[1].op == Op::kJoin);
  CHECK(plan.batches[2].entries[0].name == "y");
}

TEST_CASE("coordinator: where ranks differ about a priority the lowest rank's counts, and it is no error") {
  Ranks ranks(in_parts(0));
  ranks.say(0, {urgent("a", 1), urgent("b", 2)});
  ranks.say(1, {urgent("a", 7), urgent("b", -7)});
  CHECK(all_of(ranks) == "b a");
}

TEST_CASE("coordinator: an urgent one goes between the parts of a large one, which are never lost") {
  Ranks ranks(in_parts(1024));
  std::vector<std::string> names;
  ranks.everybody_says({urgent("big", 1, 1000)});
  Plan plan = ranks.decide(2);
  REQUIRE(plan.batches.size() == 2);
  CHECK(plan.batches[0].part == Part{0, 4, 0});
  CHECK(plan.batches[1].part == Part{1, 4, 0});
  CHECK(plan.batches[1].entries.empty());
  names = {"big"};
  ranks.everybody_says({urgent("late", 0), urgent("now", 3, 600), urgent("same", 1)});
  CHECK(all_of(ranks, &names) == "now/0 now/1 now/2 big/2 big/3 same late");
  CHECK(ranks.coordinator.pending() == 0);
}

TEST_CASE("coordinator: nothing runs in parts while nothing has a priority, nor Adasum, GPUs' memory and errors") {
  Ranks ranks(in_parts(1024));
  ranks.everybody_says({urgent("big", 0, 1000)});
  CHECK(all_of(ranks) == "big");
  Request adasum = urgent("adasum", 1, 1000), device = urgent("device", 1, 1000);
  adasum.signature.reduce = Reduce::kAdasum;
  device.signature.device = 1;
  ranks.everybody_says({adasum, device});
  CHECK(all_of(ranks) == "adasum device");
  Request wrong = urgent("wrong", 1, 1000);
  ranks.say(0, {wrong});
  wrong.signature.tensors[0].dtype = DType::kI64;
  ranks.say(1, {wrong});
  CHECK(all_of(ranks) == "wrong");
}

TEST_CASE("coordinator: less urgent ones join a batch as far as one part goes; a fused batch is cut like any other") {
  Ranks ranks(in_parts(1024, 1 << 20));
  ranks.everybody_says({urgent("a", 2, 100), urgent("b", 1, 100), urgent("c", 1, 200), urgent("d", 2, 400)});
  CHECK(all_of(ranks) == "ad/0 ad/1 bc/0 bc/1");
  ranks.everybody_says({urgent("k", 2, 100), urgent("l", 1, 100), urgent("m", 1, 200)});
  CHECK(all_of(ranks) == "kl m");
}

TEST_CASE("part_of: the parts together send, receive and reduce each element once, and empty steps vanish") {
  for (int size : {2, 3, 5}) {
    for (size_t count : {1u, 7u, 1000u, 12345u}) {
      const Schedule whole = plan_ring_allreduce({.rank = 1, .size = size, .count = count, .in_place = true});
      std::vector<int> covered(count, 0), expected(count, 0);
      auto mark = [](const Schedule& s, std::vector<int>* marks) {
        for (const Step& step : s.steps) {
          CHECK(step.count > 0);
          for (size_t i = 0; i < step.count; ++i) (*marks)[step.from.first + i] += step.action == Action::kSend;
          for (size_t i = 0; i < step.count; ++i) (*marks)[step.to.first + i] += 100 * (step.action != Action::kSend);
        }
      };
      mark(whole, &expected);
      for (int part = 0; part < 7; ++part) mark(part_of(whole, part, 7), &covered);
      CHECK(covered == expected);
    }
  }
}

TEST_CASE("parts give the bits of the whole: ring, recursive doubling and two levels, packed and in place" *
          doctest::test_suite("long")) {
  for (int size : kThreadSanitized ? std::vector{3} : std::vector{2, 3, 4}) {
    for (const char* ring_from : {"0", "1000000000"}) {
      const auto with = [&](const char* bytes) {
        return sums(size,
                    {{"HOROCLONE_SHARED_MEMORY", "0"},
                     {"HOROCLONE_RING_THRESHOLD_BYTES", ring_from},
                     {"HOROCLONE_SEGMENT_BYTES", "4096"},
                     {"HOROCLONE_FUSION_THRESHOLD", "0"},
                     {"HOROCLONE_PARTITION_BYTES", bytes}},
                    false);
      };
      CAPTURE(size);
      CHECK(with("0") == with("5000"));
    }
  }
  const auto two_level = [](const char* bytes) {
    return sums(4,
                {{"HOROCLONE_HIERARCHICAL_ALLREDUCE", "1"},
                 {"HOROCLONE_FUSION_THRESHOLD", "0"},
                 {"HOROCLONE_PARTITION_BYTES", bytes}},
                true);
  };
  CHECK(two_level("0") == two_level("5000"));
}

TEST_CASE("operations with priorities, submitted in any order with delays, end in one order on every rank") {
  constexpr int kSize = 3, kOperations = 24;
  std::vector<std::string> order[kSize];
  World world(kSize, {{"HOROCLONE_SHARED_MEMORY", "0"}, {"HOROCLONE_PARTITION_BYTES", "20000"}});
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    std::mt19937 random(static_cast<unsigned>(rank) + 7);
    for (int round = 0; round < 4; ++round) {
      Ended ended;
      std::vector<std::vector<float>> v;
      for (int i = 0; i < kOperations; ++i)
        v.emplace_back(1000 * (1 + i % 5 * (i % 5) * (i % 5)), static_cast<float>(i));
      std::vector<int> shuffled(kOperations);
      for (int i = 0; i < kOperations; ++i) shuffled[i] = i;
      std::shuffle(shuffled.begin(), shuffled.end(), random);
      std::vector<int64_t> handles(kOperations);
      for (int i : shuffled) {
        CHECK_OK(submit(engine, Op::kAllreduce, "t" + std::to_string(i), v[i], &v[i],
                        {static_cast<int64_t>(v[i].size())}, &handles[i], [&](Submission& s) {
                          s.priority = i % 7 - 3;
                          s.done = note_end;
                          s.done_context = &ended;
                        }));
        if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
      }
      for (int i = 0; i < kOperations; ++i) {
        CHECK_OK(finish(engine, handles[i]));
        CHECK_LOCKED(std::count(v[i].begin(), v[i].end(), static_cast<float>(3 * i)) ==
                     static_cast<int64_t>(v[i].size()));
        engine.release(handles[i]);
      }
      while (true) {  // the last callbacks may still be under way
        std::unique_lock lock(ended.mutex);
        if (ended.handles.size() == kOperations) break;
        lock.unlock();
        std::this_thread::yield();
      }
      std::string text;
      for (int64_t handle : ended.handles)
        text += " " + std::to_string(std::find(handles.begin(), handles.end(), handle) - handles.begin());
      order[rank].push_back(text);
    }
  }));
  CHECK(order[0] == order[1]);
  CHECK(order[0] == order[2]);
}

TEST_CASE("errors and joins between the parts of a large one leave the runtime usable") {
  World world(2, {{"HOROCLONE_SHARED_MEMORY", "0"}, {"HOROCLONE_PARTITION_BYTES", "8192"}});
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    for (int round = 0; round < 3; ++round) {
      const int64_t n = 400000;
      std::vector<float> big(n, 1.0f), small(rank ? 3 : 4, 1.0f), other(8, 2.0f);
      int64_t h[3] = {};
      CHECK_OK(submit(engine, Op::kAllreduce, "big", big, &big, {n}, &h[0], [](Submission& s) { s.priority = 1; }));
      CHECK_OK(submit(engine, Op::kAllreduce, "wrong", small, &small, {static_cast<int64_t>(small.size())}, &h[1],
                      [](Submission& s) { s.priority = 9; }));
      const Status bad = finish(engine, h[1]);
      CHECK_LOCKED(bad.code() == Code::kMismatch);
      CHECK_OK(submit(engine, Op::kAllreduce, "right", other, &other, {8}, &h[2]));
      CHECK_OK(finish(engine, h[2]));
      CHECK_OK(finish(engine, h[0]));
      CHECK_LOCKED(std::count(big.begin(), big.end(), 2.0f) == n);
      for (int64_t handle : h) engine.release(handle);
      // A joined rank takes part in every part.
      int64_t last = 0;
      if (rank == 0) {
        CHECK_OK(submit(engine, Op::kAllreduce, "big", big, &big, {n}, &last, [](Submission& s) { s.priority = 1; }));
        CHECK_OK(finish(engine, last));
        CHECK_LOCKED(std::count(big.begin(), big.end(), 2.0f) == n);
        engine.release(last);
      }
      CHECK_OK(perform(engine, Op::kJoin));
    }
  }));
}
