// One stream of bytes over several connections, alone.
#include "net/parallel_stream.h"

#include <doctest/doctest.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <random>

using namespace hc;

namespace {

std::byte byte_at(uint64_t position) { return static_cast<std::byte>(position * 31 + (position >> 11)); }

struct Streams {
  explicit Streams(int connections, int buffer = 4096) {
    std::vector<Fd> left, right;
    for (int i = 0; i < connections; ++i) {
      int pair[2];
      REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
      setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &buffer, sizeof(buffer));
      left.emplace_back(pair[0]);
      right.emplace_back(pair[1]);
    }
    out = std::make_unique<ParallelStream>(std::move(left), &traffic);
    in = std::make_unique<ParallelStream>(std::move(right), &traffic);
  }
  // What of these parts of the stream is taken.
  IoResult write(const std::vector<size_t>& parts) {
    std::vector<std::vector<std::byte>> bytes;
    std::vector<iovec> places;
    uint64_t at = written;
    for (const size_t count : parts) {
      auto& one = bytes.emplace_back(count);
      for (std::byte& b : one) b = byte_at(at++);
      places.push_back({one.data(), count});
    }
    const IoResult result = out->write(places);
    written += result.bytes;
    return result;
  }
  IoResult read(const std::vector<size_t>& parts) {
    std::vector<std::vector<std::byte>> bytes;
    std::vector<iovec> places;
    for (const size_t count : parts) {
      auto& one = bytes.emplace_back(count);
      places.push_back({one.data(), count});
    }
    const IoResult result = in->read(places);
    size_t rest = result.bytes;
    for (const auto& one : bytes) {
      const size_t count = std::min(rest, one.size());
      for (size_t i = 0; i < count; ++i) same &= one[i] == byte_at(received++);
      rest -= count;
    }
    return result;
  }

  Traffic traffic;
  std::unique_ptr<ParallelStream> out, in;
  uint64_t written = 0, received = 0;
  bool same = true;
};

std::vector<size_t> some_parts(std::mt19937* random) {
  std::vector<size_t> parts((*random)() % 17 + 1);
  for (size_t& one : parts) one = (*random)() % ((*random)() % 5 ? 300 : 150'000) + 1;
  return parts;
}

}  // namespace

TEST_CASE("parallel stream: bytes come out in the order in which they were written, whatever the sockets take") {
  std::mt19937 random(3);
  for (const int connections : {2, 3, 16}) {
    Streams streams(connections);
    while (streams.written < 6'000'000) {
      if (random() % 2) streams.write(some_parts(&random));
      if (random() % 3) streams.read(some_parts(&random));
      if (random() % 4 == 0) streams.out->flush();
      CHECK(streams.out->unacknowledged() <= streams.written);
    }
    for (int i = 0; i < 100'000 && streams.received < streams.written; ++i) {
      streams.out->flush();
      streams.read({100'000, 3});
    }
    CHECK(streams.received == streams.written);
    CHECK(streams.same);
    CHECK_FALSE(streams.out->has_copied());
    CHECK(streams.out->unacknowledged() == 0);
  }
}

TEST_CASE("parallel stream: draining gives all that the other side takes for acknowledged, without a hole") {
  for (unsigned seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    Streams streams(5);
    while (streams.written < 600'000 + seed * 7000) {
      streams.write(some_parts(&random));
      if (random() % 3 == 0) streams.read(some_parts(&random));
    }
    // One connection breaks, the others are behind.
    ::shutdown(streams.out->connections()[random() % 5].get(), SHUT_RDWR);
    const uint64_t acknowledged = streams.written - streams.out->unacknowledged();
    std::vector<std::byte> bytes;
    streams.in->drain(&bytes);
    bool same = streams.same;
    for (size_t i = 0; i < bytes.size(); ++i) same &= bytes[i] == byte_at(streams.received + i);
    CHECK(same);
    CHECK(streams.received + bytes.size() >= acknowledged);
    CHECK(streams.received + bytes.size() <= streams.written);
  }
}

TEST_CASE("parallel stream: a head that was changed on its way, and an end within a piece, are failures") {
  Streams streams(2);
  REQUIRE(streams.write({1000}).bytes == 1000);
  std::byte first[200];
  REQUIRE(::recv(streams.in->connections()[0].get(), first, 9, 0) == 9);  // the head is not whole any more
  IoResult result = streams.read({1000});
  CHECK(result.what == Io::kFailed);
  CHECK(result.error_number == EBADMSG);

  Streams others(2);
  REQUIRE(others.write({1000}).bytes == 1000);
  REQUIRE(others.read({300}).bytes == 300);
  for (int i = 0; i < 2; ++i) ::shutdown(others.out->connections()[i].get(), SHUT_WR);
  REQUIRE(others.read({700}).bytes == 700);
  CHECK(others.read({1}).what == Io::kEnded);
}

TEST_CASE("parallel stream: a sleeper is woken by what is here already, and not by what waits for its turn") {
  Streams streams(2);
  const Fd epoll(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  const auto is_woken = [&] { return ::epoll_wait(epoll.get(), &event, 1, 0) == 1; };
  streams.in->settle(epoll.get(), 7, true, false);
  CHECK_FALSE(is_woken());
  REQUIRE(streams.write({2 * ParallelStream::kPieceBytes}).bytes > 0);
  CHECK(is_woken());
  CHECK(uint64_t{event.data.u64} == 7);
  // Most of the second piece is read beside the first one.
  while (streams.received < ParallelStream::kPieceBytes + 1) {
    streams.out->flush();
    streams.read({1});
    if (streams.received == 1) streams.read({ParallelStream::kPieceBytes - 2});
  }
  while (streams.out->has_copied()) {
    streams.out->flush();
    streams.read({1});
  }
  streams.in->settle(epoll.get(), 7, true, false);
  CHECK(is_woken());
  while (streams.received < streams.written) streams.read({5000});
  streams.in->settle(epoll.get(), 7, true, false);
  CHECK_FALSE(is_woken());
  CHECK(streams.same);
}
