// The mesh with ranks as threads, in both modes: topology, frames, data, sleeping and waking, goodbyes and losses.
#include <poll.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>

#include "tests/net/net_world.h"

using namespace hc;
using namespace hc::net_tests;

namespace {

std::vector<uint8_t> frame_of(int from, int to, size_t bytes) {
  std::vector<uint8_t> frame(bytes);
  for (size_t i = 0; i < bytes; ++i) frame[i] = static_cast<uint8_t>(i * 7 + from * 31 + to);
  return frame;
}

// Every rank sends frames and segments to every other and checks what it gets.
void exchange(Mesh& mesh, int rank) {
  const size_t frame_sizes[] = {1, 100, 5000, 200000, 17};
  constexpr size_t kSegment = 300000;
  struct Pair {
    std::vector<std::byte> out, in;
    Transfer send, receive;
  };
  std::vector<Pair> pairs(mesh.size());
  for (int peer = 0; peer < mesh.size(); ++peer) {
    if (peer == rank) continue;
    for (size_t bytes : frame_sizes) REQUIRE(mesh.channel(peer).send(frame_of(rank, peer, bytes)).is_ok());
    Pair& p = pairs[peer];
    p.out.assign(kSegment, static_cast<std::byte>(rank * 16 + peer));
    p.in.resize(kSegment);
    p.send = {{7, 0, 1, 0}, p.out.data(), kSegment};
    p.receive = {{7, 0, 1, 0}, p.in.data(), kSegment};
    mesh.channel(peer).post_send(&p.send);
    mesh.channel(peer).post_receive(&p.receive);
  }
  std::vector<Loss> losses;
  for (int peer = 0; peer < mesh.size(); ++peer) {
    if (peer == rank) continue;
    for (size_t bytes : frame_sizes) REQUIRE(next_frame(mesh, peer, &losses) == frame_of(peer, rank, bytes));
  }
  for (int peer = 0; peer < mesh.size(); ++peer) {
    if (peer == rank) continue;
    Pair& p = pairs[peer];
    bool moved = false;
    for (Deadline deadline = Deadline::in(20); !(p.send.done && p.receive.done && mesh.channel(peer).flushed());) {
      REQUIRE_FALSE(deadline.passed());
      REQUIRE(mesh.poll(100, &moved, &losses).is_ok());
    }
    REQUIRE(p.in == std::vector<std::byte>(kSegment, static_cast<std::byte>(peer * 16 + rank)));
    REQUIRE(mesh.bytes_from(peer) > kSegment + 200000);
  }
  REQUIRE(losses.empty());
}

}  // namespace

TEST_CASE("ranks that look only at rings with news exchange frames and data") {
  std::vector<MeshOptions> options(5, small_options(true));
  for (MeshOptions& one : options) one.few_local_ranks = 0;
  options[3].node = "another";
  MeshWorld world(options);
  world.must_connect();
  world.each(exchange);
  MeshWorld many(12, true);  // more than few_local_ranks is by default
  many.must_connect();
  many.each(exchange);
}

TEST_CASE("a ring whose data nobody wanted at first is looked at again when somebody does, without news") {
  std::vector<MeshOptions> options(2, small_options(true));
  for (MeshOptions& one : options) one.few_local_ranks = 0;
  MeshWorld world(options);
  world.must_connect();
  Mesh &from = *world.meshes[0], &to = *world.meshes[1];
  constexpr size_t kBytes = kMaxTransferBytes, kSegments = kMaxUnexpectedBytes / kBytes + 1;  // the last has no room
  std::vector<std::byte> out(kBytes, std::byte{3}), in(kBytes);
  std::vector<Transfer> sends(kSegments), receives(kSegments);
  for (size_t i = 0; i < kSegments; ++i) {
    sends[i] = {{7, 0, static_cast<uint32_t>(i), 0}, out.data(), kBytes};
    from.channel(1).post_send(&sends[i]);
  }
  const auto both = [&] {
    const bool sent = from.progress_shared();
    return to.progress_shared() || sent;
  };
  while (both()) {
  }
  CHECK(sends[kSegments - 2].done);
  CHECK_FALSE(sends[kSegments - 1].done);
  for (size_t i = kSegments; i-- > 0;) {
    std::fill(in.begin(), in.end(), std::byte{0});
    receives[i] = {{7, 0, static_cast<uint32_t>(i), 0}, in.data(), kBytes};
    to.channel(0).post_receive(&receives[i]);
    for (Deadline deadline = Deadline::in(20); !(sends[i].done && receives[i].done);) {
      REQUIRE_FALSE(deadline.passed());
      (void)both();
    }
    CHECK(in == out);
  }
  CHECK_FALSE(both());
}

