// Operations on device memory, on fakes of CUDA and NCCL: no GPU takes part. Ranks are engines in threads, each with
// a "device" of its own; streams are threads with delays, so that whoever forgets to wait reads old values.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <latch>
#include <numeric>
#include <random>
#include <thread>

#include "base/log_lines.h"
#include "tests/gpu/gpu_gradients.h"

namespace hc {

namespace {

int element(size_t i, int rank, int salt) {
  return static_cast<int>(1 + (i * 7 + static_cast<size_t>(rank * 3 + salt)) % 5);
}

template <class T>
std::vector<T> filled(size_t count, int rank, int salt = 0) {
  std::vector<T> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<T>(element(i, rank, salt));
  return values;
}

// The reduction over `size` ranks of filled(), element i.
double expected(Reduce reduce, size_t i, int size, int salt = 0) {
  double total = 0;
  for (int r = 0; r < size; ++r) {
    const double v = element(i, r, salt);
    if (r == 0)
      total = v;
    else if (reduce == Reduce::kMin)
      total = std::min(total, v);
    else if (reduce == Reduce::kMax)
      total = std::max(total, v);
    else if (reduce == Reduce::kProduct)
      total *= v;
    else
      total += v;
  }
  return reduce == Reduce::kAverage ? total / size : total;
}

}  // namespace

TEST_CASE("fake of CUDA and NCCL: the host does not wait for the device, streams do") {
  FakeEnvironment slow(Variables{{"HC_FAKE_DELAY_US", "60000"}});
  World world(2, gpu_settings());
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    const auto first = filled<float>(64, rank);
    float* data = gpu.tensor(first);
    CHECK_OK(reduce_now(engine, gpu, "warm", data, 64));  // the communicator comes up
    (void)gpu.read(data, 64);
    gpu.write(data, first);
    // Late on the producer's stream: the input is written by what is queued there now.
    CHECK(gpu.busy());
    CHECK_OK(reduce_now(engine, gpu, "late", data, 64));
    CHECK(gpu.busy());  // enqueued, and the input itself was not there yet
    const auto got = gpu.read(data, 64);
    for (size_t i = 0; i < 64; ++i) CHECK(got[i] == expected(Reduce::kSum, i, 2));
  }));
}

TEST_CASE("fake of CUDA and NCCL: many small and some large tensors, one by one and as a group") {
  FakeEnvironment slow(Variables{{"HC_FAKE_DELAY_US", "100"}});
  World world(3, gpu_settings());
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    constexpr size_t kTensors = 40;
    std::vector<std::vector<float>> values;
    std::vector<float*> data;
    for (size_t t = 0; t < kTensors; ++t) {
      values.push_back(filled<float>(t % 10 == 3 ? 100000 : 1 + 13 * t, rank, static_cast<int>(t)));
      data.push_back(gpu.tensor(values.back()));
    }
    std::vector<int64_t> handles(kTensors);
    for (size_t k = 0; k < kTensors; ++k) {  // every rank in an order of its own
      const size_t t = (k * 7 + static_cast<size_t>(rank) * 11) % kTensors;
      const auto count = static_cast<int64_t>(values[t].size());
      CHECK_OK(submit_gpu(engine, gpu, Op::kAllreduce, text_of("g", t), data[t], data[t], {count}, DType::kF32,
                          &handles[t], [](Submission& s) { s.reduce = Reduce::kSum; }));
    }
    for (const int64_t handle : handles) {
      CHECK_OK(enqueued(engine, gpu, handle));
      engine.release(handle);
    }
    for (size_t t = 0; t < kTensors; ++t) {
      const auto got = gpu.read(data[t], values[t].size());
      const size_t last = got.size() - 1;
      CHECK(got[0] == expected(Reduce::kSum, 0, 3, static_cast<int>(t)));
      CHECK(got[last] == expected(Reduce::kSum, last, 3, static_cast<int>(t)));
    }
    // As a group, of two dtypes.
    const auto a = filled<float>(10, rank);
    const auto b = filled<double>(20, rank);
    float* on_a = gpu.tensor(a);
    double* on_b = gpu.tensor(b);
    const int64_t ten[] = {10}, twenty[] = {20};
    const Submission::Tensor tensors[] = {{on_a, on_a, ten, DType::kF32}, {on_b, on_b, twenty, DType::kF64}};
    Submission s;
    s.name = "group";
    s.reduce = Reduce::kSum;
    s.tensors = tensors;
    gpu.place(&s);
    int64_t handle = 0;
    CHECK_OK(engine.submit(s, &handle));
    CHECK_OK(enqueued(engine, gpu, handle));
    engine.release(handle);
    CHECK(gpu.read(on_a, 10)[9] == expected(Reduce::kSum, 9, 3));
    CHECK(gpu.read(on_b, 20)[19] == expected(Reduce::kSum, 19, 3));
  }));
}

