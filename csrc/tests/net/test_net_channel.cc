// One behaviour, two channels: every case here runs on TCP (4 KiB socket buffers, so that partial reads and writes
// happen all the time) and on rings in shared memory. Also the inbox on its own.
#include <doctest/doctest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "base/clock.h"
#include "net/inbox.h"
#include "net/shm_channel.h"
#include "net/tcp_channel.h"

using namespace hc;

namespace {

// Two channels that face each other, both moved on by the test.
struct Link {
  virtual ~Link() = default;
  std::unique_ptr<FramedChannel> a, b;
  Traffic traffic_a, traffic_b;
  // The far end disappears as the mesh would notice it.
  virtual void end_b() = 0;

  void step() {
    bool moved = false;
    status_a = a->progress(&moved);
    status_b = b->progress(&moved);
  }
  bool until(const std::function<bool()>& condition, double timeout_s = 10) {
    for (Deadline deadline = Deadline::in(timeout_s); !condition();) {
      if (deadline.passed()) return false;
      step();
    }
    return true;
  }
  Status status_a, status_b;
};

struct TcpLink final : Link {
  TcpLink() {
    int control[2], data[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, control) == 0);
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, data) == 0);
    for (int fd : {control[0], control[1], data[0], data[1]}) {
      int bytes = 4096;
      setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
    }
    a = std::make_unique<TcpChannel>(1, "rank 1 (b)", &traffic_a,
                                     TcpChannel::Sockets{Fd(control[0]), Fd(data[0]), -1, 0});
    b = std::make_unique<TcpChannel>(0, "rank 0 (a)", &traffic_b,
                                     TcpChannel::Sockets{Fd(control[1]), Fd(data[1]), -1, 0});
    raw_control = control[1];
    raw_data = data[1];
  }
  void end_b() override { static_cast<TcpChannel&>(*b).close(); }
  int raw_control, raw_data;  // b's, for bytes that b would never send
};

// Of a frame that no channel would send, as TcpLink's b would sign it.
ControlHeader header_of(uint32_t bytes) {
  ControlHeader header;
  header.bytes = bytes;
  header.guard = FrameSigner(SipKey{}).guard_of(header);
  return header;
}

struct ShmLink final : Link {
  ShmLink() {
    for (auto& arena : arenas) {
      auto made = Arena::create(kMinArenaBytes);
      REQUIRE(made.is_ok());
      arena = made.take();
      REQUIRE(arena->commit(kRingsOffset, 2 * kRingBytes).is_ok());
    }
    a = std::make_unique<ShmChannel>(1, "rank 1 (b)", &traffic_a,
                                     ShmChannel::Ends{arenas[0], arenas[1], 0, 1, &silent});
    b = std::make_unique<ShmChannel>(0, "rank 0 (a)", &traffic_b,
                                     ShmChannel::Ends{arenas[1], arenas[0], 1, 0, &silent});
  }
  void end_b() override { a->lose("closed its connection without a goodbye"); }
  std::shared_ptr<Arena> arenas[2];
  Doorbell silent;
};

std::unique_ptr<Link> make_link(bool shared) {
  if (shared) return std::make_unique<ShmLink>();
  return std::make_unique<TcpLink>();
}

std::vector<uint8_t> frame_of(size_t bytes, unsigned seed) {
  std::vector<uint8_t> frame(bytes);
  for (size_t i = 0; i < bytes; ++i) frame[i] = static_cast<uint8_t>(i * 131 + seed * 17 + (i >> 8));
  return frame;
}

std::vector<std::byte> data_of(size_t bytes, unsigned seed) {
  std::vector<std::byte> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(i * 13 + seed * 7 + (i >> 9));
  return data;
}

Tag tag_of(uint16_t process_set, uint32_t batch, uint64_t offset) { return {3, process_set, batch, offset}; }

}  // namespace

#define FOR_EACH_CHANNEL(link)                \
  bool shared = false;                        \
  SUBCASE("TCP") {}                           \
  SUBCASE("shared memory") { shared = true; } \
  auto link = make_link(shared)

