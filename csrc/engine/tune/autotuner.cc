#include "engine/tune/autotuner.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace hc {
namespace {

// Shorter steps count as one: the clock and the scheduler would be measured, not the settings.
constexpr double kShortestStepS = 0.002;
constexpr size_t kMaxKeys = 1u << 16;  // a program that never repeats a name has no steps: then this many are one

std::vector<size_t> lengths_of(const std::vector<Ladder>& ladders) {
  std::vector<size_t> lengths;
  for (const Ladder& ladder : ladders) lengths.push_back(ladder.values.size());
  return lengths;
}

TuneSearch::Point start_of(const std::vector<Ladder>& ladders) {
  TuneSearch::Point start;
  for (const Ladder& ladder : ladders) start.push_back(ladder.start);
  return start;
}

double median_of(std::vector<double>* values) {
  const auto middle = values->begin() + static_cast<std::ptrdiff_t>(values->size() / 2);
  std::nth_element(values->begin(), middle, values->end());
  return *middle;
}

}  // namespace

Autotuner::Autotuner(Options options, std::vector<Ladder> ladders, Tuning start)
    : options_(options),
      ladders_(std::move(ladders)),
      search_(lengths_of(ladders_), start_of(ladders_), options.search),
      settings_(start),
      warmups_left_(options.warmup_samples) {
  settings_.searching = searching();
}

bool Autotuner::completed(uint64_t key, size_t bytes, TimePoint now) {
  if (!searching()) return false;
  if (!in_step_) {
    in_step_ = true;
    step_began_ = now;
  }
  bool changed = false;
  if (seen_.contains(key) || seen_.size() >= kMaxKeys) {
    seen_.clear();
    if (seconds_between(step_began_, now) >= kShortestStepS) changed = end_step(now);
  }
  seen_.insert(key);
  step_bytes_ += bytes;
  return changed;
}

// The operation that has just completed is the first of the next step.
bool Autotuner::end_step(TimePoint now) {
  const double rate = static_cast<double>(step_bytes_) / seconds_between(step_began_, now);
  step_began_ = now;
  step_bytes_ = 0;
  if (steps_to_skip_ > 0) {
    --steps_to_skip_;
    return false;
  }
  rates_.push_back(rate);
  return rates_.size() >= static_cast<size_t>(options_.steps_per_sample) && end_sample();
}

bool Autotuner::end_sample() {
  TuneSample sample;
  sample.number = ++sample_count_;
  sample.steps = rates_.size();
  sample.score = median_of(&rates_);
  sample.settings = settings_;
  rates_.clear();
  const bool warming = warmups_left_ > 0;
  sample.purpose = warming ? "warmup" : search_.purpose();
  samples_.push_back(sample);
  if (warming) {
    --warmups_left_;
    return false;
  }
  search_.measured(sample.score);
  const bool changed = apply(search_.trial(), searching());
  if (!searching()) {
    sample.number = ++sample_count_;
    sample.purpose = search_.purpose();
    sample.score = search_.best_score();
    sample.steps = 0;
    sample.settings = settings_;
    samples_.push_back(sample);
  }
  return changed;
}

bool Autotuner::apply(const TuneSearch::Point& point, bool searching) {
  Tuning wanted = settings_;
  wanted.searching = searching;
  for (size_t i = 0; i < ladders_.size(); ++i) set_value(&wanted, ladders_[i].knob, ladders_[i].values[point[i]]);
  if (wanted == settings_) return false;
  settings_ = wanted;
  settings_.version++;
  steps_to_skip_ = 1;
  return true;
}

std::vector<TuneSample> Autotuner::take_samples() { return std::exchange(samples_, {}); }

std::string tune_log_head() {
  std::string text = "sample,purpose,steps,bytes_per_second";
  for (int k = 0; k < kKnobCount; ++k) text += text_of(",", word_of(static_cast<Knob>(k)));
  return text + "\n";
}

std::string tune_log_line(const TuneSample& s) {
  std::string text = text_of(s.number, ",", s.purpose, ",", s.steps, ",", std::llround(s.score));
  for (int k = 0; k < kKnobCount; ++k) {
    const Knob knob = static_cast<Knob>(k);
    const double value = value_of(s.settings, knob);
    text += knob == Knob::kBatchingDelay ? text_of(",", value) : text_of(",", static_cast<uint64_t>(value));
  }
  return text + "\n";
}

}  // namespace hc