TEST_CASE("fake of CUDA and NCCL: operations that move rows, equal and not, and what one rank gets") {
  FakeEnvironment slow(Variables{{"HC_FAKE_DELAY_US", "200"}});
  for (const char* backend : {"nccl", "peers", "host"}) {
    CAPTURE(backend);
    World world(3, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", backend}}));
    CHECK_OK(world.each([](Engine& engine, int rank) {
      FrameworkOnGpu gpu(rank);
      int64_t handle = 0;
      const auto take = [&](size_t count) {
        std::vector<int32_t> none(count);
        int32_t* to = gpu.tensor(none);
        CHECK_OK(enqueued(engine, gpu, handle));
        CHECK_OK(engine.copy_result(handle, 0, to, count * 4, gpu.stream));
        engine.release(handle);
        return gpu.read(to, count);
      };
      // Rank r gives r rows of two; then everybody the same.
      const std::vector<int32_t> rows(static_cast<size_t>(rank) * 2, rank + 10);
      const void* in = gpu.tensor(rows);
      CHECK_OK(submit_gpu(engine, gpu, Op::kAllgather, "v", in, nullptr, {rank, 2}, DType::kI32, &handle));
      CHECK(take(6) == std::vector<int32_t>{11, 11, 12, 12, 12, 12});
      const std::vector<int32_t> even(4, rank);
      const void* four = gpu.tensor(even);
      CHECK_OK(submit_gpu(engine, gpu, Op::kAllgather, "e", four, nullptr, {4}, DType::kI32, &handle));
      CHECK(take(12) == std::vector<int32_t>{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2});
      // Four rows over three ranks: the first has two.
      const std::vector<int32_t> ramp = {1, 2, 3, 4};
      const void* on_ramp = gpu.tensor(ramp);
      const auto sum = [](Submission& s) { s.reduce = Reduce::kSum; };
      CHECK_OK(submit_gpu(engine, gpu, Op::kReducescatter, "s", on_ramp, nullptr, {4}, DType::kI32, &handle, sum));
      CHECK(take(rank == 0 ? 2 : 1) ==
            (rank == 0 ? std::vector<int32_t>{3, 6} : std::vector<int32_t>{rank == 1 ? 9 : 12}));
      // Rank r sends r rows to rank 0, one to the others.
      const std::vector<int32_t> out(static_cast<size_t>(rank) + 2, rank);
      const void* on_out = gpu.tensor(out);
      const int64_t splits[] = {rank, 1, 1};
      CHECK_OK(submit_gpu(engine, gpu, Op::kAlltoall, "a", on_out, nullptr, {rank + 2}, DType::kI32, &handle,
                          [&](Submission& s) { s.splits = splits; }));
      CHECK(take(3) == (rank == 0 ? std::vector<int32_t>{1, 2, 2} : std::vector<int32_t>{0, 1, 2}));
      // Everybody's rows to rank 2, and their sum to rank 1.
      const void* again = gpu.tensor(rows);
      const auto to_last = [](Submission& s) { s.root = 2; };
      CHECK_OK(submit_gpu(engine, gpu, Op::kGather, "t", again, nullptr, {rank, 2}, DType::kI32, &handle, to_last));
      CHECK(take(rank == 2 ? 6 : 0) ==
            (rank == 2 ? std::vector<int32_t>{11, 11, 12, 12, 12, 12} : std::vector<int32_t>{}));
      const std::vector<float> part(300, static_cast<float>(rank) + 1);
      const float* on_part = gpu.tensor(part);
      float* total = static_cast<float*>(gpu.memory(300 * sizeof(float)));
      CHECK_OK(submit_gpu(engine, gpu, Op::kReduce, "r", on_part, rank == 1 ? total : nullptr, {300}, DType::kF32,
                          &handle, [](Submission& s) {
                            s.root = 1;
                            s.reduce = Reduce::kAverage;
                          }));
      CHECK_OK(enqueued(engine, gpu, handle));
      engine.release(handle);
      if (rank == 1) CHECK(gpu.read(total, 300) == std::vector<float>(300, 2.0f));
      CHECK(gpu.read(on_part, 300) == part);
      // Broadcast of bool, in place.
      const std::vector<uint8_t> flags(5000, rank == 1);
      uint8_t* on_flags = gpu.tensor(flags);
      CHECK_OK(submit_gpu(engine, gpu, Op::kBroadcast, "b", on_flags, on_flags, {5000}, DType::kBool, &handle,
                          [](Submission& s) { s.root = 1; }));
      CHECK_OK(enqueued(engine, gpu, handle));
      engine.release(handle);
      CHECK(gpu.read(on_flags, 5000) == std::vector<uint8_t>(5000, 1));
    }));
    CHECK(fake_count("memory") == 0);
  }
}

TEST_CASE("fake of CUDA and NCCL: process sets that share ranks start their work in one order") {
  FakeEnvironment slow(Variables{{"HC_FAKE_DELAY_US", "50"}});
  World world(3, gpu_settings());
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    std::vector<std::vector<int>> members = {{0, 1, 2}, {0, 1}, {1, 2}, {0, 2}};
    std::vector<int> ids = {0};
    for (size_t s = 1; s < members.size(); ++s) {
      ids.push_back(0);
      CHECK_OK(engine.add_process_set(members[s], &ids.back()));
    }
    constexpr int kRounds = 25;
    const std::vector<float> one(32, 1.0f);
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int round = 0; round < kRounds; ++round) {
      std::vector<size_t> order(members.size());
      std::iota(order.begin(), order.end(), 0u);
      std::shuffle(order.begin(), order.end(), random);
      std::vector<std::pair<size_t, int64_t>> handles;
      std::vector<float*> data(members.size());
      for (const size_t s : order) {
        if (std::find(members[s].begin(), members[s].end(), rank) == members[s].end()) continue;
        data[s] = gpu.tensor(one);
        int64_t handle = 0;
        CHECK_OK(submit_gpu(engine, gpu, Op::kAllreduce, "x", data[s], data[s], {32}, DType::kF32, &handle,
                            [&](Submission& sub) {
                              sub.process_set = ids[s];
                              sub.reduce = Reduce::kSum;
                            }));
        handles.emplace_back(s, handle);
      }
      for (const auto& [s, handle] : handles) {
        CHECK_OK(enqueued(engine, gpu, handle));
        engine.release(handle);
        CHECK(gpu.read(data[s], 32)[31] == static_cast<float>(members[s].size()));
      }
    }
    // Each rank has a stream of its own, before all others, and a communicator for each of its sets.
    all_are_here(engine, "before counting");
    CHECK(fake_count("urgent streams") == 3 + 2 + 2 + 2);
    CHECK(fake_communicators() == 3 + 2 + 2 + 2);
    all_are_here(engine, "after counting");
    CHECK_OK(engine.remove_process_set(ids[2]));
  }));
  CHECK(fake_count("streams") == 0);
  CHECK(fake_communicators() == 0);
}

