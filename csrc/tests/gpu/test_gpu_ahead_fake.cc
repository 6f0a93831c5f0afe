// Steps that are alike go on while another rank is late, rank 0 as well, and what is called between them starts before
// the buckets that its ranks have not filled; on fakes of CUDA and NCCL: no GPU takes part. The fake says so when
// ranks launch different things, or in another order, on one communicator; values say so when somebody does not wait.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <numeric>
#include <random>

#include "tests/gpu/gpu_gradients.h"
#include "tests/sanitized.h"

namespace hc {

namespace {

using std::chrono::milliseconds;

constexpr int kWarm = 6;

void begin_step(Gradients& gradients, float value) {
  for (int b = 0; b < kBuckets; ++b) gradients.submit(b, value);
}
void end_step(Gradients& gradients) {
  for (int b = 0; b < kBuckets; ++b) CHECK_OK(gradients.await(b));
}
void whole_step(Gradients& gradients, float value) {
  begin_step(gradients, value);
  end_step(gradients);
}
void step_of(Gradients& gradients, float value, float sum) {
  begin_step(gradients, value);
  for (int b = 0; b < kBuckets; ++b) gradients.expect(b, sum);
}

void exchange(Engine& engine, FrameworkOnGpu& gpu, float* mail, int rank, int from, int to) {
  if (rank != from && rank != to) return;
  int64_t handle = 0;
  const bool sends = rank == from;
  CHECK_OK(submit_gpu(engine, gpu, sends ? Op::kSend : Op::kReceive, "", sends ? mail : nullptr, sends ? nullptr : mail,
                      {8}, DType::kF32, &handle, [&](Submission& s) { s.root = sends ? to : from; }));
  CHECK_OK(enqueued(engine, gpu, handle));
  engine.release(handle);
}

}  // namespace

TEST_CASE("fake of CUDA and NCCL: a step of steps that are alike waits on the host for no rank, whichever is late") {
  for (const int late : {0, 2}) {
    CAPTURE(late);
    std::barrier<> barrier(3);
    std::atomic<int> through{0};  // ranks that have ended their step
    World world(3, gpu_settings());
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      FrameworkOnGpu gpu(rank);
      Gradients gradients(engine, gpu);
      for (int warm = 0; warm < kWarm; ++warm) step_of(gradients, 1.0f, 3.0f);
      barrier.arrive_and_wait();
      if (rank == late) {
        const Deadline deadline = Deadline::in(20);
        while (through < 2 && !deadline.passed()) std::this_thread::sleep_for(milliseconds(1));
        CHECK_LOCKED(through == 2);
      }
      whole_step(gradients, 2.0f);
      if (rank != late) {
        const bool busy = gpu.busy();
        CHECK_LOCKED(busy);  // the stream waits instead
        ++through;
      }
      for (int b = 0; b < kBuckets; ++b) gradients.holds(b, 6.0f);
      for (int more = 0; more < 3; ++more) step_of(gradients, 1.0f, 3.0f);
      all_are_here(engine, "end");
    }));
  }
}

TEST_CASE("fake of CUDA and NCCL: what some ranks call between steps starts before buckets that others have filled") {
  World world(4, gpu_settings());
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    int low = 0, high = 0;
    CHECK_OK(engine.add_process_set({0, 1}, &low));
    CHECK_OK(engine.add_process_set({2, 3}, &high));
    Gradients gradients(engine, gpu);
    float* data = gpu.tensor(std::vector<float>(8, 0.0f));
    for (int step = 0; step < 30; ++step) {
      // Ranks 0 and 1 are through the next step's buckets while 2 and 3 still wait here.
      if (rank > 1) std::this_thread::sleep_for(milliseconds(step > 25 ? 20 : 1));
      if (step > 5) CHECK_OK(reduce_now(engine, gpu, "of a pair", data, 8, rank < 2 ? low : high));
      if (step > 10) exchange(engine, gpu, data, rank, 1 + step % 2, 2 - step % 2);
      if (step > 15) exchange(engine, gpu, data, rank, 3, 2);
      step_of(gradients, 1.0f, 4.0f);
    }
    all_are_here(engine, "end");
  }));
}

