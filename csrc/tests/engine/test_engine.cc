// Worlds of engines in threads: agreement, execution, errors, join, process sets, shutdown. Each runs in shared memory
// and over TCP.
#include <doctest/doctest.h>

#include <atomic>
#include <latch>
#include <numeric>
#include <random>

#include "tests/locked_checks.h"
#include "tests/sanitized.h"
#include "tests/world.h"

namespace hc {
namespace {

Settings settings_of(bool shared) {
  if (shared) return {};
  return {{"HOROCLONE_SHARED_MEMORY", "0"},
          {"HOROCLONE_SEGMENT_BYTES", "1024"},
          {"HOROCLONE_SOCKET_BUFFER_BYTES", "32768"}};
}

std::vector<float> ramp(size_t n, int rank) {
  std::vector<float> v(n);
  for (size_t i = 0; i < n; ++i) v[i] = static_cast<float>((i * 7 + rank * 13) % 101);
  return v;
}
float ramp_sum(size_t i, int size) {
  float sum = 0;
  for (int r = 0; r < size; ++r) sum += static_cast<float>((i * 7 + r * 13) % 101);
  return sum;
}

void allreduce_all_sizes(int size, bool shared) {
  World world(size, settings_of(shared));
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    for (size_t n : {0, 1, 3, 17, 1000, 4096, 300007}) {
      auto in = ramp(n, rank);
      std::vector<float> out(n, -1);
      CHECK_OK(perform(engine, Op::kAllreduce, "x", in, &out, {static_cast<int64_t>(n)}));
      size_t wrong = 0;
      for (size_t i = 0; i < n; ++i) wrong += out[i] != ramp_sum(i, size);
      CHECK_LOCKED(wrong == 0);
    }
  }));
}

TEST_CASE("allreduce of every size is exact on every rank") {
  for (int size : {1, 2, 3, 4})
    for (bool shared : {true, false}) {
      CAPTURE(size);
      CAPTURE(shared);
      allreduce_all_sizes(size, shared);
    }
}

TEST_CASE("two levels: shared memory within a node, channels between, also with nodes of unequal size" *
          doctest::test_suite("long")) {
  const std::vector<std::vector<std::string>> layouts = {
      {"a", "a", "b", "b"}, {"a", "b", "a", "b"}, {"a", "a", "b"}, {"a", "b", "b", "b", "c", "c"}, {"a", "b", "c"}};
  for (const auto& layout : layouts)
    for (const char* hierarchical : {"-1", "0"}) {
      const int size = static_cast<int>(layout.size());
      CAPTURE(size);
      World world(size, {{"HOROCLONE_HIERARCHICAL_ALLREDUCE", hierarchical}, {"HOROCLONE_SEGMENT_BYTES", "40000"}});
      CHECK_OK(world.on_nodes(layout).each([&](Engine& engine, int rank) {
        for (size_t n : {1, 3, 1000, 4099, kThreadSanitized ? 30'007 : 300'007}) {
          auto in = ramp(n, rank);
          std::vector<float> out(n, -1);
          std::vector<int64_t> whole(n, rank + 1), average(n, -1);
          int64_t a = 0, b = 0;
          CHECK_OK(submit(engine, Op::kAllreduce, "x", in, &out, {static_cast<int64_t>(n)}, &a));
          CHECK_OK(submit(engine, Op::kAllreduce, "w", whole, &average, {static_cast<int64_t>(n)}, &b,
                          [](Submission& s) { s.reduce = Reduce::kAverage; }));
          CHECK_OK(finish(engine, a));
          CHECK_OK(finish(engine, b));
          engine.release(a);
          engine.release(b);
          size_t wrong = 0;
          for (size_t i = 0; i < n; ++i) wrong += out[i] != ramp_sum(i, size);
          CHECK_LOCKED(wrong == 0);
          CHECK_LOCKED(std::count(average.begin(), average.end(), size * (size + 1) / 2 / size) ==
                       static_cast<int64_t>(n));
        }
        std::vector<int64_t> mine(rank + 1, rank);
        CHECK_OK(perform<int64_t>(engine, Op::kAllgather, "g", mine, nullptr, {rank + 1}));
      }));
    }
}

