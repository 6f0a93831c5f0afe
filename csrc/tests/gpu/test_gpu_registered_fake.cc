// Buckets in memory that NCCL is told of in advance, on fakes of CUDA and NCCL: no GPU takes part. The fake counts
// what communicators know, and memory that is freed while they do.
#include <doctest/doctest.h>

#include <algorithm>
#include <barrier>
#include <thread>

#include "tests/gpu/gpu_gradients.h"

namespace hc {

namespace {

constexpr int64_t kCount = 5000;

// Declares one bucket in `at` and reduces it a few times.
int declare_and_reduce(Engine& engine, FrameworkOnGpu& gpu, void* at) {
  BucketSet set;
  set.place.is_host = false;
  set.place.index = gpu.device;
  set.buckets.push_back({"bucket", static_cast<std::byte*>(at), {kCount}, DType::kF32});
  int id = -1;
  CHECK_OK(engine.declare(0, set, &id));
  auto* data = static_cast<float*>(at);
  for (int step = 0; step < 3; ++step) {
    gpu.write(data, std::vector<float>(kCount, static_cast<float>(step + 1)));
    int64_t handle = 0;
    CHECK_OK(engine.submit_declared(0, id, 0, gpu.stream, &handle));
    CHECK_OK(enqueued(engine, gpu, handle));
    engine.release(handle);
    const float last = gpu.read(data, kCount)[kCount - 1];  // outside of the lock: it may wait for the other rank
    CHECK_LOCKED(last == static_cast<float>(2 * (step + 1)));
  }
  return id;
}

void learning_step(Engine& engine, FrameworkOnGpu& gpu) {
  CHECK_OK(reduce_now(engine, gpu, "a learning step", gpu.tensor(std::vector<float>(3, 1.0f)), 3));
}

}  // namespace

TEST_CASE("fake of CUDA and NCCL: buckets are registered as this version of NCCL can, and forgotten in time" *
          doctest::skip(kIsHip)) {
  struct Row {
    const char* version;
    int windows, buffers;
    const char* reason;
    const char* without_windows = "0";
  };
  const Row rows[] = {{"22809", 2, 0, nullptr},
                      {"23007", 0, 2, nullptr, "1"},  // success, but no window: a buffer then
                      {"22602", 0, 2, nullptr},
                      {"21805", 0, 0, "2.18.5"}};
  for (const Row& row : rows) {
    CAPTURE(row.version);
    FakeEnvironment version(Variables{{"HC_FAKE_NCCL_VERSION", row.version},
                                      {"HC_FAKE_NCCL_WITHOUT_WINDOWS", row.without_windows},
                                      {"HC_FAKE_NCCL_IN_PROGRESS_US", "100"},
                                      {"HC_FAKE_DELAY_US", "50"}});
    for (const bool undeclared : {true, false}) {
      World world(2, gpu_settings());
      std::barrier<> barrier(2);
      std::shared_ptr<Memory> kept[2];
      CHECK_OK(world.each([&](Engine& engine, int rank) {
        FrameworkOnGpu gpu(rank);
        auto memory = engine.allocate_elsewhere(rank, kCount * sizeof(float));
        CHECK_LOCKED(memory.is_ok() == (row.reason == nullptr));
        if (row.reason) {
          CHECK_LOCKED(memory.status().code() == Code::kUnsupported);
          CHECK_LOCKED(memory.status().text().find(row.reason) != std::string::npos);
          return;
        }
        kept[rank] = memory.take();
        learning_step(engine, gpu);
        const int id = declare_and_reduce(engine, gpu, kept[rank]->data());
        barrier.arrive_and_wait();
        CHECK_LOCKED(fake_registered("windows") == row.windows);
        CHECK_LOCKED(fake_registered("buffers") == row.buffers);
        barrier.arrive_and_wait();
        if (undeclared) {
          CHECK_OK(engine.undeclare(0, id));
          kept[rank].reset();
          // A rank alone tells NCCL nothing: all are together when buckets are declared.
          CHECK_LOCKED(fake_registered("windows") + fake_registered("buffers") == 2);
          barrier.arrive_and_wait();
          (void)declare_and_reduce(engine, gpu, gpu.memory(kCount * sizeof(float)));
          barrier.arrive_and_wait();
          CHECK_LOCKED(fake_registered("windows") + fake_registered("buffers") == 0);
          CHECK_LOCKED(fake_registered("blocks") == 0);
        }
        all_are_here(engine, "end");
      }));
      CHECK(fake_registered("windows") + fake_registered("buffers") == 0);  // also when nobody undeclared
      for (auto& memory : kept) memory.reset();
      CHECK(fake_registered("blocks") == 0);
      CHECK(fake_registered("freed while known") == 0);
    }
  }
}

TEST_CASE("fake of CUDA and NCCL: buckets that ranks drop at different moments are forgotten by all at once" *
          doctest::skip(kIsHip)) {
  World world(2, gpu_settings());
  std::barrier<> barrier(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    learning_step(engine, gpu);
    auto memory = engine.allocate_elsewhere(rank, kCount * sizeof(float)).take();
    const int first = declare_and_reduce(engine, gpu, memory->data());
    memory.reset();
    if (rank == 0) CHECK_OK(engine.undeclare(0, first));
    const int second = declare_and_reduce(engine, gpu, gpu.memory(kCount * sizeof(float)));
    barrier.arrive_and_wait();
    CHECK_LOCKED(fake_registered("windows") == 2);  // rank 1 still has them
    barrier.arrive_and_wait();
    if (rank == 1) CHECK_OK(engine.undeclare(0, first));
    CHECK_OK(engine.undeclare(0, second));
    (void)declare_and_reduce(engine, gpu, gpu.memory(kCount * sizeof(float)));
    barrier.arrive_and_wait();
    CHECK_LOCKED(fake_registered("windows") == 0);
    CHECK_LOCKED(fake_registered("blocks") == 0);
    all_are_here(engine, "end");
  }));
}

