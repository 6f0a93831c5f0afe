// Collectives over an in-memory mesh, all ranks stepped in random order in one thread: every operation, dtype, group
// size and many lengths, against float64 or exactly; interleaved process sets.
#include <doctest/doctest.h>

#include <cmath>
#include <functional>

#include "collective/collective.h"
#include "tests/elements.h"
#include "tests/mesh_world.h"

// A Task names only what a test is about.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace {

using namespace hc;
using Bytes = std::vector<std::byte>;

// What rank r holds at element i: small whole numbers, so that any order of summation is exact in every dtype.
double whole(int rank, size_t i, DType t) {
  if (t == DType::kBool) return (rank + i) % 3 == 0;
  return static_cast<double>((rank * 5 + i * 3) % 7 + 1);
}
Bytes filled(DType t, size_t count, const std::function<double(size_t)>& value) {
  Bytes b(count * size_of(t));
  for (size_t i = 0; i < count; ++i) store(t, b.data() + i * size_of(t), value(i));
  return b;
}

// One operation on n ranks: memory of each, tasks made by `prepare`, outputs compared with `expected`.
struct ChannelWorld {
  explicit ChannelWorld(int n, unsigned seed) : mesh(n, seed), in(n), out(n) {}
  void run(const std::function<Task(int)>& task_of) {
    Live live;
    const int n = mesh.size();
    for (int r = 0; r < n; ++r) live.push_back(made(task_of(r), group_on(mesh, first_ranks(n), r)));
    REQUIRE(run_all(live, mesh.random));
    live.clear();
    REQUIRE(mesh.quiet());
  }
  MemoryMesh mesh;
  std::vector<Bytes> in, out;
};

// One of each size, for what is only moved.
constexpr DType kMoved[] = {DType::kU8, DType::kI16, DType::kF32, DType::kF64};
// What each dtype's sum is, is shown by the reductions' own tests: here each group meets a few of them, all in turn.
std::vector<DType> some_dtypes(int n) {
  std::vector<DType> some;
  for (int i = n % 3; i < kReducedDTypeCount; i += 3) some.push_back(static_cast<DType>(i));
  return some;
}

double expected_reduction(Reduce op, int n, size_t i, DType t) {
  double v = whole(0, i, t);
  for (int r = 1; r < n; ++r) {
    const double x = whole(r, i, t);
    if (op == Reduce::kMin)
      v = std::min(v, x);
    else if (op == Reduce::kMax)
      v = std::max(v, x);
    else if (t == DType::kBool)
      v = op == Reduce::kProduct ? v && x : v || x;
    else
      v = op == Reduce::kProduct ? v * x : v + x;
  }
  return v;
}

struct Case {
  int n;
  size_t count;
  DType dtype = DType::kF32;
  Reduce reduce = Reduce::kSum;
  Algorithm algorithm = Algorithm::kAuto;
  bool in_place = false;
  size_t segment = 64;
};

void check_allreduce(const Case& c) {
  CAPTURE(c.n);
  CAPTURE(c.count);
  CAPTURE(name_of(c.dtype));
  CAPTURE(name_of(c.reduce));
  ChannelWorld w(c.n, c.n * 1000 + static_cast<unsigned>(c.count));
  for (int r = 0; r < c.n; ++r) {
    w.in[r] = filled(c.dtype, c.count, [&](size_t i) { return whole(r, i, c.dtype); });
    w.out[r] = c.in_place ? w.in[r] : Bytes(w.in[r].size(), std::byte{0xEE});
  }
  w.run([&](int r) {
    Task t{.reduce = c.reduce,
           .dtype = c.dtype,
           .algorithm = c.algorithm,
           .segment_bytes = c.segment,
           .tag = {1, 2, 3, 0}};
    t.pieces = {{c.in_place ? w.out[r].data() : w.in[r].data(), w.out[r].data(), c.count}};
    return t;
  });
  const Bytes wanted =
      filled(c.dtype, c.count, [&](size_t i) { return expected_reduction(c.reduce, c.n, i, c.dtype); });
  for (int r = 0; r < c.n; ++r) {
    REQUIRE(w.out[r] == wanted);
    if (!c.in_place) REQUIRE(w.in[r] == filled(c.dtype, c.count, [&](size_t i) { return whole(r, i, c.dtype); }));
  }
}

TEST_CASE("allreduce: every dtype, size of group and algorithm is exact on whole numbers") {
  for (int n = 1; n <= 9; ++n)
    for (DType t : some_dtypes(n))
      for (Algorithm a : {Algorithm::kRing, Algorithm::kRecursiveDoubling, Algorithm::kCirculant})
        for (size_t count : {0, 1, 3, 17, 1000})
          check_allreduce({.n = n, .count = count, .dtype = t, .algorithm = a, .in_place = (count + n) % 2 == 0});
}

