// The page of measurements: what is counted, what begins a step, and that readers see whole updates.
#include "engine/page/page.h"

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
  explicit Copy(const Page& page) : bytes(page.copy()) {}
  const PageLayout& operator*() const { return *reinterpret_cast<const PageLayout*>(bytes.data()); }
  const PageLayout* operator->() const { return &**this; }
  const PageOperations& of(Op op) const { return (**this).operations[static_cast<size_t>(op)]; }
  std::string bytes;
};

uint64_t counted(const PageOperations& of_kind) {
  uint64_t sum = 0;
  for (const PageWord& n : of_kind.histogram) sum += n;
  return sum;
}

const char kLike = 0;  // what Page::ran() tells calls of one loop by, where a test has but one

const Page::Identity kIdentity{3, 8, 1, 5, "some.host"};

}  // namespace

TEST_CASE("operations are counted by kind, time and latency") {
  Page page;
  page.begin(kIdentity);
  page.began(10'000);
  page.ended({Op::kAllreduce, 400, 10'000, 13'000, 18'000, "weights"});
  page.began(20'000);
  page.ended({Op::kAllreduce, 0, 20'000, 0, 20'500, "never moved"});
  page.ran({Op::kBroadcast, 4, 30'000, 30'200, 31'500, ""}, &kLike);
  const Copy seen(page);
  CHECK(seen->rank == 3);
  CHECK(seen->generation == 5);
  CHECK(std::string_view(reinterpret_cast<const char*>(seen->host.words)) == "some.host");
  const PageOperations& reduced = seen.of(Op::kAllreduce);
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
  Page page;
  page.begin(kIdentity);
  page.began(1000);
  page.began(2000);
  page.ended({Op::kAllreduce, 4, 1000, 1000, 5000, "a"});
  CHECK(Copy(page)->communicates_since == 1000);
  page.ended({Op::kAllreduce, 4, 2000, 2000, 7000, "b"});
  CHECK(Copy(page)->communication_ns == 6000);
  CHECK(Copy(page)->communicates_since == 0);
}

TEST_CASE("a latency beyond the last bucket is counted there, and clocks that disagree count as nothing") {
  Page page;
  page.begin(kIdentity);
  page.ran({Op::kBarrier, 0, 1000, 1000, 1000 + 3'600'000'000'000, ""}, &kLike);
  page.ran({Op::kBarrier, 0, 5000, 4000, 3000, ""}, &kLike);
  const Copy seen(page);
  CHECK(seen.of(Op::kBarrier).histogram[kLatencyBuckets - 1] == 1);
  CHECK(seen.of(Op::kBarrier).histogram[0] == 1);
  CHECK(seen.of(Op::kBarrier).running_ns == 3'600'000'000'000);
}

TEST_CASE("a step is from one use to the next of the name that repeats most often") {
  Page page;
  page.begin(kIdentity);
  uint64_t once = 0, loss = 0, metric = 0;
  page.repeats(&once, false, 1000);
  page.repeats(&loss, false, 2000);
  CHECK(Copy(page)->step == 0);  // nothing has repeated
  page.repeats(&loss, false, 5000);
  CHECK(Copy(page)->step == 1);
  CHECK(Copy(page)->step_ns == 0);
  page.repeats(&metric, false, 5500);
  page.repeats(&loss, false, 9000);
  CHECK(Copy(page)->step == 2);
  CHECK(Copy(page)->step_ns == 4000);
  page.repeats(&metric, false, 9100);  // as often as the other: stays what it is
  page.repeats(&loss, false, 14'000);
  CHECK(Copy(page)->step_ns == 5000);
  CHECK(Copy(page)->step_smoothed_ns == 4200);
  page.repeats(&metric, false, 14'100);  // now it is what repeats
  page.repeats(&metric, false, 20'100);
  page.repeats(&metric, false, 25'100);
  CHECK(Copy(page)->step == 5);
  CHECK(Copy(page)->step_ns == 5000);
}

TEST_CASE("short steps are told of several at a time, by their mean") {
  Page page;
  page.begin(kIdentity);
  uint64_t name = 0;
  uint64_t at = 10'000;
  for (int i = 0; i < 1000; ++i) page.ran({Op::kAllreduce, 4, at, at + 10, (at += 200) - 100, "name", &name}, &name);
  const Copy seen(page);
  CHECK(seen->step == 999);
  CHECK(seen->step_ns == 200);
  CHECK(seen->step_communication_ns == 100);
  CHECK(seen.of(Op::kAllreduce).count == 1000);
  CHECK(std::string_view(reinterpret_cast<const char*>(seen->last_name.words)) == "name");
}

TEST_CASE("the calls of a loop are counted at once, though many are added up together") {
  const int fd = static_cast<int>(::memfd_create("page", 0));
  REQUIRE(::ftruncate(fd, kPageBytes) == 0);
  Page page;
  REQUIRE(page.share(fd, 0, "").is_ok());
  page.begin(kIdentity);
  auto* lies = static_cast<PageLayout*>(::mmap(nullptr, kPageBytes, PROT_READ, MAP_SHARED, fd, 0));
  const PageOperations& in_memory = lies->operations[static_cast<size_t>(Op::kAllreduce)];
  uint64_t name = 0, at = 10'000;
  const char unnamed = 0, larger = 0, broadcasts = 0;  // what calls are like
  const auto call = [&](std::string_view text, uint64_t* seen) {
    page.ran({Op::kAllreduce, 4, at, at + 100, at + 300, text, seen}, seen ? static_cast<const void*>(seen) : &unnamed);
    at += 1000;
  };
  const auto check = [&](uint64_t calls, uint64_t added_up) {
    CHECK(in_memory.count == added_up);
    CHECK(lies->recent.count == calls - added_up);
    const Copy seen(page);
    const PageOperations& reduced = seen.of(Op::kAllreduce);
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
    CHECK(Copy(page)->step == calls - 1);
    CHECK(Copy(page)->step_began == at - 1000);
  }
  page.go_on();
  check(10, 10);
  CHECK(lies->step == 9);
  CHECK(lies->step_ns == 1000);
  CHECK(lies->step_communication_ns == 300);
  CHECK(lies->step_waited_ns == 300);
  page.go_on();
  check(10, 10);
  call("", nullptr);
  check(11, 11);
  call("", nullptr);
  check(12, 11);
  at += 5000;
  call("", nullptr);
  check(13, 13);  // after a pause
  CHECK(Copy(page)->step == 9);
  call("", nullptr);
  page.go_on();
  check(14, 14);
  for (uint64_t calls = 15; calls <= 14 + kRecentCalls; ++calls) {
    call("", nullptr);
    check(calls, 14);
  }
  call("", nullptr);  // for which there is no more room
  check(15 + kRecentCalls, 14 + kRecentCalls);
  page.ran({Op::kAllreduce, 4, at, at + 100, at + 5300, ""}, &unnamed);   // belongs into another bucket
  page.ran({Op::kAllreduce, 4, at + 6000, at, at + 5000, ""}, &unnamed);  // of clocks that disagree
  page.ran({Op::kAllreduce, 4, at + 6000, at + 9000, at + 6900, ""}, &unnamed);
  CHECK(in_memory.count == 14 + kRecentCalls);
  CHECK(Copy(page).of(Op::kAllreduce).histogram[0] == 17 + kRecentCalls);
  CHECK(Copy(page).of(Op::kAllreduce).histogram[3] == 1);
  CHECK(Copy(page).of(Op::kAllreduce).queued_ns == 100 * (16 + kRecentCalls) + 900);
  CHECK(Copy(page).of(Op::kAllreduce).running_ns == 200 * (15 + kRecentCalls) + 5200);
  page.ran({Op::kAllreduce, 8, at + 7000, at + 7100, at + 7300, ""}, &larger);  // of another size
  CHECK(in_memory.count == 19 + kRecentCalls);
  page.ran({Op::kAllreduce, 8, at + 7400, at + 7400, at + 7500, ""}, &larger);
  page.ran({Op::kBroadcast, 8, at + 7600, at + 7700, at + 7800, ""}, &broadcasts);
  CHECK(in_memory.count == 20 + kRecentCalls);
  CHECK(Copy(page).of(Op::kBroadcast).bytes == 8);
  CHECK(Copy(page)->last_kind == static_cast<uint32_t>(Op::kBroadcast));
  page.ran({Op::kBroadcast, 8, at + 7900, at + 7900, at + 8000, ""}, &broadcasts);
  CHECK(lies->recent.count == 1);
  page.begin(kIdentity);
  CHECK(lies->sequence % 2 == 0);
  CHECK(Copy(page).of(Op::kBroadcast).count == 0);
  ::munmap(lies, kPageBytes);
  ::close(fd);
}

TEST_CASE("in the middle of a loop other things happen") {
  Page page;
  page.begin(kIdentity);
  uint64_t bucket = 0, loss = 0, at = 10'000;
  const auto loop = [&](int calls) {
    for (; calls > 0; --calls, at += 1000) page.ran({Op::kAllreduce, 4, at, at + 100, at + 300, "loss", &loss}, &loss);
  };
  const auto step = [&] {
    page.began(at);
    page.repeats(&bucket, true, at);
    page.ended({Op::kAllreduce, 100, at, at, at + 500, "bucket", &bucket});
    at += 1000;
  };
  for (int i = 1; i <= 6; ++i) {
    step();
    loop(7);  // begins no step: a bucket does that
    CHECK(Copy(page)->step == static_cast<uint64_t>(i));
    CHECK(Copy(page).of(Op::kAllreduce).count == static_cast<uint64_t>(8 * i));
  }
  CHECK(Copy(page)->step_ns == 8000);
  CHECK(Copy(page)->step_communication_ns == 500 + 7 * 300);
  page.began(at);
  loop(3);  // while another one is under way, so its time counts once
  CHECK(Copy(page)->communication_ns == 6 * (500 + 7 * 300));
  page.ended({Op::kAllreduce, 100, at - 3000, 0, at, "bucket", &bucket});
  CHECK(Copy(page)->communication_ns == 6 * (500 + 7 * 300) + 3000);
  CHECK(Copy(page).of(Op::kAllreduce).count == 52);
}

TEST_CASE("a bucket of an optimizer tells steps, whatever names repeat") {
  Page page;
  page.begin(kIdentity);
  uint64_t loss = 0, first = 0, second = 0;
  for (uint64_t at : {1000, 2000, 3000}) page.repeats(&loss, false, at);
  for (uint64_t step = 1; step <= 4; ++step) {
    page.repeats(&first, true, 10'000 * step);
    page.repeats(&second, true, 10'000 * step + 100);
    page.repeats(&loss, false, 10'000 * step + 200);
    page.repeats(&loss, false, 10'000 * step + 300);
  }
  CHECK(Copy(page)->step == 2 + 4);
  CHECK(Copy(page)->step_ns == 10'000);
  uint64_t other = 0;  // the optimizer has made other buckets
  for (uint64_t step = 5; step <= 8; ++step) page.repeats(&other, true, 10'000 * step);
  CHECK(Copy(page)->step == 2 + 4 + 3);
  CHECK(Copy(page)->step_ns == 10'000);
}

TEST_CASE("a step has its share of communication and of waiting") {
  Page page;
  page.begin(kIdentity);
  uint64_t bucket = 0;
  for (uint64_t at : {100'000, 200'000}) {
    page.began(at);
    page.repeats(&bucket, true, at);
    page.ended({Op::kAllreduce, 4, at, at + 10'000, at + 30'000, "bucket"});
    page.ran({Op::kAllreduce, 4, at + 50'000, at + 54'000, at + 60'000, "loss"}, &kLike);
  }
  page.repeats(&bucket, true, 300'000);
  CHECK(Copy(page)->step_ns == 100'000);
  CHECK(Copy(page)->step_communication_ns == 40'000);
  CHECK(Copy(page)->step_waited_ns == 10'000);
}

TEST_CASE("a thread that waits is split into waiting for peers and for transfer") {
  Page page;
  page.begin(kIdentity);
  using namespace std::chrono_literals;
  {
    Page::Waiting waiting(page, Clock::now());
    CHECK(Copy(page)->waiting == 0);
    waiting.tell();
    waiting.tell();
    CHECK(Copy(page)->waiting == 1);
    std::this_thread::sleep_for(4ms);
    const uint64_t started = page.now();
    std::this_thread::sleep_for(2ms);
    waiting.over(started, started + 1);  // it has told: what it says counts, not when the operation was done
  }
  const Copy seen(page);
  CHECK(seen->waiting == 0);
  CHECK(seen->other_for_peers_ns >= 4'000'000);
  CHECK(seen->other_for_transfer_ns >= 2'000'000);
}

TEST_CASE("ticks and the clock tell the same moments") {
  Page page;
  page.begin(kIdentity);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  page.beat({});
  const uint64_t before = page.at(Clock::now()), ticks = page.now(), after = page.at(Clock::now());
  CHECK(ticks + 20'000 >= before);
  CHECK(ticks <= after + 20'000);
}

TEST_CASE("a shared page is seen through another mapping, and a forked child leaves it alone") {
  const int fd = static_cast<int>(::memfd_create("page", 0));
  REQUIRE(::ftruncate(fd, 3 * kPageBytes) == 0);
  Page page;
  CHECK(!page.share(fd, 3 * kPageBytes, "x").is_ok());
  CHECK(!page.share(fd, 100, "x").is_ok());
  CHECK(!page.share(-1, 0, "x").is_ok());
  REQUIRE(page.share(fd, 2 * kPageBytes, "train.py").is_ok());
  page.begin(kIdentity);
  page.stall("allreduce 'x'", {1, 4});
  page.beat({{4, 7, 900}, {1, 2, 100}});
  auto* seen = static_cast<PageLayout*>(::mmap(nullptr, 3 * kPageBytes, PROT_READ, MAP_SHARED, fd, 0));
  const auto& other = *reinterpret_cast<PageLayout*>(reinterpret_cast<std::byte*>(seen) + 2 * kPageBytes);
  CHECK(std::memcmp(&other, kPageMagic, 8) == 0);
  CHECK(other.stalled == 1);
  CHECK(other.awaited_ranks[1] == 4);
  CHECK(other.late[0].rank == 4);
  CHECK(other.late[0].times == 7);
  CHECK(other.state == 1);
  page.go_on();
  CHECK(other.stalled == 0);
  page.forget();
  page.end();  // its own memory, not the parent's
  CHECK(other.state == 1);
  ::munmap(seen, 3 * kPageBytes);
  ::close(fd);
}

TEST_CASE("a writer that was killed in the middle does not spoil the page of the next life") {
  const int fd = static_cast<int>(::memfd_create("page", 0));
  REQUIRE(::ftruncate(fd, kPageBytes) == 0);
  const uint64_t odd = 77;
  REQUIRE(::pwrite(fd, &odd, sizeof odd, 8) == sizeof odd);
  Page page;
  REQUIRE(page.share(fd, 0, "").is_ok());
  page.begin(kIdentity);
  CHECK(Copy(page)->sequence % 2 == 0);
  CHECK(Copy(page)->sequence > odd);
  ::close(fd);
}

// One writer, as the engine has it, a thread that waits, and readers: each copy is of one moment.
TEST_CASE("readers see whole updates while the page is written") {
  Page page;
  page.begin(kIdentity);
  std::atomic<bool> over{false};
  std::thread writer([&] {
    uint64_t bucket = 0, name = 0;
    for (uint64_t i = 1; !over.load(); ++i) {
      const uint64_t at = i * 10'000;
      page.began(at);
      page.repeats(&bucket, true, at);
      page.ended({Op::kAllreduce, 100, at, at + 1000, at + 3000, i % 2 ? "a name" : "another name"});
      page.ran({Op::kBarrier, 0, at + 5000, at + 5000, at + 6000, ""}, &kLike);
      for (uint64_t from : {at + 6100, at + 6200, at + 6300, at + 6400})
        page.ran({Op::kBroadcast, 8, from, from + 10, from + 40, "a loop", &name}, &name);
      if (i % 64 == 0) page.beat({{1, i, i}});
      if (i % 100 == 0) page.stall("what it waits for", {1, 2});
      if (i % 100 == 50) page.go_on();
      // Else it would write more often than a reader, slowed down by a sanitizer, can copy.
      if (i % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  });
  std::thread waiter([&] {
    while (!over.load()) {
      Page::Waiting waiting(page, Clock::now());
      waiting.tell();
      waiting.over(0, 0);
    }
  });
  uint64_t last = 0;
  const auto read = [&](uint64_t* before) {
    const Copy seen(page);
    const PageOperations& reduced = seen.of(Op::kAllreduce);
    CHECK(reduced.bytes == 100 * reduced.count);
    CHECK(reduced.queued_ns == 1000 * reduced.count);
    CHECK(reduced.running_ns == 2000 * reduced.count);
    CHECK(counted(reduced) == reduced.count);
    CHECK(reduced.count >= *before);
    *before = reduced.count;
    const PageOperations& sent = seen.of(Op::kBroadcast);
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