TEST_CASE("fake of CUDA and NCCL: while NCCL is told of buckets other work goes on, and an abort is noticed" *
          doctest::skip(kIsHip)) {
  constexpr double kTakesS = 2;  // whatever NCCL is called for
  FakeEnvironment slow(Variables{{"HC_FAKE_NCCL_IN_PROGRESS_US", std::to_string(int(kTakesS * 1e6))}});
  for (const bool aborts : {false, true}) {
    CAPTURE(aborts);
    World world(2, gpu_settings());
    (void)world.each([&](Engine& engine, int rank) {
      FrameworkOnGpu gpu(rank);
      learning_step(engine, gpu);
      auto memory = engine.allocate_elsewhere(rank, kCount * sizeof(float)).take();
      double longest_s = 0;
      std::thread beside([&] {
        for (int i = 0; i < 150; ++i) {
          const std::vector<int32_t> one = {1};
          std::vector<int32_t> sum(1);
          const TimePoint began = Clock::now();
          if (!perform(engine, Op::kAllreduce, text_of("beside ", i), one, &sum, {1}).is_ok()) return;
          longest_s = std::max(longest_s, seconds_between(began, Clock::now()));
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          if (aborts && rank == 1 && fake_registered("windows") == 2)
            return engine.abort("rank 1 raised ValueError: bad batch");
        }
      });
      BucketSet set;
      set.place.is_host = false;
      set.place.index = rank;
      set.buckets.push_back({"bucket", memory->data(), {kCount}, DType::kF32});
      int id = -1;
      const TimePoint began = Clock::now();
      const Status declared = engine.declare(0, set, &id);
      const double took_s = seconds_between(began, Clock::now());
      beside.join();
      CHECK_LOCKED(declared.is_ok() == !aborts);
      if (aborts) CHECK_LOCKED(declared.text().find("bad batch") != std::string::npos);
      if (!aborts) CHECK_LOCKED(took_s >= kTakesS);
      if (!aborts) CHECK_LOCKED(longest_s < kTakesS * 0.9);
      memory.reset();
    });
    CHECK(fake_registered("freed while known") == 0);
    CHECK(fake_registered("blocks") == 0);
  }
}

