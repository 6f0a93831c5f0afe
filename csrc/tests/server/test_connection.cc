// One connection of a parameter server, and bytes that change between its ends.
#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <random>
#include <string>
#include <vector>

#include "server/connection.h"

using namespace hc;

namespace {

// A connection over TCP, and its far end.
struct Half {
  Half() {
    Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in place{};
    place.sin_family = AF_INET;
    place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(place);
    auto* address = reinterpret_cast<sockaddr*>(&place);
    REQUIRE(::bind(listener.get(), address, bytes) == 0);
    REQUIRE(::listen(listener.get(), 1) == 0);
    REQUIRE(::getsockname(listener.get(), address, &bytes) == 0);
    Fd near(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::connect(near.get(), address, bytes) == 0);
    far = Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    connection = std::make_unique<Connection>(std::move(near), "server 0 (there)");
  }
  Fd far;
  std::unique_ptr<Connection> connection;
};

}  // namespace

TEST_CASE("connection: one bit of a frame that changes on its way is found") {
  std::vector<uint8_t> ids(80), values(4000);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint8_t>(i * 7);
  FrameHeader header;
  header.verb = Verb::kPush;
  header.count = 10;
  std::string written;
  {
    Half from;
    REQUIRE(from.connection->send(header, ids, values).is_ok());
    from.connection->shut();
    char piece[8192];
    for (ssize_t n; (n = ::read(from.far.get(), piece, sizeof(piece))) > 0;) written.append(piece, n);
  }
  REQUIRE(written.size() == sizeof(header) + ids.size() + values.size());

  std::mt19937 random(5);
  for (int trial = 0; trial < 300; ++trial) {
    std::string coming = written;
    if (trial > 0) {
      const size_t at = random() % (trial % 2 ? sizeof(header) : coming.size());
      coming[at] = static_cast<char>(coming[at] ^ 1 << random() % 8);
    }
    Half to;
    REQUIRE(::write(to.far.get(), coming.data(), coming.size()) == static_cast<ssize_t>(coming.size()));
    to.far = Fd();
    FrameHeader got;
    Buffer payload;
    const Status status = to.connection->receive(&got, &payload, 5);
    REQUIRE(status.is_ok() == (trial == 0));
    if (trial > 0) CHECK(status.code() == Code::kPeerLost);
  }
}
