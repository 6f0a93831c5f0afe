// Declared buckets in device memory, on fakes of CUDA and NCCL: no GPU takes part. The fake says so when ranks
// launch different things, or in another order, on one communicator; values say so when somebody does not wait.
#include <doctest/doctest.h>

#include <algorithm>
#include <barrier>
#include <numeric>
#include <random>

#include "tests/gpu/gpu_gradients.h"

namespace hc {

namespace {

std::vector<int> shuffled(std::mt19937& random) {
  std::vector<int> order(kBuckets);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

}  // namespace

TEST_CASE("fake of CUDA and NCCL: declared buckets start without a message, each rank in its own order") {
  FakeEnvironment slow(Variables{{"HC_FAKE_DELAY_US", "50"}});
  constexpr int kSteps = 20;
  World world(3, gpu_settings());
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    Gradients gradients(engine, gpu);
    std::mt19937 random(static_cast<unsigned>(rank));
    all_are_here(engine, "begin");
    const int64_t request_lists = counter(engine, "request_lists_sent"), plans = counter(engine, "plans_sent");
    for (int step = 0; step < kSteps; ++step) {
      const auto order = shuffled(random);
      for (const int b : order) gradients.submit(b, static_cast<float>(step + b + rank));
      for (const int b : order) gradients.expect(b, static_cast<float>(3 * (step + b) + 3));
    }
    CHECK_LOCKED(counter(engine, "persistent") == kSteps * kBuckets);
    CHECK_LOCKED(counter(engine, "request_lists_sent") == request_lists);
    CHECK_LOCKED(counter(engine, "plans_sent") == plans);
    all_are_here(engine, "end");
  }));
  CHECK(fake_count("memory") == 0);
}

TEST_CASE("fake of CUDA and NCCL: persistent buckets and other work, of other sets too, start in one order") {
  FakeEnvironment slow(Variables{{"HC_FAKE_DELAY_US", "20"}});
  World world(3, gpu_settings());
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    const std::vector<std::vector<int>> members = {{0, 1, 2}, {0, 1}, {1, 2}};
    std::vector<int> ids = {0, 0, 0};
    for (size_t s = 1; s < members.size(); ++s) CHECK_OK(engine.add_process_set(members[s], &ids[s]));
    Gradients gradients(engine, gpu);
    std::mt19937 random(static_cast<unsigned>(rank + 10));
    float* data[3];
    for (float*& d : data) d = gpu.tensor(std::vector<float>(64, 1.0f));
    for (int step = 0; step < 25; ++step) {
      std::vector<int> order(kBuckets + 3);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      int64_t handles[3] = {};
      for (const int what : order) {
        if (what < kBuckets) {
          gradients.submit(what, static_cast<float>(step + rank));
          continue;
        }
        const auto s = static_cast<size_t>(what - kBuckets);
        if (std::find(members[s].begin(), members[s].end(), rank) == members[s].end()) continue;
        gpu.write(data[s], std::vector<float>(64, 1.0f));
        CHECK_OK(submit_gpu(engine, gpu, Op::kAllreduce, "x", data[s], data[s], {64}, DType::kF32, &handles[s],
                            [&](Submission& sub) {
                              sub.process_set = ids[s];
                              sub.reduce = Reduce::kSum;
                            }));
      }
      for (int b = 0; b < kBuckets; ++b) gradients.expect(b, static_cast<float>(3 * step + 3));
      for (size_t s = 0; s < members.size(); ++s) {
        if (!handles[s]) continue;
        CHECK_OK(enqueued(engine, gpu, handles[s]));
        engine.release(handles[s]);
        CHECK_LOCKED(gpu.read(data[s], 64)[63] == static_cast<float>(members[s].size()));
      }
    }
    CHECK_LOCKED(counter(engine, "persistent") == 25 * kBuckets);
    all_are_here(engine, "end");  // rank 0 orders the others' work
  }));
}