TEST_CASE("fake of CUDA and NCCL: a joined rank takes part with identity elements, and goes on with its GPU") {
  for (const auto& [backend, used_before] :
       std::vector<std::pair<std::string, bool>>{{"auto", true}, {"auto", false}, {"host", true}, {"host", false}}) {
    CAPTURE(backend);
    CAPTURE(used_before);
    World world(2, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", backend}}));
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      FrameworkOnGpu gpu(rank);
      const auto ones = std::vector<float>(50, 1.0f);
      if (used_before) CHECK_OK(reduce_now(engine, gpu, "before", gpu.tensor(ones), 50));
      int64_t join = 0;
      const auto on_gpu = [&](Submission& s) {
        gpu.place(&s);
        s.tensors = {};
        if (!used_before) s.place.is_host = true;
      };
      if (rank == 0) {
        CHECK_OK(submit<float>(engine, Op::kJoin, "", {}, nullptr, {}, &join, on_gpu));
      } else {
        for (const Reduce reduce : {Reduce::kSum, Reduce::kMin, Reduce::kProduct}) {
          float* data = gpu.tensor(ones);
          int64_t handle = 0;
          CHECK_OK(submit_gpu(engine, gpu, Op::kAllreduce, text_of("alone", name_of(reduce)), data, data, {50},
                              DType::kF32, &handle, [&](Submission& s) { s.reduce = reduce; }));
          CHECK_OK(enqueued(engine, gpu, handle));
          engine.release(handle);
          CHECK(gpu.read(data, 50)[49] == 1.0f);
        }
        CHECK_OK(submit<float>(engine, Op::kJoin, "", {}, nullptr, {}, &join, on_gpu));
      }
      CHECK_OK(finish(engine, join));
      CHECK(engine.finished(join)->join_rank == 1);
      engine.release(join);
      float* data = gpu.tensor(ones);
      CHECK_OK(reduce_now(engine, gpu, "after", data, 50));
      CHECK(gpu.read(data, 50)[49] == 2.0f);
    }));
  }
}

