// Who drives the engine, and who need not wait for that: a thread that asks for the engine's state or ends it while
// another one waits inside, and lives that end while others look on.
#include <doctest/doctest.h>

#include <atomic>
#include <thread>

#include "engine/threads/drive_gate.h"
#include "tests/locked_checks.h"
#include "tests/sanitized.h"
#include "tests/world.h"

namespace hc {
namespace {

std::vector<std::pair<std::string, std::string>> way_of(bool shared) {
  if (shared) return {};
  return {{"HOROCLONE_SHARED_MEMORY", "0"}};
}

double seconds_of(const std::function<void()>& call) {
  const TimePoint begun = Clock::now();
  call();
  return seconds_between(begun, Clock::now());
}

// A program that stands still for seconds shows here; the limits leave a busy machine time.
TEST_CASE("the engine's state and its end do not wait for a thread that waits inside") {
  constexpr double kAtOnceS = kSanitized ? 10 : 1;
  for (bool shared : {true, false}) {
    CAPTURE(shared);
    World world(2, way_of(shared));
    std::atomic<bool> seen{false};  // by rank 0, for which rank 1 stays
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      if (rank == 1) {
        while (!seen.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return;
      }
      std::vector<float> v(8, 1);
      int64_t h = 0;
      CHECK_OK(submit(engine, Op::kAllreduce, "alone", v, &v, {8}, &h));
      std::atomic<bool> is_over{false};
      Status outcome;
      std::thread waiter([&] {
        bool done = false;
        outcome = engine.wait(h, 60, &done);
        is_over = done;
      });
      for (int round = 0; round < 20; ++round) {
        std::this_thread::sleep_for(std::chrono::milliseconds(round));  // the waiter spins, yields or sleeps
        std::string state;
        const double took_s = seconds_of([&] { state = engine.describe(); });
        CHECK_LOCKED(took_s < kAtOnceS);
        CHECK_LOCKED(state.find("alone") != std::string::npos);
      }
      CHECK_LOCKED(!is_over.load());
      const double took_s = seconds_of([&] { CHECK_OK(engine.shutdown(0.05)); });
      CHECK_LOCKED(took_s < kAtOnceS);
      waiter.join();
      CHECK_LOCKED(is_over.load());
      CHECK_LOCKED(outcome.code() == Code::kAborted);
      CHECK_LOCKED(outcome.text().find("shut down while 1 of its operations") != std::string::npos);
      seen = true;
    }));
  }
}

// The end is told to hc-engine by a doorbell. Whoever steps the engine after that could answer it instead, and
// hc-engine sleep for ever.
TEST_CASE("a life ends while another thread asks for the engine's state") {
  const int lives = kSanitized ? 10 : 40;
  for (bool shared : {true, false})
    for (int life = 0; life < lives; ++life) {
      World world(2, way_of(shared));
      CHECK_OK(world.each(
          [&](Engine& engine, int) {
            std::atomic<bool> over{false};
            std::vector<float> v(3, 1.0f);
            std::thread onlooker([&] {
              while (!over.load()) (void)engine.describe();
            });
            CHECK_OK(engine.shutdown(10));
            over = true;
            onlooker.join();
          },
          static_cast<uint32_t>(life)));
    }
}

TEST_CASE("who needs the gate comes before who waits, and after its end nobody drives") {
  using Turn = DriveGate::Turn;
  constexpr std::chrono::milliseconds kShort{1};
  DriveGate gate;
  CHECK(gate.try_enter());
  CHECK_FALSE(gate.needed());
  const auto first = gate.need(), second = gate.need();
  CHECK(gate.needed());
  CHECK(gate.wanted());
  CHECK_FALSE(gate.try_enter_at_need(first));
  gate.leave(false);
  CHECK_FALSE(gate.try_enter());
  CHECK(gate.enter_engine(kShort) == Turn::kBusy);
  CHECK_FALSE(gate.try_enter_at_need(second));
  CHECK(gate.try_enter_at_need(first));
  gate.leave(false);
  CHECK_FALSE(gate.try_enter());
  CHECK(gate.try_enter_at_need(second));
  CHECK_FALSE(gate.needed());
  gate.leave(false);
  CHECK(gate.enter_engine(kShort) == Turn::kDrives);
  gate.leave(false);

  CHECK(gate.try_enter());
  gate.stop();
  gate.leave(false);
  CHECK_FALSE(gate.try_enter());
  CHECK(gate.enter_engine(kShort) == Turn::kStopping);
  CHECK(gate.try_enter_at_need(gate.need()));  // to look at what is left
  gate.leave(false);
}

}  // namespace
}  // namespace hc
