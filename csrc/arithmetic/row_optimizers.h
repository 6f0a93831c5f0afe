// Optimizers that a parameter server runs on the rows of a table. A row is `dim` float32 weights followed by the state
// that the optimizer keeps for them. The formulas are those of torch.optim (Adam: SparseAdam, or Adam when `dense`) and
// of fbgemm's row-wise Adagrad. Thread: any; values only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hc {

// In the order of horoclone_server.h. kSum adds what is pushed, as PS-Lite's default does.
enum class Rule : int32_t { kSum, kSgd, kAdagrad, kRowWiseAdagrad, kAdam };
inline constexpr int32_t kRuleCount = 5;

struct RowOptimizer {
  Rule rule = Rule::kSum;
  bool dense = false;  // every row has a gradient in every step: Adam then divides as torch.optim.Adam does
  float learning_rate = 1;
  float epsilon = 0;
  float beta1 = 0, beta2 = 0;  // Adam; SGD's momentum is beta1
  float initial = 0;           // of Adagrad's accumulators
  bool operator==(const RowOptimizer&) const = default;
};

// Number of float32 behind the weights of a row.
size_t state_floats(const RowOptimizer& optimizer, size_t dim);
void initial_state(const RowOptimizer& optimizer, size_t dim, float* state);

// What is the same for all rows of one step.
struct RowStep {
  Rule rule;
  bool momentum;
  float scale;  // of gradients
  float rate, epsilon, beta1, beta2;
};
// `number` counts from 1.
RowStep step_of(const RowOptimizer& optimizer, uint64_t number, float scale);
void update_row(const RowStep& step, size_t dim, const float* gradient, float* row);

// Adds `count` floats.
void add_row(size_t count, const float* from, float* to);

}  // namespace hc
