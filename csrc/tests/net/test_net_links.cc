// Connections between living ranks that break and are made again. What resets and cut cables do is in
// tests/core/test_links.py, with a kernel between the ranks.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <random>

#include "net/endpoint.h"
#include "tests/net/net_world.h"

using namespace hc;
using namespace hc::net_tests;

namespace {

// Of this process: connected ones of the ranks, both ends.
std::vector<int> tcp_ends() {
  std::vector<int> all;
  for (int fd = 0; fd < 1024; ++fd) {
    sockaddr_storage peer{};
    socklen_t bytes = sizeof(peer);
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &bytes) == 0 &&
        (peer.ss_family == AF_INET || peer.ss_family == AF_INET6))
      all.push_back(fd);
  }
  return all;
}

// Two ranks that talk TCP, both moved on by the test's own thread.
struct LinkedPair {
  explicit LinkedPair(int streams = 1) : world(std::vector(2, options_with(streams))) {
    world.must_connect();
    for (auto& mesh : world.meshes) mesh->set_asleep(Sleep::kAwake);
  }
  void step() {
    bool moved = false;
    for (auto& mesh : world.meshes) REQUIRE(mesh->poll(0, &moved, &losses).is_ok());
    if (moved) return;
    for (auto& mesh : world.meshes) static_cast<void>(mesh->silent_look_us());
    usleep(200);
  }
  static MeshOptions options_with(int streams) {
    MeshOptions options = small_options(false);
    options.tcp_streams = streams;
    return options;
  }
  MeshWorld world;
  std::vector<Loss> losses;
};

std::vector<uint8_t> link_frame(size_t bytes, unsigned seed) {
  std::vector<uint8_t> frame(bytes);
  for (size_t i = 0; i < bytes; ++i) frame[i] = static_cast<uint8_t>(i * 131 + seed * 17 + (i >> 8));
  return frame;
}

int64_t times_remade(const Mesh& mesh) {
  const std::string all = mesh.counters_json();
  const std::string name = "\"connections_remade\": ";
  return std::stoll(all.substr(all.find(name) + name.size()));
}

// What one rank sends the other, and has received of what that one sends.
struct Travelling {
  struct One {
    std::vector<std::byte> bytes;
    Transfer transfer;
  };
  static size_t size_of(unsigned n) { return n % 7 == 0 ? (n * 48271u) % 900'000 : (n * 16807u) % 3'000; }
  static std::byte byte_of(unsigned n, size_t at) { return static_cast<std::byte>(n * 7 + at * 13 + (at >> 9)); }

  Travelling(Mesh& its_mesh, int peer) : mesh(its_mesh), channel(its_mesh.channel(peer)) {}
  void post(unsigned n) {
    for (const bool sends : {true, false}) {
      One& one = (sends ? out : in).emplace_back();
      one.bytes.resize(size_of(n));
      for (size_t i = 0; sends && i < one.bytes.size(); ++i) one.bytes[i] = byte_of(n, i);
      one.transfer = {{7, 0, n, 0}, one.bytes.data(), one.bytes.size()};
      sends ? channel.post_send(&one.transfer) : channel.post_receive(&one.transfer);
    }
    REQUIRE(channel.send(link_frame(1 + n * 977 % 5000, n)).is_ok());
    ++posted;
  }
  // The memory of what is sent is the sender's again, who writes something else there.
  void take() {
    std::vector<uint8_t> frame;
    for (; channel.receive(&frame); ++frames) REQUIRE(frame == link_frame(1 + frames * 977 % 5000, frames));
    while (!out.empty() && out.front().transfer.done) {
      std::fill(out.front().bytes.begin(), out.front().bytes.end(), std::byte{0xee});
      out.pop_front();
    }
    for (; !in.empty() && in.front().transfer.done; in.pop_front(), ++taken) {
      bool same = true;
      for (size_t i = 0; i < in.front().bytes.size(); ++i) same &= in.front().bytes[i] == byte_of(taken, i);
      REQUIRE(same);
    }
  }
  bool is_done() const { return out.empty() && taken == posted && frames == posted; }

  Mesh& mesh;
  Channel& channel;
  std::deque<One> out, in;
  unsigned posted = 0, taken = 0, frames = 0;
};

}  // namespace

TEST_CASE("links: connections that end in the middle of everything are made again, and no byte is lost or doubled") {
  int streams = 0;
  SUBCASE("one for data") { streams = 1; }
  SUBCASE("several for data") { streams = 5; }
  LinkedPair pair(streams);
  Travelling a(*pair.world.meshes[0], 1), b(*pair.world.meshes[1], 0);
  std::mt19937 random(5);
  const Deadline deadline = Deadline::in(60);
  for (unsigned n = 0; n < 150 || !a.is_done() || !b.is_done();) {
    REQUIRE_FALSE(deadline.passed());
    if (n < 150 && a.out.size() < 20 && b.out.size() < 20) {
      a.post(n);
      b.post(n++);
    }
    pair.step();
    a.take();
    b.take();
    if (random() % 40 != 0) continue;
    const std::vector<int> all = tcp_ends();
    if (!all.empty()) ::shutdown(all[random() % all.size()], SHUT_RDWR);
  }
  CHECK(pair.losses.empty());
  CHECK(times_remade(a.mesh) > 0);
  CHECK(times_remade(b.mesh) > 0);
}

