// Autotune: the search on synthetic cost surfaces, the sampling, the ladders, the settings on the wire, and whole
// worlds of engines that change their settings while they reduce.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "engine/tune/autotuner.h"
#include "tests/agreement/negotiation_samples.h"
#include "tests/locked_checks.h"
#include "tests/world.h"

namespace hc {
namespace {

using Point = TuneSearch::Point;
using Surface = std::function<double(const Point&)>;

TuneSearch searched(const std::vector<size_t>& lengths, const Point& start, const Surface& surface,
                    TuneSearch::Options options = {}) {
  TuneSearch s(lengths, start, options);
  for (int i = 0; !s.done() && i < 10000; ++i) s.measured(surface(s.trial()));
  REQUIRE(s.done());
  CHECK(s.samples() <= options.max_samples);
  return s;
}

// Score 100 at the top, less by `slope` for each position away from it.
Surface hill(Point top, double slope) {
  return [top = std::move(top), slope](const Point& at) {
    double score = 100;
    for (size_t i = 0; i < at.size(); ++i)
      score /= std::pow(1 + slope, std::abs(static_cast<double>(at[i]) - static_cast<double>(top[i])));
    return score;
  };
}

const std::vector<size_t> kLengths = {5, 6, 2, 4};

TEST_CASE("the search finds the top of every hill from every corner, within the samples of the default") {
  for (size_t a : {0, 2, 4})
    for (size_t b : {0, 1, 3, 5})
      for (size_t c : {0, 1})
        for (size_t d : {0, 3}) {
          const Point top = {a, b, c, d};
          for (const Point& start : {Point{4, 0, 1, 1}, Point{0, 5, 0, 3}, Point{2, 2, 1, 0}}) {
            auto s = searched(kLengths, start, hill(top, 0.2), {.max_samples = 40, .advantage = 0.04});
            CHECK(s.best() == top);
            CHECK(s.best_score() == doctest::Approx(100));
          }
        }
}

TEST_CASE("twenty samples are enough from the defaults when one or two settings matter") {
  for (size_t a = 0; a < 5; ++a) {
    CHECK(searched(kLengths, {4, 0, 1, 1}, hill({a, 0, 1, 1}, 0.3)).best() == Point{a, 0, 1, 1});
    CHECK(searched(kLengths, {4, 0, 1, 1}, hill({a, 0, 0, 1}, 0.3)).best() == Point{a, 0, 0, 1});
  }
}

TEST_CASE("settings that depend on each other are searched again after a move") {
  // A long window only pays with a small fusion threshold, and a small threshold without a window costs a little.
  const Surface surface = [](const Point& at) {
    return 100 + (at[1] == 1 ? 30 : 0) + (at[0] == 0 && at[1] == 1 ? 60 : 0);
  };
  auto s = searched({2, 2}, {1, 0}, surface, {.max_samples = 20, .advantage = 0.04});
  CHECK(s.best() == Point{0, 1});
}

TEST_CASE("where nothing matters the settings stay, whatever the noise") {
  std::mt19937 random(7);
  int moved = 0;
  for (int run = 0; run < 300; ++run) {
    std::normal_distribution<double> noise(100, 1.5);
    auto s = searched(kLengths, {4, 0, 1, 1}, [&](const Point&) { return noise(random); });
    moved += s.best() != Point{4, 0, 1, 1};
  }
  CHECK(moved <= 12);  // a move needs two pairs of samples that are 4 % apart
}

TEST_CASE("noise below the margin does not hide a gain above it") {
  std::mt19937 random(11);
  int found = 0;
  for (int run = 0; run < 200; ++run) {
    std::normal_distribution<double> noise(1, 0.01);
    const Surface top = hill({1, 0, 1, 1}, 0.15);
    auto s = searched(kLengths, {4, 0, 1, 1}, [&](const Point& at) { return top(at) * noise(random); });
    found += s.best()[0] == 1 || s.best()[0] == 2;  // one position off is within two margins
  }
  CHECK(found >= 190);
}

TEST_CASE("one lucky sample does not decide") {
  const auto told = [](std::initializer_list<double> scores) {
    TuneSearch s({2}, {0}, {});
    for (double score : scores) {
      REQUIRE(!s.done());
      s.measured(score);
    }
    CHECK(s.done());
    return s;
  };
  auto faster_time = told({100, 150, 149});  // the old point is as fast when it is measured again
  CHECK(faster_time.best() == Point{0});
  CHECK(faster_time.best_score() == doctest::Approx(124.5));
  CHECK(told({100, 150, 101, 102}).best() == Point{0});  // the new one is not, the second time
  auto better = told({100, 150, 101, 140});
  CHECK(better.best() == Point{1});
  CHECK(better.best_score() == doctest::Approx(145));
}

TEST_CASE("a search without a choice is over before it begins") {
  CHECK(TuneSearch({}, {}, {}).done());
  CHECK(TuneSearch({1, 1}, {0, 0}, {}).done());
  CHECK(TuneSearch({5}, {2}, {.max_samples = 0, .advantage = 0}).done());
}

TEST_CASE("ladders hold the value in force, and nothing that is fixed or means nothing") {
  Tuning start;
  start.fusion_bytes = 5 * kMiB;
  const auto none = [](std::string_view) { return false; };
  auto one_node = ladders_for({true, false}, start, none);
  REQUIRE(one_node.size() == 4);
  CHECK(one_node[0].knob == Knob::kFusion);
  CHECK(one_node[0].values[one_node[0].start] == 5 * kMiB);
  CHECK(std::is_sorted(one_node[0].values.begin(), one_node[0].values.end()));
  CHECK(one_node[2].knob == Knob::kFlat);
  CHECK(one_node[3].knob == Knob::kBlock);
  CHECK(ladders_for({false, true}, start, none).size() == 5);
  CHECK(ladders_for({false, false}, start, none).size() == 4);  // no two-level algorithm
  for (const Ladder& ladder : ladders_for({false, true}, start, [](std::string_view s) { return s == "CYCLE_TIME"; }))
    CHECK(ladder.knob != Knob::kBatchingDelay);
  CHECK(ladders_for({true, false}, start, [](std::string_view) { return true; }).empty());
  for (int k = 0; k < kKnobCount; ++k) {
    Tuning other = start;
    set_value(&other, static_cast<Knob>(k), 0);
    CHECK(value_of(other, static_cast<Knob>(k)) == 0);
    set_value(&other, static_cast<Knob>(k), 1);
    CHECK(value_of(other, static_cast<Knob>(k)) == 1);
  }
}

TEST_CASE("steps end when a name comes round, and a sample is the median of their rates") {
  Autotuner::Options options{.warmup_samples = 1, .steps_per_sample = 3, .search = {}};
  Autotuner tuner(options, ladders_for({true, false}, {}, [](std::string_view) { return false; }), {});
  CHECK(tuner.searching());
  CHECK(tuner.settings().searching);
  TimePoint now{};
  const auto step = [&](double seconds) {  // two tensors of 500 bytes
    bool changed = tuner.completed(1, 500, now);
    now += std::chrono::microseconds(100);
    changed = tuner.completed(2, 500, now) || changed;
    now += std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6) - 100);
    return changed;
  };
  for (int i = 0; i < 5; ++i) CHECK(!step(0.010));  // one under way at the start is skipped, three are the warm-up
  auto samples = tuner.take_samples();
  REQUIRE(samples.size() == 1);
  CHECK(std::string(samples[0].purpose) == "warmup");
  CHECK(samples[0].score == doctest::Approx(100000));
  step(1.0);  // a checkpoint
  CHECK(!step(0.010));
  CHECK(step(0.020));  // its begin ends the sample of 0.010, 1.0 and 0.010; other settings from now on
  samples = tuner.take_samples();
  REQUIRE(samples.size() == 1);
  CHECK(std::string(samples[0].purpose) == "baseline");
  CHECK(samples[0].score == doctest::Approx(100000));
  CHECK(samples[0].settings.fusion_bytes == 128 * kMiB);
  CHECK(tuner.settings().version == 1);
  CHECK(tuner.settings().fusion_bytes == 64 * kMiB);
  for (int i = 0; i < 1000 && tuner.searching(); ++i) step(0.010);
  samples = tuner.take_samples();
  REQUIRE(samples.size() > 3);
  CHECK(std::string(samples.back().purpose) == "final");
  CHECK(tuner.settings().fusion_bytes == 128 * kMiB);  // the others were no faster
  CHECK(!tuner.settings().searching);
  CHECK(tune_log_line(samples.back()).find(",final,0,100000,134217728,0,1,65536,16384,262144,262144\n") !=
        std::string::npos);
}

