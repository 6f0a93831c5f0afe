// Operations that a thread starts and waits for later: their first steps are made on that thread, and hc-engine is left
// asleep where the caller is likely to wait soon. Nothing depends on that: others ring when they wait, and poll()
// looks.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "tests/locked_checks.h"
#include "tests/world.h"

namespace hc {
namespace {

using std::chrono::milliseconds;

// A vector and the operation on it that was started.
struct Started {
  Started(Engine* engine, Op op, size_t in_elements, size_t out_elements, int64_t first, int root = 0,
          std::vector<int64_t> splits = {}, std::vector<int64_t> awaited = {})
      : engine(engine), in(in_elements), out(out_elements, -1) {
    for (size_t i = 0; i < in.size(); ++i) in[i] = first + static_cast<int64_t>(i);
    const int64_t shape[] = {static_cast<int64_t>(std::max(in_elements, op == Op::kReceive ? out_elements : 0))};
    const Submission::Tensor tensor{in.empty() ? nullptr : in.data(), out.empty() ? nullptr : out.data(), shape,
                                    DType::kI64};
    Submission s;
    s.op = op;
    s.root = root;
    s.reduce = Reduce::kSum;
    s.tensors = {&tensor, 1};
    s.splits = splits;
    s.awaited = awaited;
    CHECK_OK(engine->start(s, &handle));
  }
  void end() {
    CHECK_OK(finish(*engine, handle));
    if (handle != 0) engine->release(handle);
  }
  Engine* engine;
  std::vector<int64_t> in, out;
  int64_t handle = 0;
};

void blocking_sum(Engine& engine, int size) {
  std::vector<int64_t> values(3, 1);
  int64_t handle = 0;
  CHECK_OK(submit(engine, Op::kAllreduce, "", values, &values, {3}, &handle, [](Submission& s) {
    s.reduce = Reduce::kSum;
    s.will_wait = true;
  }));
  CHECK_OK(finish(engine, handle));
  if (handle != 0) engine.release(handle);
  CHECK_LOCKED(values == std::vector<int64_t>(3, size));
}

TEST_CASE("start: every collective, waited for at once, later or by polling") {
  for (const int size : {2, 3}) {
    World world(size);
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      std::mt19937 random(static_cast<unsigned>(rank));
      size_t wrong = 0;
      for (int step = 0; step < 150; ++step) {
        const auto n = static_cast<size_t>(size) * (step % 7 == 6 ? 500 : 4);
        const int64_t first = 1000 * rank + step;
        const auto at = [&](int r, size_t i) { return 1000 * r + step + static_cast<int64_t>(i); };
        Started sum(&engine, Op::kAllreduce, n, n, first);
        if (step % 3 == 1) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        for (int look = 0; step % 3 == 2 && sum.handle != 0 && !engine.poll(sum.handle); ++look)
          if (look == 1000000) CHECK_LOCKED(false);
        sum.end();
        Started gathered(&engine, Op::kAllgather, 4, 4 * static_cast<size_t>(size), first);
        gathered.end();
        Started scattered(&engine, Op::kReducescatter, n, n / static_cast<size_t>(size), first);
        Started exchanged(&engine, Op::kAlltoall, n, n, first);  // beside another one
        scattered.end();
        exchanged.end();
        const size_t part = n / static_cast<size_t>(size);
        for (size_t i = 0; i < n; ++i) {
          int64_t total = 0;
          for (int r = 0; r < size; ++r) total += at(r, i);
          wrong += sum.out[i] != total;
          if (i / part == static_cast<size_t>(rank)) wrong += scattered.out[i % part] != total;
          wrong += exchanged.out[i] != at(static_cast<int>(i / part), static_cast<size_t>(rank) * part + i % part);
        }
        for (size_t i = 0; i < gathered.out.size(); ++i) wrong += gathered.out[i] != at(static_cast<int>(i / 4), i % 4);
      }
      CHECK_LOCKED(wrong == 0);
    }));
  }
}

TEST_CASE("start: loops of calls that are waited for at once take the bypass, in several forms by turns") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    const auto loop = [&](int steps) {
      for (int step = 0; step < steps; ++step) {
        for (const size_t n : {3, 500, 8}) Started(&engine, Op::kAllreduce, n, n, rank).end();
        Started(&engine, Op::kAlltoall, 6, 6, rank).end();
        Started(&engine, Op::kAllgather, 6, 12, rank).end();
      }
    };
    loop(30);
    const int64_t before = counter(engine, "bypassed"), sent = counter(engine, "request_lists_sent");
    loop(60);
    CHECK_LOCKED(counter(engine, "bypassed") - before >= 250);
    CHECK_LOCKED(counter(engine, "request_lists_sent") == sent);
  }));
}

