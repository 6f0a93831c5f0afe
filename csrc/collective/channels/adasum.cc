// Adasum (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021): per tensor,
//   adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b,
// along a binary tree over the ranks. Every rank combines one slice of all vectors; only the dot products and norms of
// a level go round. So a rank sends and holds about one more copy of the buffer, whatever the number of ranks.
// Thread: the thread that makes progress.
#include <algorithm>
#include <bit>
#include <cstring>

#include "base/half.h"
#include "collective/channels/schedule.h"
#include "collective/collective.h"
#include "collective/nodes.h"
#include "collective/pieces.h"

namespace hc {
namespace {

constexpr size_t kElementsAtOnce = 32u << 10;    // one unit of arithmetic
constexpr size_t kElementsPerStep = 256u << 10;  // then other collectives get their turn

// Sums over one tensor's part of a slice.
struct Products {
  double aa = 0, ab = 0, bb = 0;
};
static_assert(sizeof(Products) == 3 * sizeof(double));

// In double, in several running sums, so that the compiler can use vectors without changing the order.
template <class T>
void add_products(const T* a, const T* b, size_t count, Products* to) {
  constexpr size_t kSums = 8;
  double aa[kSums] = {}, ab[kSums] = {}, bb[kSums] = {};
  auto add = [&](size_t sum, double x, double y) {
    aa[sum] += x * x;
    ab[sum] += x * y;
    bb[sum] += y * y;
  };
  const size_t whole = count / kSums * kSums;
  for (size_t i = 0; i < whole; i += kSums)
    for (size_t s = 0; s < kSums; ++s) add(s, static_cast<double>(a[i + s]), static_cast<double>(b[i + s]));
  for (size_t i = whole; i < count; ++i) add(i - whole, static_cast<double>(a[i]), static_cast<double>(b[i]));
  for (size_t s = 0; s < kSums; ++s) {
    to->aa += aa[s];
    to->ab += ab[s];
    to->bb += bb[s];
  }
}

template <class T>
void combine(T* a, const T* b, size_t count, const Products& p) {
  // A vector of zeros leaves the other as it is. (NaN and infinity go through to the result.)
  const double of_a = p.aa == 0 ? 1 : 1 - p.ab / (2 * p.aa), of_b = p.bb == 0 ? 1 : 1 - p.ab / (2 * p.bb);
  for (size_t i = 0; i < count; ++i)
    a[i] = static_cast<T>(of_a * static_cast<double>(a[i]) + of_b * static_cast<double>(b[i]));
}

template <class Half>
void widen(const std::byte* from, float* to, size_t count, double factor) {
  for (size_t i = 0; i < count; ++i) {
    Half value;
    std::memcpy(&value, from + i * sizeof value, sizeof value);
    to[i] = static_cast<float>(static_cast<double>(to_float(value)) * factor);
  }
}
template <class Half>
void narrow(const float* from, std::byte* to, size_t count, double factor) {
  for (size_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>(static_cast<double>(from[i]) * factor);
    Half half;
    if constexpr (std::is_same_v<Half, Float16>)
      half = to_float16(value);
    else
      half = to_bfloat16(value);
    std::memcpy(to + i * sizeof half, &half, sizeof half);
  }
}

class AdasumAllreduce final : public Collective {
 public:
  AdasumAllreduce(Task task, const Group& group)
      : task_(std::move(task)),
        group_(group),
        n_(group.size),
        total_(task_.count()),
        item_(size_of(task_.dtype)),
        work_item_(task_.dtype == DType::kF64 ? sizeof(double) : sizeof(float)),
        view_(task_.pieces, item_) {
    for (int r = 0; r < n_; ++r) counts_.push_back(begin_of(r + 1) - begin_of(r));
    mine_ = counts_[group_.rank];
    for (int r = 0; r < n_; ++r) live_.push_back(r);
    cut_into_parts();
  }

  Progress start() override {
    if (n_ == 1) {
      for (const Piece& p : task_.pieces)
        scale_copy(task_.dtype, p.out, p.in, p.count, task_.scale.pre * task_.scale.post);
      stage_ = Stage::kEnd;
      return Progress::kPending;
    }
    received_.reset(new std::byte[n_ * mine_ * item_]);
    if (item_ != work_item_) widened_.reset(new std::byte[n_ * mine_ * work_item_]);
    if (task_.pieces.size() > 1) {
      packed_.reset(new std::byte[total_ * item_]);
      view_.gather(0, total_, packed_.get());
    }
    return run(exchange(), Stage::kLoad);
  }