TEST_CASE("fake of CUDA and NCCL: programs that are the same on all ranks end, whatever they call and whoever is late" *
          doctest::test_suite("long")) {
  constexpr int kSteps = kThreadSanitized ? 35 : 60;
  for (unsigned seed : {0u, 1u, 3u}) {  // with and without each delay
    CAPTURE(seed);
    FakeEnvironment slow(Variables{{"HC_FAKE_DELAY_US", seed % 2 ? "30" : "0"},
                                   {"HC_FAKE_NCCL_IN_PROGRESS_US", seed % 3 ? "0" : "50"},
                                   {"NCCL_LAUNCH_ORDER_IMPLICIT", "1"}});
    World world(4, gpu_settings());
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      FrameworkOnGpu gpu(rank);
      const std::vector<std::vector<int>> members = {{0, 1, 2, 3}, {0, 1}, {2, 3}, {1, 2}, {1, 2, 3}};
      std::vector<int> ids = {0, 0, 0, 0, 0};
      for (size_t s = 1; s < members.size(); ++s) CHECK_OK(engine.add_process_set(members[s], &ids[s]));
      Gradients gradients(engine, gpu);
      float* data = gpu.tensor(std::vector<float>(8, 0.0f));
      std::mt19937 program(seed), mine(seed * 100 + static_cast<unsigned>(rank));
      const auto dawdle = [&] {
        if (mine() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(mine() % 3000));
      };
      for (int step = 0; step < kSteps; ++step) {
        const bool in_between = step > 20 && step % 10 == 0;  // else between the steps
        for (unsigned calls = program() % (step % 4 ? 2 : 5); calls > 0; --calls) {
          const size_t what = program() % 8, from = program() % 4, to = (from + 1 + program() % 3) % 4;
          dawdle();
          if (what >= members.size()) {
            exchange(engine, gpu, data, rank, static_cast<int>(from), static_cast<int>(to));
            continue;
          }
          if (std::find(members[what].begin(), members[what].end(), rank) == members[what].end()) continue;
          CHECK_OK(reduce_now(engine, gpu, "x", data, 8, ids[what]));
        }
        for (int b = 0; b < kBuckets; ++b) {
          dawdle();
          gradients.submit(b, static_cast<float>(step));
          if (in_between && b == 1) CHECK_OK(reduce_now(engine, gpu, "in between", data, 8));
        }
        if (step % 2)
          for (int b = 0; b < kBuckets; ++b) gradients.expect(b, static_cast<float>(4 * step));
        else
          end_step(gradients);
      }
      CHECK_LOCKED(counter(engine, "persistent") == kSteps * kBuckets);
      all_are_here(engine, "end");
    }));
    CHECK(fake_communicators() == 0);
  }
}

TEST_CASE("fake of CUDA and NCCL: a step that differs from those before it is launched as it comes") {
  World world(2, gpu_settings());
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    Gradients gradients(engine, gpu);
    std::mt19937 same(3);
    for (int step = 0; step < 60; ++step) {
      std::vector<int> order(kBuckets);
      std::iota(order.begin(), order.end(), 0);
      if (step % 10 > 7) std::shuffle(order.begin(), order.end(), same);
      if (step % 10 == 9) {  // each is waited for before the next is filled
        for (const int b : order) {
          gradients.submit(b, 1.0f);
          gradients.expect(b, 2.0f);
        }
        continue;
      }
      for (const int b : order) gradients.submit(b, 1.0f);
      for (const int b : order) gradients.expect(b, 2.0f);
    }
    CHECK_LOCKED(counter(engine, "persistent") == 60 * kBuckets);
    all_are_here(engine, "end");
  }));
}

