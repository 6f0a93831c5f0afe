#include "engine/tune/tune_search.h"

#include <utility>

namespace hc {

TuneSearch::TuneSearch(std::vector<size_t> lengths, Point start, Options options)
    : lengths_(std::move(lengths)), options_(options), trial_(start), best_(std::move(start)) {
  size_t points = 1;
  for (size_t n : lengths_) points *= n;
  if (points <= 1 || options_.max_samples < 1)
    stage_ = Stage::kDone;
  else
    begin_axis(0);
}

const char* TuneSearch::purpose() const {
  constexpr const char* names[] = {"baseline", "trial", "recheck", "confirm", "final"};
  return names[static_cast<int>(stage_)];
}

void TuneSearch::measured(double score) {
  if (done()) return;
  ++samples_;
  switch (stage_) {
    case Stage::kBaseline:
      best_score_ = seen_[best_] = score;
      return next();
    case Stage::kTrial:
      return judge_trial(score);
    case Stage::kRecheck:
      return judge_recheck(score);
    case Stage::kConfirm:
      return judge_challenger(score);
    case Stage::kDone:
      return;
  }
}

void TuneSearch::judge_trial(double score) {
  seen_[trial_] = challenger_score_ = score;
  if (score > best_score_ * (1 + options_.advantage)) {
    // Perhaps only a lucky moment, or the best point's score is of a slower time: measure both again, side by side.
    if (samples_ < options_.max_samples) {
      stage_ = Stage::kRecheck;
      challenger_ = std::exchange(trial_, best_);
      return;
    }
  } else if (score < best_score_ * (1 - 2 * options_.advantage)) {
    side_over_ = true;  // clearly worse: it will not get better further out
  }
  next();
}

void TuneSearch::judge_recheck(double score) {
  const double before = best_score_;
  best_score_ = score;
  seen_[best_] = score;
  if (challenger_score_ > score * (1 + options_.advantage) && samples_ < options_.max_samples) {
    stage_ = Stage::kConfirm;
    trial_ = challenger_;
    return;
  }
  best_score_ = seen_[best_] = (before + score) / 2;
  next();
}

void TuneSearch::judge_challenger(double again) {
  seen_[challenger_] = (challenger_score_ + again) / 2;
  if (again > best_score_ * (1 + options_.advantage)) {
    best_ = challenger_;
    best_score_ = seen_[best_];
    moved_on_axis_ = moved_in_pass_ = true;
  }
  next();
}

int TuneSearch::longer_side() const { return best_[axis_] * 2 >= lengths_[axis_] ? -1 : 1; }

void TuneSearch::begin_axis(size_t axis) {
  axis_ = axis;
  last_ = best_[axis];
  side_ = longer_side();
  side_over_ = moved_on_axis_ = second_side_ = false;
}

// The next position on this side that was not measured yet, as the trial; false: the side is over.
bool TuneSearch::take_next_on_side() {
  while (!side_over_) {
    const size_t at = last_ + static_cast<size_t>(side_);  // below 0 wraps to a number past the end
    if (at >= lengths_[axis_]) return false;
    last_ = at;
    Point point = best_;
    point[axis_] = at;
    auto known = seen_.find(point);
    if (known == seen_.end()) {
      trial_ = std::move(point);
      return true;
    }
    side_over_ = known->second < best_score_ * (1 - 2 * options_.advantage);
  }
  return false;
}

void TuneSearch::next() {
  stage_ = Stage::kTrial;
  while (samples_ < options_.max_samples) {
    if (take_next_on_side()) return;
    if (!second_side_ && !moved_on_axis_) {
      second_side_ = true;
      side_over_ = false;
      side_ = -side_;
      last_ = best_[axis_];
    } else if (axis_ + 1 < lengths_.size()) {
      begin_axis(axis_ + 1);
    } else if (moved_in_pass_) {  // the axes may depend on each other: once more from the new point
      moved_in_pass_ = false;
      begin_axis(0);
    } else {
      break;
    }
  }
  stage_ = Stage::kDone;
  trial_ = best_;
}

}  // namespace hc
