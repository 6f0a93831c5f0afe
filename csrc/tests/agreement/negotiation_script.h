// A random script for a world of ranks: who submits which operations in which order, who joins and leaves, and how each
// operation must end. The prediction is written independently of the coordinator's rules.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/agreement/negotiation_samples.h"

namespace hc::samples {

using Random = std::mt19937_64;

inline int pick(Random& random, int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); }
inline bool chance(Random& random, int percent) { return pick(random, 100) < percent; }

inline constexpr size_t kFusionBytes = 256;

// One operation of the script, as each rank submits it.
struct Operation {
  std::string name;  // empty: unnamed
  std::vector<Signature> on_rank;
  std::vector<bool> submitted_by;
  bool clash = false;  // one name, two operations
  Code invalid = Code::kOk;
  Code expected = Code::kOk;
};

struct Script {
  std::vector<Operation> operations;
  std::vector<std::vector<int>> actions;  // per rank: numbers of operations, or kJoinAction
  std::vector<bool> leaves;
  std::vector<Code> join_outcomes;
};
inline constexpr int kJoinAction = -1;

inline Signature random_signature(Random& random, Op op, int size) {
  Signature s = signature(op, {(1 + pick(random, 6)) * size, 2});
  if (op == Op::kBarrier) return s;
  if (op == Op::kAllreduce) {
    s.in_arena = chance(random, 15);
    s.reduce = static_cast<Reduce>(pick(random, 6));
    if (chance(random, 20)) s.prescale = 0.5;
    if (chance(random, 20)) s.priority = pick(random, 5) - 2;
    for (int more = chance(random, 25) ? 1 + pick(random, 3) : 0; more > 0; more--) s.tensors.push_back(s.tensors[0]);
  }
  if (op == Op::kReducescatter) s.reduce = chance(random, 50) ? Reduce::kSum : Reduce::kAverage;
  if (op == Op::kBroadcast) s.root = pick(random, size);
  DType dtype = chance(random, 60) ? DType::kF32 : DType::kF16;
  const bool whole = s.reduce != Reduce::kAdasum;  // which is for floats only
  for (TensorMeta& t : s.tensors) t.dtype = whole && !chance(random, 90) ? DType::kI64 : dtype;
  return s;
}

// What ranks may do differently without disagreeing.
inline void vary(Random& random, Signature* s, int size) {
  if (s->op == Op::kAllgather) s->tensors[0].shape[0] = pick(random, 5);
  if (s->op == Op::kAllreduce && chance(random, 10)) s->in_arena = !s->in_arena;
  if (s->op == Op::kAllreduce && chance(random, 10)) s->priority = pick(random, 5) - 2;
  if (s->op != Op::kAlltoall) return;
  s->splits.clear();
  s->tensors[0].shape[0] = 0;
  for (int i = 0; i < size; i++) s->tensors[0].shape[0] += s->splits.emplace_back(pick(random, 4));
}

// Makes this rank's signature unacceptable beside the others'.
inline void spoil(Random& random, Signature* s) {
  switch (pick(random, s->op == Op::kBroadcast ? 5 : s->op == Op::kAllreduce ? 6 : 4)) {
    case 0:
      s->tensors[0].dtype = DType::kF64;
      break;
    case 1:
      s->tensors[0].shape.back()++;
      break;
    case 2:
      s->tensors.push_back(s->tensors[0]);
      break;
    case 3:
      s->device = 1;
      break;
    case 4:
      s->op == Op::kBroadcast ? (void)(s->root ^= 1) : (void)(s->postscale = 3);
      break;
    default:
      s->reduce = s->reduce == Reduce::kMax ? Reduce::kMin : Reduce::kMax;
      break;
  }
}

class ScriptMaker {
 public:
  ScriptMaker(Random& random, int size) : random_(random), size_(size) {
    script_.actions.resize(static_cast<size_t>(size));
    script_.leaves.resize(static_cast<size_t>(size));
    for (int i = 0; i < 10; i++) {
      Op op = chance(random_, 60) ? Op::kAllreduce : static_cast<Op>(std::vector<int>{1, 2, 3, 4, 6}[pick(random_, 5)]);
      usual_.push_back(random_signature(random_, op, size_));
    }
  }
  Script make() {
    for (int phases = 1 + pick(random_, 6); phases > 0; phases--) {
      bool join = chance(random_, 25);
      add_phase(join, false);
    }
    if (chance(random_, 25)) add_phase(chance(random_, 50), true);
    return std::move(script_);
  }

 private:
  void add_phase(bool join, bool last) {
    std::vector<int> made;
    for (int i = 0; i < static_cast<int>(usual_.size()); i++)
      if (chance(random_, 50)) made.push_back(add("n" + std::to_string(i), usual_[static_cast<size_t>(i)]));
    for (int i = pick(random_, 4); i > 0; i--) {
      Op op = chance(random_, 80) ? Op::kAllreduce : Op::kAllgather;
      made.push_back(
          add("", chance(random_, 60) && op == Op::kAllreduce ? kUnnamed : random_signature(random_, op, size_)));
    }
    if (!join && !last && chance(random_, 20)) made.push_back(add_clash());
    std::shuffle(made.begin(), made.end(), random_);
    std::vector<int> length = lengths(static_cast<int>(made.size()), join && !last, last);
    bool left = std::count(script_.leaves.begin(), script_.leaves.end(), true) != 0;
    for (int i = 0; i < static_cast<int>(made.size()); i++) {
      Operation& o = script_.operations[static_cast<size_t>(made[static_cast<size_t>(i)])];
      for (int r = 0; r < size_; r++) o.submitted_by[static_cast<size_t>(r)] = length[static_cast<size_t>(r)] > i;
      predict(&o, left);
    }
    for (int r = 0; r < size_; r++) add_actions(r, made, length[static_cast<size_t>(r)], join);
    if (join) script_.join_outcomes.push_back(left ? Code::kAborted : Code::kOk);
  }