TEST_CASE("fake of CUDA and NCCL: while a thread allocates memory that NCCL is to know the others' work goes on" *
          doctest::skip(kIsHip)) {
  constexpr double kTakesS = 1.5;
  FakeEnvironment slow(Variables{{"HC_FAKE_NCCL_ALLOC_US", std::to_string(int(kTakesS * 1e6))}});
  World world(2, gpu_settings());
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    learning_step(engine, gpu);
    Status allocated;
    std::thread beside([&] { allocated = engine.allocate_elsewhere(rank, 4096).status(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const TimePoint began = Clock::now();
    learning_step(engine, gpu);
    const double took_s = seconds_between(began, Clock::now());
    beside.join();
    CHECK_OK(allocated);
    CHECK_LOCKED(took_s < kTakesS * 0.8);
    all_are_here(engine, "end");
  }));
}

// NCCL's kernels for windows only sum. The fake says so when ranks launch different ones.
TEST_CASE("fake of CUDA and NCCL: averages in windows are sums to NCCL, also beside ranks that have joined" *
          doctest::skip(kIsHip)) {
  const auto step = [](Gradients& gradients, float average) {
    for (int b = 0; b < kBuckets; ++b) {  // one by one, so that they are not packed
      gradients.submit(b, 3.0f);
      gradients.expect(b, average);
    }
  };
  for (const char* version : {"22809", "22602"})
    for (const int joins_first : {0, 1}) {
      CAPTURE(version);
      CAPTURE(joins_first);
      FakeEnvironment environment(Variables{{"HC_FAKE_NCCL_VERSION", version}});
      const int before = fake_collectives(5);
      World world(3, gpu_settings());
      CHECK_OK(world.each([&](Engine& engine, int rank) {
        FrameworkOnGpu gpu(rank);
        Gradients gradients(engine, gpu, 0, true);
        for (int i = 0; i < 6; ++i) step(gradients, 3.0f);
        if (rank != joins_first)
          for (int i = 0; i < 3; ++i) step(gradients, 2.0f);
        else  // the others have begun a bucket by then, which it takes part in
          std::this_thread::sleep_for(std::chrono::milliseconds(300));
        CHECK_OK(join(engine, gpu));
        step(gradients, 3.0f);
        all_are_here(engine, "end");
      }));
      const bool has_windows = std::string(version) == "22809";
      CHECK((fake_collectives(5) > before) == has_windows);
    }
}

TEST_CASE("fake of CUDA and NCCL: buckets of which one rank has other memory are registered by nobody" *
          doctest::skip(kIsHip)) {
  World world(2, gpu_settings());
  std::barrier<> barrier(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    learning_step(engine, gpu);
    auto memory = engine.allocate_elsewhere(rank, kCount * sizeof(float)).take();
    (void)declare_and_reduce(engine, gpu, rank ? memory->data() : gpu.memory(kCount * sizeof(float)));
    barrier.arrive_and_wait();
    CHECK_LOCKED(fake_registered("windows") == 0);
    all_are_here(engine, "end");
  }));
  CHECK(fake_registered("blocks") == 0);
}

TEST_CASE("fake of CUDA and NCCL: registered memory outlives an abort, and can be switched off" *
          doctest::skip(kIsHip)) {
  World world(2, gpu_settings());
  std::barrier<> barrier(2);
  (void)world.each([&](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    learning_step(engine, gpu);
    auto memory = engine.allocate_elsewhere(rank, kCount * sizeof(float)).take();
    (void)declare_and_reduce(engine, gpu, memory->data());
    memory.reset();  // the declaration has it
    barrier.arrive_and_wait();
    if (rank == 1) engine.abort("rank 1 raised ValueError: bad batch");
  });
  CHECK(fake_registered("freed while known") == 0);
  CHECK(fake_registered("blocks") == 0);
  World off(1, gpu_settings({{"HOROCLONE_GPU_REGISTER", "0"}}));
  CHECK_OK(off.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    CHECK_LOCKED(engine.allocate_elsewhere(0, 4096).status().text().find("HOROCLONE_GPU_REGISTER") !=
                 std::string::npos);
  }));
}

}  // namespace hc