TEST_CASE("any order of submission completes, fused or not, named or not") {
  for (bool shared : {true, false}) {
    World world(3, settings_of(shared));
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      std::mt19937 random(rank * 1000 + 7);
      for (int round = 0; round < 10; ++round) {
        const int n = 40;
        std::vector<int> order(n);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        std::vector<std::vector<float>> data(n);
        std::vector<int64_t> handles(n);
        for (int i : order) {
          data[i] = ramp(1 + i * 37 % 5000, rank);
          CHECK_OK(submit(engine, Op::kAllreduce, "t" + std::to_string(i), data[i], &data[i],
                          {static_cast<int64_t>(data[i].size())}, &handles[i]));
        }
        std::vector<int32_t> unnamed = {rank};
        int64_t unnamed_handle = 0;
        CHECK_OK(submit(engine, Op::kAllreduce, "", unnamed, &unnamed, {1}, &unnamed_handle));
        for (int i : order) {
          CHECK_OK(finish(engine, handles[i]));
          engine.release(handles[i]);
          size_t wrong = 0;
          for (size_t k = 0; k < data[i].size(); ++k) wrong += data[i][k] != ramp_sum(k, 3);
          CHECK_LOCKED(wrong == 0);
        }
        CHECK_OK(finish(engine, unnamed_handle));
        engine.release(unnamed_handle);
        CHECK_LOCKED(unnamed[0] == 3);
      }
    }));
  }
}

TEST_CASE("allgather, broadcast, alltoall, reducescatter, barrier") {
  for (bool shared : {true, false})
    for (int size : {1, 2, 4})
      for (int64_t scale : {1, 9000}) {
        CAPTURE(shared);
        CAPTURE(size);
        World world(size, settings_of(shared));
        CHECK_OK(world.each([&](Engine& engine, int rank) {
          int64_t h = 0;
          std::vector<int64_t> mine((rank + 1) * scale * 2, rank);
          CHECK_OK(submit<int64_t>(engine, Op::kAllgather, "g", mine, nullptr, {(rank + 1) * scale, 2}, &h));
          CHECK_OK(finish(engine, h));
          if (Operation* op = engine.finished(h)) {
            CHECK_LOCKED(op->first_dimension[0] == scale * size * (size + 1) / 2);
            const auto* got = reinterpret_cast<const int64_t*>(op->results[0]->data());
            size_t at = 0, wrong = 0;
            for (int r = 0; r < size; ++r)
              for (int64_t k = 0; k < (r + 1) * scale * 2; ++k) wrong += got[at++] != r;
            CHECK_LOCKED(wrong == 0);
          }
          engine.release(h);

          std::vector<double> b(scale, rank == size - 1 ? 42.0 : 0.0);
          CHECK_OK(perform(engine, Op::kBroadcast, "b", b, &b, {scale}, [&](Submission& s) { s.root = size - 1; }));
          CHECK_LOCKED(std::count(b.begin(), b.end(), 42.0) == scale);

          // Rank r sends (r + j) * scale rows to rank j.
          std::vector<int64_t> splits, to;
          for (int j = 0; j < size; ++j) {
            splits.push_back((rank + j) * scale);
            to.insert(to.end(), (rank + j) * scale, rank * 100 + j);
          }
          CHECK_OK(submit<int64_t>(engine, Op::kAlltoall, "a", to, nullptr, {static_cast<int64_t>(to.size())}, &h,
                                   [&](Submission& s) { s.splits = splits; }));
          CHECK_OK(finish(engine, h));
          if (Operation* op = engine.finished(h)) {
            size_t at = 0, wrong = 0;
            for (int r = 0; r < size; ++r) {
              CHECK_LOCKED(op->rows_from[r] == (r + rank) * scale);
              const auto* got = reinterpret_cast<const int64_t*>(op->results[0]->data());
              for (int64_t k = 0; k < (r + rank) * scale; ++k) wrong += got[at++] != r * 100 + rank;
            }
            CHECK_LOCKED(wrong == 0);
          }
          engine.release(h);

          const int64_t rows = scale * size + 1;  // the first rank gets one more
          std::vector<float> v(rows * 3);
          for (size_t k = 0; k < v.size(); ++k) v[k] = static_cast<float>(k % 50 + rank);
          CHECK_OK(submit<float>(engine, Op::kReducescatter, "r", v, nullptr, {rows, 3}, &h));
          CHECK_OK(finish(engine, h));
          if (Operation* op = engine.finished(h)) {
            const int64_t first = rank * scale + std::min(rank, 1), count = scale + (rank < 1);
            CHECK_LOCKED(op->first_dimension[0] == count);
            const auto* got = reinterpret_cast<const float*>(op->results[0]->data());
            size_t wrong = 0;
            for (int64_t k = 0; k < count * 3; ++k)
              wrong += got[k] != static_cast<float>(size * ((first * 3 + k) % 50) + size * (size - 1) / 2);
            CHECK_LOCKED(wrong == 0);
          }
          engine.release(h);

          CHECK_OK(perform(engine, Op::kBarrier));
        }));
      }
}

