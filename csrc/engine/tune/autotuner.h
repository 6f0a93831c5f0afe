// Measures how fast operations complete and searches for better settings. A step ends when an operation comes round
// again; a sample is the median of the steps' bytes per second. PURE: completions and times go in, settings come out.
// Thread: the one that makes progress on rank 0. Owner: that engine.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

#include "agreement/tuning.h"
#include "base/clock.h"
#include "base/settings_table.h"
#include "engine/tune/tune_search.h"

namespace hc {

struct TuneSample {
  int number = 0;            // from 1
  const char* purpose = "";  // "warmup", or TuneSearch::purpose()
  double score = 0;          // bytes per second
  size_t steps = 0;
  Tuning settings;
};

class Autotuner {
 public:
  struct Options {
    int warmup_samples = defaults::autotune_warmup_samples;
    int steps_per_sample = defaults::autotune_steps_per_sample;
    TuneSearch::Options search;
  };
  Autotuner(Options options, std::vector<Ladder> ladders, Tuning start);

  bool searching() const { return !search_.done(); }
  // The settings that should be in force from now on.
  const Tuning& settings() const { return settings_; }
  // An operation has completed; `key` tells which one it is within a step. True: settings() have changed.
  bool completed(uint64_t key, size_t bytes, TimePoint now);
  // The samples since the last call; the last sample of the search is followed by one with purpose "final".
  std::vector<TuneSample> take_samples();

 private:
  bool end_step(TimePoint now);
  bool end_sample();
  bool apply(const TuneSearch::Point& point, bool searching);

  const Options options_;
  const std::vector<Ladder> ladders_;
  TuneSearch search_;
  Tuning settings_;
  int warmups_left_;
  std::vector<TuneSample> samples_;
  int sample_count_ = 0;

  std::unordered_set<uint64_t> seen_;  // in this step
  bool in_step_ = false;
  TimePoint step_began_{};
  size_t step_bytes_ = 0;
  int steps_to_skip_ = 1;        // under way when settings changed, or at the start of the job
  std::vector<double> rates_{};  // of this sample's steps
};

// The head of the log and the line of one sample, as comma-separated values.
std::string tune_log_head();
std::string tune_log_line(const TuneSample& sample);

}  // namespace hc