TEST_CASE("very short steps are measured together, and names that never repeat still make steps") {
  Autotuner::Options options{.warmup_samples = 0, .steps_per_sample = 2, .search = {}};
  Autotuner tuner(options, ladders_for({true, false}, {}, [](std::string_view) { return false; }), {});
  TimePoint now{};
  for (int i = 0; i < 700; ++i, now += std::chrono::microseconds(10)) tuner.completed(1, 10, now);  // 7 ms: 3 steps
  auto samples = tuner.take_samples();
  REQUIRE(samples.size() == 1);
  CHECK(samples[0].score == doctest::Approx(1e6));
  Autotuner endless(options, ladders_for({true, false}, {}, [](std::string_view) { return false; }), {});
  for (uint64_t i = 0; i < 300000; ++i, now += std::chrono::microseconds(10)) endless.completed(i, 10, now);
  CHECK(!endless.take_samples().empty());
}

TEST_CASE("settings in a plan survive the wire, and broken ones are refused") {
  Plan plan;
  plan.generation = 3;
  Tuning t;
  t.version = 9;
  t.searching = true;
  t.batching_delay_ms = 2.5;
  t.two_level = false;
  t.adasum_by_node = true;
  t.fusion_bytes = 3 * kMiB;
  plan.tuning = t;
  plan.batches.emplace_back().op = Op::kBarrier;
  Writer out;
  encode(plan, &out);
  Reader in(out.bytes());
  Plan read;
  REQUIRE(decode(&in, &read).is_ok());
  REQUIRE(read.tuning.has_value());
  CHECK(*read.tuning == t);
  CHECK(read.batches.size() == 1);
  for (size_t n = 0; n < out.size(); ++n) {
    Reader cut(out.bytes().subspan(0, n));
    CHECK(!decode(&cut, &read).is_ok());
  }
  for (auto spoil :
       {+[](Tuning* bad) { bad->block_bytes = 0; }, +[](Tuning* bad) { bad->segment_bytes = 0; },
        +[](Tuning* bad) { bad->batching_delay_ms = -1; }, +[](Tuning* bad) { bad->batching_delay_ms = NAN; },
        +[](Tuning* bad) { bad->fusion_bytes = size_t{1} << 50; }}) {
    plan.tuning = t;
    spoil(&*plan.tuning);
    Writer bad;
    encode(plan, &bad);
    Reader broken(bad.bytes());
    CHECK(!decode(&broken, &read).is_ok());
  }
}