TEST_CASE("four ranks exchange frames and data, shared memory and TCP") {
  for (bool shared : {true, false}) {
    CAPTURE(shared);
    MeshWorld world(4, shared);
    world.must_connect();
    for (int r = 0; r < 4; ++r) {
      Mesh& mesh = *world.meshes[r];
      CHECK(mesh.rank() == r);
      CHECK(mesh.size() == 4);
      CHECK(mesh.local_rank() == r);
      CHECK(mesh.local_size() == 4);
      CHECK(mesh.cross_rank() == 0);
      CHECK(mesh.cross_size() == 1);
      CHECK(mesh.is_homogeneous());
      CHECK(mesh.all_shared() == shared);
      for (int peer = 0; peer < 4; ++peer) CHECK(mesh.shares_memory(peer) == shared);
    }
    if (shared) CHECK(world.meshes[0]->arena(1)->base() == world.meshes[1]->arena(1)->base());
    world.each(exchange);
  }
}

TEST_CASE("nodes are numbered by their lowest rank; only ranks of one node share memory") {
  std::vector<MeshOptions> options(5, small_options(true));
  options[0].node = options[2].node = options[4].node = "a";
  options[1].node = options[3].node = "b";
  MeshWorld world(options);
  world.must_connect();
  const int cross_size[] = {2, 2, 2, 2, 1}, cross_rank[] = {0, 1, 0, 1, 0};
  for (int r = 0; r < 5; ++r) {
    Mesh& mesh = *world.meshes[r];
    CHECK(mesh.local_rank() == r / 2);
    CHECK(mesh.local_size() == (r % 2 ? 2 : 3));
    CHECK(mesh.cross_size() == cross_size[r]);
    CHECK(mesh.cross_rank() == cross_rank[r]);
    CHECK_FALSE(mesh.is_homogeneous());
    for (int peer = 0; peer < 5; ++peer) {
      CHECK(mesh.node_of(peer) == peer % 2);
      CHECK(mesh.shares_memory(peer) == (peer % 2 == r % 2));
    }
  }
  world.each(exchange);
}

TEST_CASE("one rank alone connects to nobody") {
  MeshWorld world(1, true);
  world.must_connect();
  bool moved = false;
  std::vector<Loss> losses;
  CHECK(world.meshes[0]->poll(0, &moved, &losses).is_ok());
  CHECK(losses.empty());
  CHECK(world.meshes[0]->all_shared());
  CHECK(world.meshes[0]->arena(0) != nullptr);
}

TEST_CASE("a rank without shared memory talks TCP with its neighbours, the others go on sharing") {
  std::vector<MeshOptions> options(3, small_options(true));
  options[1].shared_memory = false;
  MeshWorld world(options);
  world.must_connect();
  CHECK(world.meshes[0]->shares_memory(2));
  CHECK_FALSE(world.meshes[0]->shares_memory(1));
  CHECK_FALSE(world.meshes[1]->shares_memory(1));
  CHECK(world.meshes[1]->local_size() == 3);
  world.each(exchange);
}

TEST_CASE("a sleeping rank is woken by a frame, and no wake-up is lost in many rounds") {
  for (int setup : {0, 1, 2}) {
    CAPTURE(setup);
    std::vector<MeshOptions> options(2, small_options(setup > 0));
    for (MeshOptions& one : options) one.few_local_ranks = setup == 1 ? 8 : 0;
    MeshWorld world(options);
    world.must_connect();
    world.each([&](Mesh& mesh, int rank) {
      std::vector<Loss> losses;
      for (int round = 0; round < 2000; ++round) {
        if (rank == round % 2) {
          REQUIRE(mesh.channel(1 - rank).send(frame_of(round % 5, 0, 20)).is_ok());
        } else {
          REQUIRE(next_frame(mesh, 1 - rank, &losses, 10) == frame_of(round % 5, 0, 20));
        }
      }
    });
  }
}

