// What the rank metrics costs: nanoseconds per update of a call that needs no handle, as in a loop of small
// blocking allreduces, and of an operation with one. Compare with the call itself: bench_engine, benchmarks/core.py.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "engine/rank_metrics/rank_metrics.h"

using namespace hc;

namespace {

constexpr int kUpdates = 100'000, kRounds = 51;

template <class Update>
void measure(const char* what, Update&& update) {
  std::vector<double> rounds;
  for (int round = 0; round < kRounds; ++round) {
    const TimePoint start = Clock::now();
    for (int i = 0; i < kUpdates; ++i) update();
    rounds.push_back(seconds_between(start, Clock::now()) * 1e9 / kUpdates);
  }
  std::sort(rounds.begin(), rounds.end());
  std::printf("%-28s p50 %6.1f ns  least %6.1f ns\n", what, rounds[kRounds / 2], rounds[0]);
}

}  // namespace

int main() {
  RankMetrics rank_metrics;
  rank_metrics.begin({0, 2, 0, 1, "here"});
  uint64_t seen = 0, ticks = processor_ticks();
  const TimePoint submitted = Clock::now();
  // The caller has read both clocks already, for the flight recorder.
  const auto call = [&](std::string_view name) {
    const uint64_t from = rank_metrics.at(submitted), now = rank_metrics.at(ticks += 1000);
    rank_metrics.ran({Op::kAllreduce, 4, from, from + 100, now, name, &seen}, &seen);
  };
  measure("call, short name", [&] { call("gradient"); });
  measure("call, long name", [&] { call("a.name.of.more.than.sixty.four.bytes.like.those.of.deep.models.weights"); });
  measure("operation with a handle", [&] {
    const uint64_t from = rank_metrics.at(submitted), now = rank_metrics.at(ticks += 1000);
    rank_metrics.began(from);
    rank_metrics.repeats(&seen, false, from);
    rank_metrics.ended({Op::kAllreduce, 4, from, from + 100, now, "gradient"});
  });
  measure("a thread's short wait", [&] {
    RankMetrics::Waiting(rank_metrics, submitted).over(rank_metrics.at(submitted) + 10, rank_metrics.at(ticks));
  });
  measure("a thread's wait", [&] {
    RankMetrics::Waiting waiting(rank_metrics, submitted);
    waiting.tell();
    waiting.over(0, 0);
  });
  measure("copy by a reader", [&] { (void)rank_metrics.copy(); });
  return 0;
}