TEST_CASE("a fusion threshold that shrinks holds for what is ready already") {
  samples::Ranks ranks(samples::options(2, 1024, 1 << 20));
  std::vector<Request> requests;
  for (int i = 0; i < 6; ++i) requests.push_back(samples::allreduce("t" + std::to_string(i), {1000}));
  ranks.everybody_says(requests);
  ranks.coordinator.set_fusion_bytes(8000);
  const Plan plan = ranks.decide();
  REQUIRE(plan.batches.size() == 3);
  for (const PlanBatch& batch : plan.batches) CHECK(batch.entries.size() == 2);
  ranks.everybody_says(requests);
  ranks.coordinator.set_fusion_bytes(100);  // less than one of them
  CHECK(ranks.decide().batches.size() == 6);
}

struct WorldCase {
  const char* name;
  int size;
  std::vector<std::string> nodes;
  Settings settings;
};

// Reduces until every rank has seen the end of the search; all sums must be right while settings change.
void tune_a_world(const WorldCase& c) {
  INFO(c.name);
  auto settings = c.settings;
  settings.insert(settings.end(), {{"HOROVOD_AUTOTUNE", "1"},
                                   {"HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "1"},
                                   {"HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "1"},
                                   {"HOROVOD_LOG_LEVEL", "error"}});
  World world(c.size, settings);
  if (!c.nodes.empty()) world.on_nodes(c.nodes);
  std::vector<std::string> last(c.size);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    const std::vector<size_t> sizes = {1, 100, 3000, 20000};
    std::vector<std::vector<int64_t>> in, out;
    for (size_t n : sizes) in.emplace_back(n, rank + 1), out.emplace_back(n);
    const int64_t sum = c.size * (c.size + 1) / 2;
    bool over = false;
    int64_t wrong = 0;
    for (int step = 0; step < 20000 && !over; ++step) {
      std::vector<int64_t> handles(sizes.size());
      for (size_t i = 0; i < sizes.size(); ++i)
        CHECK_OK(submit(engine, Op::kAllreduce, "t" + std::to_string(i), in[i], &out[i],
                        {static_cast<int64_t>(sizes[i])}, &handles[i]));
      for (size_t i = 0; i < sizes.size(); ++i) {
        CHECK_OK(finish(engine, handles[i]));
        engine.release(handles[i]);
        wrong += std::count_if(out[i].begin(), out[i].end(), [&](int64_t v) { return v != sum; });
      }
      if (step % 10 != 9) continue;  // all stop after the same step: when the slowest has seen the end
      std::vector<int64_t> mine = {engine.counters_json().find("\"searching\":true") != std::string::npos}, most(1);
      CHECK_OK(
          perform(engine, Op::kAllreduce, "over", mine, &most, {1}, [](Submission& s) { s.reduce = Reduce::kMax; }));
      over = most[0] == 0 && step > 20;
    }
    CHECK_LOCKED(over);
    CHECK_LOCKED(wrong == 0);
    const std::string counters = engine.counters_json();
    const size_t from = counters.find("\"autotune\":"), to = counters.find('}', from);
    last[rank] = counters.substr(from, to - from);
  }));
  for (const std::string& one : last) {
    CHECK(one == last[0]);
    CHECK(one.find("\"searching\":false") != std::string::npos);
  }
}