TEST_CASE("allreduce: every reduction") {
  for (Reduce op : {Reduce::kSum, Reduce::kAverage, Reduce::kMin, Reduce::kMax, Reduce::kProduct})
    for (DType t : {DType::kBool, DType::kI64, DType::kF32, DType::kF64})
      for (int n : {2, 3, 6})
        for (Algorithm a : {Algorithm::kRing, Algorithm::kRecursiveDoubling, Algorithm::kCirculant}) {
          if (op == Reduce::kAverage && t == DType::kBool) continue;  // refused above; Scale makes it an average
          check_allreduce({.n = n, .count = 100, .dtype = t, .reduce = op, .algorithm = a});
        }
}

TEST_CASE("allreduce: 30011 elements in tiny and in odd segments") {
  for (DType t : {DType::kU8, DType::kBF16, DType::kF32})
    for (int n : {2, 3, 9})
      for (Algorithm a : {Algorithm::kRing, Algorithm::kRecursiveDoubling, Algorithm::kCirculant})
        check_allreduce({.n = n,
                         .count = 30011,
                         .dtype = t,
                         .algorithm = a,
                         .in_place = n != 3,
                         .segment = t == DType::kU8 ? 64u : 1003u});
}

TEST_CASE("allreduce: several pieces, prescale, postscale; inputs stay; bits are equal everywhere") {
  const std::vector<size_t> lengths{5, 0, 1, 300, 64, 7};
  for (DType t : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64})
    for (int n : {1, 2, 3, 7})
      for (Algorithm a : {Algorithm::kRing, Algorithm::kRecursiveDoubling, Algorithm::kCirculant})
        for (size_t piece_count : {size_t{1}, lengths.size()}) {
          CAPTURE(name_of(t));
          CAPTURE(n);
          CAPTURE(piece_count);
          std::mt19937 random(n);
          std::normal_distribution<double> normal;
          std::vector<std::vector<Bytes>> in(n), out(n);
          for (int r = 0; r < n; ++r)
            for (size_t p = 0; p < piece_count; ++p) {
              in[r].push_back(filled(t, lengths[p], [&](size_t) { return normal(random); }));
              out[r].emplace_back(in[r][p].size(), std::byte{0xEE});
            }
          const auto inputs = in;
          ChannelWorld w(n, n);
          w.run([&](int r) {
            Task task{.dtype = t, .algorithm = a, .segment_bytes = 64};
            task.scale = {.pre = 0.5, .post = 3.0};
            for (size_t p = 0; p < piece_count; ++p)
              task.pieces.push_back({in[r][p].data(), out[r][p].data(), lengths[p]});
            return task;
          });
          REQUIRE(in == inputs);
          const double unit = t == DType::kF16    ? 0x1p-11
                              : t == DType::kBF16 ? 0x1p-8
                              : t == DType::kF32  ? 0x1p-24
                                                  : 0x1p-53;
          for (size_t p = 0; p < piece_count; ++p)
            for (size_t i = 0; i < lengths[p]; ++i) {
              double sum = 0, size = 0;
              for (int r = 0; r < n; ++r) {
                const double x = load(t, in[r][p].data() + i * size_of(t));
                sum += 0.5 * x;
                size += std::abs(0.5 * x);
              }
              // One rounding per hop and one at the end, each of at most `unit` of the partial sum.
              const double got = load(t, out[0][p].data() + i * size_of(t));
              REQUIRE(std::abs(got - 3.0 * sum) <= 3.0 * size * unit * (n + 2));
            }
          for (int r = 1; r < n; ++r) REQUIRE(out[r] == out[0]);
        }
}

TEST_CASE("allreduce: NaN payloads and signed zeros too are the same on every rank") {
  for (Algorithm a : {Algorithm::kRing, Algorithm::kRecursiveDoubling, Algorithm::kCirculant})
    for (Reduce op : {Reduce::kSum, Reduce::kMin, Reduce::kMax})
      for (int n = 2; n <= 9; ++n) {
        ChannelWorld w(n, n);
        std::vector<std::vector<uint32_t>> bits(n);
        for (int r = 0; r < n; ++r)
          for (uint32_t i = 0; i < 40; ++i) {
            const bool nan = (r + i) % 3 == 0, negative = (r * i) % 2;
            bits[r].push_back((nan ? 0x7FC00000u + static_cast<uint32_t>(r) * 40 + i : 0u) |
                              (negative ? 0x80000000u : 0u));
          }
        w.run([&](int r) {
          Task task{.reduce = op, .algorithm = a, .segment_bytes = 16};
          auto* p = reinterpret_cast<std::byte*>(bits[r].data());
          task.pieces = {{p, p, bits[r].size()}};
          return task;
        });
        for (int r = 1; r < n; ++r) REQUIRE(bits[r] == bits[0]);
      }
}