TEST_CASE("fake of CUDA and NCCL: without NCCL the data goes through host memory, or an error says why") {
  struct Row {
    Settings settings;
    std::map<std::string, std::string> environment;
    std::string why;
    bool same_device = false;
  };
  const std::vector<Row> rows = {
      {{{"HOROCLONE_NCCL_LIBRARY", "/nowhere/libnccl.so.2"}}, {}, "names this file); unset it"},
      {{}, {{"HC_FAKE_NCCL_VERSION", "21304"}}, "too old"},
      {{}, {}, "rank 0 and rank 1 use the same GPU", true},
  };
  for (const Row& row : rows)
    for (const bool demanded : {false, true}) {
      CAPTURE(row.why);
      FakeEnvironment environment(row.environment);
      Settings settings = row.settings;
      if (demanded) settings.emplace_back("HOROCLONE_GPU_OPERATIONS", "nccl");
      settings.emplace_back("HOROCLONE_LOG_LEVEL", "error");
      World world(2, gpu_settings(settings));
      CHECK_OK(world.each([&](Engine& engine, int rank) {
        FrameworkOnGpu gpu(row.same_device ? 0 : rank);
        const auto mine = filled<float>(300, rank);
        float* data = gpu.tensor(mine);
        const Status outcome = reduce_now(engine, gpu, "x", data, 300);
        if (demanded) {
          CHECK(outcome.code() == Code::kUnsupported);
          CHECK(outcome.text().find(row.why) != std::string::npos);
        } else {
          CHECK_OK(outcome);
          CHECK(gpu.read(data, 300)[299] == expected(Reduce::kSum, 299, 2));
        }
        // The runtime stays usable.
        const std::vector<int32_t> one = {1};
        std::vector<int32_t> two(1);
        CHECK_OK(
            perform(engine, Op::kAllreduce, "host", one, &two, {1}, [](Submission& s) { s.reduce = Reduce::kSum; }));
        CHECK(two[0] == 2);
      }));
    }
}