TEST_CASE("a rank that sleeps idle is left alone by frames and rung by wake(even_if_idle)") {
  MeshWorld world(2, true);
  world.must_connect();
  Mesh &sleeper = *world.meshes[0], &other = *world.meshes[1];
  sleeper.set_asleep(Sleep::kAsleepIdle);
  const uint8_t byte = 1;
  REQUIRE(other.channel(0).send({&byte, 1}).is_ok());
  other.wake(0, false);
  pollfd fd{sleeper.wait_fd(), POLLIN, 0};
  CHECK(::poll(&fd, 1, 0) == 0);
  other.wake(0, true);
  CHECK(::poll(&fd, 1, 1000) == 1);
  sleeper.set_asleep(Sleep::kAwake);
  bool moved = false;
  std::vector<Loss> losses;
  REQUIRE(sleeper.poll(0, &moved, &losses).is_ok());
  CHECK(moved);
  std::vector<uint8_t> frame;
  CHECK(sleeper.channel(1).receive(&frame));
  CHECK(::poll(&fd, 1, 0) == 0);
}

TEST_CASE("a rank that sleeps with what it has begun is left alone by frames and rung by who is about to sleep") {
  MeshWorld world(2, true);
  world.must_connect();
  Mesh &sleeper = *world.meshes[0], &other = *world.meshes[1];
  const uint8_t byte = 1;
  pollfd fd{sleeper.wait_fd(), POLLIN, 0};
  for (const Sleep state : {Sleep::kAsleepIdle, Sleep::kAsleepBegun}) {
    sleeper.set_asleep(state);
    REQUIRE(other.channel(0).send({&byte, 1}).is_ok());
    other.wake(0, false);
    CHECK(::poll(&fd, 1, 0) == 0);
    other.wake_those_with_work();
    CHECK(::poll(&fd, 1, state == Sleep::kAsleepBegun ? 1000 : 0) == (state == Sleep::kAsleepBegun));
  }
}

TEST_CASE("wake_self ends a sleep that has begun and one that is about to begin") {
  MeshWorld world(2, true);
  world.must_connect();
  Mesh& mesh = *world.meshes[0];
  bool moved = false;
  std::vector<Loss> losses;
  mesh.wake_self();
  TimePoint began = Clock::now();
  REQUIRE(mesh.poll(5000, &moved, &losses).is_ok());
  CHECK(seconds_between(began, Clock::now()) < 4.5);
  std::thread waker([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    mesh.wake_self();
  });
  began = Clock::now();
  REQUIRE(mesh.poll(5000, &moved, &losses).is_ok());
  waker.join();
  CHECK(seconds_between(began, Clock::now()) < 4.5);
  CHECK_FALSE(moved);
}

TEST_CASE("a doorbell that one thread has answered ends no other's sleep, until the asleep word says so again") {
  MeshWorld world(2, true);
  world.must_connect();
  Mesh &mesh = *world.meshes[0], &peer = *world.meshes[1];
  const auto would_wake = [&] {
    pollfd watched{mesh.wait_fd(), POLLIN, 0};
    return ::poll(&watched, 1, 0) == 1;
  };
  bool moved = false;
  std::vector<Loss> losses;
  mesh.set_asleep(Sleep::kAsleepIdle);
  peer.wake(0, true);
  CHECK(would_wake());
  REQUIRE(mesh.poll(0, &moved, &losses).is_ok());  // another thread than the one that sleeps
  CHECK(mesh.is_awake());
  mesh.wake_self();
  CHECK_FALSE(would_wake());
  mesh.set_asleep(Sleep::kAsleepWaiting);
  mesh.wake_self();
  CHECK(would_wake());
}

