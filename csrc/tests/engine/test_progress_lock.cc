// Who makes progress, and who need not wait for that: a thread that asks for the engine's state or ends it while
// another one waits inside, and lives that end while others look on.
#include <doctest/doctest.h>

#include <atomic>
#include <thread>

#include "engine/threads/progress_lock.h"
#include "tests/locked_checks.h"
#include "tests/sanitized.h"
#include "tests/world.h"

namespace hc {
namespace {

Settings settings_with(bool shared) {
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
  constexpr double kAtOnceS = 10;
  for (bool shared : {true, false}) {
    CAPTURE(shared);
    World world(2, settings_with(shared));
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
  const int lives = kSanitized ? 10 : 25;
  for (bool shared : {true, false})
    for (int life = 0; life < lives; ++life) {
      World world(2, settings_with(shared));
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

TEST_CASE("who needs the progress lock comes before who waits, and after its end nobody takes it") {
  using Outcome = ProgressLock::Outcome;
  constexpr std::chrono::milliseconds kShort{1};
  ProgressLock progress_lock;
  CHECK(progress_lock.try_acquire());
  CHECK_FALSE(progress_lock.needed());
  const auto first = progress_lock.need(), second = progress_lock.need();
  CHECK(progress_lock.needed());
  CHECK(progress_lock.wanted());
  CHECK_FALSE(progress_lock.try_acquire_at_need(first));
  progress_lock.release(false);
  CHECK_FALSE(progress_lock.try_acquire());
  CHECK(progress_lock.acquire_for_engine(kShort) == Outcome::kBusy);
  CHECK_FALSE(progress_lock.try_acquire_at_need(second));
  CHECK(progress_lock.try_acquire_at_need(first));
  progress_lock.release(false);
  CHECK_FALSE(progress_lock.try_acquire());
  CHECK(progress_lock.try_acquire_at_need(second));
  CHECK_FALSE(progress_lock.needed());
  progress_lock.release(false);
  CHECK(progress_lock.acquire_for_engine(kShort) == Outcome::kAcquired);
  progress_lock.release(false);

  CHECK(progress_lock.try_acquire());
  progress_lock.stop();
  progress_lock.release(false);
  CHECK_FALSE(progress_lock.try_acquire());
  CHECK(progress_lock.acquire_for_engine(kShort) == Outcome::kStopping);
  CHECK(progress_lock.try_acquire_at_need(progress_lock.need()));  // to look at what is left
  progress_lock.release(false);
}

}  // namespace
}  // namespace hc