TEST_CASE("fake of CUDA and NCCL: one name on a GPU here and in host memory there is a mismatch") {
  World world(2, gpu_settings());
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    const std::vector<float> values(8, 1.0f);
    std::vector<float> out(8);
    int64_t handle = 0;
    float* data = gpu.tensor(values);
    if (rank == 0)
      CHECK_OK(submit_gpu(engine, gpu, Op::kAllreduce, "w", data, data, {8}, DType::kF32, &handle));
    else
      CHECK_OK(submit(engine, Op::kAllreduce, "w", values, &out, {8}, &handle));
    const Status outcome = finish(engine, handle);
    CHECK(outcome.code() == Code::kMismatch);
    CHECK(outcome.text().find("'w'") != std::string::npos);
    CHECK(outcome.text().find("rank 0") != std::string::npos);
    CHECK(outcome.text().find("rank 1") != std::string::npos);
    CHECK(outcome.text().find("GPU") != std::string::npos);
    engine.release(handle);
    CHECK_OK(reduce_now(engine, gpu, "after", data, 8));
  }));
}

TEST_CASE("fake of CUDA and NCCL: one process drives one GPU, and makes no context") {
  const int contexts = fake_count("contexts", 3);
  World world(1, gpu_settings());
  CHECK_OK(world.each([](Engine& engine, int) {
    FrameworkOnGpu first(0), second(1);
    const std::vector<float> values(8, 1.0f);
    CHECK_OK(reduce_now(engine, first, "a", first.tensor(values), 8));
    const Status refused = reduce_now(engine, second, "b", second.tensor(values), 8);
    CHECK(refused.code() == Code::kUnsupported);
    CHECK(refused.text().find("device 1") != std::string::npos);
    CHECK(refused.text().find("device 0") != std::string::npos);
    CHECK(refused.text().find("one process drives one GPU") != std::string::npos);
    CHECK_OK(reduce_now(engine, first, "c", first.tensor(values), 8));
  }));
  World other(1, gpu_settings());
  CHECK_OK(other.each([](Engine& engine, int) {
    FrameworkOnGpu gpu(0);
    const std::vector<float> values(8, 1.0f);
    int64_t handle = 0;
    float* data = gpu.tensor(values);
    const Status refused = submit_gpu(engine, gpu, Op::kAllreduce, "x", data, data, {8}, DType::kF32, &handle,
                                      [](Submission& s) { s.place.index = 3; });
    CHECK(refused.code() == Code::kUnsupported);
    CHECK(refused.text().find(kIsHip ? "no HIP context" : "no CUDA context") != std::string::npos);
  }));
  CHECK(fake_count("contexts", 3) == contexts);
}

TEST_CASE("fake of CUDA and NCCL: an error that NCCL reports later ends the job with its words") {
  FakeEnvironment failing(Variables{{"HC_FAKE_NCCL_FAIL", "1:3:6"}});
  for (const bool will_wait : {false, true}) {  // true: hc-engine is not woken for an operation
    CAPTURE(will_wait);
    World world(2, gpu_settings({{"HOROCLONE_STALL_CHECK_TIME_SECONDS", "0.2"}}));
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      FrameworkOnGpu gpu(rank);
      const std::vector<float> values(8, 1.0f);
      Status outcome;
      for (int i = 0; i < 200 && outcome.is_ok(); ++i) {
        outcome = reduce_now(engine, gpu, text_of("x", i), gpu.tensor(values), 8, 0, will_wait);
        gpu.synchronize();  // ends although the other rank never comes: the communicator is aborted
      }
      CHECK(!outcome.is_ok());
      CHECK_MESSAGE(outcome.text().find("remote process exited or there was a network error") != std::string::npos,
                    outcome.text());
    }));
    CHECK(fake_count("memory") == 0);
  }
}

