// Adasum of device memory, by NCCL and our kernels on the fakes of CUDA and NCCL, against the float64 model: no GPU
// takes part. Nothing goes through host memory, and every rank gets the same bits.
#include <doctest/doctest.h>

#include <mutex>

#include "tests/collective/adasum_model.h"
#include "tests/gpu/gpu_fake.h"
#include "tests/locked_checks.h"
#include "tests/sanitized.h"

namespace hc {
namespace {

using Results = std::vector<std::vector<std::byte>>;

Status reduce_on_gpu(Engine& engine, FrameworkOnGpu& gpu, const AdasumCase& c, bool in_place, Results* results) {
  const int rank = engine.mesh().rank();
  std::vector<std::array<int64_t, 1>> shapes;
  std::vector<std::byte*> in, out;
  for (size_t t = 0; t < c.counts.size(); ++t) {
    const auto values = c.input(rank, t);
    in.push_back(gpu.tensor(values));
    out.push_back(in_place ? in.back() : static_cast<std::byte*>(gpu.memory(values.size())));
    shapes.push_back({static_cast<int64_t>(c.counts[t])});
  }
  std::vector<Submission::Tensor> tensors;
  for (size_t t = 0; t < in.size(); ++t) tensors.push_back({in[t], out[t], shapes[t], c.dtype});
  Submission s;
  s.reduce = Reduce::kAdasum;
  s.name = "a";
  s.prescale = c.pre;
  s.postscale = c.post;
  s.tensors = tensors;
  gpu.place(&s);
  int64_t handle = 0;
  HC_TRY(engine.submit(s, &handle));
  HC_TRY(enqueued(engine, gpu, handle));
  engine.release(handle);
  for (size_t t = 0; t < in.size(); ++t) results->push_back(gpu.read(out[t], c.counts[t] * size_of(c.dtype)));
  return Status::ok();
}

std::vector<AdasumCase> cases_of(int size) {
  std::vector<AdasumCase> cases;
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    cases.push_back({size, dtype, {1}});
    cases.push_back({size, dtype, {5, 1, 700, 33}, 0.5, 3});
    cases.push_back({size, dtype, {1024}, 2, 1});
  }
  cases.push_back({size, DType::kF32, {40001}});
  cases.push_back({size, DType::kF64, {3, 0, 50001, 700}});
  // More parts and sums than one launch takes.
  cases.push_back({size, DType::kBF16, std::vector<size_t>(300, 9)});
  return cases;
}

struct Layout {
  int size = 2;
  std::vector<std::string> nodes;
  bool by_node = false;
  const char* delay_us = "0";
};

void check_layout(const Layout& layout) {
  std::string where;
  for (const std::string& node : layout.nodes) where += node;
  CAPTURE(layout.size);
  CAPTURE(where);
  CAPTURE(layout.by_node);
  FakeEnvironment slow(Variables{{"HC_FAKE_DELAY_US", layout.delay_us}, {"HC_FAKE_DEVICES", "8"}});
  std::vector<AdasumCase> cases = cases_of(layout.size);
  if (layout.by_node)
    for (AdasumCase& c : cases) c.nodes = layout.nodes;
  const int pinned = fake_count("pinned"), launches = fake_count("launches");
  World world(layout.size, gpu_settings({{"HOROCLONE_ADASUM", layout.by_node ? "nodes" : "ranks"}}));
  if (!layout.nodes.empty()) world.on_nodes(layout.nodes);
  std::vector<Results> first(cases.size());
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    for (size_t i = 0; i < cases.size(); ++i) {
      Results results;
      CHECK_OK(reduce_on_gpu(engine, gpu, cases[i], i % 2 == 1, &results));
      std::lock_guard lock(check_mu);
      const std::string dtype = name_of(cases[i].dtype);
      for (size_t t = 0; first[i].empty() && t < results.size(); ++t) {
        const double difference = cases[i].difference(t, results[t]);
        CHECK_MESSAGE(difference <= tolerance(cases[i].dtype), dtype, " tensor ", t, " of case ", i);
      }
      if (first[i].empty()) first[i] = results;
      CHECK_MESSAGE(first[i] == results, "other bits on rank ", rank, ", case ", i);
    }
  }));
  CHECK(fake_count("pinned") == pinned);
  CHECK(fake_count("launches") > launches);
  for (const char* what : {"memory", "streams", "events", "modules"}) CHECK_MESSAGE(fake_count(what) == 0, what);
  CHECK(fake_communicators() == 0);
}

}  // namespace

