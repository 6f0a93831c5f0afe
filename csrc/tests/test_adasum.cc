// Adasum against a float64 model of the tree: every number of ranks up to 8, every float dtype, groups of tensors, in
// shared memory, over TCP and on several nodes; the same bits on every rank.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <mutex>
#include <random>

#include "base/half.h"
#include "tests/world.h"

namespace hc {
namespace {

using Vector = std::vector<double>;
using Settings = std::vector<std::pair<std::string, std::string>>;

double dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
Vector adasum(const Vector& a, const Vector& b) {
  const double aa = dot(a, a), ab = dot(a, b), bb = dot(b, b);
  const double of_a = aa == 0 ? 1 : 1 - ab / (2 * aa), of_b = bb == 0 ? 1 : 1 - ab / (2 * bb);
  Vector sum(a.size());
  for (size_t i = 0; i < a.size(); ++i) sum[i] = of_a * a[i] + of_b * b[i];
  return sum;
}
Vector model(std::vector<Vector> vectors) {
  const size_t extra = vectors.size() - std::bit_floor(vectors.size());
  std::vector<Vector> next;
  for (size_t i = 0; i < 2 * extra; i += 2) next.push_back(adasum(vectors[i], vectors[i + 1]));
  next.insert(next.end(), vectors.begin() + static_cast<long>(2 * extra), vectors.end());
  while (next.size() > 1) {
    std::vector<Vector> level;
    for (size_t i = 0; i < next.size(); i += 2) level.push_back(adasum(next[i], next[i + 1]));
    next = level;
  }
  return next[0];
}

std::vector<std::byte> packed(const Vector& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * size_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    auto put = [&](auto value) { std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value); };
    if (dtype == DType::kF16) put(to_float16(static_cast<float>(values[i])));
    if (dtype == DType::kBF16) put(to_bfloat16(static_cast<float>(values[i])));
    if (dtype == DType::kF32) put(static_cast<float>(values[i]));
    if (dtype == DType::kF64) put(values[i]);
  }
  return bytes;
}
Vector unpacked(const std::vector<std::byte>& bytes, DType dtype) {
  Vector values(bytes.size() / size_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    auto get = [&](auto value) {
      std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
      return value;
    };
    if (dtype == DType::kF16) values[i] = to_float(get(Float16{}));
    if (dtype == DType::kBF16) values[i] = to_float(get(BFloat16{}));
    if (dtype == DType::kF32) values[i] = get(float{});
    if (dtype == DType::kF64) values[i] = get(double{});
  }
  return values;
}

double tolerance(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return 0x1p-10;
    case DType::kBF16:
      return 0x1p-7;
    case DType::kF32:
      return 1e-6;
    default:
      return 1e-13;
  }
}

// Tensors of one group: rank r's values of tensor t, as the dtype holds them.
struct Case {
  int size;
  DType dtype;
  std::vector<size_t> counts;
  double pre = 1, post = 1;

  std::vector<std::byte> input(int rank, size_t tensor) const {
    std::mt19937 random(static_cast<unsigned>(rank * 1000 + static_cast<int>(tensor)));
    std::normal_distribution<double> normal(0.2 * static_cast<double>(tensor), 1);
    Vector values(counts[tensor]);
    for (double& v : values) v = tensor == 2 && rank % 2 ? 0 : normal(random);
    return packed(values, dtype);
  }
  // The largest difference from the model, relative to the tensor's largest element.
  double difference(size_t tensor, const std::vector<std::byte>& result) const {
    std::vector<Vector> all;
    for (int r = 0; r < size; ++r) {
      all.push_back(unpacked(input(r, tensor), dtype));
      for (double& v : all.back()) v *= pre;
    }
    const Vector expected = model(all), got = unpacked(result, dtype);
    double largest = 1e-30, worst = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      largest = std::max(largest, std::abs(expected[i] * post));
      worst = std::max(worst, std::abs(expected[i] * post - got[i]));
    }
    return worst / largest;
  }
};

Status reduce_group(Engine& engine, const Case& c, int rank, bool in_place, std::vector<std::vector<std::byte>>* out) {
  std::vector<std::vector<std::byte>> in;
  std::vector<std::array<int64_t, 1>> shapes;
  for (size_t t = 0; t < c.counts.size(); ++t) {
    in.push_back(c.input(rank, t));
    out->push_back(in.back());
    shapes.push_back({static_cast<int64_t>(c.counts[t])});
  }
  std::vector<Submission::Tensor> tensors;
  for (size_t t = 0; t < in.size(); ++t)
    tensors.push_back({in_place ? (*out)[t].data() : in[t].data(), (*out)[t].data(), shapes[t], c.dtype});
  Submission s;
  s.reduce = Reduce::kAdasum;
  s.name = "a";
  s.prescale = c.pre;
  s.postscale = c.post;
  s.tensors = tensors;
  int64_t handle = 0;
  HC_TRY(engine.submit(s, &handle));
  HC_TRY(finish(engine, handle));
  engine.release(handle);
  return Status::ok();
}