TEST_CASE("buffers in arenas are reduced where they lie, also when only some ranks have theirs there") {
  for (bool all : {true, false}) {
    World world(3);
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      const size_t n = 300007;
      auto block = engine.allocate(n * sizeof(float));
      CHECK_LOCKED(block.is_ok());
      std::vector<float> own(n);
      float* data = all || rank != 1 ? reinterpret_cast<float*>(block.value()->data()) : own.data();
      for (int step = 0; step < 3; ++step) {
        auto in = ramp(n, rank);
        std::copy(in.begin(), in.end(), data);
        Submission s;
        s.name = "bucket";
        const int64_t shape[] = {static_cast<int64_t>(n)};
        const Submission::Tensor t{data, data, shape, DType::kF32};
        s.tensors = {&t, 1};
        CHECK_OK(perform(engine, s));
        size_t wrong = 0;
        for (size_t i = 0; i < n; ++i) wrong += data[i] != ramp_sum(i, 3);
        CHECK_LOCKED(wrong == 0);
      }
    }));
  }
}

// Declared buckets in arenas, in another order on each rank; one rank may join early, and drop its buckets before.
void run_persistent(int size, int steps, bool with_join, bool shared, bool drops = false) {
  World world(size, settings_of(shared));
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    constexpr int kBuckets = 5;
    std::vector<std::shared_ptr<Memory>> memory;
    BucketSet set;
    for (int b = 0; b < kBuckets; ++b) {
      const int64_t n = 10000 * b + 3;
      memory.push_back(engine.allocate(n * sizeof(float)).take());
      set.buckets.push_back({"bucket" + std::to_string(b), memory.back()->data(), {n}, DType::kF32});
    }
    int id = -1;
    CHECK_OK(engine.declare(0, set, &id));
    std::mt19937 random(rank + 1);
    const int mine = with_join ? steps + rank : steps;
    for (int step = 0; step < mine; ++step) {
      std::vector<int> order = {0, 1, 2, 3, 4};
      std::shuffle(order.begin(), order.end(), random);
      int64_t handles[kBuckets];
      for (int b : order) {
        auto* v = reinterpret_cast<float*>(memory[b]->data());
        std::fill(v, v + set.buckets[b].shape[0], static_cast<float>(step + rank));
        CHECK_OK(engine.submit_declared(0, id, b, nullptr, &handles[b]));
      }
      float expected = 0;
      for (int r = 0; r < size; ++r) expected += !with_join || step < steps + r ? static_cast<float>(step + r) : 0;
      for (int b : order) {
        CHECK_OK(finish(engine, handles[b]));
        engine.release(handles[b]);
        const auto* v = reinterpret_cast<const float*>(memory[b]->data());
        const auto n = set.buckets[b].shape[0];
        CHECK_LOCKED(std::count(v, v + n, expected) == n);
      }
    }
    if (drops) CHECK_OK(engine.undeclare(0, id));
    if (!with_join) return;
    int64_t h = 0;
    CHECK_OK(submit<float>(engine, Op::kJoin, "", {}, nullptr, {}, &h));
    CHECK_OK(finish(engine, h));
    CHECK_LOCKED(engine.finished(h)->join_rank == size - 1);
  }));
}

TEST_CASE("a persistent plan runs in any order and breaks when a rank joins, also while others wait inside it") {
  for (int size : {1, 2, 4}) {
    CAPTURE(size);
    run_persistent(size, 20, false, true);
    run_persistent(size, 5, false, false);
    for (int round = 0; round < 6; ++round) run_persistent(size, round, true, true);
  }
}