TEST_CASE("channel: control frames of every size keep their order") {
  FOR_EACH_CHANNEL(link);
  std::vector<size_t> sizes = {1,     2,     3,     4,     5,     4095,  4096,    4097, 16383,
                               16384, 16385, 65023, 65024, 65025, 70000, 1 << 20, 1};
  for (size_t i = 0; i < sizes.size(); ++i) REQUIRE(link->a->send(frame_of(sizes[i], i)).is_ok());
  CHECK_FALSE(link->a->flushed());
  std::vector<uint8_t> frame;
  for (size_t i = 0; i < sizes.size(); ++i) {
    REQUIRE(link->until([&] { return link->b->receive(&frame); }));
    REQUIRE(frame == frame_of(sizes[i], i));
  }
  CHECK_FALSE(link->b->receive(&frame));
  CHECK(link->a->flushed());
  CHECK(link->traffic_a.bytes_sent.value() == link->traffic_b.bytes_received.value());
}

TEST_CASE("channel: the largest control frame passes, empty and larger ones are refused at the sender") {
  FOR_EACH_CHANNEL(link);
  CHECK(link->a->send({}).code() == Code::kInternal);
  std::vector<uint8_t> large = frame_of(kMaxControlBytes + 1, 1);
  CHECK(link->a->send(large).code() == Code::kInternal);
  large.pop_back();
  REQUIRE(link->a->send(large).is_ok());
  std::vector<uint8_t> frame;
  REQUIRE(link->until([&] { return link->b->receive(&frame); }));
  CHECK(frame == large);
}

TEST_CASE("channel: thousands of small frames both ways at once") {
  FOR_EACH_CHANNEL(link);
  int got_a = 0, got_b = 0;
  std::vector<uint8_t> frame;
  auto fetch = [&] {
    for (; link->a->receive(&frame); ++got_a) REQUIRE(frame == frame_of(1 + got_a % 70, got_a));
    for (; link->b->receive(&frame); ++got_b) REQUIRE(frame == frame_of(1 + got_b % 90, got_b));
    return got_a == 5000 && got_b == 5000;
  };
  for (int i = 0; i < 5000; ++i) {
    REQUIRE(link->a->send(frame_of(1 + i % 90, i)).is_ok());
    REQUIRE(link->b->send(frame_of(1 + i % 70, i)).is_ok());
    if (i % 50) continue;
    link->step();
    fetch();
  }
  REQUIRE(link->until(fetch));
}

TEST_CASE("channel: many streams interleave, each in its own order, whenever the receives are posted") {
  FOR_EACH_CHANNEL(link);
  std::mt19937 random(11);
  struct One {
    std::vector<std::byte> out, in;
    Transfer send, receive;
  };
  constexpr int kStreams = 12, kEach = 25;
  std::list<One> all;
  std::vector<std::vector<One*>> streams(kStreams);
  for (int s = 0; s < kStreams; ++s) {
    uint64_t offset = 0;
    for (int i = 0; i < kEach; ++i) {
      const size_t bytes = random() % 5 == 0 ? random() % 60000 : random() % 40;  // 0 as well
      One& one = all.emplace_back();
      one.out = data_of(bytes, s * 100 + i);
      one.in.resize(bytes);
      const Tag tag = tag_of(static_cast<uint16_t>(s % 3), static_cast<uint32_t>(s), offset);
      one.send = {tag, one.out.data(), bytes};
      one.receive = {tag, one.in.data(), bytes};
      streams[s].push_back(&one);
      offset += bytes;
    }
  }
  std::vector<size_t> sent(kStreams), posted(kStreams);
  for (int left = 2 * kStreams * kEach; left > 0;) {
    const int s = random() % kStreams;
    auto& next = random() % 2 ? sent[s] : posted[s];
    if (next == streams[s].size()) continue;
    One* one = streams[s][next++];
    if (&next == &sent[s]) {
      link->a->post_send(&one->send);
    } else {
      link->b->post_receive(&one->receive);
    }
    --left;
    if (random() % 4 == 0) link->step();
  }
  REQUIRE(link->until(
      [&] { return std::all_of(all.begin(), all.end(), [](const One& o) { return o.send.done && o.receive.done; }); }));
  for (const One& one : all) {
    REQUIRE(one.in == one.out);
    REQUIRE(one.receive.moved == one.in.size());
  }
  CHECK(link->a->flushed());
  CHECK(link->status_b.is_ok());
}