  // How many of the phase's operations each rank submits.
  std::vector<int> lengths(int all, bool uneven, bool last) {
    std::vector<int> length(static_cast<size_t>(size_), all);
    for (int r = 1; r < size_; r++) {
      bool leaves = last && chance(random_, 40);
      script_.leaves[static_cast<size_t>(r)] = leaves;
      if ((uneven && chance(random_, 60)) || leaves) length[static_cast<size_t>(r)] = pick(random_, all + 1);
    }
    std::rotate(length.begin(), length.begin() + (last ? 0 : pick(random_, size_)), length.end());
    return length;
  }

  void add_actions(int rank, const std::vector<int>& made, int length, bool join) {
    std::vector<int> mine(made.begin(), made.begin() + length), order = mine;
    std::shuffle(order.begin(), order.end(), random_);
    // Any order among the named ones; the unnamed keep theirs.
    size_t next = 0;
    auto is_unnamed = [&](int o) { return script_.operations[static_cast<size_t>(o)].name.empty(); };
    for (int& o : order) {
      if (!is_unnamed(o)) continue;
      while (!is_unnamed(mine[next])) next++;
      o = mine[next++];
    }
    std::vector<int>& actions = script_.actions[static_cast<size_t>(rank)];
    actions.insert(actions.end(), order.begin(), order.end());
    if (join && !script_.leaves[static_cast<size_t>(rank)]) actions.push_back(kJoinAction);
  }

  int add(std::string name, Signature usual) {
    Operation o;
    if (chance(random_, 15)) usual = random_signature(random_, usual.op, size_);
    if (chance(random_, 4) && usual.op == Op::kReducescatter) {
      usual.reduce = Reduce::kMin;
      o.invalid = Code::kInvalidArgument;
    } else if (chance(random_, 4) && usual.op == Op::kAllgather) {
      usual.tensors[0].shape = {};
      o.invalid = Code::kMismatch;
    }
    o.name = std::move(name);
    o.on_rank.assign(static_cast<size_t>(size_), usual);
    o.submitted_by.assign(static_cast<size_t>(size_), true);
    bool varies = chance(random_, 40);
    for (Signature& s : o.on_rank)
      if (varies && o.invalid == Code::kOk) vary(random_, &s, size_);
    if (chance(random_, 8) && o.invalid == Code::kOk && usual.op != Op::kBarrier) {
      spoil(random_, &o.on_rank[static_cast<size_t>(pick(random_, size_))]);
    }
    script_.operations.push_back(std::move(o));
    return static_cast<int>(script_.operations.size()) - 1;
  }

  int add_clash() {
    Operation o;
    o.clash = true;
    o.name = "clash" + std::to_string(script_.operations.size());
    for (int r = 0; r < size_; r++) {
      bool other = r == 0 ? false : r == 1 ? true : chance(random_, 50);
      o.on_rank.push_back(signature(other ? Op::kBroadcast : Op::kAllreduce, {4}));
    }
    o.submitted_by.assign(static_cast<size_t>(size_), true);
    script_.operations.push_back(std::move(o));
    return static_cast<int>(script_.operations.size()) - 1;
  }

  void predict(Operation* o, bool left) {
    const Signature* first = nullptr;
    bool everybody = true, fit = true;
    for (int r = 0; r < size_; r++) {
      size_t i = static_cast<size_t>(r);
      if (!o->submitted_by[i]) {
        everybody = false;
        continue;
      }
      if (first == nullptr) first = &o->on_rank[i];
      fit = fit && fits(*first, o->on_rank[i]);
    }
    bool joins_well = first == nullptr || first->op == Op::kAllreduce || first->op == Op::kBarrier;
    if (first != nullptr && first->device != 0 && first->prescale != 1.0 && !has_zero_identity(first->reduce))
      joins_well = false;
    o->expected = left && !everybody          ? Code::kAborted
                  : o->clash || !fit          ? Code::kMismatch
                  : !everybody && !joins_well ? Code::kUnsupported
                                              : o->invalid;
  }
  // The same, but for what vary() may change.
  static bool fits(Signature a, Signature b) {
    for (Signature* s : {&a, &b}) {
      s->in_arena = false;
      s->priority = 0;
      s->splits.clear();
      bool free = s->op == Op::kAllgather || s->op == Op::kAlltoall;
      for (TensorMeta& t : s->tensors)
        if (free && !t.shape.empty()) t.shape[0] = 0;
    }
    return a == b;
  }

  const Signature kUnnamed = signature(Op::kAllreduce, {3});
  Random& random_;
  const int size_;
  std::vector<Signature> usual_;  // [name]
  Script script_;
};

}  // namespace hc::samples