TEST_CASE("fake of CUDA and NCCL: when a rank aborts, streams that wait for it go on") {
  World world(2, gpu_settings());
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    const std::vector<float> values(8, 1.0f);
    float* data = gpu.tensor(values);
    CHECK_OK(reduce_now(engine, gpu, "first", data, 8));
    gpu.synchronize();
    int64_t handle = 0;
    CHECK_OK(submit_gpu(engine, gpu, Op::kAllreduce, "second", data, data, {8}, DType::kF32, &handle));
    if (rank == 1) {
      (void)enqueued(engine, gpu, handle);
      engine.abort("rank 1 raised ValueError: bad batch");
      gpu.synchronize();
      return;
    }
    (void)enqueued(engine, gpu, handle);
    gpu.synchronize();
    Status outcome;
    for (int i = 0; i < 1000 && outcome.is_ok(); ++i) {
      outcome = reduce_now(engine, gpu, text_of("alone", i), data, 8);
      gpu.synchronize();
    }
    CHECK(outcome.code() == Code::kAborted);
    CHECK(outcome.text().find("bad batch") != std::string::npos);
  }));
}

TEST_CASE("fake of CUDA and NCCL: ranks on one GPU beside idle ones are told once how each gets its own") {
  struct Row {
    const char* devices;
    int device_of_rank_1;
    ptrdiff_t told;
  };
  for (const Row& row : {Row{"4", 0, 1}, Row{"4", 1, 0}, Row{"1", 0, 0}}) {
    CAPTURE(row.devices);
    CAPTURE(row.device_of_rank_1);
    FakeEnvironment devices(Variables{{"HC_FAKE_DEVICES", row.devices}});
    LogLines& log = LogLines::of_process();
    log.begin();
    {
      World world(2, gpu_settings());
      CHECK_OK(world.each([&](Engine& engine, int rank) {
        FrameworkOnGpu gpu(rank == 0 ? 0 : row.device_of_rank_1);
        float* data = gpu.tensor(std::vector<float>(8, 1.0f));
        for (const char* name : {"a", "b"}) CHECK_OK(reduce_now(engine, gpu, name, data, 8));
        gpu.synchronize();
      }));
    }
    log.end();
    const std::vector<LogLine> lines = log.take();
    CHECK(row.told == std::count_if(lines.begin(), lines.end(), [](const LogLine& line) {
            return line.text.find(
                       "rank 0 and rank 1 use the same GPU, and rank 1 sees 4 of them: call "
                       "torch.cuda.set_device(hvd.local_rank())") != std::string::npos;
          }));
  }
}

TEST_CASE("fake of CUDA and NCCL: what all have launched and no GPU ends is reported, and ends the job in time") {
  LogLines& log = LogLines::of_process();
  log.begin();
  std::atomic<bool> opened{false};
  std::latch over(2);
  World world(2,
              gpu_settings({{"HOROVOD_STALL_CHECK_TIME_SECONDS", "1"}, {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "3"}}));
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    float* data = gpu.tensor(std::vector<float>(8, 1.0f));
    CHECK_OK(reduce_now(engine, gpu, "warm", data, 8));
    if (rank == 1) gpu.wait_until(&opened);
    int64_t handle = 0;
    CHECK_OK(submit_gpu(engine, gpu, Op::kAllreduce, "stuck", data, data, {8}, DType::kF32, &handle));
    CHECK_OK(enqueued(engine, gpu, handle));
    engine.release(handle);
    const std::vector<int32_t> one = {1};
    std::vector<int32_t> sum(1);
    Status outcome;
    for (int i = 0; i < 3000 && outcome.is_ok(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      outcome = perform(engine, Op::kAllreduce, text_of("on the host ", i), one, &sum, {1});
    }
    CHECK(outcome.code() == Code::kAborted);
    CHECK(outcome.text().find("stalled longer") != std::string::npos);
    CHECK(outcome.text().find("on the GPU of rank 0, allreduce 'stuck' was launched") != std::string::npos);
    over.arrive_and_wait();
    opened = true;
    gpu.synchronize();
  }));
  log.end();
  std::string warned;
  for (const LogLine& line : log.take()) warned += line.text;
  CHECK(warned.find("on its GPU: allreduce 'stuck' was launched") != std::string::npos);
  CHECK(warned.find("s ago and waits on the GPU for other ranks") != std::string::npos);
  CHECK(warned.find("s ago and waits on the GPU for what was enqueued before it") != std::string::npos);
}

