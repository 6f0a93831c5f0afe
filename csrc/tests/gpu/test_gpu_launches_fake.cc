// What launches cost, counted on fakes of CUDA and NCCL: no GPU takes part. NCCL's calls stay in progress for a while
// there, as they do in the original: the state of the communicator says so, and what comes too early is refused.
#include <doctest/doctest.h>

#include <atomic>
#include <barrier>

#include "tests/gpu/gpu_gradients.h"
#include "tests/sanitized.h"

namespace hc {

namespace {

constexpr int kBurst = 8, kSteps = 25;

int fake_groups() {
  const auto library = Library::open(kNcclFake).take();
  return reinterpret_cast<int (*)()>(library->symbol("hc_fake_groups"))();
}

// Eight buckets of one rank, declared.
class Burst {
 public:
  Burst(Engine& engine, FrameworkOnGpu& gpu, int64_t count = 64) : engine_(engine), gpu_(gpu) {
    CHECK_OK(reduce_now(engine, gpu, "a learning step", gpu.tensor(std::vector<float>(3, 1.0f)), 3));
    BucketSet set;
    set.place.is_host = false;
    set.place.index = gpu.device;
    for (int b = 0; b < kBurst; ++b) {
      data_.push_back(gpu.tensor(std::vector<float>(static_cast<size_t>(count), 1.0f)));
      set.buckets.push_back({text_of("bucket", b), reinterpret_cast<std::byte*>(data_.back()), {count}, DType::kF32});
    }
    CHECK_OK(engine.declare(0, set, &id_));
  }
  void submit(int b) { CHECK_OK(engine_.submit_declared(0, id_, b, gpu_.stream, &handles_[b])); }
  Status await(int b) {
    Status outcome = enqueued(engine_, gpu_, handles_[b]);
    engine_.release(handles_[b]);
    return outcome;
  }
  void all_at_once() {
    for (int b = 0; b < kBurst; ++b) submit(b);
    for (int b = 0; b < kBurst; ++b) CHECK_OK(await(b));
  }
  void one_by_one() {
    for (int b = 0; b < kBurst; ++b) {
      submit(b);
      CHECK_OK(await(b));
    }
  }
  float* data(int b) { return data_[static_cast<size_t>(b)]; }

 private:
  Engine& engine_;
  FrameworkOnGpu& gpu_;
  std::vector<float*> data_;
  int id_ = -1;
  int64_t handles_[kBurst] = {};
};

// Reads outside of the lock: the stream may wait for ranks that want it.
template <class T>
void holds(FrameworkOnGpu& gpu, const T* data, size_t count, T value) {
  const T last = gpu.read(data, count)[count - 1];
  CHECK_LOCKED(last == value);
}

}  // namespace

TEST_CASE("fake of CUDA and NCCL: buckets that are ready together go into few groups, while NCCL is in progress") {
  // Long enough for others of a burst to gather.
  FakeEnvironment slow(Variables{{"HC_FAKE_NCCL_IN_PROGRESS_US", "3000"}});
  std::barrier<> barrier(2);
  World world(2, gpu_settings());
  int groups = 0;
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    Burst burst(engine, gpu);
    for (int warm = 0; warm < 5; ++warm) burst.all_at_once();
    barrier.arrive_and_wait();
    if (rank == 0) groups = fake_groups();
    barrier.arrive_and_wait();
    for (int step = 0; step < kSteps; ++step) burst.all_at_once();
    barrier.arrive_and_wait();
    if (rank == 0) groups = fake_groups() - groups;
    all_are_here(engine, "end");
  }));
  MESSAGE("burst of ", kBurst, " buckets: ", static_cast<double>(groups) / (2.0 * kSteps), " groups");
  // One when the first is in, and what has gathered meanwhile; a busy machine may need a few more. Under a sanitizer a
  // bucket may take longer than a group is in progress, so that nothing gathers.
  CHECK(groups <= 2 * kSteps * (kSanitized ? kBurst : 4));
}

