// Engines whose ranks lie on different sockets: this machine's CPUs, each described as a socket of its own.
#include <doctest/doctest.h>

#include <numeric>
#include <string>
#include <vector>

#include "base/thread.h"
#include "tests/locked_checks.h"
#include "tests/made_up_machine.h"
#include "tests/world.h"

using namespace hc;

TEST_CASE("levels: engines on two sockets reduce private tensors and those in arenas, many at a time") {
  const std::vector<int> cpus = allowed_cpus();
  if (cpus.size() < 2) return;
  const MadeUpMachine machine({.sockets = cpus.back() + 1, .nodes = 1, .caches = 1, .cpus = 1});
  World world(5, {{"HOROCLONE_TOPOLOGY", machine.folder()}, {"HOROCLONE_SEGMENT_BYTES", "4096"}});
  world.on_cpus({cpus[0], cpus[0], cpus[1], cpus[1], cpus[1]});
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    const std::vector<int64_t> sizes{3, 9001, 60000, 200003};
    const int64_t all = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    auto memory = engine.allocate(static_cast<size_t>(all) * sizeof(float)).take();
    std::vector<float> plain(static_cast<size_t>(all));
    for (int round = 0; round < 3; ++round) {
      std::vector<int64_t> handles;
      for (float* base : {plain.data(), reinterpret_cast<float*>(memory->data())}) {
        float* data = base;
        for (int64_t n : sizes) {
          for (int64_t i = 0; i < n; ++i) data[i] = static_cast<float>(i % 1000 + rank + round);
          const Submission::Tensor tensor{data, data, {&n, 1}, DType::kF32};
          const std::string name = (base == plain.data() ? "private." : "arena.") + std::to_string(n);
          Submission s;
          s.name = name;
          s.tensors = {&tensor, 1};
          CHECK_OK(engine.submit(s, &handles.emplace_back()));
          data += n;
        }
      }
      for (int64_t h : handles) {
        CHECK_OK(finish(engine, h));
        engine.release(h);
      }
      int64_t wrong = 0;
      for (const float* base : {plain.data(), reinterpret_cast<float*>(memory->data())}) {
        const float* data = base;
        for (int64_t n : sizes) {
          for (int64_t i = 0; i < n; ++i) wrong += data[i] != static_cast<float>(5 * (i % 1000 + round) + 10);
          data += n;
        }
      }
      CHECK_LOCKED(wrong == 0);
    }
  }));
}
