// Reduce, gather and scatter in worlds of engines: shared memory, TCP and several nodes, every root, odd sizes, process
// sets, errors.
#include <doctest/doctest.h>

#include "tests/locked_checks.h"
#include "tests/world.h"

namespace hc {
namespace {

Settings plain_settings(bool shared) {
  if (shared) return {};
  return {{"HOROCLONE_SHARED_MEMORY", "0"}, {"HOROCLONE_SEGMENT_BYTES", "1024"}};
}

float value(size_t i, int rank) { return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 101); }
std::vector<float> values(size_t n, int rank) {
  std::vector<float> v(n);
  for (size_t i = 0; i < n; ++i) v[i] = value(i, rank);
  return v;
}
Status run(Engine& engine, Op op, int root, const std::vector<float>& in, std::vector<float>* out,
           std::vector<int64_t> shape, int64_t* handle, const std::function<void(Submission&)>& more = {}) {
  HC_TRY(submit(engine, op, "", in, out, std::move(shape), handle, [&](Submission& s) {
    s.root = root;
    if (more) more(s);
  }));
  return finish(engine, *handle);
}

void check_reduce(Engine& engine, int rank, int size, int root, size_t n) {
  const auto in = values(n, rank);
  std::vector<float> out(n, -1);
  int64_t h = 0;
  auto average = [](Submission& s) {
    s.reduce = Reduce::kAverage;
    s.prescale = 2;
  };
  CHECK_OK(run(engine, Op::kReduce, root, in, rank == root ? &out : nullptr, {static_cast<int64_t>(n)}, &h, average));
  engine.release(h);
  size_t wrong = 0;
  for (size_t i = 0; i < n && rank == root; ++i) {
    float sum = 0;
    for (int r = 0; r < size; ++r) sum += 2 * value(i, r);
    wrong += std::abs(out[i] - sum / static_cast<float>(size)) > 1e-3F;
  }
  CHECK_LOCKED(wrong == 0);
}

// Rank r has r * n rows of two elements.
void check_gather(Engine& engine, int rank, int size, int root, size_t n) {
  const size_t rows = n * static_cast<size_t>(rank);
  const auto in = values(2 * rows, rank);
  int64_t h = 0;
  CHECK_OK(run(engine, Op::kGather, root, in, nullptr, {static_cast<int64_t>(rows), 2}, &h));
  Operation* op = engine.finished(h);
  size_t wrong = 0, at = 0;
  if (rank == root && n > 0 && size > 1) {
    const auto* out = reinterpret_cast<const float*>(op->results[0]->data());
    for (int r = 0; r < size; ++r)
      for (size_t i = 0; i < 2 * n * static_cast<size_t>(r); ++i) wrong += out[at++] != value(i, r);
    CHECK_LOCKED(op->first_dimension[0] == static_cast<int64_t>(at / 2));
  }
  CHECK_LOCKED((rank == root || op->results.empty()));
  CHECK_LOCKED(wrong == 0);
  engine.release(h);
}

// The root gives rank r so many rows of two: an equal share, or r * n.
void check_scatter(Engine& engine, int rank, int size, int root, size_t n, bool splits) {
  std::vector<int64_t> parts;
  size_t rows = splits ? 0 : n * static_cast<size_t>(size) + 1;
  for (int r = 0; r < size; ++r) {
    parts.push_back(splits ? static_cast<int64_t>(n) * r : static_cast<int64_t>(n) + (r == 0));
    if (splits) rows += n * static_cast<size_t>(r);
  }
  const auto in = values(2 * rows, 5);
  int64_t h = 0;
  CHECK_OK(run(engine, Op::kScatter, root, in, nullptr, {static_cast<int64_t>(rows), 2}, &h, [&](Submission& s) {
    if (rank != root) s.tensors = {};
    if (rank == root && splits) s.splits = parts;
  }));
  Operation* op = engine.finished(h);
  size_t first = 0, wrong = 0;
  for (int r = 0; r < rank; ++r) first += 2 * static_cast<size_t>(parts[static_cast<size_t>(r)]);
  const auto mine = static_cast<size_t>(parts[static_cast<size_t>(rank)]);
  for (size_t i = 0; i < 2 * mine; ++i)
    wrong += reinterpret_cast<const float*>(op->results[0]->data())[i] != value(first + i, 5);
  CHECK_LOCKED(wrong == 0);
  CHECK_LOCKED(op->received->dtype == DType::kF32);
  CHECK_LOCKED(op->received->shape == std::vector<int64_t>{static_cast<int64_t>(mine), 2});
  engine.release(h);
}

void check_all(World& world, int size) {
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    for (int root = 0; root < size; ++root)
      for (size_t n : {0, 1, 33, 2500, 90001}) {
        if (n > 10000 && root > 1) continue;
        check_reduce(engine, rank, size, root, n);
        check_gather(engine, rank, size, root, n / 2);
        check_scatter(engine, rank, size, root, n / 2, false);
        check_scatter(engine, rank, size, root, n / 2, true);
      }
  }));
}