TEST_CASE("broadcast: roots, sizes of elements and lengths") {
  for (DType t : kMoved)
    for (int n = 1; n <= 9; ++n)
      for (size_t count : {0, 1, 3, 17, 1000}) {
        const int root = (n * 7 + static_cast<int>(count)) % n;
        const bool in_place = count % 2;
        ChannelWorld w(n, n + static_cast<unsigned>(count));
        for (int r = 0; r < n; ++r) {
          w.in[r] = filled(t, count, [&](size_t i) { return whole(r, i, t); });
          w.out[r] = in_place ? w.in[r] : Bytes(w.in[r].size());
        }
        w.run([&](int r) {
          Task task{.op = Op::kBroadcast, .dtype = t, .root = root, .segment_bytes = 64};
          task.pieces = {{in_place ? w.out[r].data() : r == root ? w.in[r].data() : nullptr, w.out[r].data(), count}};
          return task;
        });
        for (int r = 0; r < n; ++r) REQUIRE(w.out[r] == w.in[root]);
      }
}

std::vector<size_t> uneven(int n, size_t about, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<size_t> counts(n);
  for (size_t& c : counts) c = random() % 4 == 0 ? 0 : about * (random() % 5) / 2;
  return counts;
}
size_t sum_of(const std::vector<size_t>& counts, size_t upto) {
  return std::accumulate(counts.begin(), counts.begin() + upto, size_t{0});
}

TEST_CASE("allgather: unequal counts") {
  for (DType t : kMoved)
    for (int n = 1; n <= 9; ++n)
      for (size_t about : {0, 1, 3, 16, 17, 1000, 1001}) {
        const bool ring = about == 1 || about == 17 || about == 1000;
        const Algorithm algorithm = ring ? Algorithm::kRing : Algorithm::kCirculant;
        const auto counts = uneven(n, about, n + static_cast<unsigned>(about));
        const bool in_place = about % 2;
        ChannelWorld w(n, n);
        Bytes wanted;
        for (int r = 0; r < n; ++r) {
          w.in[r] = filled(t, counts[r], [&](size_t i) { return whole(r, i, t); });
          wanted.insert(wanted.end(), w.in[r].begin(), w.in[r].end());
        }
        w.run([&](int r) {
          Task task{.op = Op::kAllgather, .dtype = t, .counts = counts, .algorithm = algorithm, .segment_bytes = 64};
          w.out[r].assign(wanted.size(), std::byte{0xEE});
          std::byte* own = w.out[r].data() + sum_of(counts, r) * size_of(t);
          if (in_place) std::copy(w.in[r].begin(), w.in[r].end(), own);
          task.pieces = {{in_place ? own : w.in[r].data(), w.out[r].data(), counts[r]}};
          return task;
        });
        for (int r = 0; r < n; ++r) REQUIRE(w.out[r] == wanted);
      }
}

TEST_CASE("reducescatter: unequal counts, in place, prescaled") {
  for (int n = 1; n <= 9; ++n)
    for (DType t : some_dtypes(n))
      for (size_t about : {0, 1, 3, 16, 17, 1000, 1001}) {
        const Algorithm algorithm = about > 1 && about < 1000 ? Algorithm::kRing : Algorithm::kCirculant;
        const auto counts = uneven(n, about, 3 * n + static_cast<unsigned>(about));
        const size_t all = sum_of(counts, n);
        const bool in_place = about % 2;
        const bool scaled = is_float(t) && n % 2;
        ChannelWorld w(n, n);
        for (int r = 0; r < n; ++r) {
          w.in[r] = filled(t, all, [&](size_t i) { return whole(r, i, t); });
          w.out[r] = in_place ? w.in[r] : Bytes(counts[r] * size_of(t));
        }
        w.run([&](int r) {
          Task task{
              .op = Op::kReducescatter, .dtype = t, .counts = counts, .algorithm = algorithm, .segment_bytes = 64};
          if (scaled) task.scale = {.pre = 2.0, .post = 0.25};
          task.pieces = {{in_place ? w.out[r].data() : w.in[r].data(), w.out[r].data(), all}};
          return task;
        });
        for (int r = 0; r < n; ++r) {
          const Bytes wanted = filled(t, counts[r], [&](size_t i) {
            return expected_reduction(Reduce::kSum, n, sum_of(counts, r) + i, t) * (scaled ? 0.5 : 1.0);
          });
          REQUIRE(std::equal(wanted.begin(), wanted.end(), w.out[r].begin()));
          if (!in_place) REQUIRE(w.in[r] == filled(t, all, [&](size_t i) { return whole(r, i, t); }));
        }
      }
}

