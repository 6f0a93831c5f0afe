// Integers with factors, on every path that the core has: each rank's input times the prescale, truncated and wrapped
// in its own type, then the reduction in that type, then the postscale likewise. Compared with a model of single
// elements.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/elements.h"
#include "tests/locked_checks.h"
#include "tests/sanitized.h"
#include "tests/world.h"

namespace hc::integer_scaling {
namespace {

using Bytes = std::vector<std::byte>;
struct Factors {
  double pre, post;
};
constexpr Factors kFactors[] = {{0.5, 1}, {-1.5, 1}, {1, -0.3}, {0.5, 3}, {0.3, 0.7}, {-1, -1}};
constexpr DType kIntegers[] = {DType::kU8, DType::kI8, DType::kU16, DType::kI16, DType::kI32, DType::kI64};
constexpr Reduce kOps[] = {Reduce::kAverage, Reduce::kSum, Reduce::kMin, Reduce::kMax,
                           Reduce::kProduct, Reduce::kAnd, Reduce::kOr,  Reduce::kXor};

// Calls body(T{}) with the C++ type of an integer dtype.
template <class Body>
auto with(DType dtype, Body&& body) {
  return with_element(dtype, [&]<class T>(T zero) {
    if constexpr (std::is_integral_v<T>)
      return body(zero);
    else
      return body(int64_t{});
  });
}

// Mostly small, of both signs; now and then so large that sums and products wrap.
template <class T>
T value(int rank, size_t i) {
  const auto small = static_cast<int64_t>((3 * i + 5 * static_cast<size_t>(rank)) % 9) - 4;
  if (i % 11 != 7) return static_cast<T>(std::is_signed_v<T> ? small : small + 4);
  return static_cast<T>(std::numeric_limits<T>::max() / 2 + rank);
}

// Toward zero; as many low bits as the type has. What does not fit into int64 is the nearest that does.
template <class T>
T times(T v, double factor) {
  if (factor == 1) return v;
  const double whole = std::trunc(static_cast<double>(v) * factor);
  if (whole >= 0x1p63) return static_cast<T>(std::numeric_limits<int64_t>::max());
  return whole <= -0x1p63 ? static_cast<T>(std::numeric_limits<int64_t>::min())
                          : static_cast<T>(static_cast<int64_t>(whole));
}

template <class T>
T model(Reduce op, const Factors& f, const std::vector<int>& ranks, int size, size_t i) {
  using Wide = uint64_t;
  T acc = times(value<T>(ranks[0], i), f.pre);
  for (size_t k = 1; k < ranks.size(); ++k) {
    const T next = times(value<T>(ranks[k], i), f.pre);
    acc = op == Reduce::kMin       ? std::min(acc, next)
          : op == Reduce::kMax     ? std::max(acc, next)
          : op == Reduce::kProduct ? static_cast<T>(static_cast<Wide>(acc) * static_cast<Wide>(next))
          : op == Reduce::kAnd     ? static_cast<T>(acc & next)
          : op == Reduce::kOr      ? static_cast<T>(acc | next)
          : op == Reduce::kXor     ? static_cast<T>(acc ^ next)
                                   : static_cast<T>(static_cast<Wide>(acc) + static_cast<Wide>(next));
  }
  if (op != Reduce::kAverage) return times(acc, f.post);
  return f.post == 1 ? static_cast<T>(acc / size) : times(acc, f.post / size);
}

struct Case {
  DType dtype;
  Reduce op;
  Factors factors;
  size_t count;
  std::string text() const {
    return text_of(name_of(dtype), " ", name_of(op), " ", count, " times ", factors.pre, " and ", factors.post);
  }
};

Bytes input(DType dtype, int rank, size_t count) {
  Bytes data(count * size_of(dtype));
  with(dtype, [&](auto t) {
    for (size_t i = 0; i < count; ++i) {
      const auto v = value<decltype(t)>(rank, i);
      std::memcpy(data.data() + i * sizeof v, &v, sizeof v);
    }
  });
  return data;
}

// Elements [first, first + c.count) of the result of `ranks`; `size` of them would be a whole group.
Bytes expected(const Case& c, const std::vector<int>& ranks, int size, size_t first = 0) {
  Bytes data(c.count * size_of(c.dtype));
  with(c.dtype, [&](auto t) {
    for (size_t i = 0; i < c.count; ++i) {
      const auto v = model<decltype(t)>(c.op, c.factors, ranks, size, first + i);
      std::memcpy(data.data() + i * sizeof v, &v, sizeof v);
    }
  });
  return data;
}

std::vector<int> all_of(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  for (int r = 0; r < size; ++r) ranks[static_cast<size_t>(r)] = r;
  return ranks;
}

Submission submission(const Case& c, Op op, std::string_view name) {
  Submission s;
  s.op = op;
  s.name = name;
  s.reduce = c.op;
  s.prescale = c.factors.pre;
  s.postscale = c.factors.post;
  return s;
}

// One operation that is under way, and what has to come of it.
struct Run {
  Case c;
  Bytes in, out;
  int64_t handle = 0;

