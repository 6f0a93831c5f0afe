// The bypass for small allreduces: loops of blocking calls take it, everything else makes the ranks step back to
// the agreement, and neither a result nor an operation is lost on the way.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>

#include <atomic>
#include <random>
#include <thread>

#include "tests/locked_checks.h"
#include "tests/world.h"

namespace hc {
namespace {

float part(int rank, int step, size_t i) { return static_cast<float>((rank + 1) * (step % 1000 + 1)) + i % 5; }

float sum(int size, int step, size_t i) {
  float total = 0;
  for (int r = 0; r < size; ++r) total += part(r, step, i);
  return total;
}

// One small allreduce of which every element is checked. waits: the caller waits at once, which may take the fast path.
struct Small {
  Small(Engine* engine, std::string name, int rank, int size, int step, size_t n = 3, bool waits = false)
      : engine(engine), size(size), step(step), values(n) {
    for (size_t i = 0; i < n; ++i) values[i] = part(rank, step, i);
    CHECK_OK(submit(*engine, Op::kAllreduce, name, values, &values, {static_cast<int64_t>(n)}, &handle,
                    [waits](Submission& s) { s.will_wait = waits; }));
  }
  void finish_and_check() {
    CHECK_OK(finish(*engine, handle));
    engine->release(handle);
    size_t wrong = 0;
    for (size_t i = 0; i < values.size(); ++i) wrong += values[i] != sum(size, step, i);
    if (wrong) CHECK_LOCKED(wrong == 0);
  }
  Engine* engine;
  int size, step;
  std::vector<float> values;
  int64_t handle = 0;
};

// Mostly the fast path, and some ranks of a round the slow one.
void blocking(Engine& engine, const std::string& name, int rank, int size, int step, size_t n = 3) {
  Small(&engine, name, rank, size, step, n, (step + rank) % 4 != 0).finish_and_check();
}

TEST_CASE("bypass: a loop of blocking allreduces needs no messages, named or not") {
  for (int size : {2, 3, 5}) {
    for (std::string name : {"x", ""}) {
      World world(size);
      CHECK_OK(world.each([&](Engine& engine, int rank) {
        for (int step = 0; step < 20; ++step) blocking(engine, name, rank, size, step);
        const int64_t sent = counter(engine, "request_lists_sent") + counter(engine, "plans_sent");
        for (int step = 0; step < 200; ++step) blocking(engine, name, rank, size, step);
        CHECK_LOCKED(counter(engine, "bypassed") >= 200);
        CHECK_LOCKED(counter(engine, "request_lists_sent") + counter(engine, "plans_sent") == sent);
        // Another operation, then back again.
        blocking(engine, "other", rank, size, 1, 50000);
        for (int step = 0; step < 100; ++step) blocking(engine, name, rank, size, step);
        CHECK_LOCKED(counter(engine, "bypassed") >= 250);
      }));
    }
  }
}

TEST_CASE("bypass: no payload of any size is written over before all have read it") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    // Up to 24 bytes in the cell, below 16 KiB in the ring, up to 1 MiB in halves.
    const size_t elements[] = {16384, 6, 7, 3000, 16383, 1, 262144, 4096, 4095, 100001};
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int step = 0; step < 400; ++step) {
      const size_t n = elements[step % 10];
      if (random() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
      blocking(engine, text_of("of ", n), rank, 2, step, n);
    }
    CHECK_LOCKED(counter(engine, "bypassed") >= 200);
  }));
}

// How often rank 2 was the last to come, as this rank saw it.
uint64_t times_of_rank_2(const Engine& engine) {
  const std::string json = engine.counters_json(), key = "{\"rank\":2,\"times\":";
  const size_t at = json.find(key);
  return at == std::string::npos ? 0 : std::stoull(json.substr(at + key.size()));
}

TEST_CASE("bypass: who came last is known also to those who slept by then") {
  constexpr int kRounds = 20;
  World world(3, {{"HOROCLONE_YIELD_US", "0"}});
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    for (int step = 0; step < 20; ++step) blocking(engine, "x", rank, 3, step);
    const uint64_t times = times_of_rank_2(engine);
    for (int step = 0; step < kRounds; ++step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5 * rank));  // the ranks before it sleep in their round
      blocking(engine, "x", rank, 3, step);
    }
    CHECK_LOCKED(times_of_rank_2(engine) - times >= kRounds / 4);  // not all: the machine may be busy
  }));
}