TEST_CASE("alltoall: unequal counts, also in place") {
  for (DType t : kMoved)
    for (int n = 1; n <= 9; ++n)
      for (size_t about : {0, 1, 3, 17, 1000}) {
        const bool in_place = about % 2;
        ChannelWorld w(n, n);
        std::vector<std::vector<size_t>> sent, received(n);
        for (int r = 0; r < n; ++r) sent.push_back(uneven(n, about, 50 * n + r));
        for (int r = 0; r < n; ++r)
          for (int p = 0; p < n; ++p) received[r].push_back(sent[p][r]);
        for (int r = 0; r < n; ++r) {
          w.in[r] = filled(t, sum_of(sent[r], n), [&](size_t i) { return whole(r, i, t); });
          w.out[r] = in_place ? w.in[r] : Bytes();
          w.out[r].resize(std::max(w.out[r].size(), sum_of(received[r], n) * size_of(t)));
        }
        w.run([&](int r) {
          Task task{
              .op = Op::kAlltoall, .dtype = t, .counts = sent[r], .received_counts = received[r], .segment_bytes = 64};
          task.pieces = {{in_place ? w.out[r].data() : w.in[r].data(), w.out[r].data(), sum_of(sent[r], n)}};
          return task;
        });
        for (int r = 0; r < n; ++r) {
          Bytes wanted;
          for (int p = 0; p < n; ++p) {
            const auto from = w.in[p].begin() + sum_of(sent[p], r) * size_of(t);
            wanted.insert(wanted.end(), from, from + sent[p][r] * size_of(t));
          }
          REQUIRE(std::equal(wanted.begin(), wanted.end(), w.out[r].begin()));
        }
      }
}

TEST_CASE("barrier: nobody is done before the last has started") {
  for (int n = 1; n <= 9; ++n)
    for (int last = 0; last < n; ++last) {
      MemoryMesh mesh(n, n * 10 + last);
      Live live;
      for (int r = 0; r < n; ++r) live.push_back(made({.op = Op::kBarrier}, group_on(mesh, first_ranks(n), r)));
      bool moved = false;
      for (int r = 0; r < n; ++r)
        if (r != last) REQUIRE(live[r]->start() == Progress::kPending);
      for (int round = 0; round < 200; ++round)
        for (int r = 0; r < n; ++r)
          if (r != last) REQUIRE(live[r]->step(&moved) == Progress::kPending);
      std::vector<bool> done(n);
      done[last] = live[last]->start() == Progress::kDone;
      for (int round = 0; round < 2000; ++round)
        for (int r = 0; r < n; ++r)
          if (!done[r]) done[r] = live[r]->step(&moved) == Progress::kDone;
      for (int r = 0; r < n; ++r) CHECK(done[r]);
    }
}

TEST_CASE("collectives of different process sets share channels without order between them") {
  // Three sets over four ranks; every rank starts and steps its operations in a random order of its own.
  const std::vector<std::vector<int>> sets{{0, 1, 2, 3}, {3, 1, 0}, {1, 2}};
  for (unsigned seed = 0; seed < 20; ++seed) {
    MemoryMesh mesh(4, seed, 100);
    const size_t count = 700;
    std::vector<std::vector<float>> data;
    for (size_t s = 0; s < sets.size(); ++s)
      for (size_t twice = 0; twice < 2; ++twice)
        for (size_t r = 0; r < sets[s].size(); ++r) data.emplace_back(count, static_cast<float>(r + 1 + 10 * s));
    Live live;
    size_t at = 0;
    for (size_t s = 0; s < sets.size(); ++s)
      for (uint32_t batch = 0; batch < 2; ++batch)
        for (size_t r = 0; r < sets[s].size(); ++r) {
          Task task{.segment_bytes = 128, .tag = {7, static_cast<uint16_t>(s), batch, 0}};
          task.algorithm = (s + batch) % 2 ? Algorithm::kRing : Algorithm::kRecursiveDoubling;
          auto* p = reinterpret_cast<std::byte*>(data[at++].data());
          task.pieces = {{p, p, count}};
          live.push_back(made(task, group_on(mesh, sets[s], static_cast<int>(r))));
        }
    REQUIRE(run_all(live, mesh.random));
    at = 0;
    for (size_t s = 0; s < sets.size(); ++s)
      for (size_t i = 0; i < 2 * sets[s].size(); ++i) {
        const auto n = static_cast<float>(sets[s].size());
        REQUIRE(data[at++] == std::vector<float>(count, n * (n + 1) / 2 + 10 * static_cast<float>(s) * n));
      }
    live.clear();
    CHECK(mesh.quiet());
  }
}

}  // namespace