TEST_CASE("channel: data before its receive is kept; the limit stops data but never control") {
  FOR_EACH_CHANNEL(link);
  std::deque<Transfer> sends;
  std::vector<std::byte> out = data_of(kMaxTransferBytes, 1), in(kMaxTransferBytes);
  const int segments = kMaxUnexpectedBytes / kMaxTransferBytes + 3;
  for (int i = 0; i < segments; ++i) {
    sends.push_back({tag_of(0, 1, i * kMaxTransferBytes), out.data(), out.size()});
    link->a->post_send(&sends.back());
  }
  auto done = [&] { return std::count_if(sends.begin(), sends.end(), [](const Transfer& t) { return t.done; }); };
  CHECK(link->until([&] { return done() >= segments - 3; }));
  for (int i = 0; i < 200; ++i) link->step();
  CHECK(done() == segments - 3);  // the rest is held back at the sender
  REQUIRE(link->a->send(frame_of(10, 1)).is_ok());
  std::vector<uint8_t> frame;
  REQUIRE(link->until([&] { return link->b->receive(&frame); }));
  for (int i = 0; i < segments; ++i) {
    std::memset(in.data(), 0, in.size());
    Transfer receive{tag_of(0, 1, i * kMaxTransferBytes), in.data(), in.size()};
    link->b->post_receive(&receive);
    REQUIRE(link->until([&] { return receive.done; }));
    REQUIRE(std::memcmp(in.data(), out.data(), in.size()) == 0);
  }
  CHECK(done() == segments);
}

TEST_CASE("channel: data that is out of step breaks it with a clear error") {
  FOR_EACH_CHANNEL(link);
  std::vector<std::byte> out = data_of(100, 1), in(100);
  Transfer send{tag_of(0, 9, 0), out.data(), 100}, receive{tag_of(0, 9, 64), in.data(), 100};
  link->b->post_receive(&receive);
  link->a->post_send(&send);
  CHECK(link->until([&] { return !link->status_b.is_ok(); }));
  CHECK(link->status_b.code() == Code::kInternal);
  CHECK(link->status_b.text().find("rank 0 (a): data out of step in batch 9") == 0);
  CHECK_FALSE(receive.done);
}

TEST_CASE("channel: a withdrawn transfer is not touched again; half-way it breaks the channel") {
  FOR_EACH_CHANNEL(link);
  std::vector<std::byte> out = data_of(kMaxTransferBytes, 1), in(kMaxTransferBytes);
  Transfer early{tag_of(0, 1, 0), in.data(), 10};
  link->b->post_receive(&early);
  link->b->forget(&early);
  Transfer small{tag_of(0, 1, 0), out.data(), 10};
  link->a->post_send(&small);
  for (int i = 0; i < 5; ++i) link->step();
  CHECK_FALSE(early.done);
  CHECK(in[1] == std::byte{0});
  Transfer again{tag_of(0, 1, 0), in.data(), 10};  // what came meanwhile is not lost
  link->b->post_receive(&again);
  CHECK(again.done);

  Transfer large{tag_of(0, 2, 0), out.data(), out.size()}, queued{tag_of(0, 3, 0), out.data(), 10};
  link->a->post_send(&large);
  link->a->post_send(&queued);
  link->a->forget(&queued);
  CHECK(link->a->progress(&shared).is_ok());
  link->a->forget(&large);
  bool moved = false;
  CHECK(link->a->progress(&moved).code() == Code::kAborted);
  CHECK(link->a->flushed());

  Transfer receive{tag_of(0, 2, 0), in.data(), in.size()};
  link->b->post_receive(&receive);
  CHECK(link->b->progress(&moved).is_ok());
  CHECK(receive.moved > 0);
  link->b->forget(&receive);
  CHECK(link->b->progress(&moved).code() == Code::kAborted);
}