// Memory that can't be written until a write to it has waited for 20 ms: a thread that sums into it is late.
class SlowMemory {
 public:
  explicit SlowMemory(size_t bytes) {
    bytes_ = bytes;
    start_ = static_cast<std::byte*>(
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
    REQUIRE(static_cast<void*>(start_) != MAP_FAILED);
    struct sigaction slow{};
    slow.sa_sigaction = &let_through;
    slow.sa_flags = SA_SIGINFO;
    REQUIRE(::sigaction(SIGSEGV, &slow, &before_) == 0);
  }
  ~SlowMemory() {
    (void)::sigaction(SIGSEGV, &before_, nullptr);
    (void)::munmap(start_, bytes_);
  }
  float* values() { return reinterpret_cast<float*>(start_); }
  void make_slow() { REQUIRE(::mprotect(start_, bytes_, PROT_READ) == 0); }

 private:
  static void let_through(int, siginfo_t* info, void*) {
    auto* const at = static_cast<std::byte*>(info->si_addr);
    if (at < start_ || at >= start_ + bytes_) {  // a real fault: it comes again and ends the process
      (void)::sigaction(SIGSEGV, &before_, nullptr);
      return;
    }
    const timespec delay{0, 20'000'000};
    (void)::nanosleep(&delay, nullptr);
    (void)::mprotect(start_, bytes_, PROT_READ | PROT_WRITE);
  }
  static inline std::byte* start_ = nullptr;
  static inline size_t bytes_ = 0;
  static inline struct sigaction before_{};
};

TEST_CASE("bypass: who sleeps until the other has summed its half is woken, not left to a timer") {
  constexpr int kRounds = 20, kElements = 32768;
  SlowMemory slow(kElements * sizeof(float));
  std::atomic<int> ended{0};  // calls of rank 0
  int in_time = 0;
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    const std::vector<float> in(kElements, 1.0f);
    std::vector<float> mine(kElements);
    float* const out = rank == 1 ? slow.values() : mine.data();
    const auto call = [&] {
      const int64_t shape[] = {kElements};
      const Submission::Tensor tensor{in.data(), out, shape, DType::kF32};
      Submission s;
      s.name = "x";
      s.tensors = {&tensor, 1};
      s.will_wait = true;
      CHECK_OK(perform(engine, s));
      CHECK_LOCKED(out[kElements - 1] == 2.0f);
    };
    for (int step = 0; step < kRounds; ++step) {
      for (int quick = 0; quick < 50; ++quick) call();  // so that no thread of the engine sleeps beside the caller
      if (rank == 1) slow.make_slow();
      call();
      if (rank == 0) ++ended;
      // This rank's engine does nothing more, and the other's sleep ends by itself some 30 ms after.
      for (int waited_ms = 0; rank == 1 && ended == step && waited_ms < 12; ++waited_ms)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (rank == 1 && ended > step) ++in_time;
    }
    CHECK_LOCKED(counter(engine, "bypassed") >= kRounds);
  }));
  CHECK(in_time > 2);  // 0 or 1 where nobody wakes it; not all where the machine is busy
}

TEST_CASE("bypass: bytes are counted as on the agreed path") {
  for (const bool bypass : {true, false}) {
    World world(2, {{"HOROCLONE_BYPASS", bypass ? "1" : "0"}});
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      for (int step = 0; step < 20; ++step) blocking(engine, "x", rank, 2, step, 7);
      const int64_t before = counter(engine, "bytes"), rounds = counter(engine, "bypassed");
      for (int step = 0; step < 100; ++step) blocking(engine, "x", rank, 2, step, 7);
      CHECK_LOCKED(counter(engine, "bytes") - before == 100 * 7 * 4);
      CHECK_LOCKED((counter(engine, "bypassed") - rounds > 0) == bypass);
      std::vector<float> mine(3, 1.0f);  // rounds whose results the core owns
      const int64_t rows_before = counter(engine, "bytes");
      for (int step = 0; step < 50; ++step) {
        CHECK_OK(perform<float>(engine, Op::kAllgather, "rows", mine, nullptr, {3}));
      }
      CHECK_LOCKED(counter(engine, "bytes") - rows_before == 50 * 6 * 4);
    }));
  }
}

