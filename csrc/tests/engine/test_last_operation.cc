// What all ranks have agreed on completes on all of them, though some leave as soon as it has completed there.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "tests/locked_checks.h"
#include "tests/world.h"

namespace hc {
namespace {

// Rank 0 sends the last plan and then its goodbye; the plan reaches ranks of other machines through one of them.
TEST_CASE("the last operation completes on every rank, though rank 0 leaves behind it at once") {
  for (const Op last : {Op::kJoin, Op::kBarrier})
    for (int round = 0; round < 8; ++round) {
      CAPTURE(round);
      World world(5);
      CHECK_OK(world.on_nodes({"a", "b", "b", "b", "b"}).each([&](Engine& engine, int) {
        CHECK_OK(perform(engine, last));
      }));
    }
}

TEST_CASE("a rank below others hears that rank 0 has left, and what it still waits for fails") {
  World world(5);
  CHECK_OK(world.on_nodes({"a", "b", "b", "b", "b"}).each([&](Engine& engine, int rank) {
    if (rank == 0) return;
    int64_t handle = 0;
    std::vector<float> data{1.0f}, out{0.0f};
    CHECK_OK(submit<float>(engine, Op::kAllreduce, "nobody", data, &out, {1}, &handle));
    const Status ended = finish(engine, handle);
    CHECK_LOCKED(ended.code() == Code::kAborted);
    CHECK_LOCKED(ended.text().find("rank 0") != std::string::npos);
    engine.release(handle);
  }));
}

}  // namespace
}  // namespace hc