TEST_CASE("start: who waits needs no call of those who have started and do something else") {
  for (const bool shared : {true, false}) {
    World world(3, {{"HOROCLONE_SHARED_MEMORY", shared ? "1" : "0"}, {"HOROCLONE_YIELD_US", "0"}});
    std::atomic<int> ended{0};  // steps, by who waited
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      for (int step = 0; step < 30; ++step) blocking_sum(engine, 3);
      for (int step = 0; step < 10; ++step) {
        // Another form each time is agreed upon, and rank 0, who decides, has other things to do.
        const auto n = static_cast<size_t>(step % 3 ? 3 : 3 + step);
        Started sum(&engine, Op::kAllreduce, n, n, rank);
        if (rank != step % 3) {
          const Deadline deadline = Deadline::in(30);
          while (ended <= step && !deadline.passed()) std::this_thread::sleep_for(milliseconds(1));
          CHECK_LOCKED(ended > step);
        }
        sum.end();
        if (rank == step % 3) ++ended;
        CHECK_LOCKED(sum.out[0] == 3);
      }
      // Larger than what travels with a message's announcement: the sender has to move it when it is wanted.
      constexpr size_t kElements = 7000;
      if (rank == 1) {
        Started sent(&engine, Op::kSend, kElements, 0, 5, 2), small(&engine, Op::kSend, 3, 0, 7, 2);
        blocking_sum(engine, 3);
        sent.end();
        small.end();
      } else if (rank == 2) {
        Started got(&engine, Op::kReceive, 0, kElements, 0, 1), small(&engine, Op::kReceive, 0, 3, 0, 1);
        small.end();
        got.end();
        CHECK_LOCKED(got.out[kElements - 1] == 5 + static_cast<int64_t>(kElements) - 1);
        CHECK_LOCKED(small.out == std::vector<int64_t>{7, 8, 9});
        blocking_sum(engine, 3);
      } else {
        blocking_sum(engine, 3);
      }
    }));
  }
}

TEST_CASE("start: a message that nobody waits for arrives at one who does") {
  World world(2, {{"HOROCLONE_YIELD_US", "0"}});
  std::atomic<bool> arrived{false};
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    // hc-engine has looked a moment ago: else it is woken.
    for (int step = 0; step < 3; ++step) Started(&engine, Op::kAllreduce, 3 + step, 3 + step, 0).end();
    if (rank == 0) {
      Started sent(&engine, Op::kSend, 7000, 0, 5, 1);
      for (int look = 0; look < 3000 && !arrived; ++look) std::this_thread::sleep_for(milliseconds(10));
      CHECK_LOCKED(arrived.load());
      sent.end();
    } else {
      std::this_thread::sleep_for(milliseconds(50));
      Started got(&engine, Op::kReceive, 0, 7000, 0, 0);
      got.end();
      arrived = true;
      CHECK_LOCKED(got.out[6999] == 7004);
    }
  }));
}

TEST_CASE("start: a thread that helps goes on when nobody else comes, and ends what moves") {
  World world(2);
  std::atomic<bool> helped{false};
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    Started early(&engine, Op::kAllreduce, 3, 3, rank);
    early.end();
    if (rank == 1)
      while (!helped) std::this_thread::sleep_for(milliseconds(1));
    Started sum(&engine, Op::kAllreduce, 100000, 100000, rank);
    if (rank == 0) {
      CHECK_LOCKED(!engine.advance(sum.handle));
      helped = true;
    }
    while (sum.handle != 0 && !engine.advance(sum.handle)) continue;
    sum.end();
    CHECK_LOCKED(sum.out[99999] == 2 * 99999 + 1);
    CHECK_LOCKED(engine.advance(12345678));  // unknown: there is nothing to wait for
  }));
}