TEST_CASE("bypass: it is not taken when it is switched off, over TCP, or by what is large") {
  World tcp(2, {{"HOROCLONE_SHARED_MEMORY", "0"}});
  World off(2, {{"HOROCLONE_BYPASS", "0"}});
  World large(2);
  for (World* world : {&tcp, &off, &large})
    CHECK_OK(world->each([&](Engine& engine, int rank) {
      for (int step = 0; step < 40; ++step) blocking(engine, "x", rank, 2, step, world == &large ? 262145 : 3);
      CHECK_LOCKED(counter(engine, "bypassed") == 0);
    }));
}

TEST_CASE("bypass: dtypes, averages and scales are those of the agreed path") {
  for (int size : {2, 3}) {
    const size_t n = size == 2 ? 9001 : 5;  // two members sum one half each
    World world(size);
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      for (int step = 0; step < 60; ++step) {
        std::vector<int32_t> whole(n, 2 * rank + step);
        std::vector<double> out(n, rank + 0.5 * step);
        int64_t h = 0;
        const int64_t shape[] = {static_cast<int64_t>(n)};
        for (bool integers : {true, false}) {
          const Submission::Tensor tensor{integers ? static_cast<void*>(whole.data()) : out.data(),
                                          integers ? static_cast<void*>(whole.data()) : out.data(), shape,
                                          integers ? DType::kI32 : DType::kF64};
          Submission s;
          s.reduce = Reduce::kAverage;
          s.postscale = integers ? 1 : 2;
          s.name = integers ? "i" : "d";
          s.tensors = {&tensor, 1};
          CHECK_OK(step % 2 ? engine.call(s, &h) : engine.submit(s, &h));
          CHECK_OK(finish(engine, h));
          engine.release(h);
        }
        const double mean = (size - 1) / 2.0;  // of the ranks
        for (size_t i : {size_t{0}, n / 2, n - 1}) {
          CHECK_LOCKED(whole[i] == static_cast<int32_t>(2 * mean) + step);
          CHECK_LOCKED(out[i] == doctest::Approx(2 * (mean + 0.5 * step)));
        }
      }
      CHECK_LOCKED(counter(engine, "bypassed") > 50);
    }));
  }
}

TEST_CASE("bypass: different orders, names and shapes make the ranks step back, and they come together again") {
  for (int size : {2, 4}) {
    World world(size);
    const size_t n = size == 2 ? 20000 : 3;
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      for (int round = 0; round < 30; ++round) {
        for (int step = 0; step < 30; ++step) blocking(engine, "a", rank, size, step, n);
        {  // the ranks disagree on which comes first
          Small first(&engine, rank % 2 ? "b" : "c", rank, size, rank % 2 ? 5 : 6, n);
          Small second(&engine, rank % 2 ? "c" : "b", rank, size, rank % 2 ? 6 : 5, n);
          first.finish_and_check();
          second.finish_and_check();
        }
        for (int step = 0; step < 20; ++step) blocking(engine, "", rank, size, step);
        std::vector<float> odd(rank == size - 1 ? 3 : 4,
                               1.0f);  // the shapes differ: an error on every rank, again and again
        for (int again = 0; again < 2; ++again) {
          int64_t h = 0;
          CHECK_OK(submit(engine, Op::kAllreduce, "odd", odd, &odd, {static_cast<int64_t>(odd.size())}, &h));
          const Status differs = finish(engine, h);
          CHECK_LOCKED(differs.code() == Code::kMismatch);
          engine.release(h);
        }
      }
    }));
  }
}

TEST_CASE("bypass: a random program, the same on all ranks, with different delays on each") {
  for (unsigned seed : {1u, 2u, 3u}) {
    const int size = 2 + static_cast<int>(seed % 3);
    World world(size);
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      std::mt19937 program(seed), mine(seed * 100 + rank);
      std::vector<std::unique_ptr<Small>> open;
      for (int i = 0; i < 700; ++i) {
        const unsigned what = program() % 100;
        if (mine() % 50 == 0) std::this_thread::yield();
        if (what < 80) {
          const bool is_short = program() % 8;
          blocking(engine, is_short ? "x" : "y", rank, size, i, is_short ? 3 : 8001);
        } else if (what < 90) {
          open.push_back(std::make_unique<Small>(&engine, "open" + std::to_string(i % 7 + 10 * open.size()), rank, size,
                                                 i, 1 + program() % 6000));
        } else if (what < 94) {
          CHECK_OK(perform(engine, Op::kBarrier));
        } else {
          if (mine() % 2) std::shuffle(open.begin(), open.end(), mine);
          for (auto& small : open) small->finish_and_check();
          open.clear();
        }
      }
      for (auto& small : open) small->finish_and_check();
    }));
  }
}

