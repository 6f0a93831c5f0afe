// Latency of blocking operations and rate of asynchronous ones, two engines in two threads of one process. Prints
// medians.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "tests/world.h"

using namespace hc;

namespace {

double microseconds_since(TimePoint start) { return seconds_between(start, Clock::now()) * 1e6; }

void blocking(Engine& engine, int rank, size_t n, int rounds) {
  std::vector<float> v(n, 1.0f);
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    const TimePoint start = Clock::now();
    int64_t h = 0;
    if (!submit(engine, Op::kAllreduce, "x", v, &v, {static_cast<int64_t>(n)}, &h, [](Submission& s) {
           s.will_wait = true;
         }).is_ok())
      std::abort();
    if (!finish(engine, h).is_ok()) std::abort();
    engine.release(h);
    times.push_back(microseconds_since(start));
  }
  std::sort(times.begin(), times.end());
  if (rank == 0)
    std::printf("blocking %8zu B  p50 %8.2f us  p99 %8.2f us\n", n * 4, times[rounds / 2], times[rounds * 99 / 100]);
}

void many(Engine& engine, int rank, int count, int rounds) {
  std::vector<std::vector<float>> v(count, std::vector<float>(256, 1.0f));
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.push_back("t" + std::to_string(i));
  std::vector<int64_t> handles(count);
  std::vector<double> times, submits;
  for (int round = 0; round < rounds; ++round) {
    const TimePoint start = Clock::now();
    for (int i = 0; i < count; ++i)
      if (!submit(engine, Op::kAllreduce, names[i], v[i], &v[i], {256}, &handles[i]).is_ok()) std::abort();
    submits.push_back(microseconds_since(start) / count);
    for (int64_t h : handles) {
      if (!finish(engine, h).is_ok()) std::abort();
      engine.release(h);
    }
    times.push_back(microseconds_since(start));
  }
  std::sort(times.begin(), times.end());
  std::sort(submits.begin(), submits.end());
  if (rank == 0)
    std::printf("%d x 1 KiB: %.0f tensors/s, submit %.2f us each\n", count, count / times[rounds / 2] * 1e6,
                submits[rounds / 2]);
}

}  // namespace

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 2;
  World world(size);
  Status outcome = world.each([](Engine& engine, int rank) {
    for (size_t n : {1, 256, 2048, 16384, 262144}) blocking(engine, rank, n, n > 100000 ? 500 : 5000);
    many(engine, rank, 1000, 50);
    if (rank == 0) std::printf("%s\n", engine.counters_json().c_str());
  });
  if (!outcome.is_ok()) std::printf("failed: %s\n", outcome.text().c_str());
  return outcome.is_ok() ? 0 : 1;
}