TEST_CASE("channel: when the peer ends, its frames come first, then an error that names it") {
  FOR_EACH_CHANNEL(link);
  REQUIRE(link->b->send(frame_of(30, 1)).is_ok());
  REQUIRE(link->b->send(frame_of(31, 2)).is_ok());
  link->end_b();
  bool moved = false;
  for (int i = 0; i < 5; ++i) REQUIRE(link->a->progress(&moved).is_ok());
  CHECK((moved || shared));  // there the end was noticed after everything had been read
  std::vector<uint8_t> frame;
  CHECK((link->a->receive(&frame) && frame == frame_of(30, 1)));
  CHECK(link->a->progress(&moved).is_ok());
  CHECK((link->a->receive(&frame) && frame == frame_of(31, 2)));
  Status status = link->a->progress(&moved);
  CHECK(status.code() == Code::kPeerLost);
  CHECK(status.culprit() == 1);
  CHECK(status.text() == "rank 1 (b): closed its connection without a goodbye");
  CHECK_FALSE(link->a->send(frame_of(3, 3)).is_ok());
}

TEST_CASE("tcp channel: a broken data line is held back until the control line has told why") {
  for (const bool tells : {true, false}) {
    CAPTURE(tells);
    auto link = std::make_unique<TcpLink>();
    std::vector<std::byte> out = data_of(100, 1);
    Transfer sends[2] = {{tag_of(0, 1, 0), out.data(), out.size()}, {tag_of(0, 1, 100), out.data(), out.size()}};
    ::shutdown(link->raw_data, SHUT_RDWR);
    for (Transfer& t : sends) link->a->post_send(&t);
    CHECK_FALSE(static_cast<TcpChannel&>(*link->a).failure().is_ok());
    bool moved = false;
    CHECK(link->a->progress(&moved).is_ok());
    CHECK(link->a->send(frame_of(5, 1)).is_ok());
    if (tells) {
      REQUIRE(link->b->send(frame_of(30, 1)).is_ok());
      CHECK(link->a->progress(&moved).is_ok());
      std::vector<uint8_t> frame;
      CHECK((link->a->receive(&frame) && frame == frame_of(30, 1)));
      CHECK(link->a->progress(&moved).is_ok());
      link->end_b();
    }
    int turns = 0;
    for (Deadline deadline = Deadline::in(20); link->a->progress(&moved).is_ok(); ++turns) {
      REQUIRE_FALSE(deadline.passed());
      usleep(1000);
    }
    CHECK(link->a->progress(&moved).code() == Code::kPeerLost);
    CHECK((!tells || turns < 10));  // who was told holds nothing back
  }
}

TEST_CASE("channel: after a goodbye an end is silent, unless something is still posted") {
  FOR_EACH_CHANNEL(link);
  link->a->expect_close();
  link->end_b();
  bool moved = false;
  for (int i = 0; i < 3; ++i) CHECK(link->a->progress(&moved).is_ok());
  std::byte byte{1};
  Transfer send{tag_of(0, 1, 0), &byte, 1};
  link->a->post_send(&send);
  CHECK(link->a->progress(&moved).code() == Code::kPeerLost);
  link = make_link(shared);
  Transfer receive{tag_of(0, 1, 0), &byte, 1};
  link->a->post_receive(&receive);
  link->a->expect_close();
  link->end_b();
  Status status;
  for (int i = 0; i < 5; ++i) status = link->a->progress(&moved);
  CHECK(status.code() == Code::kPeerLost);
}