TEST_CASE("worlds reduce rightly while they tune, settle, and end with equal settings on every rank") {
  tune_a_world({"shared memory", 3, {}, {}});
  tune_a_world({"TCP", 3, {}, {{"HOROCLONE_SHARED_MEMORY", "0"}}});
  tune_a_world({"two machines", 4, {"a", "a", "b", "b"}, {}});
}

TEST_CASE("settings of rank 0 hold for all, and what is set by hand stays") {
  World world(2, {{"HOROVOD_AUTOTUNE", "1"},
                  {"HOROVOD_FUSION_THRESHOLD", "3MiB"},
                  {"HOROVOD_CYCLE_TIME", "0.25"},
                  {"HOROCLONE_FLAT_BYTES", "0"},
                  {"HOROCLONE_BLOCK_BYTES", "1000"}});
  CHECK_OK(world.each([&](Engine& engine, int) {
    std::vector<float> in(5000, 1), out(5000);
    for (int i = 0; i < 20; ++i) {
      CHECK_OK(perform(engine, Op::kAllreduce, "x", in, &out, {5000}));
    }
    CHECK_LOCKED(out[4999] == 2.0f);
    const std::string counters = engine.counters_json();
    CHECK_LOCKED(
        counters.find("{\"searching\":false,\"changes\":0,\"fusion_threshold\":3145728,\"cycle_time_ms\":0.25") !=
        std::string::npos);
  }));
}

}  // namespace
}  // namespace hc
