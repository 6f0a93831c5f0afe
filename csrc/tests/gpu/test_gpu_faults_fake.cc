// What goes wrong on one rank's GPU, on fakes of CUDA and NCCL: no GPU takes part. Each error names the rank, the
// device and the next move, nothing hangs, and tensors in host memory go on where the ranks still agree.
#include <doctest/doctest.h>

#include <atomic>

#include "tests/gpu/gpu_gradients.h"
#include "tests/sanitized.h"

namespace hc {

namespace {

constexpr size_t kMebi = 1u << 20;
constexpr int64_t kShorts = 1 << 20;  // 16-bit integers travel as 32-bit ones: 4 MiB besides

Status average(Engine& engine, FrameworkOnGpu& gpu, int16_t* data, int64_t* handle) {
  return submit_gpu(engine, gpu, Op::kAllreduce, "shorts", data, data, {kShorts}, DType::kI16, handle,
                    [](Submission& s) { s.reduce = Reduce::kAverage; });
}

}  // namespace

TEST_CASE("fake of CUDA and NCCL: memory that the framework's allocator keeps is asked for, and given") {
  FakeEnvironment full(Variables{{"HC_FAKE_MEMORY_BYTES", std::to_string(23 * kMebi)}});
  World world(2, gpu_settings());
  std::atomic<int> gave = 0;  // ranks; the memory is that of all devices, so one may give for both
  CHECK_OK(world.each([&gave](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    const auto cuda = cuda_fake();
    CuPointer kept = 0;  // by the allocator, for nobody
    CHECK_LOCKED(cuda->cuMemAlloc(&kept, 8 * kMebi) == kCuSuccess);
    engine.memory_pressure().offer();
    auto* data = gpu.tensor(std::vector<int16_t>(kShorts, static_cast<int16_t>(2 * rank + 1)));
    all_are_here(engine, "begin");
    int64_t handle = 0;
    CHECK_OK(average(engine, gpu, data, &handle));
    bool done = false;
    Status outcome;
    for (const Deadline deadline = Deadline::in(30); !done && outcome.is_ok() && !deadline.passed();) {
      outcome = engine.wait(handle, 0.02, &done);
      if (!engine.memory_pressure().is_wanted()) continue;
      if (kept) CHECK_LOCKED(cuda->cuMemFree(std::exchange(kept, 0)) == kCuSuccess);
      engine.memory_pressure().gave();
      ++gave;
    }
    CHECK_OK(outcome);
    CHECK_LOCKED(done);
    CHECK_OK(engine.stream_wait(handle, gpu.stream));
    const int16_t last = gpu.read(data, kShorts)[kShorts - 1];
    CHECK_LOCKED(last == 2);
    engine.release(handle);
    if (kept) (void)cuda->cuMemFree(kept);
    all_are_here(engine, "end");
  }));
  CHECK(gave > 0);
}

TEST_CASE("fake of CUDA and NCCL: memory that nobody can give ends the job with a text that says whose it is") {
  FakeEnvironment full(Variables{{"HC_FAKE_MEMORY_BYTES", std::to_string(7 * kMebi)}});
  World world(2, gpu_settings({{"HOROCLONE_LOG_LEVEL", "error"}}));
  (void)world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    auto* data = gpu.tensor(std::vector<int16_t>(kShorts, 1));
    all_are_here(engine, "begin");
    int64_t handle = 0;
    CHECK_OK(average(engine, gpu, data, &handle));
    const Status outcome = enqueued(engine, gpu, handle);
    CHECK_LOCKED(!outcome.is_ok());
    const bool says = outcome.text().find("the GPU of rank ") != std::string::npos &&
                      outcome.text().find("(device ") != std::string::npos &&
                      outcome.text().find("out of memory") != std::string::npos &&
                      outcome.text().find("smaller batches") != std::string::npos;
    if (!says) MESSAGE(outcome.text());
    CHECK_LOCKED(says);
    engine.release(handle);
  });
}

TEST_CASE("fake of CUDA and NCCL: what large results were given goes back to the device, with and without pools") {
  constexpr size_t kRows = 5 * kMebi;  // of each rank: 20 MiB
  for (const char* without : {"0", "1"}) {
    CAPTURE(std::string(without));
    if (kThreadSanitized && without[0] == '1') continue;
    FakeEnvironment environment(Variables{{"HC_FAKE_WITHOUT_POOLS", without}});
    const bool has_pools = without[0] == '0';
    World world(2, gpu_settings());
    CHECK_OK(world.each([has_pools](Engine& engine, int rank) {
      FrameworkOnGpu gpu(rank);
      auto* mine = gpu.tensor(std::vector<int32_t>(kRows, rank + 1));
      auto* all = static_cast<int32_t*>(gpu.memory(2 * kRows * 4));
      for (const size_t rows : {kRows, size_t{100}}) {
        int64_t handle = 0;
        CHECK_OK(submit_gpu(engine, gpu, Op::kAllgather, "rows", mine, nullptr, {static_cast<int64_t>(rows)},
                            DType::kI32, &handle));
        CHECK_OK(enqueued(engine, gpu, handle));
        CHECK_OK(engine.copy_result(handle, 0, all, 2 * rows * 4, gpu.stream));
        engine.release(handle);
        const auto got = gpu.read(all, 2 * rows);
        CHECK_LOCKED(got[rows - 1] == 1);
        CHECK_LOCKED(got[2 * rows - 1] == 2);
        all_are_here(engine, "read");
        gpu.synchronize();
        const int unused = fake_count("unused");
        if (has_pools) CHECK_LOCKED(unused <= (rows == kRows ? 0 : 4096));
        all_are_here(engine, "unused counted");
      }
      engine.trim_memory();  // as a framework asks that has none left
      all_are_here(engine, "trimmed");
      CHECK_LOCKED(fake_count("unused") == 0);
      CHECK_LOCKED(fake_count("memory") == 4);  // `mine` and `all` of each rank
      all_are_here(engine, "memory counted");
      // Nobody takes this one, and it outlives the process set's stream.
      int64_t handle = 0;
      CHECK_OK(submit_gpu(engine, gpu, Op::kAllgather, "left", mine, nullptr, {100}, DType::kI32, &handle));
      CHECK_OK(enqueued(engine, gpu, handle));
    }));
    CHECK(fake_count("memory") == 0);
    CHECK(fake_count("pools") == 0);
    CHECK(fake_count("streams") == 0);
    CHECK(fake_count("events") == 0);
  }
}

