// When a silent rank is asked, held up by witnesses and lost: by a clock that the test turns.
#include "engine/watch/liveness.h"

#include <doctest/doctest.h>

#include <string>

namespace hc {
namespace {

using ActionKind = Liveness::Action::Kind;

// Two ranks; this one is 0 and waits for 1 from the beginning on.
struct Watcher {
  Liveness liveness{2, {0.25, 1, 2}};
  double now_s = 100;
  int pings = 0, warnings = 0, asked_others = 0;
  double lost_s = 0;  // how long it had been silent

  static TimePoint at(double s) {
    return TimePoint(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s)));
  }
  void tick() {
    for (const Liveness::Action& action : liveness.tick(at(now_s), {false, true})) {
      CHECK(action.rank == 1);
      pings += action.kind == ActionKind::kPing;
      warnings += action.kind == ActionKind::kWarn;
      asked_others += action.kind == ActionKind::kAskOthers;
      if (action.kind == ActionKind::kLost && lost_s == 0) lost_s = action.silent_s;
    }
  }
  // For so long, with ticks as the engine has them. each() may hear something.
  template <class Each>
  void run(double for_s, Each each) {
    const double end_s = now_s + for_s;
    while (now_s < end_s && lost_s == 0) {
      now_s += 1.0 / 16;
      each();
      tick();
    }
  }
  void run(double for_s) {
    run(for_s, [] {});
  }
};

TEST_CASE("a rank that says nothing is lost after the limit, which counts the wait before the first question") {
  Watcher one;
  one.run(1.6);
  CHECK(one.lost_s == 0);
  CHECK(one.warnings == 1);
  CHECK(one.asked_others >= 2);
  one.run(5);
  CHECK(one.lost_s >= 2);
  CHECK(one.lost_s < 2.1);
  CHECK(one.now_s - 100 < 1.9);
}

TEST_CASE("a rank that is silent for a second again and again is not lost, and is then given more time") {
  Watcher one;
  for (int round = 0; round < 50; ++round) {
    one.run(1.25);
    one.liveness.heard(1);
    one.run(0.5, [&] { one.liveness.heard(1); });
  }
  CHECK(one.lost_s == 0);
  CHECK(one.liveness.limit_s(1) > 2.5);
  CHECK(one.liveness.limit_s(1) <= 4);
  one.run(20);
  CHECK(one.lost_s > 2.5);
}

TEST_CASE("a rank that answers at once is asked again after the wait, and keeps the limit low") {
  Watcher one;
  int answered = 0;
  one.run(10, [&] {
    if (one.pings > answered) one.liveness.heard(1), answered = one.pings;
  });
  CHECK(one.pings >= 20);
  CHECK(one.pings <= 40);
  CHECK(one.liveness.limit_s(1) < 2.05);
  one.run(5);
  CHECK(one.lost_s < 2.2);
}

TEST_CASE("who speaks is not asked") {
  Watcher one;
  one.tick();
  one.run(3, [&] { one.liveness.heard(1); });
  const int pings = one.pings;
  CHECK(pings <= 12);
  CHECK(one.lost_s == 0);
}

TEST_CASE("while this rank itself does not run nobody is silent") {
  Watcher one;
  one.run(1);
  one.now_s += 10;  // stopped
  one.tick();
  CHECK(one.lost_s == 0);
  one.run(0.5);
  CHECK(one.lost_s == 0);
  for (int n = 0; n < 20; ++n) one.now_s += 1, one.tick();  // as good as stopped: four looks would be twenty seconds
  CHECK(one.lost_s > 0);
  CHECK(one.lost_s < 2.5);
}

TEST_CASE("a witness holds the verdict up as long as it says so, and not for ever") {
  Watcher one;
  const auto witness = [&] { one.liveness.witnessed(1, Watcher::at(one.now_s)); };
  one.run(5, witness);
  CHECK(one.lost_s == 0);
  SUBCASE("it falls silent as well") {
    one.run(5);
    CHECK(one.lost_s < 6.5);
  }
  SUBCASE("it goes on") { one.run(20, witness); }
  CHECK(one.lost_s > 5);
  CHECK(one.lost_s < Liveness::kWitnessedS + 0.2);
}

TEST_CASE("a limit below the wait before the first question still leaves time to answer it") {
  Liveness liveness{2, {5, 1, 2}};
  CHECK(liveness.tick(Watcher::at(100), {false, true}).size() == 1);
  for (const Liveness::Action& action : liveness.tick(Watcher::at(100.9), {false, true}))
    CHECK(action.kind != ActionKind::kLost);
  CHECK(liveness.tick(Watcher::at(101.1), {false, true})[0].kind == ActionKind::kLost);
}

TEST_CASE("of many ranks each is asked again more rarely") {
  Liveness liveness{1000, {0.25, 1, 2}};
  const std::vector<bool> waits(1000, true);
  size_t pings = 0;
  for (int n = 0; n < 160; ++n) {
    for (int rank = 0; rank < 1000; ++rank) liveness.heard(rank);
    for (const Liveness::Action& action : liveness.tick(Watcher::at(100 + n / 16.0), waits))
      pings += action.kind == ActionKind::kPing;
  }
  CHECK(pings <= 10 * 400 + 1000);
}

}  // namespace
}  // namespace hc