TEST_CASE("fake of CUDA and NCCL: adasum of any number of ranks stays on the GPUs" * doctest::test_suite("long")) {
  for (const int size : kThreadSanitized ? std::vector{2, 5} : std::vector{1, 2, 3, 5, 8})
    check_layout({size, {}, false, size < 3 ? "100" : "0"});
  check_layout({4, {"a", "a", "b", "b"}, false});
}

TEST_CASE("fake of CUDA and NCCL: adasum of the averages of machines") {
  check_layout({4, {"a", "a", "b", "b"}, true, "100"});
  check_layout({3, {"a", "b", "b"}, true});
  if (kThreadSanitized) return;
  check_layout({2, {"a", "a"}, true});
  check_layout({6, {"a", "a", "b", "b", "c", "c"}, true});
}

TEST_CASE("fake of CUDA and NCCL: adasum without kernels, and between peers, goes through host memory") {
  const std::vector<Settings> backends = {{{"HOROCLONE_GPU_KERNELS", "off"}}, {{"HOROCLONE_GPU_OPERATIONS", "peers"}}};
  for (Settings settings : backends) {
    settings.emplace_back("HOROCLONE_LOG_LEVEL", "error");
    const int pinned = fake_count("pinned");
    World world(2, gpu_settings(settings));
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      FrameworkOnGpu gpu(rank);
      const AdasumCase c{2, DType::kF16, {70, 3}};
      Results results;
      CHECK_OK(reduce_on_gpu(engine, gpu, c, true, &results));
      const double worst = std::max(c.difference(0, results[0]), c.difference(1, results[1]));
      CHECK_LOCKED(worst <= tolerance(c.dtype));
    }));
    CHECK(fake_count("pinned") > pinned);
  }
}

// The backend that Sum takes is the setting's, not Adasum's.
TEST_CASE("fake of CUDA and NCCL: adasum of machines leaves other allreduces as they were, beside a joined rank") {
  World world(4, gpu_settings({{"HOROCLONE_ADASUM", "nodes"}}));
  world.on_nodes({"a", "a", "b", "b"});
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    float* data = gpu.tensor(std::vector<float>(40'000, static_cast<float>(rank)));
    int64_t handle = 0;
    const auto reduce = [&](Reduce how) {
      CHECK_OK(submit_gpu(engine, gpu, Op::kAllreduce, name_of(how), data, data, {40'000}, DType::kF32, &handle,
                          [&](Submission& s) { s.reduce = how; }));
      CHECK_OK(enqueued(engine, gpu, handle));
      engine.release(handle);
    };
    reduce(Reduce::kSum);
    const auto sum = gpu.read(data, 40'000);
    CHECK_LOCKED(sum == std::vector<float>(40'000, 6.0F));
    gpu.write(data, std::vector<float>(40'000, rank == 3 ? 0.0F : 4.0F));
    if (rank != 3) reduce(Reduce::kAdasum);  // the joined rank counts as zeros in its node's average
    CHECK_OK(join(engine, gpu));
    const auto got = gpu.read(data, 40'000);
    // The averages are 4 and 2 everywhere: three quarters of the first and nothing of the second.
    CHECK_LOCKED((rank == 3 || got == std::vector<float>(40'000, 3.0F)));
  }));
}

}  // namespace hc