  Progress step(bool* moved) override {
    for (size_t budget = kElementsPerStep; budget > 0;) {
      if (running_) {
        const Progress progress = running_->step(moved);
        if (progress == Progress::kFailed) return fail(Status(running_->status()));
        if (progress == Progress::kPending) return progress;
        running_.reset();
      }
      *moved = true;
      const Progress progress = work(&budget);
      if (progress != Progress::kPending) return progress;
    }
    return Progress::kPending;
  }

 private:
  enum class Stage { kLoad, kProducts, kCombine, kEnd };

  size_t begin_of(int rank) const { return chunk_begin(total_, n_, rank); }
  std::byte* whole() const { return packed_ ? packed_.get() : task_.pieces[0].out; }
  std::byte* work_of(int vector) const {
    return (widened_ ? widened_.get() : received_.get()) + static_cast<size_t>(vector) * mine_ * work_item_;
  }

  // My slice, cut where tensors and units of work end.
  struct Part {
    size_t tensor, first, count;
  };
  void cut_into_parts() {
    const size_t begin = begin_of(group_.rank), end = begin + mine_;
    size_t at = 0;
    for (size_t t = 0; t < task_.pieces.size(); ++t) {
      const size_t first = std::max(at, begin), last = std::min(at + task_.pieces[t].count, end);
      for (size_t from = first; from < last; from += kElementsAtOnce)
        parts_.push_back({t, from - begin, std::min(kElementsAtOnce, last - from)});
      at += task_.pieces[t].count;
    }
  }

  Task part_of_task(Op op) const {
    Task task;
    task.op = op;
    task.dtype = task_.dtype;
    task.segment_bytes = task_.segment_bytes;
    task.tag = task_.tag;
    return task;
  }
  // Everybody's vectors, my slice of each.
  Task exchange() const {
    Task task = part_of_task(Op::kAlltoall);
    task.counts = counts_;
    task.received_counts.assign(n_, mine_);
    task.longest_part = *std::max_element(counts_.begin(), counts_.end());
    task.pieces = {{packed_ ? packed_.get() : task_.pieces[0].in, received_.get(), n_ * mine_}};
    return task;
  }
  Task sum_of_products() {
    Task task = part_of_task(Op::kAllreduce);
    task.dtype = DType::kF64;
    auto* data = reinterpret_cast<std::byte*>(products_.data());
    task.pieces = {{data, data, 3 * products_.size()}};
    return task;
  }
  Task gather_result() const {
    Task task = part_of_task(Op::kAllgather);
    task.counts = counts_;
    task.pieces = {{whole() + begin_of(group_.rank) * item_, whole(), mine_}};
    return task;
  }

  Progress run(Task task, Stage next) {
    stage_ = next;
    auto made = make_collective(std::move(task), group_);
    if (!made.is_ok()) return fail(made.status());
    running_ = made.take();
    if (running_->start() == Progress::kFailed) return fail(Status(running_->status()));
    return Progress::kPending;
  }

  // Pairs of one level, as places in live_. Ranks beyond a power of two are reduced into others first.
  size_t pairs() const {
    const size_t core = std::bit_floor(live_.size());
    return live_.size() == core ? core / 2 : live_.size() - core;
  }

  Progress work(size_t* budget) {
    switch (stage_) {
      case Stage::kLoad:
        load();
        if (task_.adasum_by_node) average_nodes();
        *budget -= std::min(*budget, n_ * mine_);
        return begin_level();
      case Stage::kProducts:
        if (!each_part(budget, [this](int a, int b, const Part& p, Products& sums) { add(a, b, p, sums); }))
          return Progress::kPending;
        return run(sum_of_products(), Stage::kCombine);
      case Stage::kCombine:
        if (!each_part(budget, [this](int a, int b, const Part& p, Products& sums) { merge(a, b, p, sums); }))
          return Progress::kPending;
        for (size_t pair = 0, n = pairs(); pair < n; ++pair) live_.erase(live_.begin() + static_cast<long>(pair) + 1);
        return begin_level();
      case Stage::kEnd:
        if (packed_) view_.scatter(0, total_, packed_.get());
        return Progress::kDone;
    }
    return Progress::kDone;
  }

