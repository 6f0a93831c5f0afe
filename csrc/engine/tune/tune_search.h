// Looks for the best point of a small grid with few, noisy measurements: one axis after the other, from the value in
// force outwards (coordinate descent with a line search), and a point must beat the best one twice, side by side the
// second time. PURE: scores go in, points come out. docs/decisions/autotuning.md says why not a Gaussian process.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "base/settings_table.h"

namespace hc {

inline constexpr double kAdvantageOfNoise = 0.05;  // HOROCLONE_AUTOTUNE_NOISE times this is Options::advantage

class TuneSearch {
 public:
  using Point = std::vector<size_t>;  // a position on each axis
  struct Options {
    int max_samples = defaults::autotune_max_samples;
    // By how much, of the score, a point must be better to count as better.
    double advantage = kAdvantageOfNoise * defaults::autotune_noise;
  };
  // lengths: how many positions each axis has.
  TuneSearch(std::vector<size_t> lengths, Point start, Options options);

  bool done() const { return stage_ == Stage::kDone; }
  const Point& trial() const { return trial_; }  // what to measure next
  // Of the trial: "baseline", "trial", "recheck" (the best once more), "confirm" (its challenger once more).
  const char* purpose() const;
  void measured(double score);  // of the trial; more is better
  const Point& best() const { return best_; }
  double best_score() const { return best_score_; }
  int samples() const { return samples_; }

 private:
  enum class Stage { kBaseline, kTrial, kRecheck, kConfirm, kDone };
  void judge_trial(double score);
  void judge_recheck(double score);
  void judge_challenger(double again);
  void next();
  bool take_next_on_side();
  void begin_axis(size_t axis);
  int longer_side() const;

  const std::vector<size_t> lengths_;
  const Options options_;
  Stage stage_ = Stage::kBaseline;
  Point trial_, best_, challenger_;
  double best_score_ = 0, challenger_score_ = 0;
  int samples_ = 0;
  std::map<Point, double> seen_;
  // The line search: along axis_, towards side_ (+1 or -1), last_ was the last position looked at.
  size_t axis_ = 0, last_ = 0;
  int side_ = 1;
  bool side_over_ = false, moved_on_axis_ = false, second_side_ = false, moved_in_pass_ = false;
};

}  // namespace hc
