// A thousand lives of the device path in one process, on the fakes of CUDA, NCCL and NVRTC: whatever a life makes is
// gone after it. No GPU takes part.
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/gpu/gpu_gradients.h"
#include "tests/sanitized.h"

namespace hc {
namespace {

constexpr int kLives = kThreadSanitized ? 30 : kSanitized ? 60 : 1000, kWarmUp = 10;

size_t entries(const char* folder) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

// As text, so that a difference says what it is.
std::string left_behind() {
  std::string text = text_of("descriptors ", entries("/proc/self/fd"), ", threads ", entries("/proc/self/task"));
  for (const char* what : {"memory", "streams", "events", "modules", "pinned now"})
    text += text_of(", ", what, " ", fake_count(what));
  for (const char* what : {"windows", "buffers", "blocks", "freed while known"})
    text += text_of(", ", what, " ", fake_registered(what));
  return text_of(text, ", communicators ", fake_communicators());
}

size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  size_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * 4096;
}

// A tensor by NCCL alone, one with the help of kernels, one by Adasum, and a bucket in registered memory.
void live(Engine& engine, FrameworkOnGpu& gpu, int rank) {
  int64_t handle = 0;
  auto* floats = gpu.tensor(std::vector<float>(100, static_cast<float>(rank)));
  CHECK_OK(reduce_now(engine, gpu, "alone", floats, 100));
  CHECK_OK(
      reduce_now(engine, gpu, "kernels", gpu.tensor(std::vector<int16_t>(50, 1)), 50, DType::kI16, Reduce::kAverage));
  CHECK_OK(reduce_now(engine, gpu, "adasum", floats, 100, DType::kF32, Reduce::kAdasum));
  BucketSet set;
  set.place.is_host = false;
  set.place.index = gpu.device;
  auto memory = engine.allocate_elsewhere(gpu.device, 4096);
  auto* bucket = static_cast<std::byte*>(memory.is_ok() ? memory.value()->data() : gpu.memory(4096));
  set.buckets.push_back({"bucket", bucket, {1000}, DType::kF32});
  int id = -1;
  CHECK_OK(engine.declare(0, set, &id));
  for (int step = 0; step < 2; ++step) {
    CHECK_OK(engine.submit_declared(0, id, 0, gpu.stream, &handle));
    CHECK_OK(enqueued(engine, gpu, handle));
    engine.release(handle);
  }
  const auto got = gpu.read(floats, 1);
  CHECK_LOCKED(got[0] == 1.0F);
}

}  // namespace

TEST_CASE("fake of CUDA and NCCL: a thousand lives leave nothing behind" * doctest::test_suite("long")) {
  for (const char* backend : {"nccl", "peers", "host"}) {
    CAPTURE(std::string(backend));
    std::string before;
    size_t resident = 0;
    const int lives = backend[0] == 'n' ? kLives : kLives / 30;
    for (int n = 0; n < lives + kWarmUp; ++n) {
      if (n == kWarmUp) {
        before = left_behind();
        resident = resident_bytes();
      }
      {
        World world(2, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", backend},
                                     {"HOROCLONE_GPU_PEER_BYTES", "2097152"},
                                     {"HOROCLONE_LOG_LEVEL", "error"}}));
        CHECK_OK(world.each([](Engine& engine, int rank) {
          FrameworkOnGpu gpu(rank);
          live(engine, gpu, rank);
        }));
      }
      // A thread that was joined stays listed for a moment.
      for (const Deadline soon = Deadline::in(20); n >= kWarmUp && left_behind() != before && !soon.passed();)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (n >= kWarmUp) REQUIRE(left_behind() == before);
    }
    const auto grown = static_cast<int64_t>(resident_bytes()) - static_cast<int64_t>(resident);
    MESSAGE(std::string(backend), ": ", before, "; resident memory grew by ", grown >> 10, " KiB");
    if (!kSanitized) CHECK(grown < (8 << 20));  // a sanitizer keeps what was freed
  }
}

}  // namespace hc