TEST_CASE("tcp channel: the last data is taken in, though the end of the control line comes first") {
  std::vector<std::byte> out = data_of(700, 5), in(700);
  Transfer send{tag_of(0, 1, 0), out.data(), out.size()}, receive{tag_of(0, 1, 0), in.data(), in.size()};
  auto link = std::make_unique<TcpLink>();
  bool moved = false;
  link->a->post_receive(&receive);
  SUBCASE("both ended") {
    for (const bool goodbye : {false, true}) {
      CAPTURE(goodbye);
      link = std::make_unique<TcpLink>();
      link->a->post_receive(&receive);
      link->b->post_send(&send);
      REQUIRE(send.done);
      link->end_b();
      if (goodbye) link->a->expect_close();
      Status status;
      for (int i = 0; i < 5; ++i) status = link->a->progress(&moved);
      CHECK(status.code() == (goodbye ? Code::kOk : Code::kPeerLost));
      CHECK(receive.done);
      CHECK(in == out);
    }
  }
  SUBCASE("data follows later, then nothing does") {
    ::shutdown(link->raw_control, SHUT_WR);
    for (int i = 0; i < 3; ++i) CHECK(link->a->progress(&moved).is_ok());
    CHECK(static_cast<TcpChannel&>(*link->a).closing());
    link->b->post_send(&send);
    CHECK(link->a->progress(&moved).is_ok());
    CHECK(receive.done);
    for (Deadline deadline = Deadline::in(20); link->a->progress(&moved).is_ok();) {
      REQUIRE_FALSE(deadline.passed());
      usleep(1000);
    }
    CHECK(link->a->progress(&moved).code() == Code::kPeerLost);
  }
}

TEST_CASE("channel: two threads, one for each end, both directions at once") {
  FOR_EACH_CHANNEL(link);
  auto make_progress = [&](FramedChannel& channel, unsigned own, unsigned other) {
    std::vector<std::byte> out = data_of(700000, own), in(700000);
    std::deque<Transfer> sends, receives;
    for (uint32_t batch = 0; batch < 6; ++batch) {
      sends.push_back({tag_of(0, batch, 0), out.data(), out.size()});
      channel.post_send(&sends.back());
    }
    int frames = 0;
    std::vector<uint8_t> frame;
    bool good = true;
    for (Deadline deadline = Deadline::in(30); !deadline.passed();) {
      bool moved = false;
      good &= channel.progress(&moved).is_ok();
      if (receives.size() < 6 && (receives.empty() || receives.back().done)) {
        if (!receives.empty()) good &= in == data_of(700000, other);
        receives.push_back({tag_of(0, static_cast<uint32_t>(receives.size()), 0), in.data(), in.size()});
        channel.post_receive(&receives.back());
        good &= channel.send(frame_of(100, own)).is_ok();
      }
      while (channel.receive(&frame)) good &= frame == frame_of(100, other), ++frames;
      if (!good) return false;
      if (frames == 6 && receives.size() == 6 && receives.back().done && channel.flushed()) return true;
      if (!moved) std::this_thread::yield();
    }
    return false;
  };
  bool good_a = false, good_b = false;
  std::thread thread([&] { good_a = make_progress(*link->a, 1, 2); });
  good_b = make_progress(*link->b, 2, 1);
  thread.join();
  CHECK(good_a);
  CHECK(good_b);
}

TEST_CASE("channel: lengths that cannot be are refused before anything is allocated") {
  auto link = std::make_unique<TcpLink>();
  SUBCASE("control") {
    const ControlHeader header = header_of(0xffffffffu);
    REQUIRE(::write(link->raw_control, &header, sizeof(header)) == sizeof(header));
    bool moved = false;
    Status status = link->a->progress(&moved);
    CHECK(status.text().find("sent a control frame of 4294967295 bytes") != std::string::npos);
    CHECK(status.culprit() == 1);
  }
  SUBCASE("control, nothing") {
    const ControlHeader header = header_of(0);
    REQUIRE(::write(link->raw_control, &header, sizeof(header)) == sizeof(header));
    bool moved = false;
    CHECK_FALSE(link->a->progress(&moved).is_ok());
  }
  SUBCASE("data") {
    SegmentHeader header(tag_of(0, 1, 0), 0xffffffffu);
    REQUIRE(::write(link->raw_data, &header, sizeof(header)) == sizeof(header));
    bool moved = false;
    CHECK(link->a->progress(&moved).text().find("damaged data header") != std::string::npos);
  }
  SUBCASE("data without its guard") {
    SegmentHeader header(tag_of(0, 1, 0), 4);
    header.guard ^= 1;
    REQUIRE(::write(link->raw_data, &header, sizeof(header)) == sizeof(header));
    bool moved = false;
    CHECK(link->a->progress(&moved).code() == Code::kInternal);
  }
}