TEST_CASE("fake of CUDA and NCCL: a rank that joins breaks the persistent plan, and nobody hangs") {
  for (int steps = 0; steps < 4; ++steps) {
    World world(2, gpu_settings());
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      FrameworkOnGpu gpu(rank);
      Gradients gradients(engine, gpu);
      for (int step = 0; step < steps + 2 * rank; ++step) {  // rank 0 leaves first, while rank 1 waits in a bucket
        for (int b = 0; b < kBuckets; ++b) gradients.submit(b, 1.0f);
        for (int b = 0; b < kBuckets; ++b) gradients.expect(b, step < steps ? 2.0f : 1.0f);
      }
      CHECK_OK(join(engine, gpu));
      // After three steps that were alike rank 0 has given the tickets of the next one. It takes back what rank 1 has
      // not begun by then.
      const int64_t whole = steps * kBuckets, found = counter(engine, "persistent");
      CHECK_LOCKED(found >= whole);
      CHECK_LOCKED(found <= whole + (steps >= 3 ? kBuckets : 0));
    }));
  }
}

TEST_CASE("fake of CUDA and NCCL: where a plan cannot be persistent, declared buckets are announced") {
  struct Row {
    const char* what;
    int process_set_from;  // -1: the world
    Settings settings;
    std::vector<std::string> nodes;
  };
  const Row rows[] = {{"several machines", -1, {}, {"a", "b", "b"}},
                      {"host memory moves the data", -1, {{"HOROCLONE_GPU_OPERATIONS", "host"}}, {}},
                      {"a set without rank 0", 1, {}, {}}};
  for (const Row& row : rows) {
    CAPTURE(row.what);
    World world(3, gpu_settings(row.settings));
    if (!row.nodes.empty()) world.on_nodes(row.nodes);
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      FrameworkOnGpu gpu(rank);
      int set = 0;
      if (row.process_set_from > 0) CHECK_OK(engine.add_process_set({1, 2}, &set));
      const float size = set ? 2.0f : 3.0f;
      if (rank >= row.process_set_from) {
        Gradients gradients(engine, gpu, set);
        for (int step = 0; step < 3; ++step) {
          for (int b = 0; b < kBuckets; ++b) gradients.submit(b, 1.0f);
          for (int b = 0; b < kBuckets; ++b) gradients.expect(b, size);
        }
      }
      CHECK_LOCKED(counter(engine, "persistent") == 0);
      all_are_here(engine, "end");
    }));
  }
}

TEST_CASE("fake of CUDA and NCCL: launch tickets outnumber the places for them while a rank looks the other way") {
  World world(3, gpu_settings());
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    int pair = 0;
    CHECK_OK(engine.add_process_set({0, 1}, &pair));
    Gradients gradients(engine, gpu);
    if (rank < 2) {
      float* data = gpu.tensor(std::vector<float>(8, 0.0f));
      for (int i = 0; i < 200; ++i) CHECK_OK(reduce_now(engine, gpu, "pair", data, 8, pair));
    }
    for (int step = 0; step < 40; ++step) {
      for (int b = 0; b < kBuckets; ++b) gradients.submit(b, 1.0f);
      for (int b = 0; b < kBuckets; ++b) gradients.expect(b, 3.0f);
    }
  }));
}

TEST_CASE("fake of CUDA and NCCL: an abort reaches those who wait in a persistent bucket") {
  World world(2, gpu_settings());
  std::barrier<> barrier(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    Gradients gradients(engine, gpu);
    if (rank == 1) gradients.submit(0, 1.0f);  // it waits for rank 0, which orders the launches
    barrier.arrive_and_wait();
    if (rank == 0) return engine.abort("rank 0 raised ValueError: bad batch");
    const Status outcome = gradients.await(0);
    CHECK_LOCKED(outcome.code() == Code::kAborted);
    CHECK_LOCKED(outcome.text().find("bad batch") != std::string::npos);
  }));
}

}  // namespace hc