TEST_CASE("fake of CUDA and NCCL: rank 0 takes part in what others have begun of a step that it then withdraws") {
  World world(3, gpu_settings());
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    Gradients gradients(engine, gpu);
    for (int warm = 0; warm < kWarm; ++warm) step_of(gradients, 1.0f, 3.0f);
    if (rank == 0) {  // the others are through this step; rank 0 waits behind what it fills last
      std::this_thread::sleep_for(milliseconds(20));
      gradients.submit(kBuckets - 1, 1.0f);
      std::this_thread::sleep_for(milliseconds(30));
      for (int b = 0; b < kBuckets - 1; ++b) gradients.submit(b, 1.0f);
      for (int b = 0; b < kBuckets; ++b) gradients.expect(b, 3.0f);
    } else {
      step_of(gradients, 1.0f, 3.0f);
    }
    for (int more = 0; more < 3 * kWarm; ++more) step_of(gradients, 1.0f, 3.0f);
    CHECK_LOCKED(counter(engine, "persistent") == (4 * kWarm + 1) * kBuckets);
    all_are_here(engine, "end");
  }));
}

TEST_CASE("fake of CUDA and NCCL: a rank that joins after steps that were alike gives what the others still need") {
  for (const int first : {0, 1, 2}) {
    for (const int more : {1, 3}) {
      CAPTURE(first);
      CAPTURE(more);
      World world(3, gpu_settings());
      CHECK_OK(world.each([&](Engine& engine, int rank) {
        FrameworkOnGpu gpu(rank);
        Gradients gradients(engine, gpu);
        for (int warm = 0; warm < kWarm; ++warm) whole_step(gradients, 1.0f);
        if (rank != first)
          for (int step = 0; step < more; ++step) step_of(gradients, 1.0f, 2.0f);
        CHECK_OK(join(engine, gpu));
        // Announced from now on.
        step_of(gradients, 1.0f, 3.0f);
        all_are_here(engine, "end");
      }));
      CHECK(fake_communicators() == 0);
    }
  }
}

TEST_CASE("fake of CUDA and NCCL: another optimizer comes, and goes, after steps that were alike") {
  World world(2, gpu_settings());
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    Gradients one(engine, gpu);
    for (int warm = 0; warm < kWarm; ++warm) whole_step(one, 1.0f);
    if (rank == 1) std::this_thread::sleep_for(milliseconds(5));
    {
      Gradients two(engine, gpu);
      for (int step = 0; step < 5; ++step) {
        step_of(two, 2.0f, 4.0f);
        step_of(one, 1.0f, 2.0f);
      }
      two.undeclare();
    }
    for (int step = 0; step < kWarm; ++step) whole_step(one, 1.0f);
    if (rank == 0) std::this_thread::sleep_for(milliseconds(20));
    step_of(one, 1.0f, 2.0f);
    one.undeclare();
    Gradients three(engine, gpu);
    for (int step = 0; step < kWarm; ++step) step_of(three, 3.0f, 6.0f);
    all_are_here(engine, "end");
  }));
}

TEST_CASE("fake of CUDA and NCCL: rank 0 shuts down while another rank is in a step that it does not take part in") {
  World world(2, gpu_settings({{"HOROCLONE_LOG_LEVEL", "error"}}));
  (void)world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    Gradients gradients(engine, gpu);
    for (int warm = 0; warm < kWarm; ++warm) step_of(gradients, 1.0f, 2.0f);
    if (rank == 0) return;
    std::this_thread::sleep_for(milliseconds(100));
    begin_step(gradients, 1.0f);
    Status outcome;
    for (int b = 0; b < kBuckets; ++b) {
      Status one = gradients.await(b);
      if (!one.is_ok()) outcome = std::move(one);
    }
    CHECK_LOCKED(outcome.code() == Code::kAborted);
    CHECK_LOCKED(outcome.text().find("rank 0") != std::string::npos);
  });
}

}  // namespace hc
