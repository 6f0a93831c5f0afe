// Every way in which device memory is reduced gives what host memory gives: engines in threads on the doubles of CUDA,
// NCCL and NVRTC; no GPU takes part.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "base/half.h"
#include "tests/gpu_double.h"

namespace hc {

namespace {

// Small whole numbers, so that every order of a sum gives the same; as elements of the dtype.
std::vector<std::byte> elements(DType dtype, size_t count, int rank) {
  std::vector<std::byte> data(count * size_of(dtype));
  for (size_t i = 0; i < count; ++i) {
    const int value = dtype == DType::kBool ? static_cast<int>(i + static_cast<size_t>(rank)) % 2
                                            : 1 + static_cast<int>((i * 7 + static_cast<size_t>(rank) * 3) % 5);
    const auto f = static_cast<float>(value);
    const auto d = static_cast<double>(value);
    const auto wide = static_cast<int64_t>(value);
    const uint16_t half = dtype == DType::kF16 ? to_float16(f).bits : to_bfloat16(f).bits;
    const void* from = &wide;
    if (dtype == DType::kF16 || dtype == DType::kBF16) from = &half;
    if (dtype == DType::kF32) from = &f;
    if (dtype == DType::kF64) from = &d;
    std::memcpy(data.data() + i * size_of(dtype), from, size_of(dtype));
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
  CHECK(
      submit_gpu(engine, gpu, c.op, name, in, owned || !has_result ? nullptr : out, {length}, c.dtype, &handle, adjust)
          .text() == "");
  CHECK(enqueued(engine, gpu, handle).text() == "");
  if (owned) CHECK(engine.copy_result(handle, 0, out, count * item, gpu.stream).text() == "");
  engine.release(handle);
  Submission s;
  s.op = c.op;
  const std::string host_name = name + " on the host";
  s.name = host_name;
  const int64_t shape[] = {length};
  const Submission::Tensor tensor{mine.data(), has_result ? on_host.data() : nullptr, shape, c.dtype};
  s.tensors = {&tensor, 1};
  adjust(s);
  CHECK(engine.submit(s, &handle).text() == "");
  CHECK(finish(engine, handle).text() == "");
  engine.release(handle);
  CHECK_MESSAGE(gpu.read(out, count * item) == on_host, name);
}

constexpr DType kDTypes[] = {DType::kBool, DType::kU8,  DType::kI8,   DType::kU16, DType::kI16, DType::kI32,
                             DType::kI64,  DType::kF16, DType::kBF16, DType::kF32, DType::kF64};

void all_agree(Engine& engine, FrameworkOnGpu& gpu) {
  for (const Op op : {Op::kAllreduce, Op::kReducescatter, Op::kReduce})
    for (const DType dtype : kDTypes)
      for (const Reduce reduce : {Reduce::kAverage, Reduce::kSum, Reduce::kMin, Reduce::kMax, Reduce::kProduct})
        for (const bool scaled : {false, true}) {
          if (dtype == DType::kBool && (reduce == Reduce::kAverage || scaled)) continue;
          if (scaled && reduce == Reduce::kAverage) continue;
          const bool sums = reduce == Reduce::kAverage || reduce == Reduce::kSum;
          if (op == Op::kReducescatter && !sums) continue;
          const size_t count = op == Op::kAllreduce ? 1003 : 130;
          agrees(engine, gpu, {op, dtype, reduce, scaled ? 0.5 : 1, scaled ? 4.0 : 1, count},
                 text_of(name_of(op), name_of(dtype), name_of(reduce), scaled));
        }
}

}  // namespace

TEST_CASE("double of CUDA: every way reduces every dtype as host memory does, and on the device") {
  for (const char* way : {"nccl", "peers"}) {
    CAPTURE(way);
    World world(2, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", way}}));
    const int before = double_count("pinned");
    CHECK(world
              .each([](Engine& engine, int rank) {
                FrameworkOnGpu gpu(rank);
                all_agree(engine, gpu);
              })
              .text() == "");
    CHECK(double_count("pinned") == before);  // nothing went through host memory
    CHECK(double_count("memory") == 0);
    CHECK(double_count("modules") == 0);
  }
}

}  // namespace hc