// NCCL's abort waits until the device has stopped: of two communicators the one that is aborted first may wait on the
// device for the other.
TEST_CASE("fake of CUDA and NCCL: communicators of which one waits for the other are all aborted") {
  FakeEnvironment slow(Variables{{"HC_FAKE_DELAY_US", "20000"}});
  World world(3, gpu_settings());
  std::latch all_under_way(3);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    const std::vector<float> values(8, 1.0f);
    int pair = 0;
    CHECK_OK(engine.add_process_set({0, 1}, &pair));
    float* data = gpu.tensor(values);
    const auto begin = [&](const char* name, int set) {
      int64_t handle = 0;
      CHECK_OK(submit_gpu(engine, gpu, Op::kAllreduce, name, data, data, {8}, DType::kF32, &handle,
                          [&](Submission& s) { s.process_set = set; }));
      CHECK_OK(enqueued(engine, gpu, handle));
      engine.release(handle);
    };
    if (rank < 2) begin("warm pair", pair);
    begin("warm world", 0);
    gpu.synchronize();
    all_are_here(engine, "both are up");
    for (int i = 0; rank == 1 && i < 50; ++i) gpu.write(data, values);  // a second of work
    if (rank < 2) begin("of the pair", pair);
    begin("behind it", 0);
    all_under_way.arrive_and_wait();
    if (rank == 1) engine.abort("rank 1 raised ValueError: bad batch");
    gpu.synchronize();
    CHECK(reduce_now(engine, gpu, "afterwards", data, 8).code() == Code::kAborted);
  }));
}

TEST_CASE("fake of CUDA and NCCL: memory that the device has not is an error that names it") {
  FakeEnvironment failing(Variables{{"HC_FAKE_CUDA_FAIL", "cuMemHostAlloc:1:2"}});
  World world(1, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", "host"}}));
  CHECK_OK(world.each([](Engine& engine, int) {
    FrameworkOnGpu gpu(0);
    const std::vector<float> values(8, 1.0f);
    // Once is not enough: what is in stock is given back, then it is tried again.
    CHECK_OK(reduce_now(engine, gpu, "x", gpu.tensor(values), 8));
  }));
}

TEST_CASE("fake of CUDA and NCCL: lives follow each other, with the communicator slow to come up") {
  FakeEnvironment slow(Variables{{"HC_FAKE_NCCL_INIT_US", "30000"}});
  World world(2, gpu_settings());
  for (uint32_t life = 1; life <= 5; ++life)
    CHECK_OK(world.each(
        [](Engine& engine, int rank) {
          FrameworkOnGpu gpu(rank);
          const std::vector<float> values(8, 1.0f);
          float* data = gpu.tensor(values);
          CHECK_OK(reduce_now(engine, gpu, "x", data, 8));
          CHECK(gpu.read(data, 8)[0] == 2.0f);
        },
        life));
  CHECK(fake_count("memory") == 0);
  CHECK(fake_count("streams") == 0);
  CHECK(fake_count("events") == 0);
}

}  // namespace hc