TEST_CASE("a rank that has dropped its buckets and joins or leaves lets those go on that wait in them") {
  for (int size : {2, 3})
    for (int round = 0; round < 5; ++round) run_persistent(size, round, true, true, true);
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    auto memory = engine.allocate(400).take();
    BucketSet set;
    set.buckets.push_back({"b", memory->data(), {100}, DType::kF32});
    int id = -1;
    CHECK_OK(engine.declare(0, set, &id));
    if (rank == 1) {
      CHECK_OK(engine.undeclare(0, id));
      return;
    }
    int64_t h = 0;
    CHECK_OK(engine.submit_declared(0, id, 0, nullptr, &h));
    const Status outcome = finish(engine, h);
    CHECK_LOCKED(outcome.code() == Code::kAborted);
    CHECK_LOCKED(outcome.text().find("rank 1") != std::string::npos);
  }));
}

TEST_CASE("buckets that are dropped as soon as they were submitted are reduced all the same") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    auto memory = engine.allocate(400).take();
    auto* values = reinterpret_cast<float*>(memory->data());
    for (int round = 0; round < 200; ++round) {
      BucketSet set;
      set.buckets.push_back({"b" + std::to_string(round), memory->data(), {100}, DType::kF32});
      int id = -1;
      CHECK_OK(engine.declare(0, set, &id));
      std::fill(values, values + 100, static_cast<float>(1 + rank));
      int64_t h = 0;
      CHECK_OK(engine.submit_declared(0, id, 0, nullptr, &h));
      CHECK_OK(engine.undeclare(0, id));
      CHECK_OK(finish(engine, h));
      engine.release(h);
      CHECK_LOCKED(std::count(values, values + 100, 3.0f) == 100);
    }
  }));
}

TEST_CASE("ranks that declare different buckets are told so, and go on") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    auto memory = engine.allocate(400).take();
    BucketSet set;
    set.buckets.push_back({"b", memory->data(), {rank ? 100 : 99}, DType::kF32});
    int id = -1;
    const Status differs = engine.declare(0, set, &id);
    CHECK_LOCKED(differs.code() == Code::kMismatch);
    set.buckets[0].shape = {100};
    CHECK_OK(engine.declare(0, set, &id));
    int64_t h = 0;
    CHECK_OK(engine.submit_declared(0, id, 0, nullptr, &h));
    CHECK_OK(finish(engine, h));
  }));
}

TEST_CASE("a mismatch raises on every rank and the engine goes on") {
  for (bool shared : {true, false}) {
    World world(3, settings_of(shared));
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      std::vector<float> v(rank == 1 ? 3 : 4, 1.0f);
      int64_t h = 0;
      CHECK_OK(submit(engine, Op::kAllreduce, "w", v, &v, {static_cast<int64_t>(v.size())}, &h));
      const Status bad = finish(engine, h);
      CHECK_LOCKED(bad.code() == Code::kMismatch);
      CHECK_LOCKED(bad.text().find("'w'") != std::string::npos);
      CHECK_LOCKED(bad.text().find("rank 1") != std::string::npos);
      engine.release(h);
      std::vector<float> good(4, 1.0f);
      CHECK_OK(perform(engine, Op::kAllreduce, "w", good, &good, {4}));
      CHECK_LOCKED(good[0] == 3.0f);
    }));
  }
}

TEST_CASE("a duplicate name is refused at once and the first operation completes") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    std::vector<float> a(10, 1), b(10, 1);
    int64_t first = 0, second = 0;
    if (rank == 0) {
      CHECK_OK(submit(engine, Op::kAllreduce, "d", a, &a, {10}, &first));
      const Status refused = submit(engine, Op::kAllreduce, "d", b, &b, {10}, &second);
      CHECK_LOCKED(refused.code() == Code::kInvalidArgument);
    }
    CHECK_OK(perform(engine, Op::kBarrier));
    if (rank == 1) CHECK_OK(submit(engine, Op::kAllreduce, "d", a, &a, {10}, &first));
    CHECK_OK(finish(engine, first));
    CHECK_LOCKED(a[0] == 2.0f);
  }));
}

