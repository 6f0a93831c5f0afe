// The rank metrics: what is counted, what begins a step, and that readers see whole updates.
#include "engine/rank_metrics/rank_metrics.h"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

using namespace hc;

namespace {

struct Copy {
  explicit Copy(const RankMetrics& rank_metrics) : bytes(rank_metrics.copy()) {}
  const RankMetricsLayout& operator*() const { return *reinterpret_cast<const RankMetricsLayout*>(bytes.data()); }
  const RankMetricsLayout* operator->() const { return &**this; }
  const MetricOperations& of(Op op) const { return (**this).operations[static_cast<size_t>(op)]; }
  std::string bytes;
};

uint64_t counted(const MetricOperations& of_kind) {
  uint64_t sum = 0;
  for (const MetricWord& n : of_kind.histogram) sum += n;
  return sum;
}

const char kLike = 0;  // what RankMetrics::ran() tells calls of one loop by, where a test has but one

const RankMetrics::Identity kIdentity{3, 8, 1, 5, "some.host"};

}  // namespace

TEST_CASE("operations are counted by kind, time and latency") {
  RankMetrics rank_metrics;
  rank_metrics.begin(kIdentity);
  rank_metrics.began(10'000);
  rank_metrics.ended({Op::kAllreduce, 400, 10'000, 13'000, 18'000, "weights"});
  rank_metrics.began(20'000);
  rank_metrics.ended({Op::kAllreduce, 0, 20'000, 0, 20'500, "never moved"});
  rank_metrics.ran({Op::kBroadcast, 4, 30'000, 30'200, 31'500, ""}, &kLike);
  const Copy seen(rank_metrics);
  CHECK(seen->rank == 3);
  CHECK(seen->generation == 5);
  CHECK(std::string_view(reinterpret_cast<const char*>(seen->host.words)) == "some.host");
  const MetricOperations& reduced = seen.of(Op::kAllreduce);
  CHECK(reduced.count == 2);
  CHECK(reduced.bytes == 400);
  CHECK(reduced.queued_ns == 3000 + 500);
  CHECK(reduced.running_ns == 5000);
  CHECK(reduced.histogram[0] == 1);  // 0.5 us
  CHECK(reduced.histogram[4] == 1);  // 8 us
  CHECK(seen.of(Op::kBroadcast).queued_ns == 200);
  CHECK(seen->for_peers_ns == 200);
  CHECK(seen->for_transfer_ns == 1300);
  CHECK(seen->communication_ns == 8000 + 500 + 1500);
  CHECK(seen->last_kind == static_cast<uint32_t>(Op::kBroadcast));
  CHECK(seen->last_done == 31'500);
  CHECK(seen->under_way == 0);
}

TEST_CASE("operations that overlap count once for the time of communication") {
  RankMetrics rank_metrics;
  rank_metrics.begin(kIdentity);
  rank_metrics.began(1000);
  rank_metrics.began(2000);
  rank_metrics.ended({Op::kAllreduce, 4, 1000, 1000, 5000, "a"});
  CHECK(Copy(rank_metrics)->communicates_since == 1000);
  rank_metrics.ended({Op::kAllreduce, 4, 2000, 2000, 7000, "b"});
  CHECK(Copy(rank_metrics)->communication_ns == 6000);
  CHECK(Copy(rank_metrics)->communicates_since == 0);
}

TEST_CASE("a latency beyond the last bucket is counted there, and clocks that disagree count as nothing") {
  RankMetrics rank_metrics;
  rank_metrics.begin(kIdentity);
  rank_metrics.ran({Op::kBarrier, 0, 1000, 1000, 1000 + 3'600'000'000'000, ""}, &kLike);
  rank_metrics.ran({Op::kBarrier, 0, 5000, 4000, 3000, ""}, &kLike);
  const Copy seen(rank_metrics);
  CHECK(seen.of(Op::kBarrier).histogram[kLatencyBuckets - 1] == 1);
  CHECK(seen.of(Op::kBarrier).histogram[0] == 1);
  CHECK(seen.of(Op::kBarrier).running_ns == 3'600'000'000'000);
}

TEST_CASE("a step is from one use to the next of the name that repeats most often") {
  RankMetrics rank_metrics;
  rank_metrics.begin(kIdentity);
  uint64_t once = 0, loss = 0, metric = 0;
  rank_metrics.repeats(&once, false, 1000);
  rank_metrics.repeats(&loss, false, 2000);
  CHECK(Copy(rank_metrics)->step == 0);  // nothing has repeated
  rank_metrics.repeats(&loss, false, 5000);
  CHECK(Copy(rank_metrics)->step == 1);
  CHECK(Copy(rank_metrics)->step_ns == 0);
  rank_metrics.repeats(&metric, false, 5500);
  rank_metrics.repeats(&loss, false, 9000);
  CHECK(Copy(rank_metrics)->step == 2);
  CHECK(Copy(rank_metrics)->step_ns == 4000);
  rank_metrics.repeats(&metric, false, 9100);  // as often as the other: stays what it is
  rank_metrics.repeats(&loss, false, 14'000);
  CHECK(Copy(rank_metrics)->step_ns == 5000);
  CHECK(Copy(rank_metrics)->step_smoothed_ns == 4200);
  rank_metrics.repeats(&metric, false, 14'100);  // now it is what repeats
  rank_metrics.repeats(&metric, false, 20'100);
  rank_metrics.repeats(&metric, false, 25'100);
  CHECK(Copy(rank_metrics)->step == 5);
  CHECK(Copy(rank_metrics)->step_ns == 5000);
}

TEST_CASE("short steps are told of several at a time, by their mean") {
  RankMetrics rank_metrics;
  rank_metrics.begin(kIdentity);
  uint64_t name = 0;
  uint64_t at = 10'000;
  for (int i = 0; i < 1000; ++i)
    rank_metrics.ran({Op::kAllreduce, 4, at, at + 10, (at += 200) - 100, "name", &name}, &name);
  const Copy seen(rank_metrics);
  CHECK(seen->step == 999);
  CHECK(seen->step_ns == 200);
  CHECK(seen->step_communication_ns == 100);
  CHECK(seen.of(Op::kAllreduce).count == 1000);
  CHECK(std::string_view(reinterpret_cast<const char*>(seen->last_name.words)) == "name");
}

TEST_CASE("the calls of a loop are counted at once, though many are added up together") {
  const int fd = static_cast<int>(::memfd_create("rank_metrics", 0));
  REQUIRE(::ftruncate(fd, kRankMetricsBytes) == 0);
  RankMetrics rank_metrics;
  REQUIRE(rank_metrics.share(fd, 0, "").is_ok());
  rank_metrics.begin(kIdentity);
  auto* lies = static_cast<RankMetricsLayout*>(::mmap(nullptr, kRankMetricsBytes, PROT_READ, MAP_SHARED, fd, 0));
  const MetricOperations& in_memory = lies->operations[static_cast<size_t>(Op::kAllreduce)];
  uint64_t name = 0, at = 10'000;
  const char unnamed = 0, larger = 0, broadcasts = 0;  // what calls are like
  const auto call = [&](std::string_view text, uint64_t* seen) {
    rank_metrics.ran({Op::kAllreduce, 4, at, at + 100, at + 300, text, seen},
                     seen ? static_cast<const void*>(seen) : &unnamed);
    at += 1000;
  };
  const auto check = [&](uint64_t calls, uint64_t added_up) {
    CHECK(in_memory.count == added_up);
    CHECK(lies->recent.count == calls - added_up);
    const Copy seen(rank_metrics);
    const MetricOperations& reduced = seen.of(Op::kAllreduce);
    CHECK(reduced.count == calls);
    CHECK(reduced.bytes == 4 * calls);
    CHECK(reduced.queued_ns == 100 * calls);
    CHECK(reduced.running_ns == 200 * calls);
    CHECK(counted(reduced) == calls);
    CHECK(seen->communication_ns == 300 * calls);
    CHECK(seen->for_peers_ns == 100 * calls);
    CHECK(seen->for_transfer_ns == 200 * calls);
    CHECK(seen->last_done == at - 700);
    CHECK(seen->sequence % 2 == 0);
    CHECK(seen->recent.count == 0);
  };
  call("loop", &name);
  check(1, 1);  // a name that readers do not know yet
  call("loop", &name);
  check(2, 2);  // which begins steps from now on
  for (uint64_t calls = 3; calls <= 10; ++calls) {
    call("loop", &name);
    check(calls, 2);
    CHECK(Copy(rank_metrics)->step == calls - 1);
    CHECK(Copy(rank_metrics)->step_began == at - 1000);
  }
  rank_metrics.go_on();
  check(10, 10);
  CHECK(lies->step == 9);
  CHECK(lies->step_ns == 1000);
  CHECK(lies->step_communication_ns == 300);
  CHECK(lies->step_waited_ns == 300);
  rank_metrics.go_on();
  check(10, 10);
  call("", nullptr);
  check(11, 11);
  call("", nullptr);
  check(12, 11);
  at += 5000;
  call("", nullptr);
  check(13, 13);  // after a pause
  CHECK(Copy(rank_metrics)->step == 9);
  call("", nullptr);
  rank_metrics.go_on();
  check(14, 14);
  for (uint64_t calls = 15; calls <= 14 + kRecentCalls; ++calls) {
    call("", nullptr);
    check(calls, 14);
  }
  call("", nullptr);  // for which there is no more room
  check(15 + kRecentCalls, 14 + kRecentCalls);
  rank_metrics.ran({Op::kAllreduce, 4, at, at + 100, at + 5300, ""}, &unnamed);   // belongs into another bucket
  rank_metrics.ran({Op::kAllreduce, 4, at + 6000, at, at + 5000, ""}, &unnamed);  // of clocks that disagree
  rank_metrics.ran({Op::kAllreduce, 4, at + 6000, at + 9000, at + 6900, ""}, &unnamed);
  CHECK(in_memory.count == 14 + kRecentCalls);
  CHECK(Copy(rank_metrics).of(Op::kAllreduce).histogram[0] == 17 + kRecentCalls);
  CHECK(Copy(rank_metrics).of(Op::kAllreduce).histogram[3] == 1);
  CHECK(Copy(rank_metrics).of(Op::kAllreduce).queued_ns == 100 * (16 + kRecentCalls) + 900);
  CHECK(Copy(rank_metrics).of(Op::kAllreduce).running_ns == 200 * (15 + kRecentCalls) + 5200);
  rank_metrics.ran({Op::kAllreduce, 8, at + 7000, at + 7100, at + 7300, ""}, &larger);  // of another size
  CHECK(in_memory.count == 19 + kRecentCalls);
  rank_metrics.ran({Op::kAllreduce, 8, at + 7400, at + 7400, at + 7500, ""}, &larger);
  rank_metrics.ran({Op::kBroadcast, 8, at + 7600, at + 7700, at + 7800, ""}, &broadcasts);
  CHECK(in_memory.count == 20 + kRecentCalls);
  CHECK(Copy(rank_metrics).of(Op::kBroadcast).bytes == 8);
  CHECK(Copy(rank_metrics)->last_kind == static_cast<uint32_t>(Op::kBroadcast));
  rank_metrics.ran({Op::kBroadcast, 8, at + 7900, at + 7900, at + 8000, ""}, &broadcasts);
  CHECK(lies->recent.count == 1);
  rank_metrics.begin(kIdentity);
  CHECK(lies->sequence % 2 == 0);
  CHECK(Copy(rank_metrics).of(Op::kBroadcast).count == 0);
  ::munmap(lies, kRankMetricsBytes);
  ::close(fd);
}

TEST_CASE("in the middle of a loop other things happen") {
  RankMetrics rank_metrics;
  rank_metrics.begin(kIdentity);
  uint64_t bucket = 0, loss = 0, at = 10'000;
  const auto loop = [&](int calls) {
    for (; calls > 0; --calls, at += 1000)
      rank_metrics.ran({Op::kAllreduce, 4, at, at + 100, at + 300, "loss", &loss}, &loss);
  };
  const auto step = [&] {
    rank_metrics.began(at);
    rank_metrics.repeats(&bucket, true, at);
    rank_metrics.ended({Op::kAllreduce, 100, at, at, at + 500, "bucket", &bucket});
    at += 1000;
  };
  for (int i = 1; i <= 6; ++i) {
    step();
    loop(7);  // begins no step: a bucket does that
    CHECK(Copy(rank_metrics)->step == static_cast<uint64_t>(i));
    CHECK(Copy(rank_metrics).of(Op::kAllreduce).count == static_cast<uint64_t>(8 * i));
  }
  CHECK(Copy(rank_metrics)->step_ns == 8000);
  CHECK(Copy(rank_metrics)->step_communication_ns == 500 + 7 * 300);
  rank_metrics.began(at);
  loop(3);  // while another one is under way, so its time counts once
  CHECK(Copy(rank_metrics)->communication_ns == 6 * (500 + 7 * 300));
  rank_metrics.ended({Op::kAllreduce, 100, at - 3000, 0, at, "bucket", &bucket});
  CHECK(Copy(rank_metrics)->communication_ns == 6 * (500 + 7 * 300) + 3000);
  CHECK(Copy(rank_metrics).of(Op::kAllreduce).count == 52);
}

TEST_CASE("a bucket of an optimizer tells steps, whatever names repeat") {
  RankMetrics rank_metrics;
  rank_metrics.begin(kIdentity);
  uint64_t loss = 0, first = 0, second = 0;
  for (uint64_t at : {1000, 2000, 3000}) rank_metrics.repeats(&loss, false, at);
  for (uint64_t step = 1; step <= 4; ++step) {
    rank_metrics.repeats(&first, true, 10'000 * step);
    rank_metrics.repeats(&second, true, 10'000 * step + 100);
    rank_metrics.repeats(&loss, false, 10'000 * step + 200);
    rank_metrics.repeats(&loss, false, 10'000 * step + 300);
  }
  CHECK(Copy(rank_metrics)->step == 2 + 4);
  CHECK(Copy(rank_metrics)->step_ns == 10'000);
  uint64_t other = 0;  // the optimizer has made other buckets
  for (uint64_t step = 5; step <= 8; ++step) rank_metrics.repeats(&other, true, 10'000 * step);
  CHECK(Copy(rank_metrics)->step == 2 + 4 + 3);
  CHECK(Copy(rank_metrics)->step_ns == 10'000);
}

TEST_CASE("a step has its share of communication and of waiting") {
  RankMetrics rank_metrics;
  rank_metrics.begin(kIdentity);
  uint64_t bucket = 0;
  for (uint64_t at : {100'000, 200'000}) {
    rank_metrics.began(at);
    rank_metrics.repeats(&bucket, true, at);
    rank_metrics.ended({Op::kAllreduce, 4, at, at + 10'000, at + 30'000, "bucket"});
    rank_metrics.ran({Op::kAllreduce, 4, at + 50'000, at + 54'000, at + 60'000, "loss"}, &kLike);
  }
  rank_metrics.repeats(&bucket, true, 300'000);
  CHECK(Copy(rank_metrics)->step_ns == 100'000);
  CHECK(Copy(rank_metrics)->step_communication_ns == 40'000);
  CHECK(Copy(rank_metrics)->step_waited_ns == 10'000);
}

TEST_CASE("a thread that waits is split into waiting for peers and for transfer") {
  RankMetrics rank_metrics;
  rank_metrics.begin(kIdentity);
  using namespace std::chrono_literals;
  {
    RankMetrics::Waiting waiting(rank_metrics, Clock::now());
    CHECK(Copy(rank_metrics)->waiting == 0);
    waiting.tell();
    waiting.tell();
    CHECK(Copy(rank_metrics)->waiting == 1);
    std::this_thread::sleep_for(4ms);
    const uint64_t started = rank_metrics.now();
    std::this_thread::sleep_for(2ms);
    waiting.over(started, started + 1);  // it has told: what it says counts, not when the operation was done
  }
  const Copy seen(rank_metrics);
  CHECK(seen->waiting == 0);
  CHECK(seen->other_for_peers_ns >= 4'000'000);
  CHECK(seen->other_for_transfer_ns >= 2'000'000);
}

TEST_CASE("ticks and the clock tell the same moments") {
  RankMetrics rank_metrics;
  rank_metrics.begin(kIdentity);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  bool same = false;
  for (int look = 0; look < 100 && !same; ++look) {  // a busy machine may stop this thread between two readings
    rank_metrics.beat({});
    const uint64_t before = rank_metrics.at(Clock::now()), ticks = rank_metrics.now(),
                   after = rank_metrics.at(Clock::now());
    same = ticks + 20'000 >= before && ticks <= after + 20'000;
  }
  CHECK(same);
}

TEST_CASE("shared metrics are seen through another mapping, and a forked child leaves it alone") {
  const int fd = static_cast<int>(::memfd_create("rank_metrics", 0));
  REQUIRE(::ftruncate(fd, 3 * kRankMetricsBytes) == 0);
  RankMetrics rank_metrics;
  CHECK(!rank_metrics.share(fd, 3 * kRankMetricsBytes, "x").is_ok());
  CHECK(!rank_metrics.share(fd, 100, "x").is_ok());
  CHECK(!rank_metrics.share(-1, 0, "x").is_ok());
  REQUIRE(rank_metrics.share(fd, 2 * kRankMetricsBytes, "train.py").is_ok());
  rank_metrics.begin(kIdentity);
  rank_metrics.stall("allreduce 'x'", {1, 4});
  rank_metrics.beat({{4, 7, 900}, {1, 2, 100}});
  auto* seen = static_cast<RankMetricsLayout*>(::mmap(nullptr, 3 * kRankMetricsBytes, PROT_READ, MAP_SHARED, fd, 0));
  const auto& other = *reinterpret_cast<RankMetricsLayout*>(reinterpret_cast<std::byte*>(seen) + 2 * kRankMetricsBytes);
  CHECK(std::memcmp(&other, kRankMetricsMagic, 8) == 0);
  CHECK(other.stalled == 1);
  CHECK(other.awaited_ranks[1] == 4);
  CHECK(other.late[0].rank == 4);
  CHECK(other.late[0].times == 7);
  CHECK(other.state == 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  rank_metrics.stall("allreduce 'x'", {1});  // still the same stall
  rank_metrics.go_on();
  rank_metrics.go_on();
  CHECK(other.stalled == 0);
  CHECK(other.stalled_ms >= 20);
  CHECK(other.stalled_ms < 10'000);
  rank_metrics.forget();
  rank_metrics.end();  // its own memory, not the parent's
  CHECK(other.state == 1);
  ::munmap(seen, 3 * kRankMetricsBytes);
  ::close(fd);
}

TEST_CASE("a writer that was killed in the middle does not spoil the metrics of the next life") {
  const int fd = static_cast<int>(::memfd_create("rank_metrics", 0));
  REQUIRE(::ftruncate(fd, kRankMetricsBytes) == 0);
  const uint64_t odd = 77;
  REQUIRE(::pwrite(fd, &odd, sizeof odd, 8) == sizeof odd);
  RankMetrics rank_metrics;
  REQUIRE(rank_metrics.share(fd, 0, "").is_ok());
  rank_metrics.begin(kIdentity);
  CHECK(Copy(rank_metrics)->sequence % 2 == 0);
  CHECK(Copy(rank_metrics)->sequence > odd);
  ::close(fd);
}

// One writer, as the engine has it, a thread that waits, and readers: each copy is of one moment.
TEST_CASE("readers see whole updates while the metrics are written") {
  RankMetrics rank_metrics;
  rank_metrics.begin(kIdentity);
  std::atomic<bool> over{false};
  std::thread writer([&] {
    uint64_t bucket = 0, name = 0;
    for (uint64_t i = 1; !over.load(); ++i) {
      const uint64_t at = i * 10'000;
      rank_metrics.began(at);
      rank_metrics.repeats(&bucket, true, at);
      rank_metrics.ended({Op::kAllreduce, 100, at, at + 1000, at + 3000, i % 2 ? "a name" : "another name"});
      rank_metrics.ran({Op::kBarrier, 0, at + 5000, at + 5000, at + 6000, ""}, &kLike);
      for (uint64_t from : {at + 6100, at + 6200, at + 6300, at + 6400})
        rank_metrics.ran({Op::kBroadcast, 8, from, from + 10, from + 40, "a loop", &name}, &name);
      if (i % 64 == 0) rank_metrics.beat({{1, i, i}});
      if (i % 100 == 0) rank_metrics.stall("what it waits for", {1, 2});
      if (i % 100 == 50) rank_metrics.go_on();
      // Else it would write more often than a reader, slowed down by a sanitizer, can copy.
      if (i % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  });
  std::thread waiter([&] {
    while (!over.load()) {
      RankMetrics::Waiting waiting(rank_metrics, Clock::now());
      waiting.tell();
      waiting.over(0, 0);
    }
  });
  uint64_t last = 0;
  const auto read = [&](uint64_t* before) {
    const Copy seen(rank_metrics);
    const MetricOperations& reduced = seen.of(Op::kAllreduce);
    CHECK(reduced.bytes == 100 * reduced.count);
    CHECK(reduced.queued_ns == 1000 * reduced.count);
    CHECK(reduced.running_ns == 2000 * reduced.count);
    CHECK(counted(reduced) == reduced.count);
    CHECK(reduced.count >= *before);
    *before = reduced.count;
    const MetricOperations& sent = seen.of(Op::kBroadcast);
    CHECK(sent.bytes == 8 * sent.count);
    CHECK(sent.queued_ns == 10 * sent.count);
    CHECK(sent.running_ns == 30 * sent.count);
    CHECK(counted(sent) == sent.count);
  };
  std::thread other([&] {
    uint64_t mine = 0;
    for (int i = 0; i < 3000; ++i) read(&mine);
  });
  for (int i = 0; i < 3000; ++i) read(&last);
  other.join();
  while (last < 100) read(&last);
  over = true;
  writer.join();
  waiter.join();
}