TEST_CASE("bypass: two threads of each rank, one of which leaves rounds open while the other announces") {
  World world(3);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    const auto work = [&](const std::string& name, int steps) {
      for (int step = 0; step < steps; ++step) blocking(engine, name, rank, 3, step);
    };
    for (int round = 0; round < 10; ++round) {
      work("alone", 40);
      std::thread other(work, "a", 30 + 7 * round);
      work("b", 50);
      other.join();
    }
    CHECK_LOCKED(counter(engine, "bypassed") > 0);
  }));
}

TEST_CASE("bypass: a rank joins or leaves while the others are in a round") {
  for (int round = 0; round < 6; ++round) {
    World world(3);
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      const int steps = 20 + (rank == 1 ? 0 : round + 3);
      for (int step = 0; step < steps; ++step) {
        std::vector<float> v(4, 1.0f);
        CHECK_OK(
            perform(engine, Op::kAllreduce, "x", v, &v, {4}, [round](Submission& s) { s.will_wait = round % 3 != 0; }));
        CHECK_LOCKED(v[3] == (step < 20 ? 3.0f : 2.0f));
      }
      int64_t h = 0;
      CHECK_OK(perform(engine, Op::kJoin));
      for (int step = 0; step < 40; ++step) blocking(engine, "x", rank, 3, step);
      if (rank == 2 && round % 2) return;
      std::vector<float> v(4, 1.0f);
      CHECK_OK(submit(engine, Op::kAllreduce, "x", v, &v, {4}, &h));
      const Status last = finish(engine, h);
      CHECK_LOCKED(last.is_ok() == (round % 2 == 0));
      if (!last.is_ok()) CHECK_LOCKED(last.text().find("rank 2") != std::string::npos);
      engine.release(h);
    }));
  }
}

TEST_CASE("bypass: a call that repeats leaves nothing behind, and is written down like any other") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    for (std::string name : {"x", ""}) {
      const auto call = [&](int step, size_t n, int64_t* handle) {
        std::vector<float> values(n, static_cast<float>(rank + step));
        CHECK_OK(submit(engine, Op::kAllreduce, name, values, &values, {static_cast<int64_t>(n)}, handle,
                        [](Submission& s) { s.will_wait = true; }));
        CHECK_OK(finish(engine, *handle));
        engine.release(*handle);
        CHECK_LOCKED(values[n - 1] == static_cast<float>(1 + 2 * step));
      };
      int64_t handle = 0;
      int short_ones = 0;
      for (int step = 0; step < 300; ++step) {
        call(step, 5, &handle);
        short_ones += handle == 0;
      }
      CHECK_LOCKED(short_ones > 0);
      CHECK_LOCKED(counter(engine, "live_handles") == 0);
      // What is like it but for its size is not taken for it.
      for (int step = 0; step < 40; ++step) call(step, step % 2 ? 5 : 6, &handle);
    }
    const std::string record = engine.flight_record("test");
    CHECK_LOCKED(record.find("\"state\":\"pending\"") == std::string::npos);
    CHECK_LOCKED(record.find("\"call\":680,") != std::string::npos);
    CHECK_LOCKED(record.find("\"use\":339,") != std::string::npos);
  }));
}

TEST_CASE("bypass: while a call is under way its name is taken, and a rank that never comes is named") {
  World world(2, {{"HOROCLONE_YIELD_US", "100000"}});
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    for (int step = 0; step < 40; ++step) blocking(engine, "x", rank, 2, step);
    if (rank == 1) return;
    std::vector<float> values(3, 1.0f);
    int64_t handle = 0;
    CHECK_OK(
        submit(engine, Op::kAllreduce, "x", values, &values, {3}, &handle, [](Submission& s) { s.will_wait = true; }));
    REQUIRE(handle != 0);  // nobody else came: it is an operation now
    int64_t second = 0;
    const Status taken = submit(engine, Op::kAllreduce, "x", values, &values, {3}, &second);
    CHECK_LOCKED(taken.code() == Code::kInvalidArgument);
    const Status left = finish(engine, handle);
    CHECK_LOCKED(!left.is_ok());
    CHECK_LOCKED(left.text().find("rank 1") != std::string::npos);
    engine.release(handle);
  }));
}

}  // namespace
}  // namespace hc
