// The bypass for broadcast, allgather, reducescatter, alltoall and barrier: where all ranks submit the same they
// take it, with the results of the agreed path; where they do not, they step back and lose nothing.
#include <doctest/doctest.h>

#include <chrono>
#include <random>
#include <thread>

#include "tests/locked_checks.h"
#include "tests/world.h"

namespace hc {
namespace {

int64_t small_value(int rank, int step, int64_t at) { return rank * 1000003 + step * 101 + at; }

struct SmallCase {
  Op op = Op::kAllgather;
  std::string name;
  int64_t rows = 3, row = 2;  // of this rank's input; elements of a row
  int root = 0;
  std::vector<int64_t> splits = {};
};

const std::byte* result_bytes(Operation* op) { return op->results[0]->data(); }

// Submits, waits, and counts what is wrong in the result. All ranks give equal rows, and so equal splits.
size_t run_small(Engine& engine, const SmallCase& c, int rank, int size, int step) {
  std::vector<int64_t> in(static_cast<size_t>(c.rows * c.row));
  for (size_t i = 0; i < in.size(); ++i) in[i] = small_value(rank, step, static_cast<int64_t>(i));
  int64_t handle = 0;
  const bool is_broadcast = c.op == Op::kBroadcast;
  CHECK_OK(submit<int64_t>(engine, c.op, c.name, in, is_broadcast ? &in : nullptr, {c.rows, c.row}, &handle,
                           [&](Submission& s) {
                             s.reduce = Reduce::kSum;
                             s.root = c.root;
                             s.splits = c.splits;
                             s.will_wait = (step + rank) % 3 != 0;
                           }));
  const Status status = finish(engine, handle);
  CHECK_OK(status);
  Operation* op = status.is_ok() && handle != 0 ? engine.finished(handle) : nullptr;
  if (!op && !(handle == 0 && (is_broadcast || c.op == Op::kBarrier))) return 1;
  size_t wrong = 0;
  if (is_broadcast)
    for (size_t i = 0; i < in.size(); ++i) wrong += in[i] != small_value(c.root, step, static_cast<int64_t>(i));
  const auto* got = c.op == Op::kBarrier || is_broadcast ? nullptr : reinterpret_cast<const int64_t*>(result_bytes(op));
  if (c.op == Op::kAllgather) {
    wrong += op->first_dimension[0] != c.rows * size;
    for (int r = 0; r < size; ++r)
      for (int64_t i = 0; i < c.rows * c.row; ++i) wrong += *got++ != small_value(r, step, i);
  }
  if (c.op == Op::kReducescatter) {
    const int64_t rest = c.rows % size, mine = c.rows / size + (rank < rest);
    const int64_t first = (c.rows / size * rank + std::min<int64_t>(rank, rest)) * c.row;
    wrong += op->first_dimension[0] != mine;
    for (int64_t i = 0; i < mine * c.row; ++i) {
      int64_t sum = 0;
      for (int r = 0; r < size; ++r) sum += small_value(r, step, first + i);
      wrong += *got++ != sum;
    }
  }
  if (c.op == Op::kAlltoall) {
    int64_t first = 0;
    for (int r = 0; r < rank; ++r) first += c.splits.empty() ? c.rows / size : c.splits[static_cast<size_t>(r)];
    const int64_t mine = c.splits.empty() ? c.rows / size : c.splits[static_cast<size_t>(rank)];
    wrong += op->rows_from != std::vector<int64_t>(static_cast<size_t>(size), mine);
    for (int r = 0; r < size; ++r)
      for (int64_t i = 0; i < mine * c.row; ++i) wrong += *got++ != small_value(r, step, first * c.row + i);
  }
  engine.release(handle);
  return wrong;
}

std::vector<SmallCase> small_cases(int size) {
  std::vector<int64_t> uneven(static_cast<size_t>(size), 1);
  uneven.back() = 4;
  return {{Op::kBroadcast, "b0"},
          {Op::kBroadcast, "b1", 3, 2, size - 1},
          {Op::kAllgather, "g"},
          {Op::kAllgather, "", 1, 1},
          {Op::kReducescatter, "r", 2 * size + 1},
          {Op::kReducescatter, "", 1, 1},  // the other ranks' slices are empty
          {Op::kAlltoall, "a", 2 * size},
          {Op::kAlltoall, "", size + 3, 2, 0, uneven},
          {Op::kAllgather, "large", 200, 10},
          {Op::kBarrier, ""}};
}

TEST_CASE("bypass: loops of every operation take it, and give what the agreed path gives") {
  for (int size : {2, 3, 5}) {
    World world(size);
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      size_t wrong = 0;
      for (const SmallCase& c : small_cases(size)) {
        for (int step = 0; step < 20; ++step) wrong += run_small(engine, c, rank, size, step);
        const int64_t before = counter(engine, "bypassed");
        for (int step = 0; step < 80; ++step) wrong += run_small(engine, c, rank, size, step);
        CHECK_LOCKED(counter(engine, "bypassed") - before >= 70);
      }
      // One after the other they share a session.
      const int64_t before = counter(engine, "bypassed");
      for (int step = 0; step < 50; ++step)
        for (const SmallCase& c : small_cases(size)) wrong += run_small(engine, c, rank, size, step);
      CHECK_LOCKED(counter(engine, "bypassed") - before >= 400);
      CHECK_LOCKED(wrong == 0);
    }));
  }
}