TEST_CASE("links: several connections for data take the place of the first one, which is no loss") {
  LinkedPair pair(4);
  const size_t before = tcp_ends().size();
  Travelling a(*pair.world.meshes[0], 1), b(*pair.world.meshes[1], 0);
  for (unsigned n = 0; n < 30; ++n) {
    a.post(n);
    b.post(n);
  }
  for (Deadline deadline = Deadline::in(60); !a.is_done() || !b.is_done() || tcp_ends().size() < before + 6;) {
    REQUIRE_FALSE(deadline.passed());
    pair.step();
    a.take();
    b.take();
  }
  CHECK(pair.losses.empty());
  CHECK(times_remade(a.mesh) + times_remade(b.mesh) == 0);
}

TEST_CASE("links: of several connections only those of the peer's newest attempt are taken, each once") {
  LinkedPair pair;
  const Credentials credentials{"sixteen bytes or more", "net tests"};
  auto endpoint = Endpoint::decode(pair.world.endpoints[0]);
  REQUIRE(endpoint.is_ok());
  std::vector<Fd> kept;
  const auto is_welcome = [&](int from, uint8_t number, uint8_t count, uint8_t attempt) {
    auto fd = start_connect(endpoint.value().addresses.front(), {});
    REQUIRE(fd.is_ok());
    kept.push_back(fd.take());
    Handshake one = Handshake::connect(&credentials, {from, 0, 7, Purpose::kParallel, number, count, attempt});
    for (const Deadline deadline = Deadline::in(10);;) {
      REQUIRE_FALSE(deadline.passed());
      const Handshake::State state = one.step(kept.back().get());
      if (one.ready_to_prove()) one.allow_proof();
      if (state != Handshake::State::kPending) return state == Handshake::State::kDone;
      pair.step();
    }
  };
  CHECK(is_welcome(1, 0, 3, 1));
  CHECK_FALSE(is_welcome(1, 0, 3, 1));  // that one is there
  CHECK_FALSE(is_welcome(1, 1, 2, 1));  // of another number of them
  CHECK_FALSE(is_welcome(1, 3, 3, 1));
  CHECK_FALSE(is_welcome(0, 1, 3, 1));
  CHECK(is_welcome(1, 1, 3, 1));
  CHECK(is_welcome(1, 0, 3, 2));
  CHECK_FALSE(is_welcome(1, 0, 3, 255));
  CHECK_FALSE(is_welcome(1, 2, 3, 1));
  CHECK(pair.losses.empty());
}

TEST_CASE("links: a connection that ends while several are opened is made again, and no byte is lost or doubled") {
  std::mt19937 random(3);
  for (int steps = 0; steps < 60; ++steps) {
    CAPTURE(steps);
    LinkedPair pair(4);
    Travelling a(*pair.world.meshes[0], 1), b(*pair.world.meshes[1], 0);
    for (unsigned n = 0; n < 16; ++n) {
      a.post(n);
      b.post(n);
    }
    for (int i = 0; i < steps / 2; ++i) pair.step();
    for (unsigned i = random() % 3; i < 3; ++i)
      if (const std::vector<int> all = tcp_ends(); !all.empty())
        ::shutdown(all[random() % all.size()], random() % 2 ? SHUT_RDWR : SHUT_WR);
    for (const Deadline deadline = Deadline::in(20); !a.is_done() || !b.is_done();) {
      REQUIRE_FALSE(deadline.passed());
      pair.step();
      a.take();
      b.take();
    }
    CHECK(pair.losses.empty());
  }
}