TEST_CASE("fake of CUDA: memory that peers map outlives an abort until they have forgotten it") {
  FakeEnvironment slow(Variables{{"HC_FAKE_DELAY_US", "200000@1"}});
  const int before = fake_count("illegal");
  World world(2, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", "peers"},
                               {"HOROCLONE_GPU_PEER_BYTES", "2097152"},
                               {"HOROCLONE_LOG_LEVEL", "error"}}));
  (void)world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    float* data = gpu.tensor(std::vector<float>(1000, 1.0f));
    all_are_here(engine, "begin");
    const int launches = fake_count("launches");
    all_are_here(engine, "counted");
    int64_t handle = 0;
    CHECK_OK(submit_gpu(engine, gpu, Op::kAllreduce, "x", data, data, {1000}, DType::kF32, &handle));
    if (rank == 0) {  // both have packed, and the slow GPU is about to read what lies on this one
      for (const Deadline limit = Deadline::in(60); fake_count("launches") < launches + 4 && !limit.passed();)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      engine.abort("rank 0 raised ValueError: bad batch");
    }
    const Status outcome = enqueued(engine, gpu, handle);
    CHECK_LOCKED(!outcome.is_ok());
    engine.release(handle);
  });
  CHECK(fake_count("illegal") == before);
  for (const Deadline limit = Deadline::in(30); fake_count("memory") > 0 && !limit.passed();)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(fake_count("memory") == 0);
}

TEST_CASE("fake of CUDA and NCCL: an abort overtakes nothing that its rank has done") {
  FakeEnvironment slow(Variables{{"HC_FAKE_DELAY_US", "50000@1"}});
  World world(2, gpu_settings({{"HOROCLONE_LOG_LEVEL", "error"}}));
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    float* data = gpu.tensor(std::vector<float>(1000, 1.0f));
    CHECK_OK(reduce_now(engine, gpu, "x", data, 1000));
    if (rank == 0) {
      gpu.synchronize();
      engine.abort("rank 0 raised ValueError: bad batch");
      return;
    }
    const Status outcome = perform(engine, Op::kBarrier);
    const bool busy = gpu.busy();
    CHECK_LOCKED(!busy);
    CHECK_LOCKED(outcome.text().find("bad batch") != std::string::npos);
    CHECK_LOCKED(gpu.read(data, 1000)[999] == 2.0f);
  }));
}

TEST_CASE("fake of CUDA and NCCL: after an error for good a GPU's tensors are refused, those of the host go on") {
  World world(2, gpu_settings());
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    auto* data = gpu.tensor(std::vector<float>(8, 1.0f));
    CHECK_OK(reduce_now(engine, gpu, "before", data, 8));
    gpu.synchronize();
    all_are_here(engine, "begin");
    if (rank == 0) ::setenv("HC_FAKE_CUDA_STICKY", "cuStreamIsCapturing:1:700", 1);
    all_are_here(engine, "broken");
    int64_t handle = 0;
    const Status refused = submit_gpu(engine, gpu, Op::kAllreduce, "x", data, data, {8}, DType::kF32, &handle);
    CHECK_LOCKED(!refused.is_ok());
    const bool says = refused.text().find("started anew") != std::string::npos &&
                      refused.text().find(text_of("rank ", rank)) != std::string::npos &&
                      refused.text().find(kIsHip ? "HIP error 700" : "CUDA error 700") != std::string::npos;
    if (!says) MESSAGE(refused.text());
    CHECK_LOCKED(says);
    all_are_here(engine, "on the host");
    if (rank == 0) ::unsetenv("HC_FAKE_CUDA_STICKY");
    all_are_here(engine, "end");
  }));
}

TEST_CASE("fake of CUDA and NCCL: a rank that leaves before its step is named where NCCL waits for it") {
  World world(3, gpu_settings({{"HOROCLONE_LOG_LEVEL", "error"}}));
  (void)world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    Gradients gradients(engine, gpu);
    all_are_here(engine, "begin");
    if (rank == 2) return;  // shuts down
    for (int b = 0; b < kBuckets; ++b) gradients.submit(b, 1.0f);
    Status outcome;
    for (int b = 0; b < kBuckets; ++b)
      if (Status one = gradients.await(b); !one.is_ok()) outcome = one;
    // The streams wait; what is called next, or the same, says why.
    int64_t handle = 0;
    std::vector<float> one(1, 1.0f), sum(1);
    if (outcome.is_ok()) outcome = submit(engine, Op::kAllreduce, "next", one, &sum, {1}, &handle);
    if (outcome.is_ok()) outcome = finish(engine, handle);
    CHECK_LOCKED(!outcome.is_ok());
    CHECK_LOCKED(outcome.text().find("rank 2") != std::string::npos);
    for (const Deadline deadline = Deadline::in(30); gpu.busy() && !deadline.passed();)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK_LOCKED(!gpu.busy());
  });
}

}  // namespace hc
