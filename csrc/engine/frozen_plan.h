// Recognises that the declared buckets of a process set come in the same batches and order twice in a row, and then
// says, without any message, what may start when; and how ranks that wait inside such a plan get out again together.
// PURE: every rank feeds it the same plans and comes to the same order. The words in shared memory are the engine's;
// here are their values and the steps between them, for its compare-and-swap loops.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/negotiation.h"

namespace hc {

struct FrozenBatch {
  std::vector<uint32_t> slots;
  Algorithm algorithm = Algorithm::kAuto;
  bool in_arena = false;
  bool operator==(const FrozenBatch&) const = default;
};

class FrozenPlan {
 public:
  // The slots of the declared buckets, without repetition: one step is each of them once.
  explicit FrozenPlan(std::vector<uint32_t> declared);

  // Every batch of the process set, in plan order. True: this batch completed the second of two equal steps, and from
  // now on the plan is frozen, in this generation. Batches of other slots do not matter.
  bool observe(const PlanBatch& batch);
  bool frozen() const { return frozen_; }
  uint32_t generation() const { return generation_; }
  const std::vector<FrozenBatch>& order() const { return order_; }

  // A place in the frozen order counts on through the steps: step * order().size() + batch. Every rank enters the
  // places one after the other, so what has run is always a beginning.
  // This rank submitted a bucket. False: not of this plan, or again before it ran; then the plan must be broken.
  bool submit(uint32_t slot);
  // Everything that place needs is submitted on this rank.
  bool ready(uint64_t place) const;
  // The plan is broken: places from `first_not_run` on do not run. Back to watching, in the next generation; returns
  // the slots that were submitted in vain, to be announced to the coordinator.
  std::vector<uint32_t> thaw(uint64_t first_not_run);

 private:
  struct Declared {
    uint32_t slot;
    uint32_t batch = 0;      // in order_
    uint64_t submitted = 0;  // times since the plan froze
    bool seen = false;       // in the step under observation
  };
  Declared* find(uint32_t slot);
  void forget_step();
  void start_over();

  std::vector<Declared> declared_;   // ascending by slot
  std::vector<FrozenBatch> step_;    // under observation
  std::vector<FrozenBatch> order_;   // the last whole step; the plan when frozen
  std::vector<uint64_t> submitted_;  // per batch of order_: slots since the plan froze
  size_t seen_ = 0;
  bool frozen_ = false;
  uint32_t generation_ = 0;
};

// One word per place of the order (modulo the order's length), shared by the ranks: the generation and how many
// arrivals there were in it. The last arrival and a break are decided by the same compare-and-swap, so either every
// rank runs the batch or none does.
class ArrivalWord {
 public:
  explicit ArrivalWord(uint64_t value = 0) : value_(value) {}
  uint64_t value() const { return value_; }

  enum class Verdict { kWaiting, kRuns, kBroken };
  // For a rank that has arrived: kRuns as soon as all `size` ranks have arrived `step` + 1 times.
  Verdict verdict(uint32_t generation, uint64_t step, int size) const;
  // The word with one more arrival; nothing: broken, do not enter.
  std::optional<ArrivalWord> arrive(uint32_t generation) const;
  // The word that nobody can arrive at any more; nothing: too late (everybody has arrived, it runs) or done already.
  std::optional<ArrivalWord> broken(uint32_t generation, uint64_t step, int size) const;

 private:
  static constexpr int kArrivalBits = 40;
  static constexpr uint64_t kArrivals = (uint64_t{1} << kArrivalBits) - 1;
  static constexpr uint64_t kEras = (uint64_t{1} << (64 - kArrivalBits)) - 1;
  // An era is twice the generation while it is open, and one more once it is broken.
  static uint64_t era_of(uint32_t generation) { return (uint64_t{generation} << 1) & kEras; }
  uint64_t era() const { return value_ >> kArrivalBits; }
  uint64_t arrivals() const { return value_ & kArrivals; }
  bool is_before(uint64_t other) const { return era() != other && ((other - era()) & kEras) <= kEras / 2; }
  uint64_t value_;
};

}  // namespace hc