TEST_CASE("links: a rank that leaves while several connections are opened has sent all that it sent") {
  for (const int leaves : {0, 1}) {
    for (int steps = 0; steps < 24; ++steps) {
      CAPTURE(leaves);
      CAPTURE(steps);
      LinkedPair pair(4);
      Mesh &leaver = *pair.world.meshes[leaves], &stays = *pair.world.meshes[1 - leaves];
      Channel &out = leaver.channel(1 - leaves), &in = stays.channel(leaves);
      for (int i = 0; i < steps; ++i) pair.step();
      std::vector<std::byte> sent(60'000, std::byte{0x5a}), received(sent.size());
      Transfer send{{7, 0, 1, 0}, sent.data(), sent.size()}, receive{{7, 0, 1, 0}, received.data(), received.size()};
      in.post_receive(&receive);
      out.post_send(&send);
      REQUIRE(out.send(link_frame(100, 1)).is_ok());
      std::vector<uint8_t> frame;
      bool has_left = false, has_heard = false;
      for (const Deadline deadline = Deadline::in(20); !receive.done || !has_heard;) {
        REQUIRE_FALSE(deadline.passed());
        REQUIRE(pair.losses.empty());
        bool moved = false;
        if (!has_left && out.flushed()) {
          leaver.close();
          has_left = true;
        }
        if (!has_left) REQUIRE(leaver.poll(0, &moved, &pair.losses).is_ok());
        REQUIRE(stays.poll(0, &moved, &pair.losses).is_ok());
        if (!has_heard && in.receive(&frame)) {
          stays.expect_close(leaves);
          has_heard = true;
        }
      }
      CHECK(received == sent);
    }
  }
}

TEST_CASE("links: one of several connections may end when nobody has more to write to it") {
  LinkedPair pair(4);
  Travelling a(*pair.world.meshes[0], 1), b(*pair.world.meshes[1], 0);
  std::mt19937 random(9);
  for (unsigned n = 0; n < 60; ++n) {
    a.post(n);
    b.post(n);
    for (unsigned steps = random() % 40; steps > 0; --steps) pair.step();
    if (const std::vector<int> all = tcp_ends(); !all.empty())
      ::shutdown(all[random() % all.size()], random() % 2 ? SHUT_RDWR : SHUT_WR);
    for (const Deadline deadline = Deadline::in(20); !a.is_done() || !b.is_done();) {
      REQUIRE_FALSE(deadline.passed());
      pair.step();
      a.take();
      b.take();
    }
  }
  CHECK(pair.losses.empty());
}

TEST_CASE("links: where no other connection can be made, the first one goes on") {
  LinkedPair pair(4);
  for (int fd = 0; fd < 1024; ++fd) {
    int listens = 0;
    socklen_t bytes = sizeof(listens);
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) == 0 && listens) ::shutdown(fd, SHUT_RDWR);
  }
  const size_t before = tcp_ends().size();
  Travelling a(*pair.world.meshes[0], 1), b(*pair.world.meshes[1], 0);
  for (unsigned n = 0; n < 30; ++n) {
    a.post(n);
    b.post(n);
  }
  for (Deadline deadline = Deadline::in(60); !a.is_done() || !b.is_done();) {
    REQUIRE_FALSE(deadline.passed());
    pair.step();
    a.take();
    b.take();
  }
  CHECK(pair.losses.empty());
  CHECK(tcp_ends().size() == before);
  CHECK(times_remade(a.mesh) + times_remade(b.mesh) == 0);
}

TEST_CASE("links: both lines of an idle pair end at once, and whoever speaks first is heard") {
  LinkedPair pair;
  for (int turn = 0; turn < 6; ++turn) {
    for (int fd : tcp_ends()) ::shutdown(fd, SHUT_RDWR);
    Mesh &speaks = *pair.world.meshes[turn % 2], &hears = *pair.world.meshes[1 - turn % 2];
    REQUIRE(speaks.channel(1 - turn % 2).send(link_frame(100, turn)).is_ok());
    std::vector<uint8_t> frame;
    for (Deadline deadline = Deadline::in(20); !hears.channel(turn % 2).receive(&frame);) {
      REQUIRE_FALSE(deadline.passed());
      pair.step();
    }
    CHECK(frame == link_frame(100, turn));
  }
  CHECK(pair.losses.empty());
}

TEST_CASE("links: strangers at the listeners of a running job are bounded and change nothing") {
  LinkedPair pair;
  auto endpoint = Endpoint::decode(pair.world.endpoints[0]);
  REQUIRE(endpoint.is_ok());
  std::vector<Fd> strangers;
  for (int i = 0; i < 200; ++i) {
    auto fd = start_connect(endpoint.value().addresses.front(), {});
    REQUIRE(fd.is_ok());
    if (i % 2) {
      const iovec garbage{const_cast<char*>("GET / HTTP/1.1\r\n\r\n"), 18};
      static_cast<void>(send_parts(fd.value().get(), {&garbage, 1}));
    }
    strangers.push_back(fd.take());
    pair.step();
  }
  for (int i = 0; i < 200; ++i) pair.step();
  const size_t alive = static_cast<size_t>(std::count_if(strangers.begin(), strangers.end(), [](const Fd& fd) {
    std::byte waste;
    const iovec part{&waste, 1};
    return receive_parts(fd.get(), {&part, 1}).what == Io::kWouldBlock;
  }));
  CHECK(alive <= 64);
  REQUIRE(pair.world.meshes[0]->channel(1).send(link_frame(50, 1)).is_ok());
  std::vector<uint8_t> frame;
  for (Deadline deadline = Deadline::in(20); !pair.world.meshes[1]->channel(0).receive(&frame);) {
    REQUIRE_FALSE(deadline.passed());
    pair.step();
  }
  CHECK(frame == link_frame(50, 1));
  CHECK(pair.losses.empty());
}