TEST_CASE("fake of CUDA and NCCL: a bucket costs at most 12 calls of the driver, and a steady loop makes no event") {
  for (const bool together : {true, false}) {
    CAPTURE(together);
    std::barrier<> barrier(2);
    World world(2, gpu_settings());
    int calls = 0, events = 0;
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      FrameworkOnGpu gpu(rank);
      Burst burst(engine, gpu);
      const auto step = [&] { together ? burst.all_at_once() : burst.one_by_one(); };
      for (int warm = 0; warm < 20; ++warm) {
        step();
        gpu.synchronize();
      }
      barrier.arrive_and_wait();
      if (rank == 0) {
        calls = fake_count("calls");
        events = fake_count("events made");
      }
      barrier.arrive_and_wait();
      for (int n = 0; n < kSteps; ++n) {
        step();
        gpu.synchronize();  // as a training loop that looks at its loss
      }
      barrier.arrive_and_wait();
      if (rank == 0) {
        calls = fake_count("calls") - calls;
        events = fake_count("events made") - events;
      }
      barrier.arrive_and_wait();
      all_are_here(engine, "end");
    }));
    const double each = static_cast<double>(calls) / (2 * kSteps * kBurst);
    const std::string how = together ? "together: " : "one by one: ";
    MESSAGE(how, each, " calls of the driver a bucket; ", events, " events made");
    // Who finds one that is not over asks again; under a sanitizer that is more often.
    CHECK(each <= (kSanitized ? 13 : 12));
    // Now and then more of them are under way than ever before.
    CHECK(events <= (kSteps * kBurst) / 10);
  }
}

TEST_CASE("fake of CUDA and NCCL: ranks that call something else before or after they fill their buckets go on") {
  World world(2, gpu_settings());
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    Burst burst(engine, gpu);
    float* data = gpu.tensor(std::vector<float>(8, 0.0f));
    for (int step = 0; step < 6; ++step) {
      for (int b = 0; b < kBurst / 2; ++b) burst.submit(b);
      if (step % 2 == rank) CHECK_OK(reduce_now(engine, gpu, "in between", data, 8));
      for (int b = kBurst / 2; b < kBurst; ++b) burst.submit(b);
      if (step % 2 != rank) CHECK_OK(reduce_now(engine, gpu, "in between", data, 8));
      for (int b = 0; b < kBurst; ++b) CHECK_OK(burst.await(b));
    }
    all_are_here(engine, "end");
  }));
}

TEST_CASE("fake of CUDA and NCCL: what waits behind a bucket that its rank does not fill ends with a text") {
  World world(2, gpu_settings({{"HOROVOD_STALL_CHECK_TIME_SECONDS", "1"}, {"HOROCLONE_LOG_LEVEL", "error"}}));
  (void)world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    Burst burst(engine, gpu);
    float* data = gpu.tensor(std::vector<float>(8, 0.0f));
    for (int warm = 0; warm < 4; ++warm) burst.all_at_once();
    gpu.synchronize();
    all_are_here(engine, "steady");
    if (rank == 0) burst.all_at_once();
    const Status outcome = reduce_now(engine, gpu, "before the buckets on rank 1 alone", data, 8);
    if (rank == 0 && outcome.is_ok()) return;  // enqueued behind them; its streams end with the abort
    CHECK_LOCKED(!outcome.is_ok());
    const bool says = outcome.text().find("rank 1 has waited") != std::string::npos ||
                      outcome.text().find("rank 1") != std::string::npos;
    if (!says) MESSAGE(outcome.text());
    CHECK_LOCKED(says);
  });
}

TEST_CASE("fake of CUDA and NCCL: a rank that shuts down after its last step waits for slower ones") {
  World world(2, gpu_settings());
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    Burst burst(engine, gpu);
    for (int warm = 0; warm < 4; ++warm) burst.all_at_once();
    gpu.synchronize();
    gpu.write(burst.data(0), std::vector<float>(64, 1.0f));
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    burst.all_at_once();
    if (rank == 1) holds(gpu, burst.data(0), 1, 2.0f);
  }));
}

