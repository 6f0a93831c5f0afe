// Adasum against a float64 model of the tree: every number of ranks up to 8, every float dtype, groups of tensors, in
// shared memory, over TCP and on several nodes; the same bits on every rank.
#include <doctest/doctest.h>

#include <mutex>

#include "tests/collective/adasum_model.h"
#include "tests/sanitized.h"
#include "tests/world.h"

namespace hc {
namespace {

using Case = AdasumCase;

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
  cases.push_back({size, DType::kF32, {9000}});
  cases.push_back({size, DType::kF32, {3, 0, 20001, 9000}});
  return cases;
}

TEST_CASE("adasum of 1 to 8 ranks is the tree of pairs, in shared memory and over TCP") {
  for (int size = 1; size <= 8; ++size)
    for (bool shared : {true, false}) {
      if ((!shared && size > 5) || (kSanitized && (size == 4 || size == 6 || size == 7))) continue;
      Settings settings = {{"HOROCLONE_BLOCK_BYTES", "16384"}};
      if (!shared) settings = {{"HOROCLONE_SHARED_MEMORY", "0"}, {"HOROCLONE_SEGMENT_BYTES", "4096"}};
      World world(size, settings);
      check_cases(world, cases_of(size));
    }
}

TEST_CASE("adasum across nodes of which some have several ranks") {
  for (const std::vector<std::string>& nodes :
       {std::vector<std::string>{"a", "a", "b", "b"}, std::vector<std::string>{"a", "b", "b"}}) {
    World world(static_cast<int>(nodes.size()), {{"HOROCLONE_SEGMENT_BYTES", "16384"}});
    world.on_nodes(nodes);
    check_cases(world, cases_of(static_cast<int>(nodes.size())));
  }
}

TEST_CASE("adasum of the averages of each node, where HOROCLONE_ADASUM of rank 0 is nodes") {
  for (const std::vector<std::string>& nodes :
       {std::vector<std::string>{"a", "a", "b", "b"}, std::vector<std::string>{"a", "b", "b", "b", "c"},
        std::vector<std::string>{"a", "a", "a"}}) {
    World world(static_cast<int>(nodes.size()), {{"HOROCLONE_ADASUM", "nodes"}});
    world.on_nodes(nodes);
    std::vector<Case> cases = cases_of(static_cast<int>(nodes.size()));
    for (Case& c : cases) c.nodes = nodes;
    check_cases(world, cases);
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
