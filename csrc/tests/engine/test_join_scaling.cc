// The identity element that a joined rank gives is not scaled: results are those of the ranks that have data.
#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <utility>

#include "tests/locked_checks.h"
#include "tests/world.h"

namespace hc::join_scaling {
namespace {

constexpr std::pair<double, double> kFactors[] = {{0.5, 1.0}, {-0.5, 2.0}, {0.0, 1.0}, {1.0, 2.0}};  // before and after

// Small powers of two: products and halves are exact.
template <class T>
T value(int rank, size_t i) {
  return static_cast<T>(static_cast<size_t>(4) << ((i + static_cast<size_t>(rank)) % 3));
}

// The ranks below `present` hold data. Exact in every order: small whole numbers times small powers of two.
template <class T>
T expected(Reduce op, double pre, double post, int present, int size, size_t i) {
  double acc = static_cast<double>(value<T>(0, i)) * pre;
  for (int r = 1; r < present; ++r) {
    const double next = static_cast<double>(value<T>(r, i)) * pre;
    acc = op == Reduce::kMin       ? std::min(acc, next)
          : op == Reduce::kMax     ? std::max(acc, next)
          : op == Reduce::kProduct ? acc * next
                                   : acc + next;
  }
  return static_cast<T>(acc * post / (op == Reduce::kAverage ? size : 1));
}

template <class T>
void check(Engine& engine, int rank, int present, size_t count, bool in_place, int32_t priority) {
  const int size = engine.mesh().size();
  for (Reduce op : {Reduce::kProduct, Reduce::kMin, Reduce::kMax, Reduce::kSum, Reduce::kAverage})
    for (const auto& factors : kFactors) {
      const double pre = factors.first, post = factors.second;
      if (op == Reduce::kAverage && size == 3) continue;  // no third is exact
      std::vector<T> in(count), given, out(count);
      for (size_t i = 0; i < count; ++i) in[i] = value<T>(rank, i);
      given = in;
      CHECK_OK(perform(engine, Op::kAllreduce, "x", in, in_place ? &in : &out, {static_cast<int64_t>(count)},
                       [&](Submission& s) {
                         s.reduce = op;
                         s.prescale = pre;
                         s.postscale = post;
                         s.priority = priority;
                       }));
      size_t wrong = 0;
      for (size_t i = 0; i < count; ++i)
        wrong += !((in_place ? in : out)[i] == expected<T>(op, pre, post, present, size, i));
      std::lock_guard lock(check_mu);
      CHECK_MESSAGE(wrong == 0, name_of(op), " times ", pre, " and ", post, ", ", count, " elements");
      if (!in_place) CHECK(in == given);
    }
}

void check_world(World& world, int present, const std::function<void(Engine&, int)>& body) {
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    if (rank < present) body(engine, rank);
    CHECK_OK(perform(engine, Op::kJoin));
    // Behind the join everybody has data again, and the same name is scaled as ever.
    if (rank < present) check<double>(engine, rank, engine.mesh().size(), 9, true, 0);
    if (rank >= present) check<double>(engine, rank, engine.mesh().size(), 9, false, 0);
  }));
}

}  // namespace

TEST_CASE("beside a joined rank only data is scaled: shared memory, channels, two levels and parts") {
  struct Row {
    int size, present;
    Settings settings;
    std::vector<std::string> nodes;
  };
  const std::vector<Row> rows = {
      {2, 1, {{"HOROCLONE_FLAT_BYTES", "1024"}, {"HOROCLONE_BLOCK_BYTES", "4096"}}, {}},
      {4, 2, {{"HOROCLONE_FLAT_BYTES", "1024"}, {"HOROCLONE_BLOCK_BYTES", "4096"}}, {}},
      {3, 2, {{"HOROCLONE_SHARED_MEMORY", "0"}, {"HOROCLONE_PARTITION_BYTES", "5000"}}, {}},
      {3, 1, {{"HOROCLONE_SHARED_MEMORY", "0"}, {"HOROCLONE_RING_THRESHOLD_BYTES", "0"}}, {}},
      {4, 3, {{"HOROCLONE_HIERARCHICAL_ALLREDUCE", "1"}, {"HOROCLONE_PARTITION_BYTES", "9000"}}, {"a", "a", "b", "b"}},
  };
  for (const Row& row : rows) {
    CAPTURE(row.size);
    World world(row.size, row.settings);
    if (!row.nodes.empty()) world.on_nodes(row.nodes);
    check_world(world, row.present, [&](Engine& engine, int rank) {
      for (size_t count : {size_t{2}, size_t{3001}}) {
        check<float>(engine, rank, row.present, count, false, 0);
        check<double>(engine, rank, row.present, count, true, 1);
        check<int32_t>(engine, rank, row.present, count, true, 0);
        check<int64_t>(engine, rank, row.present, count, false, 3);
      }
    });
  }
}

TEST_CASE("beside a joined rank a tensor in the arena is scaled once, also one that was reduced there before") {
  World world(3);
  check_world(world, 2, [](Engine& engine, int rank) {
    constexpr size_t kCount = 20'000;
    auto memory = engine.allocate(kCount * sizeof(float)).take();
    auto* data = reinterpret_cast<float*>(memory->data());
    for (int step = 0; step < 3; ++step) {
      std::fill(data, data + kCount, static_cast<float>(4 + rank));
      const int64_t shape[] = {static_cast<int64_t>(kCount)};
      const Submission::Tensor tensor{data, data, shape, DType::kF32};
      Submission s;
      s.name = "arena";
      s.reduce = Reduce::kProduct;
      s.prescale = 0.5;
      s.tensors = {&tensor, 1};
      CHECK_OK(perform(engine, s));
      CHECK_LOCKED(std::count(data, data + kCount, 5.0f) == static_cast<ptrdiff_t>(kCount));
    }
  });
}

}  // namespace hc::join_scaling