TEST_CASE("fake of CUDA and NCCL: everything works while NCCL's calls are in progress, with every version") {
  for (const char* version : {"21803", "22602", "22705", "22809", "23200"}) {
    CAPTURE(std::string(version));
    FakeEnvironment slow(Variables{{"HC_FAKE_NCCL_VERSION", version},
                                   {"HC_FAKE_NCCL_IN_PROGRESS_US", "300"},
                                   {"NCCL_LAUNCH_ORDER_IMPLICIT", "1"},
                                   {"HC_FAKE_NCCL_INIT_US", "2000"},
                                   {"HC_FAKE_DELAY_US", "20"}});
    World world(2, gpu_settings());
    CHECK_OK(world.each([](Engine& engine, int rank) {
      FrameworkOnGpu gpu(rank);
      auto memory = engine.allocate_elsewhere(rank, 4096);
      Burst burst(engine, gpu);
      burst.all_at_once();
      auto* floats = gpu.tensor(std::vector<float>(100, static_cast<float>(rank + 1)));
      CHECK_OK(reduce_now(engine, gpu, "scaled", floats, 100, DType::kF32, Reduce::kSum, 0.25));
      holds(gpu, floats, 1, 0.75f);
      CHECK_OK(reduce_now(engine, gpu, "adasum", floats, 100, DType::kF32, Reduce::kAdasum));
      auto* shorts = gpu.tensor(std::vector<int16_t>(50, static_cast<int16_t>(3 + rank)));
      CHECK_OK(reduce_now(engine, gpu, "kernels", shorts, 50, DType::kI16, Reduce::kAverage));
      holds(gpu, shorts, 1, int16_t{3});
      // A message, and a bucket in memory that NCCL is told of.
      auto* mail = gpu.tensor(std::vector<float>(10, static_cast<float>(rank)));
      int64_t handle = 0;
      CHECK_OK(submit_gpu(engine, gpu, rank ? Op::kReceive : Op::kSend, "", rank ? nullptr : mail,
                          rank ? mail : nullptr, {10}, DType::kF32, &handle,
                          [&](Submission& s) { s.root = 1 - rank; }));
      CHECK_OK(enqueued(engine, gpu, handle));
      engine.release(handle);
      holds(gpu, mail, 1, 0.0f);
      if (memory.is_ok()) {
        BucketSet set;
        set.place.is_host = false;
        set.place.index = gpu.device;
        set.buckets.push_back({"registered", memory.value()->data(), {1000}, DType::kF32});
        int id = -1;
        CHECK_OK(engine.declare(0, set, &id));
      }
      burst.all_at_once();
      all_are_here(engine, "end");
    }));
    CHECK(fake_communicators() == 0);
    CHECK(fake_registered("windows") + fake_registered("buffers") == 0);
  }
}

TEST_CASE("fake of CUDA and NCCL: an abort reaches what a blocking call of an old NCCL waits in") {
  FakeEnvironment old(Variables{{"HC_FAKE_NCCL_VERSION", "22602"}});
  std::barrier<> barrier(2);
  World world(2, gpu_settings());
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    auto* data = gpu.tensor(std::vector<float>(8, 1.0f));
    int64_t handle = 0;
    // Rank 1 takes no part in the communicator's making: its device is another one than that of its tensor.
    CHECK_OK(submit_gpu(engine, gpu, Op::kAllreduce, "x", data, data, {8}, DType::kF32, &handle));
    barrier.arrive_and_wait();
    if (rank == 1) return engine.abort("rank 1 raised ValueError: bad batch");
    const Status outcome = enqueued(engine, gpu, handle);
    if (!outcome.is_ok()) CHECK_LOCKED(outcome.text().find("bad batch") != std::string::npos);
    engine.release(handle);
  }));
  CHECK(fake_communicators() == 0);
}

TEST_CASE("fake of CUDA and NCCL: large copies within the device are the driver's, small ones a kernel's") {
  World world(2, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", "peers"}, {"HOROCLONE_GPU_PEER_BYTES", "8388608"}}));
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    constexpr size_t kLarge = 1u << 19;  // floats: 2 MiB
    auto* small = gpu.tensor(std::vector<float>(64, 1.0f));
    auto* large = gpu.tensor(std::vector<float>(kLarge, 1.0f));
    CHECK_OK(reduce_now(engine, gpu, "small", small, 64));
    all_are_here(engine, "one");
    const int before = fake_count("copies");
    all_are_here(engine, "two");
    CHECK_OK(reduce_now(engine, gpu, "large", large, kLarge));
    holds(gpu, large, kLarge, 2.0f);
    all_are_here(engine, "three");
    CHECK_LOCKED(fake_count("copies") - before == 4);  // in and out, of both ranks
    all_are_here(engine, "end");
  }));
}

}  // namespace hc
