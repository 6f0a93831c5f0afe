// Messages between GPUs and scatters from one, on fakes of CUDA and NCCL: no GPU takes part. Values, order, what
// would deadlock if it were launched in each rank's own order, ends that do not fit, aborts.
#include <doctest/doctest.h>

#include <atomic>
#include <numeric>
#include <thread>

#include "tests/gpu/gpu_fake.h"
#include "tests/locked_checks.h"
#include "tests/sanitized.h"

namespace hc::gpu_messages {  // several files of tests are compiled as one
namespace {

using Values = std::vector<int32_t>;

Values numbers(size_t count, int first) {
  Values values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

// One rank of the world: its engine and its framework's GPU.
struct Rank {
  Engine& engine;
  FrameworkOnGpu& gpu;

  int64_t submit(Op op, void* data, size_t count, int peer, int64_t tag = 0, int process_set = 0) {
    int64_t handle = 0;
    const Status submitted =
        submit_gpu(engine, gpu, op, "", op == Op::kSend ? data : nullptr, op == Op::kSend ? nullptr : data,
                   {static_cast<int64_t>(count)}, DType::kI32, &handle, [&](Submission& s) {
                     s.root = peer;
                     s.tag = tag;
                     s.process_set = process_set;
                     if (op == Op::kReceive && !data) s.tensors = {};
                   });
    CHECK_OK(submitted);
    return handle;
  }
  int64_t send(int32_t* data, size_t count, int to, int64_t tag = 0, int process_set = 0) {
    return submit(Op::kSend, data, count, to, tag, process_set);
  }
  // data null: takes what comes.
  int64_t receive(int32_t* data, size_t count, int from, int64_t tag = 0, int process_set = 0) {
    return submit(Op::kReceive, data, count, from, tag, process_set);
  }
  Status ends(int64_t handle) {
    Status outcome = enqueued(engine, gpu, handle);
    engine.release(handle);
    return outcome;
  }
  int32_t* place(size_t count) { return gpu.tensor(Values(count, -1)); }
  // What came into memory of the core's.
  Values take(int64_t handle) {
    CHECK_OK(enqueued(engine, gpu, handle));
    const Operation* op = engine.finished(handle);
    const auto count = static_cast<size_t>(op->received->count());
    int32_t* to = place(count);
    if (op->results_in_work) CHECK_OK(engine.copy_result(handle, 0, to, count * 4, gpu.stream));
    engine.release(handle);
    return gpu.read(to, count);
  }
  Status sum(const std::string& name, int32_t* data, size_t count, int process_set = 0) {
    int64_t handle = 0;
    HC_TRY(submit_gpu(engine, gpu, Op::kAllreduce, name, data, data, {static_cast<int64_t>(count)}, DType::kI32,
                      &handle, [&](Submission& s) {
                        s.reduce = Reduce::kSum;
                        s.process_set = process_set;
                      }));
    return ends(handle);
  }
};

using Body = std::function<void(Rank&, int rank)>;
void on_gpus(World& world, const Body& body, bool one_gpu = false) {
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    FrameworkOnGpu gpu(one_gpu ? 0 : rank);
    Rank self{engine, gpu};
    body(self, rank);
    gpu.synchronize();
  }));
  CHECK(fake_count("memory") == 0);
  CHECK(fake_communicators() == 0);
}