namespace {

// What a channel writes, and one that reads what the test writes instead.
struct HalfLink {
  explicit HalfLink(const FrameKeys& keys = {}) {
    int control[2], data[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, control) == 0);
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, data) == 0);
    channel = std::make_unique<TcpChannel>(1, "rank 1 (b)", &traffic,
                                           TcpChannel::Sockets{Fd(control[0]), Fd(data[0]), -1, 0, keys});
    far[0] = Fd(control[1]);
    far[1] = Fd(data[1]);
  }
  Traffic traffic;
  std::unique_ptr<TcpChannel> channel;
  Fd far[2];
};

// Two connections that the peer has opened, and what it writes over them.
struct Offers final : Remaker {
  Offers(HalfLink* link, uint64_t starts_at) {
    std::vector<Fd> far;
    for (int i = 0; i < 2; ++i) {
      int ends[2];
      REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
      offered.emplace_back(ends[0]);
      far.emplace_back(ends[1]);
    }
    out = std::make_unique<ParallelStream>(std::move(far), &link->traffic, starts_at);
    link->channel->remake_with(this);
  }
  void lost(int, Line, const IoResult&) override { ++losses; }
  void watch() override {}
  std::vector<Fd> take_offered(int) override { return std::move(offered); }
  std::vector<Fd> offered;
  std::unique_ptr<ParallelStream> out;
  int losses = 0;
};

}  // namespace

TEST_CASE("channel: a line that is stopped while the peer changes over to several connections has what they brought") {
  HalfLink link;
  Offers offers(&link, 100);
  link.channel->stop(Line::kData);
  std::vector<std::byte> bytes(300);
  REQUIRE(::send(link.far[1].get(), bytes.data(), 100, 0) == 100);
  ::shutdown(link.far[1].get(), SHUT_WR);
  const iovec part{bytes.data(), bytes.size()};
  REQUIRE(offers.out->write({&part, 1}).bytes == bytes.size());
  CHECK(link.channel->drain(Line::kData) == 400);
}

TEST_CASE("channel: several connections that begin elsewhere than the first one seems to end are not read") {
  HalfLink link;
  Offers offers(&link, 100);
  ::shutdown(link.far[1].get(), SHUT_WR);
  std::vector<std::byte> bytes(300);
  const iovec part{bytes.data(), bytes.size()};
  REQUIRE(offers.out->write({&part, 1}).bytes == bytes.size());
  bool moved = false;
  REQUIRE(link.channel->progress(&moved).is_ok());
  CHECK(offers.losses == 1);
  CHECK(link.channel->drain(Line::kData) == 0);
}