  void start(Engine& engine, Op op, const std::string& name, const std::function<void(Submission&)>& adjust = {}) {
    const int64_t shape[] = {static_cast<int64_t>(c.count)};
    const bool has_result = op != Op::kReduce || engine.mesh().rank() == 0;
    in = input(c.dtype, engine.mesh().rank(), c.count);
    out.assign(op == Op::kReducescatter ? 0 : in.size(), std::byte{0x5a});
    const Submission::Tensor tensor{in.data(), op == Op::kReducescatter || !has_result ? nullptr : out.data(), shape,
                                    c.dtype};
    Submission s = submission(c, op, name);
    s.tensors = {&tensor, 1};
    if (adjust) adjust(s);
    CHECK_OK(s.will_wait ? engine.call(s, &handle) : engine.submit(s, &handle));
  }

  void finish_and_check(Engine& engine, Op op, const std::vector<int>& ranks) {
    CHECK_OK(finish(engine, handle));
    const int size = engine.mesh().size(), rank = engine.mesh().rank();
    Case mine = c;
    size_t first = 0;
    if (op == Op::kReducescatter) {
      const size_t each = c.count / static_cast<size_t>(size), more = c.count % static_cast<size_t>(size);
      const auto me = static_cast<size_t>(rank);
      mine.count = each + (me < more);
      first = me * each + std::min(me, more);
      const std::byte* result = engine.finished(handle)->results[0]->data();
      out.assign(result, result + mine.count * size_of(c.dtype));
    }
    if (op != Op::kReduce || rank == 0) {
      const bool right = out == expected(mine, ranks, size, first);
      std::lock_guard lock(check_mu);
      CHECK_MESSAGE(right, name_of(op), " ", c.text(), " on rank ", rank, " of ", size);
    }
    if (op != Op::kReducescatter) CHECK_LOCKED(in == input(c.dtype, rank, c.count));
    engine.release(handle);
  }
};

bool can(Op op, const Case& c) {
  const bool sums = c.op == Reduce::kAverage || c.op == Reduce::kSum;
  return op != Op::kReducescatter || sums;
}

// Every operation, and every dtype with some of the factors (test_reduce.cc has all), some at a time, so that some
// share a batch and some do not.
void check_all(Engine& engine, Op op, size_t count, int32_t priority = 0) {
  const std::vector<int> ranks = all_of(engine.mesh().size());
  int number = 0, pair = 0;
  for (DType dtype : kIntegers)
    for (const Factors& factors : kFactors) {
      if (++pair % 5) continue;
      std::vector<Run> runs;
      for (Reduce reduce : kOps)
        for (size_t of : {count, count / 2 + 1})
          if (can(op, {dtype, reduce, factors, of})) runs.push_back({{dtype, reduce, factors, of}, {}, {}});
      for (Run& run : runs)
        run.start(engine, op, text_of(name_of(op), ".", count, ".", number++),
                  [&](Submission& s) { s.priority = priority; });
      for (Run& run : runs) run.finish_and_check(engine, op, ranks);
    }
}

}  // namespace

TEST_CASE("integers with factors in shared memory: each input is truncated, then summed, flat and in blocks") {
  for (int size : kThreadSanitized ? std::vector{3} : std::vector{1, 2, 3, 4}) {
    CAPTURE(size);
    World world(size, {{"HOROCLONE_FLAT_BYTES", "1024"}, {"HOROCLONE_BLOCK_BYTES", "4096"}});
    CHECK_OK(world.each([&](Engine& engine, int) {
      for (Op op : {Op::kAllreduce, Op::kReducescatter, Op::kReduce})
        for (size_t count : {size_t{7}, size_t{3001}}) check_all(engine, op, count);
    }));
  }
}

TEST_CASE("integers with factors over channels: rings, recursive doubling, trees, and in parts" *
          doctest::test_suite("long")) {
  for (int size : kThreadSanitized ? std::vector{3} : std::vector{2, 3, 4})
    for (const char* ring_from : {"0", "1000000000"}) {
      CAPTURE(size);
      World world(size, {{"HOROCLONE_SHARED_MEMORY", "0"},
                         {"HOROCLONE_RING_THRESHOLD_BYTES", ring_from},
                         {"HOROCLONE_SEGMENT_BYTES", "1024"},
                         {"HOROCLONE_PARTITION_BYTES", "5000"}});
      CHECK_OK(world.each([&](Engine& engine, int) {
        check_all(engine, Op::kAllreduce, 7);
        check_all(engine, Op::kAllreduce, 3001, 2);
        check_all(engine, Op::kReducescatter, 301);
        check_all(engine, Op::kReduce, 301);
      }));
    }
}

TEST_CASE("integers with factors over nodes with several ranks: two levels, also in parts" *
          doctest::test_suite("long")) {
  for (const std::vector<std::string>& nodes :
       {std::vector<std::string>{"a", "a", "b", "b"}, std::vector<std::string>{"a", "b", "b"}}) {
    if (kThreadSanitized && nodes.size() == 4) continue;
    World world(static_cast<int>(nodes.size()),
                {{"HOROCLONE_HIERARCHICAL_ALLREDUCE", "1"}, {"HOROCLONE_PARTITION_BYTES", "20000"}});
    CHECK_OK(world.on_nodes(nodes).each([&](Engine& engine, int) {
      check_all(engine, Op::kAllreduce, 9001);
      check_all(engine, Op::kAllreduce, 18'001, 1);
    }));
  }
}

TEST_CASE("integers with factors in rounds of the bypass") {
  World world(3);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    for (DType dtype : kIntegers)
      for (Op op : {Op::kAllreduce, Op::kReducescatter})
        for (int step = 0; step < 60; ++step) {
          const Reduce reduce = step % 2 ? Reduce::kAverage : Reduce::kSum;
          Run run{{dtype, reduce, kFactors[static_cast<size_t>(step) / 2 % 2], 23}, {}, {}};
          run.start(engine, op, text_of(name_of(op), name_of(dtype), step % 4),
                    [&](Submission& s) { s.will_wait = (step + rank) % 3 != 0; });
          run.finish_and_check(engine, op, all_of(3));
        }
    CHECK_LOCKED(counter(engine, "bypassed") >= 90);
  }));
}