// Both send before they receive, of sizes from nothing to more than NCCL's fake holds at a time.
void exchange(Rank& self, int other, int rank) {
  for (const size_t count : {size_t{0}, size_t{1}, size_t{1000}, size_t{300'000}}) {
    int32_t* out = self.gpu.tensor(numbers(count, rank * 7));
    int32_t* in = self.place(count);
    const int64_t sent = self.send(out, count, other);
    const int64_t got = self.receive(in, count, other);
    CHECK_OK(self.ends(sent));
    CHECK_OK(self.ends(got));
    const bool right = self.gpu.read(in, count) == numbers(count, other * 7);
    CHECK_LOCKED(right);
  }
}

}  // namespace

TEST_CASE("fake of CUDA and NCCL: messages between GPUs, both send first, by NCCL and through host memory") {
  FakeEnvironment slow(Variables{{"HC_FAKE_DELAY_US", "200"}});
  for (const char* backend : {"nccl", "auto", "peers", "host"}) {
    CAPTURE(backend);
    const bool one_gpu = std::string(backend) == "auto";
    World world(2, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", backend}}));
    const int before = fake_count("pinned");
    on_gpus(world, [](Rank& self, int rank) { exchange(self, 1 - rank, rank); }, one_gpu);
    if (std::string(backend) == "nccl") CHECK_MESSAGE(fake_count("pinned") == before, "nothing goes by host memory");
  }
}

TEST_CASE("fake of CUDA and NCCL: the host waits for no GPU in a message, streams do") {
  FakeEnvironment slow(Variables{{"HC_FAKE_DELAY_US", "60000"}});
  World world(2, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", "nccl"}}));
  on_gpus(world, [](Rank& self, int rank) {
    int32_t* data = rank == 0 ? self.gpu.tensor(numbers(5000, 3)) : self.place(5000);
    const int64_t handle = rank == 0 ? self.send(data, 5000, 1) : self.receive(data, 5000, 0);
    CHECK_OK(self.ends(handle));
    const bool busy = self.gpu.busy();
    CHECK_LOCKED(busy);
    const bool right = self.gpu.read(data, 5000) == numbers(5000, 3);
    CHECK_LOCKED(right);
  });
}

TEST_CASE("fake of CUDA and NCCL: rings, crossed orders, tags and collectives in between never wait for each other") {
  FakeEnvironment slow(Variables{{"HC_FAKE_DELAY_US", "30"}});
  for (const bool shared : {true, false}) {
    CAPTURE(shared);
    World world(3,
                gpu_settings({{"HOROCLONE_GPU_OPERATIONS", "nccl"}, {"HOROCLONE_SHARED_MEMORY", shared ? "1" : "0"}}));
    on_gpus(world, [](Rank& self, int rank) {
      constexpr size_t kCount = 2000;
      constexpr int kRounds = 6;
      struct Open {
        int64_t handle;
        int32_t* place;
        int first;
      };
      std::vector<Open> open;
      for (int round = 0; round < kRounds; ++round) {
        // Everybody to everybody, each rank in an order of its own, with a collective in the middle of it.
        for (int step = 0; step < 6; ++step) {
          const int which = (step * (rank % 2 ? 5 : 1) + rank + round) % 6;
          const int peer = (rank + 1 + which % 2) % 3;
          const int64_t tag = which / 2;
          if (which % 4 < 2) {
            int32_t* data = self.gpu.tensor(numbers(kCount, rank * 100 + round * 10 + static_cast<int>(tag)));
            open.push_back({self.send(data, kCount, peer, tag), nullptr, 0});
          } else {
            open.push_back({0, nullptr, 0});
          }
          if (step == 3) {
            int32_t* total = self.gpu.tensor(Values(100, rank + 1));
            CHECK_OK(self.sum(text_of("sum ", round), total, 100));
            const bool right = self.gpu.read(total, 100) == Values(100, 6);
            CHECK_LOCKED(right);
          }
        }
        // which 0, 1, 4, 5: both peers with tags 0 and 2.
        for (const int64_t tag : {2, 0})
          for (int other = 0; other < 3; ++other) {
            if (other == rank) continue;
            int32_t* place = self.place(kCount);
            open.push_back(
                {self.receive(place, kCount, other, tag), place, other * 100 + round * 10 + static_cast<int>(tag)});
          }
      }
      size_t wrong = 0;
      for (const Open& one : open)
        if (one.handle) CHECK_OK(self.ends(one.handle));
      for (const Open& one : open)
        if (one.place) wrong += self.gpu.read(one.place, kCount) != numbers(kCount, one.first);
      CHECK_LOCKED(wrong == 0);
    });
  }
}

TEST_CASE("fake of CUDA and NCCL: messages between ranks on several nodes, whose plans travel along a tree") {
  World world(4, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", "nccl"}, {"HOROCLONE_CONTROL_FANOUT", "1"}}));
  world.on_nodes({"a", "b", "b", "c"});
  on_gpus(world, [](Rank& self, int rank) {
    int32_t* out = self.gpu.tensor(numbers(3000, rank));
    int32_t* in = self.place(3000);
    for (int step = 1; step < 4; ++step) {
      const int64_t sent = self.send(out, 3000, (rank + step) % 4);
      int32_t* total = self.gpu.tensor(Values(10, 1));
      CHECK_OK(self.sum(text_of("sum ", step), total, 10));
      const int64_t got = self.receive(in, 3000, (rank + 4 - step) % 4);
      CHECK_OK(self.ends(got));
      CHECK_OK(self.ends(sent));
      const bool right = self.gpu.read(in, 3000) == numbers(3000, (rank + 4 - step) % 4);
      const bool summed = self.gpu.read(total, 10) == Values(10, 4);
      CHECK_LOCKED(right);
      CHECK_LOCKED(summed);
    }
  });
}

TEST_CASE("fake of CUDA and NCCL: messages and process sets go on when the ranks on the way of plans have left") {
  World world(4, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", "nccl"}, {"HOROCLONE_CONTROL_FANOUT", "1"}}));
  world.on_nodes({"a", "b", "b", "c"});  // plans for rank 3 pass 1 and 2
  std::atomic<int> ended{0};
  on_gpus(world, [&](Rank& self, int rank) {
    int id = -1;
    CHECK_OK(self.engine.add_process_set({0, 3}, &id));
    int32_t* total = self.gpu.tensor(Values(10, 1));
    CHECK_OK(self.sum("all have begun", total, 10));
    if (rank == 1 || rank == 2) return;
    for (const int gone : {1, 2}) {
      const Status sent = self.ends(self.send(total, 10, gone));
      CHECK_LOCKED(sent.code() == Code::kAborted);
    }
    exchange(self, 3 - rank, rank);
    for (int i = 0; i < 3; ++i) CHECK_OK(self.sum(text_of("on two ", i), total, 10, id));
    const bool summed = self.gpu.read(total, 10) == Values(10, 4 * 2 * 2 * 2);
    CHECK_LOCKED(summed);
    ++ended;
    while (ended < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
}

TEST_CASE(
    "fake of CUDA and NCCL: a message needs ranks that sleep: the one that orders and those on the way of launch "
    "tickets") {
  for (const bool one_machine : {true, false}) {
    CAPTURE(one_machine);
    World world(4, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", "nccl"}, {"HOROCLONE_CONTROL_FANOUT", "1"}}));
    if (!one_machine) world.on_nodes({"a", "b", "b", "c"});  // to rank 3 by 1 and 2, which share memory
    std::atomic<int> ended{0};
    on_gpus(world, [&](Rank& self, int rank) {
      int32_t* total = self.gpu.tensor(Values(10, 1));
      CHECK_OK(self.sum("all have begun", total, 10));
      if (rank == 1 || rank == 3) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));  // until the others' hc-engine sleeps
        int32_t* data = rank == 1 ? self.gpu.tensor(numbers(3000, 7)) : self.place(3000);
        const int64_t handle = rank == 1 ? self.send(data, 3000, 3) : self.receive(data, 3000, 1);
        CHECK_OK(self.ends(handle));
        const bool right = self.gpu.read(data, 3000) == numbers(3000, 7);
        CHECK_LOCKED(right);
        ++ended;
      }
      while (ended < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
}

// What it is asked in the moment in which its barrier ends comes while it is awake, and rings nothing.
TEST_CASE("fake of CUDA and NCCL: the rank that orders is asked while it comes out of a barrier, and answers") {
  const int rounds = kSanitized ? 100 : 1000;
  World world(3, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", "nccl"}}));
  std::atomic<int> ended{0};
  on_gpus(world, [&](Rank& self, int rank) {
    int32_t* data = self.gpu.tensor(numbers(10, 0));
    for (int round = 1; round <= rounds; ++round) {
      std::vector<float> none;
      int64_t barrier = 0;
      CHECK_OK(submit(self.engine, Op::kBarrier, "all", none, &none, {}, &barrier,
                      [](Submission& s) { s.will_wait = true; }));
      Status outcome = finish(self.engine, barrier);
      if (barrier) self.engine.release(barrier);
      if (rank == 1) outcome = self.ends(self.send(data, 10, 2));
      if (rank == 2) outcome = self.ends(self.receive(data, 10, 1));
      CHECK_OK(outcome);
      if (rank != 0) ++ended;
      const Deadline deadline = Deadline::in(30);  // rank 0 does nothing meanwhile that would wake its engine
      while (ended < 2 * round && !deadline.passed()) std::this_thread::sleep_for(std::chrono::microseconds(20));
      const bool answered = ended >= 2 * round;
      CHECK_LOCKED(answered);
      if (!answered) return;
    }
  });
}

TEST_CASE("fake of CUDA and NCCL: messages arrive also after rank 0, which orders them, has shut down") {
  for (const bool shared : {true, false}) {
    CAPTURE(shared);
    World world(3,
                gpu_settings({{"HOROCLONE_GPU_OPERATIONS", "nccl"}, {"HOROCLONE_SHARED_MEMORY", shared ? "1" : "0"}}));
    on_gpus(world, [](Rank& self, int rank) {
      for (int i = 0; rank && i < (kSanitized ? 10 : 50); ++i) exchange(self, 3 - rank, rank);
    });
  }
}

TEST_CASE("fake of CUDA and NCCL: a receive without a tensor takes what comes, from anybody and from itself") {
  for (const char* backend : {"nccl", "host"}) {
    CAPTURE(backend);
    if (kThreadSanitized && backend[0] == 'h') continue;
    World world(2, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", backend}}));
    on_gpus(world, [](Rank& self, int rank) {
      int32_t* out = self.gpu.tensor(numbers(70, rank));
      const int64_t sent = self.send(out, 70, 1 - rank);
      const int64_t got = self.receive(nullptr, 0, -1);
      const bool right = self.take(got) == numbers(70, 1 - rank);
      CHECK_LOCKED(right);
      CHECK_OK(self.ends(sent));
      const int64_t own = self.send(out, 70, rank, 5);
      CHECK_OK(self.ends(own));  // done before anybody receives
      self.gpu.write(out, Values(70, 0));
      int32_t* place = self.place(70);
      const int64_t back = self.receive(place, 70, rank, 5);
      CHECK_OK(self.ends(back));
      const bool same = self.gpu.read(place, 70) == numbers(70, rank);
      CHECK_LOCKED(same);
      if (rank == 1) return;                             // one of them shows what follows
      const size_t large = (kSelfBufferBytes / 4) + 10;  // too large to be copied: waits for its receiver
      int32_t* much = self.gpu.tensor(Values(large, rank));
      const int64_t waits = self.send(much, large, rank, 6);
      const int64_t taken = self.receive(nullptr, 0, rank, 6);
      const bool all = self.take(taken) == Values(large, rank);
      CHECK_LOCKED(all);
      CHECK_OK(self.ends(waits));
    });
  }
}

TEST_CASE("fake of CUDA and NCCL: one end on a GPU and the other in host memory is an error on both, and all goes on") {
  World world(2, gpu_settings());
  on_gpus(world, [](Rank& self, int rank) {
    Values on_host = numbers(10, 5);
    int32_t* on_gpu = self.gpu.tensor(numbers(10, 5));
    for (const bool gpu_sends : {true, false}) {
      int64_t handle = 0;
      if ((rank == 0) == gpu_sends) {
        handle = rank == 0 ? self.send(on_gpu, 10, 1) : self.receive(on_gpu, 10, 0);
      } else {
        const auto adjust = [&](Submission& s) { s.root = 1 - rank; };
        const Status submitted =
            rank == 0
                ? submit(self.engine, Op::kSend, "", on_host, static_cast<Values*>(nullptr), {10}, &handle, adjust)
                : submit(self.engine, Op::kReceive, "", Values(), &on_host, {10}, &handle, adjust);
        CHECK_OK(submitted);
      }
      const Status outcome = finish(self.engine, handle);
      self.engine.release(handle);
      CHECK_LOCKED(outcome.code() == Code::kMismatch);
      const bool says = outcome.text().find(gpu_sends ? "sent a tensor on a GPU" : "sent a tensor in host memory") !=
                        std::string::npos;
      INFO(outcome.text());
      CHECK_LOCKED(says);
    }
    exchange(self, 1 - rank, rank);
  });
}

TEST_CASE("fake of CUDA and NCCL: a receive without a tensor or a GPU takes a GPU's message into host memory") {
  World world(2, gpu_settings());
  on_gpus(world, [](Rank& self, int rank) {
    if (rank == 0) {
      CHECK_OK(self.ends(self.send(self.gpu.tensor(numbers(900, 4)), 900, 1)));
      return;
    }
    int64_t handle = 0;
    const Status submitted =
        submit(self.engine, Op::kReceive, "", Values(), static_cast<Values*>(nullptr), {0}, &handle, [](Submission& s) {
          s.root = 0;
          s.tensors = {};
        });
    CHECK_OK(submitted);
    CHECK_OK(finish(self.engine, handle));
    const Operation* op = self.engine.finished(handle);
    const auto* values = reinterpret_cast<const int32_t*>(op->results[0]->data());
    const bool right = !op->results_in_work && Values(values, values + 900) == numbers(900, 4);
    CHECK_LOCKED(right);
    self.engine.release(handle);
  });
}

TEST_CASE("fake of CUDA and NCCL: NCCL that is demanded and cannot be used for a message is an error on both ends") {
  World world(2, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", "nccl"}}));
  on_gpus(
      world,
      [](Rank& self, int rank) {
        int32_t* data = self.gpu.tensor(numbers(10, 0));
        const int64_t handle = rank == 0 ? self.send(data, 10, 1) : self.receive(data, 10, 0);
        const Status outcome = self.ends(handle);
        const bool says = outcome.text().find("both ends use the same GPU") != std::string::npos;
        CHECK_LOCKED(outcome.code() == Code::kUnsupported);
        CHECK_LOCKED(says);
      },
      true);
}

TEST_CASE("fake of CUDA and NCCL: an abort ends messages that wait and those that streams wait for") {
  for (const bool matched : {false, true}) {
    CAPTURE(matched);
    World world(2, gpu_settings());
    std::atomic<bool> submitted{false};
    on_gpus(world, [&](Rank& self, int rank) {
      exchange(self, 1 - rank, rank);
      int32_t* data = self.gpu.tensor(numbers(10, 0));
      const int64_t handle = rank == 0 ? self.send(data, 10, 1) : matched ? self.receive(data, 10, 0) : 0;
      if (rank == 0) submitted.store(true);
      while (!submitted.load()) std::this_thread::yield();
      if (rank == 1) {
        self.engine.abort("rank 1 raised ValueError: bad batch");
        if (matched) (void)self.ends(handle);
        return;
      }
      Status outcome = self.ends(handle);
      for (int i = 0; i < 1000 && outcome.is_ok(); ++i) outcome = self.sum(text_of("alone", i), data, 10);
      const bool says = outcome.code() == Code::kAborted && outcome.text().find("bad batch") != std::string::npos;
      INFO(outcome.text());
      CHECK_LOCKED(says);
    });
  }
}

TEST_CASE("fake of CUDA and NCCL: an error that NCCL reports in a message ends the job with its words") {
  FakeEnvironment failing(Variables{{"HC_FAKE_NCCL_FAIL", "1:2:6"}});
  World world(2, gpu_settings({{"HOROCLONE_STALL_CHECK_TIME_SECONDS", "0.2"}}));
  on_gpus(world, [](Rank& self, int rank) {
    int32_t* data = self.gpu.tensor(numbers(10, 0));
    Status outcome;
    for (int i = 0; i < 200 && outcome.is_ok(); ++i)
      outcome = self.ends(rank == 0 ? self.send(data, 10, 1) : self.receive(data, 10, 0));
    const bool says = outcome.text().find("remote process exited or there was a network error") != std::string::npos;
    INFO(outcome.text());
    CHECK_LOCKED(says);
  });
}

TEST_CASE("fake of CUDA and NCCL: scatters from a GPU, equal and not, to ranks that pass nothing") {
  FakeEnvironment slow(Variables{{"HC_FAKE_DELAY_US", "200"}});
  for (const char* backend : {"nccl", "peers", "host"}) {
    CAPTURE(backend);
    World world(3, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", backend}}));
    on_gpus(world, [](Rank& self, int rank) {
      const std::vector<std::vector<int64_t>> all_splits = {{}, {3, 0, 2}, {0, 0, 5}};
      for (size_t i = 0; i < all_splits.size(); ++i)
        for (int root = 0; root < 3; ++root) {
          int64_t handle = 0;
          int32_t* rows = self.gpu.tensor(numbers(10, root));
          const Status submitted =
              submit_gpu(self.engine, self.gpu, Op::kScatter, text_of("s", i, root), rank == root ? rows : nullptr,
                         nullptr, {5, 2}, DType::kI32, &handle, [&](Submission& s) {
                           s.root = root;
                           if (rank == root) s.splits = all_splits[i];
                           if (rank != root) s.tensors = {};
                         });
          CHECK_OK(submitted);
          const std::vector<int64_t> counts = all_splits[i].empty() ? std::vector<int64_t>{2, 2, 1} : all_splits[i];
          int64_t before = 0;
          for (int r = 0; r < rank; ++r) before += counts[static_cast<size_t>(r)];
          const auto count = static_cast<size_t>(counts[static_cast<size_t>(rank)]) * 2;
          const bool right = self.take(handle) == numbers(count, root + static_cast<int>(before) * 2);
          CHECK_LOCKED(right);
        }
    });
  }
}

TEST_CASE("fake of CUDA and NCCL: a scatter from a GPU to a rank without one says so; from host memory it works") {
  World world(2, gpu_settings());
  on_gpus(world, [](Rank& self, int rank) {
    const Values rows = numbers(4, 0);
    for (const bool from_gpu : {true, false}) {
      int64_t handle = 0;
      Submission s;
      s.op = Op::kScatter;
      s.name = from_gpu ? "gpu" : "host";
      const int64_t shape[] = {4};
      const Submission::Tensor tensor{from_gpu ? self.gpu.tensor(rows) : rows.data(), nullptr, shape, DType::kI32};
      if (rank == 0) s.tensors = {&tensor, 1};
      if ((rank == 0) == from_gpu) self.gpu.place(&s);  // the other rank offers nothing, or its GPU in vain
      CHECK_OK(self.engine.submit(s, &handle));
      const Status outcome = finish(self.engine, handle);
      INFO(outcome.text());
      if (from_gpu) {
        const bool says = outcome.text().find("rank 1 takes part without one") != std::string::npos;
        CHECK_LOCKED(says);
      } else {
        CHECK_OK(outcome);
        const Operation* op = self.engine.finished(handle);
        const bool on_host = !op->results_in_work && op->results.size() == 1;
        CHECK_LOCKED(on_host);
      }
      self.engine.release(handle);
    }
  });
}

}  // namespace hc::gpu_messages