TEST_CASE("what a rank said before it closed is received first, then its loss is told once") {
  for (bool shared : {true, false}) {
    CAPTURE(shared);
    MeshWorld world(2, shared);
    world.must_connect();
    Mesh &stays = *world.meshes[0], &leaves = *world.meshes[1];
    std::vector<std::byte> segment(3000, std::byte{5}), got(3000);
    Transfer send{{7, 0, 1, 0}, segment.data(), segment.size()}, receive{{7, 0, 1, 0}, got.data(), got.size()};
    for (int i = 0; i < 3; ++i) REQUIRE(leaves.channel(0).send(frame_of(1, i, 50)).is_ok());
    leaves.channel(0).post_send(&send);
    REQUIRE(send.done);
    leaves.close();
    std::vector<Loss> losses;
    for (int i = 0; i < 3; ++i) REQUIRE(next_frame(stays, 1, &losses) == frame_of(1, i, 50));
    stays.channel(1).post_receive(&receive);
    bool moved = false;
    for (Deadline deadline = Deadline::in(5); losses.empty();) {
      REQUIRE_FALSE(deadline.passed());
      REQUIRE(stays.poll(200, &moved, &losses).is_ok());
    }
    REQUIRE(losses.size() == 1);
    CHECK(losses[0].rank == 1);
    CHECK(losses[0].reason == "closed its connection without a goodbye");
    CHECK(receive.done);
    CHECK(got == segment);
    for (int i = 0; i < 3; ++i) REQUIRE(stays.poll(1, &moved, &losses).is_ok());
    CHECK(losses.size() == 1);
    Status status = stays.channel(1).progress(&moved);
    CHECK(status.code() == Code::kPeerLost);
    CHECK(status.culprit() == 1);
    CHECK(status.text().find("rank 1 (") == 0);
  }
}

TEST_CASE("after a goodbye the end of a connection is no loss") {
  for (bool shared : {true, false}) {
    CAPTURE(shared);
    MeshWorld world(2, shared);
    world.must_connect();
    Mesh& stays = *world.meshes[0];
    const uint8_t goodbye = 1;
    REQUIRE(world.meshes[1]->channel(0).send({&goodbye, 1}).is_ok());
    world.meshes[1]->close();
    // The end may be noticed together with the goodbye, before the engine could read it.
    std::vector<Loss> losses;
    bool moved = false;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    REQUIRE(stays.poll(100, &moved, &losses).is_ok());
    REQUIRE(stays.poll(0, &moved, &losses).is_ok());
    CHECK(losses.empty());
    REQUIRE(next_frame(stays, 1, &losses).size() == 1);
    stays.expect_close(1);
    TimePoint began = Clock::now();
    for (int i = 0; i < 4; ++i) REQUIRE(stays.poll(50, &moved, &losses).is_ok());
    CHECK(losses.empty());
    CHECK(seconds_between(began, Clock::now()) > 0.1);  // it sleeps, the ended connection does not keep it busy
    CHECK(stays.channel(1).progress(&moved).is_ok());
  }
}

TEST_CASE("after close, poll says so and another mesh can be made; descriptors do not grow") {
  auto open_files = [] {
    int count = 0;
    for (int fd = 0; fd < 1024; ++fd) {
      pollfd one{fd, 0, 0};
      if (::poll(&one, 1, 0) >= 0 && !(one.revents & POLLNVAL)) ++count;
    }
    return count;
  };
  int before = 0;
  for (int life = 0; life < 8; ++life) {
    {
      MeshWorld world(3, life % 2 == 0);
      world.must_connect();
      world.each(exchange);
      for (auto& mesh : world.meshes) mesh->close();
      bool moved = false;
      std::vector<Loss> losses;
      CHECK(world.meshes[0]->poll(0, &moved, &losses).code() == Code::kNotInitialized);
    }
    if (life == 1) before = open_files();
    if (life > 1) CHECK(open_files() == before);
  }
}

TEST_CASE("counters tell what moved") {
  MeshWorld world(2, true);
  world.must_connect();
  const uint8_t byte = 1;
  const std::string before = world.meshes[0]->counters_json();
  for (int i = 0; i < 10; ++i) REQUIRE(world.meshes[0]->channel(1).send({&byte, 1}).is_ok());
  const std::string after = world.meshes[0]->counters_json();
  CHECK(after.find("\"frames_sent\": 10") != std::string::npos);
  CHECK(after.find("\"bytes_sent\": 170") != std::string::npos);  // with headers of 16 bytes
  // Frames in shared memory cost no system call while the peer is awake.
  auto syscalls = [](const std::string& json) { return json.substr(json.find("\"syscalls\"")); };
  CHECK(syscalls(before) == syscalls(after));
}
