// Nanoseconds of the agreement in the steady state: what a rank pays to announce (cache and bytes), what the
// coordinator pays to take and to decide. Medians over steps, because the machine may be busy; takes a few seconds.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "tests/agreement/negotiation_samples.h"

using namespace hc;
using namespace hc::samples;

namespace {

constexpr int kTensors = 1000;
constexpr int kSteps = 300;

using Samples = std::vector<double>;  // ns per operation, one for each step (and rank)

struct Costs {
  Samples announce, encode, decode, take, decide;
  size_t plan_bytes = 0, request_list_bytes = 0;  // of the last step
};

double median(Samples samples) {
  std::nth_element(samples.begin(), samples.begin() + static_cast<ptrdiff_t>(samples.size() / 2), samples.end());
  return samples[samples.size() / 2];
}

class Stopwatch {
 public:
  explicit Stopwatch(Samples* to) : to_(to) {}
  ~Stopwatch() { to_->push_back(std::chrono::duration<double, std::nano>(Clock::now() - start_).count() / kTensors); }

 private:
  Samples* to_;
  TimePoint start_ = Clock::now();
};

std::vector<Request> step_of(bool unnamed_ones, uint64_t step) {
  std::vector<Request> list;
  for (int i = 0; i < kTensors; i++) {
    Signature s = signature(Op::kAllreduce, {i % 100 + 1, 64});
    uint64_t sequence = step * kTensors + static_cast<uint64_t>(i);
    list.push_back(unnamed_ones ? unnamed(sequence, s) : named("model.layer" + std::to_string(i) + ".weight", s));
  }
  return list;
}

void run_step(Ranks* ranks, const std::vector<Request>& step, Costs* costs) {
  for (int r = 0; r < ranks->size_; r++) {
    RequestList sent, arrived;
    Writer w;
    sent.rank = r;
    {
      Stopwatch watch(&costs->announce);
      for (const Request& request : step) ranks->cache[static_cast<size_t>(r)].announce(request, &sent);
    }
    {
      Stopwatch watch(&costs->encode);
      encode(sent, &w);
    }
    costs->request_list_bytes = w.size();
    {
      Stopwatch watch(&costs->decode);
      Reader in(w.bytes());
      if (!decode(&in, &arrived).is_ok()) std::abort();
    }
    Stopwatch watch(&costs->take);
    if (!ranks->coordinator.take(arrived, {}).is_ok()) std::abort();
  }
  Plan plan;
  {
    Stopwatch watch(&costs->decide);
    plan = ranks->coordinator.decide(100000);
  }
  Writer w;
  encode(plan, &w);
  costs->plan_bytes = w.size();
}

void measure(int size, bool unnamed_ones) {
  Ranks ranks(options(size, 4096));
  uint64_t number = 0;
  for (; number < 3; number++) {  // learn
    std::vector<Request> step = step_of(unnamed_ones, number);
    ranks.said.clear();
    ranks.everybody_says(step);
    ranks.decide();
  }
  Costs costs;
  for (int i = 0; i < kSteps; i++) run_step(&ranks, step_of(unnamed_ones, number++), &costs);
  std::printf(
      "%s, %2d ranks: announce %5.1f  encode %4.1f  decode %4.1f  take %5.1f ns per announcement;  decide %5.1f ns per "
      "operation;  request list %zu B, plan %zu B per step of %d\n",
      unnamed_ones ? "unnamed" : "named  ", size, median(costs.announce), median(costs.encode), median(costs.decode),
      median(costs.take), median(costs.decide), costs.request_list_bytes, costs.plan_bytes, kTensors);
}

}  // namespace

int main() {
  for (bool unnamed_ones : {false, true})
    for (int size : {1, 2, 4, 16}) measure(size, unnamed_ones);
}