TEST_CASE("join gives identity elements and the same last rank everywhere") {
  for (bool shared : {true, false}) {
    World world(3, settings_of(shared));
    std::atomic<int> last_sum{0};
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      for (int step = 0; step < 3 + rank; ++step) {
        std::vector<float> v(100, 5.0f - rank), least(1, static_cast<float>(10 + rank)), unnamed(2, 1.0f);
        int64_t a = 0, b = 0;
        CHECK_OK(perform(engine, Op::kAllreduce, "", unnamed, &unnamed, {2}));
        CHECK_LOCKED(unnamed[0] == (step < 3 ? 3.0f : step == 3 ? 2.0f : 1.0f));
        CHECK_OK(submit(engine, Op::kAllreduce, "g", v, &v, {100}, &a));
        CHECK_OK(submit(engine, Op::kAllreduce, "least", least, &least, {1}, &b,
                        [](Submission& s) { s.reduce = Reduce::kMin; }));
        CHECK_OK(finish(engine, a));
        CHECK_OK(finish(engine, b));
        engine.release(a);
        engine.release(b);
        if (step < 3) CHECK_LOCKED(v[0] == 12.0f);
        if (step == 3) CHECK_LOCKED(v[0] == 7.0f);  // ranks 1 and 2
        if (step == 4) CHECK_LOCKED(v[0] == 3.0f);
        if (step == 4) CHECK_LOCKED(least[0] == 12.0f);
      }
      int64_t h = 0;
      CHECK_OK(submit<float>(engine, Op::kJoin, "", {}, nullptr, {}, &h));
      CHECK_OK(finish(engine, h));
      last_sum += engine.finished(h) ? engine.finished(h)->join_rank : 100;
      engine.release(h);
      std::vector<float> behind(2, 1.0f);  // unnamed operations still match
      CHECK_OK(perform(engine, Op::kAllreduce, "", behind, &behind, {2}));
      CHECK_LOCKED(behind[1] == 3.0f);
    }));
    CHECK(last_sum == 6);  // rank 2 joined last, seen by three ranks
  }
}

TEST_CASE("process sets do not delay each other and their ids are reused") {
  World world(4);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    int even = 0, odd = 0;
    CHECK_OK(engine.add_process_set({0, 2}, &even));
    CHECK_OK(engine.add_process_set({1, 3}, &odd));
    CHECK_LOCKED(even == 1);
    CHECK_LOCKED(odd == 2);
    const int mine = rank % 2 ? odd : even;
    for (int step = 0; step < 5; ++step) {
      std::vector<float> v(5000, static_cast<float>(rank));
      CHECK_OK(perform(engine, Op::kAllreduce, "x", v, &v, {5000}, [&](Submission& s) { s.process_set = mine; }));
      CHECK_LOCKED(v[4999] == (rank % 2 ? 4.0f : 2.0f));
    }
    std::vector<float> v(1);
    int64_t h = 0;
    const Status foreign = submit(engine, Op::kAllreduce, "y", v, &v, {1}, &h,
                                  [&](Submission& s) { s.process_set = rank % 2 ? even : odd; });
    CHECK_LOCKED(foreign.code() == Code::kInvalidArgument);
    CHECK_OK(engine.remove_process_set(even));
    int again = 0;
    CHECK_OK(engine.add_process_set({0, 1, 3}, &again));
    CHECK_LOCKED(again == even);
    if (rank != 2) {
      std::vector<float> w(5000, 1.0f);
      CHECK_OK(perform(engine, Op::kAllreduce, "x", w, &w, {5000}, [&](Submission& s) { s.process_set = again; }));
      CHECK_LOCKED(w[0] == 3.0f);
    }
  }));
}

TEST_CASE("a rank that shuts down early fails the others' waiting operations, naming it") {
  for (int leaver : {0, 1}) {
    World world(3);
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      if (rank == leaver) return;
      std::vector<float> v(4, 1);
      int64_t h = 0;
      const Status refused = submit(engine, Op::kAllreduce, "late", v, &v, {4}, &h);
      const Status outcome = refused.is_ok() ? finish(engine, h, 10) : refused;
      CHECK_LOCKED(outcome.code() == Code::kAborted);
      CHECK_LOCKED(outcome.text().find("rank " + std::to_string(leaver)) != std::string::npos);
      CHECK_LOCKED(outcome.text().find("late") != std::string::npos);
    }));
  }
}

TEST_CASE("a rank that has sent its share and shut down is no loss to one that is still receiving it") {
  World world(2, {{"HOROCLONE_SHARED_MEMORY", "0"}, {"HOROCLONE_LIVENESS_PROBE_S", "0.01"}});
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    std::vector<float> v(4000000, rank == 0 ? 7.0f : 0.0f);
    CHECK_OK(perform(engine, Op::kBroadcast, "b", v, &v, {4000000}));
    CHECK_LOCKED(std::count(v.begin(), v.end(), 7.0f) == 4000000);
  }));
}