TEST_CASE("integers with factors where they lie: in the arena, and as declared buckets on one machine and on two") {
  const Settings two_level = {{"HOROCLONE_HIERARCHICAL_ALLREDUCE", "1"}};
  for (const std::vector<std::string>& nodes : {std::vector<std::string>{}, std::vector<std::string>{"a", "a", "b"}}) {
    World world(3, nodes.empty() ? Settings{} : two_level);
    CHECK_OK(world.on_nodes(nodes).each([&](Engine& engine, int rank) {
      int pair = 0;
      for (DType dtype : kIntegers)
        for (const Factors& factors : kFactors)
          for (Reduce reduce : {Reduce::kSum, Reduce::kAverage, Reduce::kProduct}) {
            if (++pair % 7) continue;
            const Case c{dtype, reduce, factors, 17'003};
            const Bytes in = input(dtype, rank, c.count), right = expected(c, all_of(3), 3);
            auto memory = engine.allocate(in.size()).take();
            std::byte* data = memory->data();
            const auto holds = [&](int64_t handle) {
              CHECK_OK(finish(engine, handle));
              engine.release(handle);
              CHECK_LOCKED(std::equal(right.begin(), right.end(), data));
            };
            const int64_t shape[] = {static_cast<int64_t>(c.count)};
            std::copy(in.begin(), in.end(), data);
            const Submission::Tensor tensor{data, data, shape, dtype};
            Submission s = submission(c, Op::kAllreduce, "");
            s.tensors = {&tensor, 1};
            int64_t handle = 0;
            CHECK_OK(engine.submit(s, &handle));
            holds(handle);
            BucketSet set;
            set.reduce = reduce;
            set.prescale = factors.pre;
            set.postscale = factors.post;
            set.buckets.push_back({"b", data, {shape[0]}, dtype});
            int id = -1;
            CHECK_OK(engine.declare(0, set, &id));
            for (int step = 0; step < 2; ++step) {
              std::copy(in.begin(), in.end(), data);
              CHECK_OK(engine.submit_declared(0, id, 0, nullptr, &handle));
              holds(handle);
            }
            CHECK_OK(engine.undeclare(0, id));
          }
    }));
  }
}

}  // namespace hc::integer_scaling
