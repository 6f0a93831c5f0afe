#include "arithmetic/row_optimizers.h"

#include <algorithm>
#include <cmath>

namespace hc {

size_t state_floats(const RowOptimizer& optimizer, size_t dim) {
  switch (optimizer.rule) {
    case Rule::kSum:
      return 0;
    case Rule::kSgd:
      return optimizer.beta1 != 0 ? dim : 0;
    case Rule::kAdagrad:
      return dim;
    case Rule::kRowWiseAdagrad:
      return 1;
    case Rule::kAdam:
      return 2 * dim;
  }
  return 0;
}

void initial_state(const RowOptimizer& optimizer, size_t dim, float* state) {
  const bool sums = optimizer.rule == Rule::kAdagrad || optimizer.rule == Rule::kRowWiseAdagrad;
  std::fill_n(state, state_floats(optimizer, dim), sums ? optimizer.initial : 0.0f);
}

RowStep step_of(const RowOptimizer& o, uint64_t number, float scale) {
  RowStep step{o.rule, o.beta1 != 0, scale, o.learning_rate, o.epsilon, o.beta1, o.beta2};
  if (o.rule != Rule::kAdam) return step;
  const double first = 1.0 - std::pow(static_cast<double>(o.beta1), static_cast<double>(number));
  const double second = std::sqrt(1.0 - std::pow(static_cast<double>(o.beta2), static_cast<double>(number)));
  step.rate = static_cast<float>(static_cast<double>(o.learning_rate) * second / first);
  if (o.dense) step.epsilon = static_cast<float>(static_cast<double>(o.epsilon) * second);
  return step;
}

namespace {

void adagrad(const RowStep& s, size_t dim, const float* __restrict gradient, float* __restrict row) {
  float* __restrict sums = row + dim;
  for (size_t i = 0; i < dim; ++i) {
    const float g = gradient[i] * s.scale;
    sums[i] += g * g;
    row[i] -= s.rate * g / (std::sqrt(sums[i]) + s.epsilon);
  }
}

// The mean of the squares: in double, as a row may have a million elements.
void row_wise_adagrad(const RowStep& s, size_t dim, const float* __restrict gradient, float* __restrict row) {
  double squares = 0;
  for (size_t i = 0; i < dim; ++i) {
    const double g = static_cast<double>(gradient[i] * s.scale);
    squares += g * g;
  }
  row[dim] += static_cast<float>(squares / static_cast<double>(dim));
  const float rate = s.rate * s.scale / (std::sqrt(row[dim]) + s.epsilon);
  for (size_t i = 0; i < dim; ++i) row[i] -= rate * gradient[i];
}

void adam(const RowStep& s, size_t dim, const float* __restrict gradient, float* __restrict row) {
  float* __restrict mean = row + dim;
  float* __restrict squares = row + 2 * dim;
  for (size_t i = 0; i < dim; ++i) {
    const float g = gradient[i] * s.scale;
    mean[i] += (1 - s.beta1) * (g - mean[i]);
    squares[i] += (1 - s.beta2) * (g * g - squares[i]);
    row[i] -= s.rate * mean[i] / (std::sqrt(squares[i]) + s.epsilon);
  }
}

void sgd(const RowStep& s, size_t dim, const float* __restrict gradient, float* __restrict row) {
  if (!s.momentum) {
    for (size_t i = 0; i < dim; ++i) row[i] -= s.rate * (gradient[i] * s.scale);
    return;
  }
  float* __restrict velocity = row + dim;
  for (size_t i = 0; i < dim; ++i) {
    velocity[i] = s.beta1 * velocity[i] + gradient[i] * s.scale;
    row[i] -= s.rate * velocity[i];
  }
}

}  // namespace

void update_row(const RowStep& step, size_t dim, const float* gradient, float* row) {
  switch (step.rule) {
    case Rule::kSum:
      for (size_t i = 0; i < dim; ++i) row[i] += gradient[i] * step.scale;
      return;
    case Rule::kSgd:
      return sgd(step, dim, gradient, row);
    case Rule::kAdagrad:
      return adagrad(step, dim, gradient, row);
    case Rule::kRowWiseAdagrad:
      return row_wise_adagrad(step, dim, gradient, row);
    case Rule::kAdam:
      return adam(step, dim, gradient, row);
  }
}

void add_row(size_t count, const float* __restrict from, float* __restrict to) {
  for (size_t i = 0; i < count; ++i) to[i] += from[i];
}

}  // namespace hc