TEST_CASE("abort reaches every rank with its text, and they sleep when the one that raised has left") {
  for (const std::string node : {"of all", "of rank 2", ""}) {
    CAPTURE(node);
    World world(3, settings_of(!node.empty()));
    if (!node.empty()) world.on_nodes({"of all", "of all", node});
    std::latch ended(3), rested(2);
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      CHECK_OK(perform(engine, Op::kBarrier));
      if (rank == 1) {
        engine.abort("rank 1 raised ValueError: bad batch 17");
        ended.arrive_and_wait();
        return;
      }
      std::vector<float> v(4, 1);
      const Status outcome = perform(engine, Op::kAllreduce, "late", v, &v, {4});
      CHECK_LOCKED(outcome.code() == Code::kAborted);
      CHECK_LOCKED(outcome.text().find("bad batch 17") != std::string::npos);
      ended.arrive_and_wait();
      const bool rests = comes_to_rest(engine);
      CHECK_LOCKED(rests);
      rested.arrive_and_wait();
    }));
  }
}

TEST_CASE("an engine sleeps when another rank has left, and while it waits for one") {
  for (bool shared : {true, false}) {
    CAPTURE(shared);
    World world(3, settings_of(shared));
    std::latch left(2), rested(2);
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      int set = 0;
      CHECK_OK(engine.add_process_set({0, 2}, &set));
      if (rank == 1) return;
      bool rests = comes_to_rest(engine);
      CHECK_LOCKED(rests);
      left.arrive_and_wait();
      std::vector<float> v(4, 1);
      int64_t h = 0;
      const auto begin = [&] {
        CHECK_OK(submit(engine, Op::kAllreduce, "v", v, &v, {4}, &h, [&](Submission& s) { s.process_set = set; }));
      };
      if (rank == 0) begin();
      rests = comes_to_rest(engine);
      CHECK_LOCKED(rests);
      rested.arrive_and_wait();
      if (rank == 2) begin();
      CHECK_OK(finish(engine, h));
    }));
  }
}

TEST_CASE("an abort overtakes nothing that its rank has done") {
  for (int round = 0; round < 30; ++round) {
    World world(3, settings_of(round % 2 == 0));
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      for (int step = 0; step < 5; ++step) {
        std::vector<float> v(4000, static_cast<float>(rank));
        CHECK_OK(perform(engine, Op::kAllreduce, "v", v, &v, {4000}));
      }
      if (rank == 1) engine.abort("rank 1 raised ValueError: bad batch 17");
    }));
  }
}

TEST_CASE("many worlds one after the other") {
  for (int round = 0; round < 10; ++round) {
    World world(2);
    CHECK_OK(world.each(
        [&](Engine& engine, int rank) {
          std::vector<float> v(3, static_cast<float>(rank));
          CHECK_OK(perform(engine, Op::kAllreduce, "x", v, &v, {3}));
          CHECK_LOCKED(v[0] == 1.0f);
        },
        static_cast<uint32_t>(round)));
  }
}

TEST_CASE("who asks for the engine's state again and again does not hold up the work") {
  for (bool shared : {true, false}) {
    World world(2, settings_of(shared));
    CHECK_OK(world.each([&](Engine& engine, int) {
      for (int step = 0; step < 20; ++step) {
        std::vector<float> v(64, 1.0f);
        int64_t h = 0;
        CHECK_OK(submit(engine, Op::kAllreduce, "v", v, &v, {64}, &h));
        const Deadline deadline = Deadline::in(20);
        while (!engine.poll(h) && !deadline.passed()) (void)engine.describe();
        const bool done = engine.poll(h);
        CHECK_LOCKED(done);
        CHECK_OK(finish(engine, h));
        engine.release(h);
        if (v[0] != 2.0f) CHECK_LOCKED(v[0] == 2.0f);
      }
    }));
  }
}

TEST_CASE("two threads of one rank submit and wait at the same time") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int) {
    const auto work = [&](const std::string& prefix) {
      for (int step = 0; step < 200; ++step) {
        std::vector<float> v(64, 1.0f);
        CHECK_OK(perform(engine, Op::kAllreduce, prefix + std::to_string(step % 7), v, &v, {64}));
        if (v[0] != 2.0f) CHECK_LOCKED(v[0] == 2.0f);
      }
    };
    std::thread other(work, "a");
    work("b");
    other.join();
  }));
}

}  // namespace
}  // namespace hc