  Progress begin_level() {
    if (live_.size() == 1) {
      store();
      return run(gather_result(), Stage::kEnd);
    }
    products_.assign(pairs() * task_.pieces.size(), Products{});
    stage_ = Stage::kProducts;
    return Progress::kPending;
  }

  // Does `visit` for (pair, part) from where the last call ended; false: more is left.
  template <class Visit>
  bool each_part(size_t* budget, Visit&& visit) {
    const size_t units = pairs() * parts_.size();
    for (; next_unit_ < units && *budget > 0; ++next_unit_) {
      const size_t pair = next_unit_ / parts_.size();
      const Part& part = parts_[next_unit_ % parts_.size()];
      visit(live_[2 * pair], live_[2 * pair + 1], part, products_[pair * task_.pieces.size() + part.tensor]);
      *budget -= std::min(*budget, part.count);
    }
    if (next_unit_ < units) return false;
    next_unit_ = 0;
    return true;
  }
  template <class T>
  T* at(int vector, const Part& part) const {
    return reinterpret_cast<T*>(work_of(vector)) + part.first;
  }
  void add(int a, int b, const Part& p, Products& sums) const {
    if (task_.dtype == DType::kF64) return add_products(at<double>(a, p), at<double>(b, p), p.count, &sums);
    add_products(at<float>(a, p), at<float>(b, p), p.count, &sums);
  }
  void merge(int a, int b, const Part& p, const Products& sums) const {
    if (task_.dtype == DType::kF64) return combine(at<double>(a, p), at<double>(b, p), p.count, sums);
    combine(at<float>(a, p), at<float>(b, p), p.count, sums);
  }

  void load() {
    const size_t count = n_ * mine_;
    const double factor = task_.scale.pre;
    auto* wide = reinterpret_cast<float*>(widened_.get());
    if (task_.dtype == DType::kF16)
      widen<Float16>(received_.get(), wide, count, factor);
    else if (task_.dtype == DType::kBF16)
      widen<BFloat16>(received_.get(), wide, count, factor);
    else if (factor != 1.0)
      scale_copy(task_.dtype, received_.get(), received_.get(), count, factor);
    if (widened_) received_.reset();
  }
  // The vectors of one node become one, their average, in the place of the first.
  void average_nodes() {
    std::vector<int> firsts;
    for (const std::vector<int>& members : ranks_by_node(group_.node)) {
      std::vector<const std::byte*> sources;
      for (const int r : members) sources.push_back(work_of(r));
      std::byte* const to[] = {work_of(members[0])};
      const DType dtype = task_.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
      const Scale average{1.0, 1.0 / static_cast<double>(members.size()), 1};
      if (members.size() > 1) reduce(dtype, Reduce::kSum, to, sources, mine_, average);
      firsts.push_back(members[0]);
    }
    live_ = std::move(firsts);
  }
  void store() const {
    std::byte* to = whole() + begin_of(group_.rank) * item_;
    const std::byte* from = work_of(live_[0]);
    const auto* wide = reinterpret_cast<const float*>(from);
    if (task_.dtype == DType::kF16)
      narrow<Float16>(wide, to, mine_, task_.scale.post);
    else if (task_.dtype == DType::kBF16)
      narrow<BFloat16>(wide, to, mine_, task_.scale.post);
    else
      scale_copy(task_.dtype, to, from, mine_, task_.scale.post);
  }

  const Task task_;
  const Group& group_;
  const int n_;
  const size_t total_, item_, work_item_;
  const PieceView view_;
  std::vector<size_t> counts_;  // [rank] elements of its slice
  size_t mine_ = 0;
  std::vector<Part> parts_;
  std::vector<int> live_;  // the vectors that are left, in rank order
  std::unique_ptr<std::byte[]> packed_, received_, widened_;
  std::vector<Products> products_;  // [pair * tensors + tensor]
  size_t next_unit_ = 0;
  Stage stage_ = Stage::kLoad;
  std::unique_ptr<Collective> running_;
};

}  // namespace

Result<std::unique_ptr<Collective>> make_adasum_allreduce(Task task, const Group& group) {
  if (!is_float(task.dtype))
    return error(Code::kInvalidArgument, "Adasum scales by real numbers; ", name_of(task.dtype), " has none");
  return std::unique_ptr<Collective>(std::make_unique<AdasumAllreduce>(std::move(task), group));
}

}  // namespace hc