TEST_CASE("start: an alltoall without awaited rows writes into the caller's memory only where all parts are equal") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    for (const bool equal : {true, false, true}) {
      // Else rank 0 gives two rows to each, rank 1 one to each.
      Started exchanged(&engine, Op::kAlltoall, equal || rank == 0 ? 4 : 2, 4, 10 * rank);
      CHECK_OK(finish(engine, exchanged.handle));
      Operation* op = exchanged.handle ? engine.finished(exchanged.handle) : nullptr;
      const bool owned = op && !op->results.empty() && op->results[0];
      CHECK_LOCKED(owned != equal);
      const std::vector<int64_t> wanted =
          rank == 0 ? std::vector<int64_t>{0, 1, 10, 11} : std::vector<int64_t>{2, 3, 12, 13};
      if (equal) CHECK_LOCKED(exchanged.out == wanted);
      if (!equal) CHECK_LOCKED(exchanged.out == std::vector<int64_t>(4, -1));
      if (owned) CHECK_LOCKED(op->rows_from == std::vector<int64_t>{2, 1});
      if (exchanged.handle) engine.release(exchanged.handle);
    }
  }));
}

// Rank r sends two rows to rank 0, `last` to rank 1; in every third step each awaits what does not come. Where all send
// alike there are rounds of the bypass, which hold for that only: rank 1 leaves them when it sends otherwise.
TEST_CASE("start: an alltoall writes into the caller's memory where the awaited rows come, however they are cut") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    size_t wrong = 0;
    for (int step = 0; step < 120; ++step) {
      const bool alike = step % 40 < 30, fits = step % 3 != 2;
      const auto last_of = [&](int r) { return static_cast<size_t>(alike || r == 0 ? 1 : 4); };
      const size_t last = last_of(rank), room = rank == 0 ? 4 : last_of(0) + last_of(1);
      std::vector<int64_t> comes{2, 2};
      if (rank == 1) comes = {static_cast<int64_t>(last_of(0)), static_cast<int64_t>(last_of(1))};
      const std::vector<int64_t> awaited = fits ? comes : std::vector<int64_t>{comes[0] - 1, comes[1] + 1};
      Started exchanged(&engine, Op::kAlltoall, 2 + last, room, 10 * rank, 0, {2, static_cast<int64_t>(last)}, awaited);
      CHECK_OK(finish(engine, exchanged.handle));
      Operation* op = exchanged.handle ? engine.finished(exchanged.handle) : nullptr;
      const bool owned = op && !op->results.empty() && op->results[0];
      wrong += owned == fits;
      std::vector<int64_t> wanted;
      for (int r = 0; r < 2; ++r)
        for (int64_t i = 0; i < comes[static_cast<size_t>(r)]; ++i) wanted.push_back(10 * r + (rank == 0 ? i : 2 + i));
      wrong += exchanged.out != (fits ? wanted : std::vector<int64_t>(room, -1));
      wrong += op && op->rows_from != comes;
      if (exchanged.handle) engine.release(exchanged.handle);
    }
    CHECK_LOCKED(wrong == 0);
  }));
}

TEST_CASE("start: a call that awaits other rows is none of the equal ones that repeat") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    size_t wrong = 0;
    for (int step = 0; step < 200; ++step) {
      const bool fits = step % 10 != 9;
      std::vector<int64_t> in(4), out(6, -1);
      std::iota(in.begin(), in.end(), 10 * rank);
      const std::vector<int64_t> awaited{1, 1};
      int64_t handle = 0;
      CHECK_OK(submit(engine, Op::kAlltoall, "", in, &out, {4}, &handle, [&](Submission& s) {
        s.will_wait = true;
        if (!fits) s.awaited = awaited;
      }));
      CHECK_OK(finish(engine, handle));
      std::vector<int64_t> wanted(6, -1);
      if (fits) wanted = {2 * rank, 2 * rank + 1, 10 + 2 * rank, 11 + 2 * rank, -1, -1};
      wrong += out != wanted;
      if (handle) engine.release(handle);
    }
    CHECK_LOCKED(wrong == 0);
  }));
}

TEST_CASE("start: rows awaited from another number of ranks are refused") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int) {
    int64_t handle = 0;
    const std::vector<int64_t> in(4), awaited{1, 1, 2};
    std::vector<int64_t> out(4);
    const Status refused =
        submit(engine, Op::kAlltoall, "", in, &out, {4}, &handle, [&](Submission& s) { s.awaited = awaited; });
    CHECK_LOCKED(refused.code() == Code::kInvalidArgument);
    CHECK_LOCKED(refused.text().find("from 3 ranks of 2") != std::string::npos);
  }));
}

}  // namespace
}  // namespace hc