TEST_CASE("bypass: unequal rows are agreed on, and do not disturb what is equal") {
  World world(3);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    size_t wrong = 0;
    for (int round = 0; round < 20; ++round) {
      for (int step = 0; step < 12; ++step) wrong += run_small(engine, {Op::kAllgather, "g"}, rank, 3, step);
      // The same name, and this time the ranks have 1, 2 and 3 rows.
      for (int again = 0; again < 2; ++again) {
        std::vector<int64_t> in(static_cast<size_t>(rank + 1), 10 * rank + again);
        int64_t handle = 0;
        CHECK_OK(submit<int64_t>(engine, Op::kAllgather, "g", in, nullptr, {rank + 1}, &handle));
        const Status status = finish(engine, handle);
        CHECK_LOCKED(status.code() == Code::kOk);
        if (Operation* op = engine.finished(handle)) {
          const auto* got = reinterpret_cast<const int64_t*>(result_bytes(op));
          CHECK_LOCKED(op->first_dimension[0] == 6);
          CHECK_LOCKED(std::vector<int64_t>(got, got + 6) ==
                       std::vector<int64_t>{again, 10 + again, 10 + again, 20 + again, 20 + again, 20 + again});
        }
        engine.release(handle);
      }
      // Rank r sends r + 1 rows to everybody: no two tables are alike, so a round is stepped back from.
      for (int step = 0; step < 12; ++step) wrong += run_small(engine, {Op::kAlltoall, "a", 6}, rank, 3, step);
      std::vector<int64_t> in(static_cast<size_t>(3 * (rank + 1)), rank);
      int64_t handle = 0;
      CHECK_OK(submit<int64_t>(engine, Op::kAlltoall, "a", in, nullptr, {3 * (rank + 1)}, &handle));
      CHECK_OK(finish(engine, handle));
      if (Operation* op = engine.finished(handle)) {
        CHECK_LOCKED(op->rows_from == std::vector<int64_t>{1, 2, 3});
        const auto* got = reinterpret_cast<const int64_t*>(result_bytes(op));
        CHECK_LOCKED(std::vector<int64_t>(got, got + 6) == std::vector<int64_t>{0, 1, 1, 2, 2, 2});
      }
      engine.release(handle);
    }
    CHECK_LOCKED(wrong == 0);
  }));
}

TEST_CASE("bypass: two operations of one name are an error on every rank, and the next call works") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    for (int round = 0; round < 5; ++round) {
      size_t wrong = 0;
      for (int step = 0; step < 20; ++step) wrong += run_small(engine, {Op::kAlltoall, "a", 4}, rank, 2, step);
      CHECK_LOCKED(wrong == 0);
      std::vector<int64_t> in(5, rank);
      int64_t handle = 0;
      CHECK_OK(submit<int64_t>(engine, rank ? Op::kAllgather : Op::kReducescatter, "two", in, nullptr, {5}, &handle));
      const Status differ = finish(engine, handle);
      CHECK_LOCKED(differ.code() == Code::kMismatch);
      engine.release(handle);
    }
  }));
}

TEST_CASE("bypass: a random program of every operation, with different delays on each rank") {
  for (unsigned seed : {1u, 2u, 3u}) {
    const int size = 2 + static_cast<int>(seed % 3);
    World world(size);
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      std::mt19937 program(seed), mine(seed * 100 + static_cast<unsigned>(rank));
      const std::vector<SmallCase> all = small_cases(size);
      size_t wrong = 0;
      for (int i = 0; i < 80; ++i) {
        const SmallCase& c = all[program() % all.size()];
        for (unsigned step = program() % 25; step > 0; --step) {
          if (mine() % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(mine() % 300));
          wrong += run_small(engine, c, rank, size, static_cast<int>(step));
        }
      }
      CHECK_LOCKED(wrong == 0);
    }));
  }
}

}  // namespace
}  // namespace hc