void check_cases(World& world, const std::vector<Case>& cases) {
  std::mutex mu;
  std::vector<std::vector<std::vector<std::byte>>> first(cases.size());
  const Status outcome = world.each([&](Engine& engine, int rank) {
    for (size_t i = 0; i < cases.size(); ++i) {
      std::vector<std::vector<std::byte>> out;
      const Status status = reduce_group(engine, cases[i], rank, i % 2 == 1, &out);
      std::lock_guard lock(mu);
      INFO(status.text());
      CHECK(status.is_ok());
      for (size_t t = 0; rank == 0 && t < out.size(); ++t) {
        CAPTURE(cases[i].size);
        CAPTURE(name_of(cases[i].dtype));
        CAPTURE(t);
        CHECK(cases[i].difference(t, out[t]) <= tolerance(cases[i].dtype));
      }
      if (first[i].empty()) first[i] = out;
      CHECK(first[i] == out);  // the same bits on every rank
    }
  });
  INFO(outcome.text());
  CHECK(outcome.is_ok());
}

std::vector<Case> cases_of(int size) {
  std::vector<Case> cases;
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    cases.push_back({size, dtype, {1}});
    cases.push_back({size, dtype, {5, 1, 700, 33}, 0.5, 3});
  }
  cases.push_back({size, DType::kF32, {40000}});
  cases.push_back({size, DType::kF32, {3, 0, 120001, 70000}});
  return cases;
}

TEST_CASE("adasum of 1 to 8 ranks is the tree of pairs, in shared memory and over TCP") {
  for (int size = 1; size <= 8; ++size)
    for (bool shared : {true, false}) {
      if (!shared && size > 5) continue;
      Settings settings;
      if (!shared) settings = {{"HOROCLONE_SHARED_MEMORY", "0"}, {"HOROCLONE_SEGMENT_BYTES", "4096"}};
      World world(size, settings);
      check_cases(world, cases_of(size));
    }
}

TEST_CASE("adasum across nodes of which some have several ranks") {
  for (const std::vector<std::string>& nodes :
       {std::vector<std::string>{"a", "a", "b", "b"}, std::vector<std::string>{"a", "b", "b"}}) {
    World world(static_cast<int>(nodes.size()));
    world.on_nodes(nodes);
    check_cases(world, cases_of(static_cast<int>(nodes.size())));
  }
}

TEST_CASE("adasum of equal vectors is the vector, of orthogonal ones the sum") {
  World world(4);
  std::mutex mu;
  const Status outcome = world.each([&](Engine& engine, int rank) {
    std::vector<float> equal(100, 1.5F), orthogonal(4, 0), out(100), sum(4);
    orthogonal[static_cast<size_t>(rank)] = 2;
    int64_t h = 0;
    auto with_adasum = [](Submission& s) { s.reduce = Reduce::kAdasum; };
    CHECK(submit(engine, Op::kAllreduce, "e", equal, &out, {100}, &h, with_adasum).is_ok());
    CHECK(finish(engine, h).is_ok());
    CHECK(submit(engine, Op::kAllreduce, "o", orthogonal, &sum, {4}, &h, with_adasum).is_ok());
    CHECK(finish(engine, h).is_ok());
    std::lock_guard lock(mu);
    CHECK(out == equal);
    CHECK(sum == std::vector<float>(4, 2));
  });
  CHECK(outcome.is_ok());
}

TEST_CASE("adasum refuses integers at once, and a joined rank counts as zeros") {
  World world(2);
  std::mutex mu;
  const Status outcome = world.each([&](Engine& engine, int rank) {
    std::vector<int32_t> whole(3), out(3);
    int64_t h = 0;
    auto with_adasum = [](Submission& s) { s.reduce = Reduce::kAdasum; };
    const Status refused = submit(engine, Op::kAllreduce, "i", whole, &out, {3}, &h, with_adasum);
    std::vector<double> mine{1, 2, 3}, sum(3);
    Status reduced;
    if (rank == 0) {
      reduced = submit(engine, Op::kAllreduce, "x", mine, &sum, {3}, &h, with_adasum);
      if (reduced.is_ok()) reduced = finish(engine, h);
    }
    Submission join;
    join.op = Op::kJoin;
    Status joined = engine.submit(join, &h);
    if (joined.is_ok()) joined = finish(engine, h);
    std::lock_guard lock(mu);
    CHECK(refused.code() == Code::kInvalidArgument);
    CHECK(refused.text().find("Adasum needs floating-point tensors, not int32") != std::string::npos);
    CHECK(reduced.is_ok());
    CHECK(joined.is_ok());
    if (rank == 0) CHECK(sum == mine);
  });
  CHECK(outcome.is_ok());
}

}  // namespace
}  // namespace hc