TEST_CASE("channel: what is written and not acknowledged is done when the peer says goodbye, or is lost") {
  struct Nobody final : Remaker {
    void lost(int, Line, const IoResult&) override {}
    void watch() override {}
    std::vector<Fd> take_offered(int) override { return {}; }
  } nobody;
  for (const bool says_goodbye : {true, false}) {
    HalfLink link;
    link.channel->remake_with(&nobody);
    std::vector<std::byte> memory(100'000);
    Transfer transfer{tag_of(0, 1, 0), memory.data(), memory.size()};
    link.channel->post_send(&transfer);
    bool moved = false;
    REQUIRE(link.channel->progress(&moved).is_ok());
    REQUIRE(transfer.moved == memory.size());
    REQUIRE_FALSE(transfer.done);  // nobody has read it yet
    if (says_goodbye)
      link.channel->expect_close();
    else
      link.channel->lose("has ended");
    CHECK(transfer.done);
  }
}

TEST_CASE("channel: who is in the stream cannot speak for a peer") {
  const auto signed_by = [](const FrameKeys& keys, int number, const std::vector<uint8_t>& frame) {
    FrameSigner signer(keys.out);
    for (int i = 0; i < number; ++i) signer.sign(frame);
    const ControlHeader header = signer.sign(frame);
    std::string text(reinterpret_cast<const char*>(&header), sizeof header);
    return text.append(frame.begin(), frame.end());
  };
  const FrameKeys ours = frame_keys("a secret of the job", "here", "there");
  const FrameKeys theirs{ours.in, ours.out}, strangers = frame_keys("another secret", "there", "here");
  const std::vector<uint8_t> one = frame_of(60, 1), two = frame_of(60, 2);
  const std::string first = signed_by(theirs, 0, one), second = signed_by(theirs, 1, two);
  const std::pair<std::string, size_t> cases[] = {
      {first + second, 2},                // as they were sent
      {first + first, 1},                 // again
      {second, 0},                        // one left out
      {second + first, 0},                // in another order
      {signed_by(strangers, 0, one), 0},  // of somebody without the secret
      {signed_by(ours, 0, one), 0},       // sent back
      {first.substr(0, 16) + second.substr(16), 0},
  };
  for (const auto& [bytes, accepted] : cases) {
    HalfLink to(ours);
    REQUIRE(::write(to.far[0].get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    bool moved = false;
    (void)to.channel->progress(&moved);
    size_t got = 0;
    for (std::vector<uint8_t> frame; to.channel->receive(&frame); ++got) CHECK(frame == (got == 0 ? one : two));
    CHECK(got == accepted);
    CHECK(to.channel->failure().is_ok() == (accepted == 2));
  }
}

TEST_CASE("channel: one bit that changes on its way is found before anybody reads what it belongs to") {
  const std::vector<uint8_t> frames[] = {frame_of(60, 1), frame_of(1, 2), frame_of(20'000, 3)};
  std::vector<std::vector<std::byte>> segments;
  for (const size_t bytes : {4, 0, 777, 30'000}) {
    auto& one = segments.emplace_back(bytes);
    for (size_t i = 0; i < bytes; ++i) one[i] = static_cast<std::byte>(i * 7 + bytes);
  }
  const auto transfers_of = [&](std::vector<std::vector<std::byte>>& memory) {
    std::vector<Transfer> all;
    for (size_t i = 0; i < memory.size(); ++i)
      all.push_back({tag_of(0, static_cast<uint32_t>(i), 0), memory[i].data(), memory[i].size()});
    return all;
  };

  std::string written[2];
  {
    HalfLink from;
    for (const auto& frame : frames) REQUIRE(from.channel->send(frame).is_ok());
    auto sends = transfers_of(segments);
    for (Transfer& one : sends) from.channel->post_send(&one);
    for (int turn = 0; turn < 100; ++turn) {
      bool moved = false;
      REQUIRE(from.channel->progress(&moved).is_ok());
      for (int line : {0, 1}) {
        char piece[65536];
        for (ssize_t n; (n = ::read(from.far[line].get(), piece, sizeof(piece))) > 0;) written[line].append(piece, n);
      }
    }
    REQUIRE(sends.back().done);
  }

  std::mt19937 random(11);
  for (int trial = 0; trial < 300; ++trial) {
    std::string coming[2] = {written[0], written[1]};
    const int line = trial % 2;
    if (trial >= 2) {  // the first ones of a stream are its headers
      const size_t at = random() % (trial % 3 == 0 ? 100 : coming[line].size());
      coming[line][at] = static_cast<char>(coming[line][at] ^ 1 << random() % 8);
    }
    HalfLink to;
    auto memory = segments;
    for (auto& one : memory) std::fill(one.begin(), one.end(), std::byte{});
    auto receives = transfers_of(memory);
    for (Transfer& one : receives) to.channel->post_receive(&one);
    size_t gone[2] = {0, 0}, got = 0;
    bool failed = false;
    const auto take = [&] {
      for (std::vector<uint8_t> frame; to.channel->receive(&frame); ++got) REQUIRE(frame == frames[got]);
    };
    for (int quiet = 0; quiet < 3 && !failed;) {
      bool moved = false;
      for (int at : {0, 1}) {
        const size_t piece = std::min<size_t>(coming[at].size() - gone[at], 5000);
        const ssize_t n = piece == 0 ? 0 : ::write(to.far[at].get(), coming[at].data() + gone[at], piece);
        if (n > 0) gone[at] += static_cast<size_t>(n), moved = true;
      }
      failed = !to.channel->progress(&moved).is_ok();
      take();
      quiet = moved ? 0 : quiet + 1;
    }
    take();
    for (size_t i = 0; i < receives.size(); ++i) REQUIRE((!receives[i].done || memory[i] == segments[i]));
    REQUIRE(failed == (trial >= 2));
    if (trial < 2) REQUIRE((got == 3 && receives.back().done));
  }
}

TEST_CASE("channel: a frame cut off by the end is named as such") {
  auto link = std::make_unique<TcpLink>();
  const ControlHeader header = header_of(100);
  REQUIRE(::write(link->raw_control, &header, sizeof(header)) == sizeof(header));
  REQUIRE(::write(link->raw_control, "abc", 3) == 3);
  link->end_b();
  bool moved = false;
  CHECK(link->a->progress(&moved).is_ok());  // a part of a frame is no reason to complain yet
  CHECK(link->a->progress(&moved).text() == "rank 1 (b): closed its connection in the middle of a frame");
}

TEST_CASE("shm channel: a ring whose cursor lies is an error, not a crash") {
  auto link = std::make_unique<ShmLink>();
  auto* header = reinterpret_cast<RingHeader*>(ring_pair(*link->arenas[1], 0));
  header->head[0].store(uint64_t{1} << 40);
  bool moved = false;
  CHECK(link->a->progress(&moved).code() == Code::kPeerLost);
}

TEST_CASE("inbox: one read may bring the end of a segment and the next header") {
  Inbox inbox(false);
  std::vector<std::byte> in(8);
  Transfer first{tag_of(0, 1, 0), in.data(), 4}, second{tag_of(0, 1, 4), in.data() + 4, 4};
  REQUIRE(inbox.post(&first).is_ok());
  REQUIRE(inbox.post(&second).is_ok());
  auto feed = [&](const void* from, size_t bytes) {
    const auto* at = static_cast<const std::byte*>(from);
    size_t left = bytes;
    for (const iovec& place : inbox.places()) {
      size_t piece = std::min(left, place.iov_len);
      std::memcpy(place.iov_base, at, piece);
      at += piece, left -= piece;
    }
    REQUIRE(left == 0);
    REQUIRE(inbox.took(bytes).is_ok());
  };
  SegmentHeader header(tag_of(0, 1, 0), 4), next(tag_of(0, 1, 4), 4);
  feed(&header, 10);
  feed(reinterpret_cast<std::byte*>(&header) + 10, sizeof(header) - 10);
  CHECK(inbox.waiting());
  feed("ab", 2);
  CHECK(first.moved == 2);
  std::byte tail[2 + sizeof(next)];
  std::memcpy(tail, "cd", 2);
  std::memcpy(tail + 2, &next, sizeof(next));
  feed(tail, sizeof(tail));
  CHECK(first.done);
  CHECK_FALSE(inbox.forget(&second));  // it is being filled
  feed("efgh", 4);
  CHECK(second.done);
  CHECK(std::memcmp(in.data(), "abcdefgh", 8) == 0);
  CHECK(inbox.between_segments());
  CHECK(inbox.segments() == 2);
}

TEST_CASE("inbox: a receive posted while its segment is arriving takes over what is there") {
  Inbox inbox(false, 100);
  SegmentHeader header(tag_of(0, 1, 0), 90);
  std::memcpy(inbox.places()[0].iov_base, &header, sizeof(header));
  REQUIRE(inbox.took(sizeof(header)).is_ok());
  std::memset(inbox.places()[0].iov_base, 5, 40);
  REQUIRE(inbox.took(40).is_ok());
  CHECK(inbox.kept_bytes() == 90);
  std::vector<std::byte> in(90);
  Transfer receive{tag_of(0, 1, 0), in.data(), 90};
  REQUIRE(inbox.post(&receive).is_ok());
  CHECK(receive.moved == 40);
  CHECK(inbox.kept_bytes() == 0);
  std::memset(inbox.places()[0].iov_base, 5, 50);
  REQUIRE(inbox.took(50).is_ok());
  CHECK(receive.done);
  CHECK(in == std::vector<std::byte>(90, std::byte{5}));
}