TEST_CASE("rooted: reduce, gather and scatter with every root, in shared memory and over TCP") {
  for (int size : {1, 2, 3, 5})
    for (bool shared : {true, false}) {
      CAPTURE(size);
      CAPTURE(shared);
      World world(size, plain_settings(shared));
      check_all(world, size);
    }
}

TEST_CASE("rooted: two nodes of which one has two ranks") {
  World world(3);
  world.on_nodes({"a", "b", "a"});
  check_all(world, 3);
}

TEST_CASE("rooted: differences between ranks are errors on every rank, and the runtime goes on") {
  for (bool shared : {true, false}) {
    World world(3, plain_settings(shared));
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      const std::vector<float> in(6, 1);
      std::vector<float> out(6);
      int64_t h = 0;
      for (Op op : {Op::kReduce, Op::kGather, Op::kScatter}) {
        const Status status = run(engine, op, rank == 1 ? 1 : 0, in, &out, {6}, &h);
        CHECK_LOCKED(status.code() == Code::kMismatch);
        CHECK_LOCKED(status.text().find("root rank 1") != std::string::npos);
      }
      Status status = run(engine, Op::kReduce, 0, in, &out, {rank == 2 ? 5 : 6}, &h);
      CHECK_LOCKED(status.code() == Code::kMismatch);
      status = run(engine, Op::kReduce, 3, in, &out, {6}, &h);
      CHECK_LOCKED(status.code() == Code::kInvalidArgument);
      status = run(engine, Op::kGather, 0, in, nullptr, {}, &h);
      CHECK_LOCKED(status.text().find("rank-zero tensor") != std::string::npos);
      check_reduce(engine, rank, 3, 2, 100);
      check_scatter(engine, rank, 3, 2, 100, true);
    }));
  }
}

TEST_CASE("rooted: not while a rank has joined") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    const std::vector<float> in(6, 1);
    std::vector<float> out(6);
    int64_t h = 0;
    for (Op op : {Op::kReduce, Op::kGather, Op::kScatter}) {
      if (rank == 0) {
        const Status status = run(engine, op, 0, in, &out, {6}, &h);
        CHECK_LOCKED(status.code() == Code::kUnsupported);
        CHECK_LOCKED(status.text().find("not supported with Join") != std::string::npos);
      }
    }
    CHECK_OK(perform(engine, Op::kJoin));
  }));
}

TEST_CASE("rooted: in a process set roots are world ranks, and the same names run again from the cache") {
  World world(4);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    int set = 0;
    CHECK_OK(engine.add_process_set({1, 3}, &set));
    if (rank % 2 == 0) return;
    for (int round = 0; round < 5; ++round) {
      const std::vector<float> in(4, static_cast<float>(rank));
      std::vector<float> out(4);
      int64_t h = 0;
      auto here = [&](Submission& s) {
        s.process_set = set;
        s.root = 3;
      };
      CHECK_OK(perform(engine, Op::kReduce, "r", in, rank == 3 ? &out : nullptr, {4}, here));
      CHECK_LOCKED((rank == 1 || out == std::vector<float>(4, 4)));
      CHECK_OK(submit<float>(engine, Op::kScatter, "s", in, nullptr, {4}, &h, [&](Submission& s) {
        here(s);
        if (rank == 1) s.tensors = {};
      }));
      CHECK_OK(finish(engine, h));
      CHECK_LOCKED(reinterpret_cast<const float*>(engine.finished(h)->results[0]->data())[1] == 3);
      engine.release(h);
    }
  }));
}

}  // namespace
}  // namespace hc
