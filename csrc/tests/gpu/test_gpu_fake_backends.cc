// Every backend by which device memory is reduced gives what host memory gives: engines in threads on the fakes of
// CUDA, NCCL and NVRTC; no GPU takes part.
#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <random>
#include <span>
#include <string>

#include "collective/gpu/device_levels.h"
#include "tests/elements.h"
#include "tests/gpu/gpu_fake.h"
#include "tests/locked_checks.h"

namespace hc {

namespace {

// Small whole numbers, so that every order of a sum gives the same; as elements of the dtype.
std::vector<std::byte> elements(DType dtype, size_t count, int rank) {
  std::vector<std::byte> data(count * size_of(dtype));
  for (size_t i = 0; i < count; ++i) {
    const int value = dtype == DType::kBool ? static_cast<int>(i + static_cast<size_t>(rank)) % 2
                                            : 1 + static_cast<int>((i * 7 + static_cast<size_t>(rank) * 3) % 5);
    store(dtype, data.data() + i * size_of(dtype), value);
  }
  return data;
}

struct Case {
  Op op = Op::kAllreduce;
  DType dtype = DType::kF32;
  Reduce reduce = Reduce::kSum;
  double pre = 1, post = 1;
  size_t count = 0;
};

// The same operation on the device and in host memory; true where the results are the same bytes.
void agrees(Engine& engine, FrameworkOnGpu& gpu, const Case& c, const std::string& name) {
  const int rank = engine.mesh().rank(), size = engine.mesh().size();
  const size_t item = size_of(c.dtype);
  const auto mine = elements(c.dtype, c.count, rank);
  const size_t share =
      c.count / static_cast<size_t>(size) + (static_cast<size_t>(rank) < c.count % static_cast<size_t>(size));
  const bool has_result = c.op != Op::kReduce || rank == 1;
  const size_t count = c.op == Op::kReducescatter ? share : has_result ? c.count : 0;
  const std::byte* in = gpu.tensor(mine);
  auto* out = static_cast<std::byte*>(gpu.memory(count * item));
  std::vector<std::byte> on_host(count * item);
  const auto adjust = [&](Submission& s) {
    s.reduce = c.reduce;
    s.prescale = c.pre;
    s.postscale = c.post;
    s.root = 1;
  };
  const auto length = static_cast<int64_t>(c.count);
  const bool owned = c.op == Op::kReducescatter;
  int64_t handle = 0;
  CHECK_OK(submit_gpu(engine, gpu, c.op, name, in, owned || !has_result ? nullptr : out, {length}, c.dtype, &handle,
                      adjust));
  CHECK_OK(enqueued(engine, gpu, handle));
  if (owned) CHECK_OK(engine.copy_result(handle, 0, out, count * item, gpu.stream));
  engine.release(handle);
  Submission s;
  s.op = c.op;
  const std::string host_name = name + " on the host";
  s.name = host_name;
  const int64_t shape[] = {length};
  const Submission::Tensor tensor{mine.data(), has_result ? on_host.data() : nullptr, shape, c.dtype};
  s.tensors = {&tensor, 1};
  adjust(s);
  CHECK_OK(perform(engine, s));
  CHECK_MESSAGE(gpu.read(out, count * item) == on_host, name);
  CHECK(gpu.read(in, mine.size()) == mine);
}

constexpr DType kReducedTypes[] = {DType::kBool, DType::kU8,  DType::kI8,   DType::kU16, DType::kI16, DType::kI32,
                                   DType::kI64,  DType::kF16, DType::kBF16, DType::kF32, DType::kF64};

constexpr Reduce kNumberReductions[] = {Reduce::kAverage, Reduce::kSum, Reduce::kMin, Reduce::kMax, Reduce::kProduct};
constexpr Reduce kBitReductions[] = {Reduce::kAnd, Reduce::kOr, Reduce::kXor};

void all_agree(Engine& engine, FrameworkOnGpu& gpu, std::span<const Reduce> reductions) {
  for (const Op op : {Op::kAllreduce, Op::kReducescatter, Op::kReduce})
    for (const DType dtype : kReducedTypes)
      for (const Reduce reduce : reductions)
        for (const bool scaled : {false, true}) {
          if (!takes(reduce, dtype) || (dtype == DType::kBool && scaled)) continue;
          if (scaled && reduce == Reduce::kAverage && is_float(dtype)) continue;
          const bool sums = reduce == Reduce::kAverage || reduce == Reduce::kSum;
          if (op == Op::kReducescatter && !sums) continue;
          const size_t count = op == Op::kAllreduce ? 1003 : 130;
          agrees(engine, gpu, {op, dtype, reduce, scaled ? 0.5 : 1, scaled ? 4.0 : 1, count},
                 text_of(name_of(op), name_of(dtype), name_of(reduce), scaled));
          if (scaled && !is_float(dtype))  // truncated on every rank, and below 0
            agrees(engine, gpu, {op, dtype, reduce, -0.4, 1, count},
                   text_of(name_of(op), name_of(dtype), name_of(reduce), "negative"));
        }
}

}  // namespace

TEST_CASE("fake of CUDA: every backend reduces every dtype as host memory does, and on the device") {
  const int contexts = fake_count("contexts", 2);
  FakeEnvironment slow(Variables{{"HC_FAKE_DELAY_US", "20"}});
  for (const std::string backend : {"nccl", "peers", "host"}) {
    CAPTURE(backend);
    World world(2, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", backend}}));
    const int before = fake_count("pinned");
    CHECK_OK(world.each([](Engine& engine, int rank) {
      FrameworkOnGpu gpu(rank);
      all_agree(engine, gpu, kNumberReductions);
    }));
    CHECK((fake_count("pinned") == before) == (backend != "host"));  // nothing goes through host memory unasked
    const int then = fake_count("pinned");
    CHECK_OK(world.each([](Engine& engine, int rank) {
      FrameworkOnGpu gpu(rank);
      all_agree(engine, gpu, kBitReductions);
    }));
    // NCCL reduces the truth of bools, and no other bits.
    CHECK((fake_count("pinned") == then) == (backend == "peers"));
    for (const char* left : {"memory", "streams", "events", "modules"}) CHECK(fake_count(left) == 0);
  }
  CHECK(fake_count("contexts", 2) == contexts);  // of a device that is nobody's
}

TEST_CASE("places in two levels: equal nodes of several ranks, in any order of ranks") {
  const auto place = [](const std::vector<int>& node, int rank) {
    const LevelPlace p = level_place(node, rank);
    return std::vector<int>{p.inner_rank, p.inner_size, p.inner_leader, p.outer_rank, p.outer_size, p.outer_leader};
  };
  CHECK(place({0, 0, 1, 1, 2, 2}, 3) == std::vector<int>{1, 2, 2, 1, 3, 1});
  CHECK(place({5, 3, 5, 3}, 3) == std::vector<int>{1, 2, 1, 1, 2, 2});
  for (const std::vector<int>& none : {std::vector<int>{0}, {0, 0}, {0, 1}, {0, 0, 1}, {0, 1, 1, 0, 0}})
    for (int rank = 0; rank < static_cast<int>(none.size()); ++rank) CHECK(level_place(none, rank).inner_size == 1);
}

TEST_CASE("fake of CUDA and NCCL: two levels where they are asked for give the same sums") {
  struct Row {
    std::vector<std::string> nodes;
    const char* asked;
    int communicators;  // of each rank
  };
  for (const Row& row : {Row{{"a", "a", "b", "b"}, "1", 3}, Row{{"a", "b", "a", "b"}, "1", 3},
                         Row{{"a", "a", "b", "b"}, "-1", 1}, Row{{"a", "a", "a", "b"}, "1", 1}}) {
    CAPTURE(row.nodes[1]);
    CAPTURE(row.asked);
    World world(4, gpu_settings({{"HOROCLONE_HIERARCHICAL_ALLREDUCE", row.asked}}));
    world.on_nodes(row.nodes);
    std::atomic<int> most{0};
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      FrameworkOnGpu gpu(rank);
      int number = 0;
      for (const size_t count : {size_t{16384}, size_t{70'003}})
        for (const Reduce reduce : {Reduce::kAverage, Reduce::kMax})
          for (const DType dtype : {DType::kF32, DType::kU8})
            agrees(engine, gpu, {Op::kAllreduce, dtype, reduce, 1, 1, count}, text_of("x", number++));
      agrees(engine, gpu, {Op::kAllreduce, DType::kF32, Reduce::kSum, 0.5, 4, 30'001}, "scaled");
      agrees(engine, gpu, {Op::kReducescatter, DType::kF32, Reduce::kSum, 1, 1, 30'001}, "slices");
      most = std::max(most.load(), fake_communicators());
    }));
    CHECK(most == 4 * row.communicators);
    CHECK(fake_communicators() == 0);
    CHECK(fake_count("memory") == 0);
  }
}

TEST_CASE("fake of CUDA: peers go in rounds where the tensors are larger than their memory") {
  World world(3, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", "peers"}, {"HOROCLONE_GPU_PEER_BYTES", "2097152"}}));
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    agrees(engine, gpu, {Op::kAllreduce, DType::kF32, Reduce::kAverage, 1, 1, 1'300'001}, "a");
    agrees(engine, gpu, {Op::kAllreduce, DType::kU8, Reduce::kSum, 1, 1, 2'097'152}, "b");
    agrees(engine, gpu, {Op::kReducescatter, DType::kF64, Reduce::kSum, 1, 1, 700'001}, "c");
    agrees(engine, gpu, {Op::kReduce, DType::kI16, Reduce::kMax, 1, 1, 1'100'003}, "d");
    // Rows: of every rank its own number, more than one round of the longest.
    const size_t rows = 200'000 + static_cast<size_t>(rank) * 250'000;
    const std::vector<int32_t> mine(rows, rank + 1);
    int64_t handle = 0;
    CHECK_OK(submit_gpu(engine, gpu, Op::kAllgather, "g", gpu.tensor(mine), nullptr, {static_cast<int64_t>(rows)},
                        DType::kI32, &handle));
    CHECK_OK(enqueued(engine, gpu, handle));
    constexpr size_t kAll = 3 * 200'000 + 3 * 250'000;
    auto* all = static_cast<int32_t*>(gpu.memory(kAll * 4));
    CHECK_OK(engine.copy_result(handle, 0, all, kAll * 4, gpu.stream));
    engine.release(handle);
    std::vector<int32_t> want;
    for (int r = 0; r < 3; ++r) want.insert(want.end(), 200'000 + static_cast<size_t>(r) * 250'000, r + 1);
    CHECK(gpu.read(all, kAll) == want);
    int32_t* same = gpu.tensor(std::vector<int32_t>(900'000, rank));
    CHECK_OK(submit_gpu(engine, gpu, Op::kBroadcast, "b", same, same, {900'000}, DType::kI32, &handle,
                        [](Submission& s) { s.root = 2; }));
    CHECK_OK(enqueued(engine, gpu, handle));
    engine.release(handle);
    CHECK(gpu.read(same, 900'000) == std::vector<int32_t>(900'000, 2));
  }));
  CHECK(fake_count("memory") == 0);
}

TEST_CASE(
    "fake of CUDA: ranks on one GPU reduce there without being asked to, or through host memory, with the reason") {
  struct Row {
    Settings settings;
    Variables environment;
    std::string why;  // empty: on the GPU
  };
  const std::vector<Row> rows = {
      {{}, {}, ""},
      {{{"HOROCLONE_NCCL_LIBRARY", "/nowhere/libnccl.so.2"}}, {}, ""},
      {{{"HOROCLONE_GPU_KERNELS", "off"}}, {}, "HOROCLONE_GPU_KERNELS is off"},
      {{{"HOROCLONE_NVRTC_LIBRARY", "/nowhere/libnvrtc.so.13"}}, {}, "HOROCLONE_NVRTC_LIBRARY names this file"},
      {{{"HOROCLONE_SHARED_MEMORY", "0"}}, {}, "does not share memory"},
      {{}, {{"HC_FAKE_CUDA_FAIL", "cuIpcGetMemHandle:2:1"}}, "cuIpcGetMemHandle"},
  };
  for (const Row& row : rows)
    for (const bool demanded : {false, true}) {
      CAPTURE(row.why);
      CAPTURE(demanded);
      if (demanded && !row.environment.empty()) continue;  // the call's number would be another
      FakeEnvironment environment(row.environment);
      Settings settings = row.settings;
      settings.emplace_back("HOROCLONE_LOG_LEVEL", "error");
      if (demanded) settings.emplace_back("HOROCLONE_GPU_OPERATIONS", "peers");
      const int before = fake_count("pinned"), ids = fake_ids();
      World world(2, gpu_settings(settings));
      CHECK_OK(world.each([&](Engine& engine, int rank) {
        FrameworkOnGpu gpu(0);
        if (row.why.empty() || !demanded)
          return agrees(engine, gpu, {Op::kAllreduce, DType::kF32, Reduce::kAverage, 1, 1, 1000}, "x");
        float* data = gpu.tensor(std::vector<float>(8, static_cast<float>(rank)));
        int64_t handle = 0;
        CHECK_OK(submit_gpu(engine, gpu, Op::kAllreduce, "x", data, data, {8}, DType::kF32, &handle));
        const Status refused = enqueued(engine, gpu, handle);
        CHECK(refused.code() == Code::kUnsupported);
        CHECK_MESSAGE(refused.text().find(row.why) != std::string::npos, refused.text());
        engine.release(handle);
      }));
      CHECK((fake_count("pinned") > before) == (!row.why.empty() && !demanded));
      CHECK(fake_ids() == ids);  // no communicator is made, and NCCL would keep a thread for each id
      CHECK(fake_count("memory") == 0);
    }
}

}  // namespace hc
