// Our kernels, compiled by the C++ compiler and run by the fake of CUDA: no GPU takes part. The same bodies are what
// nvcc and NVRTC compile; what they compute is compared with the host's reductions bit by bit.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "arithmetic/reduce.h"
#include "device/gpu.h"
#include "tests/elements.h"
#include "tests/gpu/gpu_fake.h"
#include "tests/locked_checks.h"

namespace hc {

namespace {

KernelOptions kernel_options() {
  KernelOptions options;
  options.nvrtc_library = kNvrtcFake;
  options.cache = "off";
  return options;
}

// A device with a context, as a framework leaves it, and our kernels on it.
struct Bench {
  FrameworkOnGpu framework{0};
  std::shared_ptr<Gpu> gpu;
  GpuKernels* kernels = nullptr;
  Bench() {
    auto adopted = Gpu::adopt(cuda_fake(), 0);
    REQUIRE(adopted.is_ok());
    gpu = adopted.take();
    auto loaded = gpu->kernels(kernel_options());
    REQUIRE_MESSAGE(loaded.is_ok(), loaded.status().text());
    kernels = loaded.value();
  }
};

// Random bit patterns: for floats that means NaN, infinities and denormals now and then.
std::vector<std::byte> random_elements(DType dtype, size_t count, unsigned seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> data(count * size_of(dtype));
  for (size_t i = 0; i < count; ++i) {
    uint64_t bits = random();
    if (dtype == DType::kBool) bits = bits % 3;
    std::byte* at = data.data() + i * size_of(dtype);
    std::memcpy(at, &bits, size_of(dtype));
    if (is_float(dtype) && random() % 8)  // mostly of a size in which sums round
      store(dtype, at, static_cast<double>(static_cast<int64_t>(random() % 20001) - 10000) / 64);
  }
  return data;
}

constexpr DType kAll[] = {DType::kBool, DType::kU8,  DType::kI8,   DType::kU16, DType::kI16, DType::kI32,
                          DType::kI64,  DType::kF16, DType::kBF16, DType::kF32, DType::kF64};

struct Scaling {
  double pre, post;
  int64_t divisor;
};

void reduces_like_the_host(Bench& bench, DType dtype, Reduce op, const Scaling& scaling, size_t count, size_t skip) {
  constexpr size_t kInputs = 3;
  const size_t item = size_of(dtype);
  std::vector<std::vector<std::byte>> inputs;
  std::vector<const std::byte*> on_host;
  std::vector<CuPointer> in, out;
  for (size_t s = 0; s < kInputs; ++s) {
    inputs.push_back(random_elements(dtype, skip + count, static_cast<unsigned>(s * 100 + count)));
    in.push_back(cu_pointer(bench.framework.tensor(inputs.back())) + skip * item);
  }
  for (const auto& one : inputs) on_host.push_back(one.data() + skip * item);
  out = {in[1], cu_pointer(bench.framework.memory((count + skip) * item)) + skip * item};  // one of the inputs, another
  const Reduction reduction{dtype, op, scaling.pre, scaling.post, scaling.divisor, in, out, count};
  CHECK_OK(bench.kernels->reduce(reduction, bench.framework.stream));
  std::vector<std::byte> want(count * item);
  std::byte* to = want.data();
  reduce(dtype, op, {&to, 1}, on_host, count, {scaling.pre, scaling.post, scaling.divisor});
  for (const CuPointer at : out) {
    const auto got = bench.framework.read(reinterpret_cast<const std::byte*>(at), count * item);
    CHECK_MESSAGE(got == want, name_of(dtype), " ", name_of(op), " ", count, " from ", skip);
  }
}

}  // namespace

TEST_CASE("fake of CUDA: the reduction kernel gives the host's bits, for every dtype, operation, size and alignment") {
  {
    Bench bench;
    const int look_ups = fake_count("look-ups");
    CHECK(look_ups > 0);
    for (const DType dtype : kAll)
      for (const Reduce op : {Reduce::kAverage, Reduce::kSum, Reduce::kMin, Reduce::kMax, Reduce::kProduct,
                              Reduce::kAnd, Reduce::kOr, Reduce::kXor})
        for (const size_t count : {1, 7, 64, 1003}) {
          if (!takes(reduced_as(op), dtype)) continue;
          reduces_like_the_host(bench, dtype, op, {1, 1, 1}, count, 0);
          reduces_like_the_host(bench, dtype, op, {0.5, 3, 1}, count, 1);
          reduces_like_the_host(bench, dtype, op, {-1.5, -0.3, 1}, count, 0);
          if (op == Reduce::kSum && !is_float(dtype)) {
            reduces_like_the_host(bench, dtype, op, {1, 1, 3}, count, 0);
            reduces_like_the_host(bench, dtype, op, {0.5, 1, 3}, count, 0);
          }
        }
    reduces_like_the_host(bench, DType::kF32, Reduce::kSum, {1, 1.0 / 3, 1}, 300'001, 0);  // more than one stride
    CHECK(fake_count("look-ups") == look_ups);  // which may wait for what runs on the GPU
  }
  CHECK(fake_count("memory") == 0);
  CHECK(fake_count("modules") == 0);
}

TEST_CASE("fake of CUDA: pack and unpack, more tensors than one launch takes, odd sizes and addresses") {
  Bench bench;
  constexpr size_t kTensors = 401;
  const int before = fake_count("launches");
  for (const size_t item : {1, 4}) {
    const DType dtype = item == 1 ? DType::kU8 : DType::kF32;
    std::vector<std::vector<std::byte>> values;
    std::vector<PackedPiece> pieces, others;
    size_t bytes = 0;
    for (size_t t = 0; t < kTensors; ++t) {
      const size_t count = t % 9 == 0 ? 0 : (t * 13) % 217 + (t == 100 ? 70'000 : 0), skip = t % 5;
      values.push_back(random_elements(dtype, count + skip, static_cast<unsigned>(t)));
      pieces.push_back({cu_pointer(bench.framework.tensor(values[t])) + skip * item, count, bytes});
      others.push_back({cu_pointer(bench.framework.memory((count + skip) * item)) + skip * item, count, bytes});
      values[t].erase(values[t].begin(), values[t].begin() + static_cast<ptrdiff_t>(skip * item));
      bytes += GpuKernels::packed_bytes(count, dtype);
    }
    const CuPointer packed = cu_pointer(bench.framework.memory(bytes));
    const Packing copy{dtype, dtype, 1, 1};
    CHECK_OK(bench.kernels->pack(copy, packed, pieces, bench.framework.stream));
    CHECK_OK(bench.kernels->unpack(copy, packed, others, bench.framework.stream));
    for (size_t t = 0; t < kTensors; ++t)
      CHECK(bench.framework.read(reinterpret_cast<const std::byte*>(others[t].tensor), values[t].size()) == values[t]);
  }
  CHECK(fake_count("launches") - before == 2 * 2 * 3);  // 160 at a time
}

TEST_CASE("fake of CUDA: a long piece beside short ones is cut, so that all blocks work on it, in one launch") {
  Bench bench;
  constexpr size_t kLong = 1'000'003;  // of 4 bytes: 16 rows
  std::vector<std::vector<std::byte>> values;
  std::vector<PackedPiece> pieces, others;
  size_t bytes = 0;
  for (const size_t count : {size_t{5}, kLong, size_t{7}}) {
    values.push_back(random_elements(DType::kF32, count, 3));
    pieces.push_back({cu_pointer(bench.framework.tensor(values.back())), count, bytes});
    others.push_back({cu_pointer(bench.framework.memory(count * 4)), count, bytes});
    bytes += GpuKernels::packed_bytes(count, DType::kF32);
  }
  const CuPointer packed = cu_pointer(bench.framework.memory(bytes));
  const int launches = fake_count("launches"), rows = fake_count("rows");
  CHECK_OK(bench.kernels->pack({DType::kF32, DType::kF32, 2, 1}, packed, pieces, bench.framework.stream));
  CHECK_OK(bench.kernels->unpack({DType::kF32, DType::kF32, 0.5, 1}, packed, others, bench.framework.stream));
  for (size_t t = 0; t < values.size(); ++t) {
    const auto* at = reinterpret_cast<const std::byte*>(others[t].tensor);
    const auto got = bench.framework.read(at, values[t].size());
    size_t wrong = 0;
    for (size_t i = 0; i < got.size(); i += 4) {
      const double a = load(DType::kF32, got.data() + i), b = load(DType::kF32, values[t].data() + i);
      wrong += !(a == b || std::abs(b) > 1e38 || (a != a && b != b));
    }
    CHECK(wrong == 0);
  }
  CHECK(fake_count("launches") - launches == 2);
  CHECK(fake_count("rows") - rows == 2 * (16 + 2));
}

TEST_CASE("fake of CUDA: pack and unpack cast, scale and divide as the host does") {
  struct Row {
    DType tensor, packed;
    double there, back;
    int64_t divisor;
  };
  const Row rows[] = {
      {DType::kF32, DType::kF32, 0.5, 3, 1}, {DType::kF64, DType::kF64, 0.1, 7, 1},
      {DType::kF16, DType::kF32, 0.5, 3, 1}, {DType::kBF16, DType::kF32, 3, 0.1, 1},
      {DType::kI8, DType::kI8, 0.5, 3, 1},   {DType::kU8, DType::kU8, -1.5, 0.5, 1},
      {DType::kI16, DType::kI32, 0.3, 7, 1}, {DType::kU16, DType::kI32, -9, 9, 1},
      {DType::kI32, DType::kI32, 2.5, 2, 1}, {DType::kI64, DType::kI64, 0.25, 2, 1},
      {DType::kI64, DType::kI64, -8, 1, 3},  {DType::kU8, DType::kU8, 0.5, 1, 3},
      {DType::kI16, DType::kI32, 1, 1, 3},   {DType::kU16, DType::kI32, 1, 1, 3},
      {DType::kI8, DType::kI8, 1, 1, 3},     {DType::kU8, DType::kU8, 1, 1, 2},
      {DType::kI32, DType::kI32, 1, 1, 5},   {DType::kI64, DType::kI64, 1, 1, 7},
  };
  Bench bench;
  const int look_ups = fake_count("look-ups");
  for (const Row& row : rows)
    for (const size_t skip : {0, 1}) {
      constexpr size_t kCount = 321;
      const size_t item = size_of(row.tensor);
      const auto values = random_elements(row.tensor, kCount + skip, 11);
      std::byte* in = bench.framework.tensor(values);
      auto* out = static_cast<std::byte*>(bench.framework.memory((kCount + skip) * item));
      const CuPointer packed = cu_pointer(bench.framework.memory(GpuKernels::packed_bytes(kCount, row.packed)));
      const PackedPiece from{cu_pointer(in) + skip * item, kCount, 0}, to{cu_pointer(out) + skip * item, kCount, 0};
      const CuStream stream = bench.framework.stream;
      CHECK_OK(bench.kernels->pack({row.tensor, row.packed, row.there, 1}, packed, {&from, 1}, stream));
      CHECK(bench.kernels->unpack({row.tensor, row.packed, row.back, row.divisor}, packed, {&to, 1}, stream).is_ok());
      std::vector<std::byte> want(kCount * item);
      std::byte* at = want.data();
      const std::byte* source = values.data() + skip * item;
      // A sum of one source: scaled there and back.
      reduce(row.tensor, Reduce::kSum, {&at, 1}, {&source, 1}, kCount, {row.there, row.back, row.divisor});
      const auto got = bench.framework.read(out + skip * item, kCount * item);
      size_t wrong = 0;
      for (size_t i = 0; i < kCount; ++i) {
        const double a = load(row.tensor, got.data() + i * item), b = load(row.tensor, want.data() + i * item);
        wrong += !(a == b || (a != a && b != b));  // a NaN's payload is not promised
      }
      CHECK_MESSAGE(wrong == 0, name_of(row.tensor), " by ", name_of(row.packed), " from ", skip);
    }
  CHECK(fake_count("look-ups") == look_ups);
}

TEST_CASE("fake of HIP and hipRTC: the device's own name for its architecture is what kernels are compiled for" *
          doctest::skip(!kIsHip)) {
  FrameworkOnGpu framework(0);
  auto gpu = Gpu::adopt(cuda_fake(), 0);
  CHECK(gpu.value()->api().platform.version_text() == "6.3");
  auto loaded = gpu.value()->kernels(kernel_options());
  CHECK(loaded.is_ok());
  CHECK(loaded.value()->origin() == "hipRTC 13.0 for gfx90a:sramecc+:xnack-");
  CHECK(cuda_fake()->check(2, "cuMemAlloc").text() == "hipMalloc: out of memory (HIP error 2)");
}

TEST_CASE("fake of CUDA and NVRTC: why there are no kernels, and where they come from" * doctest::skip(kIsHip)) {
  struct Row {
    Variables environment;
    std::string library, why;
  };
  const Row rows[] = {
      {{}, "/nowhere/libnvrtc.so.13", "HOROCLONE_NVRTC_LIBRARY names this file"},
      {{}, kNcclFake, "has no nvrtcVersion"},
      {{{"HC_FAKE_NVRTC_FAIL", "nvrtcCompileProgram:1:6"}}, kNvrtcFake, "error: on demand"},
      {{{"HC_FAKE_NVRTC_FAIL", "nvrtcGetCUBIN:1:9"}}, kNvrtcFake, "INTERNAL"},
      {{{"HC_FAKE_CAPABILITY", "70"}}, kNvrtcFake, "from compute capability 80 on"},
      {{{"HC_FAKE_CUDA_FAIL", "cuModuleLoadData:1:200"}, {"HC_FAKE_CAPABILITY", "120"}},
       kNvrtcFake,
       "image is invalid"},
      {{{"HC_FAKE_CUDA_FAIL", "cuDeviceGetAttribute:1:1"}}, kNvrtcFake, "cuDeviceGetAttribute"},
  };
  FrameworkOnGpu framework(0);
  for (const Row& row : rows) {
    FakeEnvironment environment(row.environment);
    KernelOptions options = kernel_options();
    options.nvrtc_library = row.library;
    // One that no other test has: what was compiled before would be taken.
    if (!row.environment.contains("HC_FAKE_CAPABILITY")) ::setenv("HC_FAKE_CAPABILITY", "100", 1);
    auto gpu = Gpu::adopt(cuda_fake(), 0);
    auto loaded = gpu.value()->kernels(options);
    CHECK(!loaded.is_ok());
    CHECK_MESSAGE(loaded.status().text().find(row.why) != std::string::npos, loaded.status().text());
    CHECK(gpu.value()->kernels(kernel_options()).status().text() == loaded.status().text());  // it is not tried again
    ::unsetenv("HC_FAKE_CAPABILITY");
  }
  KernelOptions off = kernel_options();
  off.off = true;
  auto gpu = Gpu::adopt(cuda_fake(), 0);
  CHECK(gpu.value()->kernels(off).status().text().find("HOROCLONE_GPU_KERNELS") != std::string::npos);
  FakeEnvironment newer(Variables{{"HC_FAKE_CAPABILITY", "103"}});  // PTX of 10.0, which the driver translates
  auto other = Gpu::adopt(cuda_fake(), 0);
  auto loaded = other.value()->kernels(kernel_options());
  CHECK(loaded.is_ok());
  CHECK(loaded.value()->origin() == "NVRTC 13.0 for sm_103");
}

}  // namespace hc
