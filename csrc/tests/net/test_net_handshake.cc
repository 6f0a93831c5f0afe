// Who may connect: the handshake on its own, and strangers of every kind at a mesh that is connecting.
#include <doctest/doctest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "base/build.h"
#include "base/wire.h"
#include "net/bootstrap.h"
#include "net/endpoint.h"
#include "net/handshake.h"
#include "tests/net/net_world.h"
#include "tests/sanitized.h"

using namespace hc;
using namespace hc::net_tests;
using State = Handshake::State;

namespace {

struct SocketPair {
  SocketPair() {
    int fds[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
    a.reset(fds[0]);
    b.reset(fds[1]);
  }
  Fd a, b;
};

const Credentials kCredentials{"sixteen bytes or more", "net tests"};

Handshake acceptor(const Credentials& credentials, Verdict verdict = Verdict::kWelcome) {
  return Handshake::accept(&credentials, 7, [verdict](const Claim&) { return verdict; });
}

// Steps both until neither is pending.
void shake(Handshake& connector, Handshake& acceptor, const SocketPair& sockets) {
  for (int round = 0; round < 20; ++round) {
    connector.step(sockets.a.get());
    if (connector.ready_to_prove()) connector.allow_proof();
    acceptor.step(sockets.b.get());
  }
}

std::string read_all(int fd) {
  std::string all;
  char buffer[512];
  for (ssize_t n; (n = ::read(fd, buffer, sizeof(buffer))) > 0;) all.append(buffer, n);
  return all;
}

// A TCP connection of the test to a mesh's first address.
Fd dial(const std::string& endpoint) {
  auto e = Endpoint::decode(endpoint);
  REQUIRE(e.is_ok());
  auto fd = start_connect(e.value().addresses.at(0), {});
  REQUIRE_MESSAGE(fd.is_ok(), fd.status().text());
  pollfd one{fd.value().get(), POLLOUT, 0};
  REQUIRE(::poll(&one, 1, 2000) == 1);
  return fd.take();
}

// Whether the other side hangs up in time.
bool is_hung_up(int fd, double timeout_s) {
  for (Deadline deadline = Deadline::in(timeout_s); !deadline.passed();) {
    pollfd one{fd, POLLIN, 0};
    ::poll(&one, 1, deadline.remaining_ms());
    char buffer[256];
    const ssize_t n = ::recv(fd, buffer, sizeof(buffer), MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN)) return true;
  }
  return false;
}

// Rank 0 of two connects on its own thread while the test does things to its listener; then rank 1 comes.
struct ConnectingMesh {
  explicit ConnectingMesh(double report_after_s = 10, int ranks = 2) : world(ranks, false) {
    MeshMembers members = members_of(world.endpoints, 0);
    members.report_after_s = report_after_s;
    members.say = [this](const std::string& text) {
      std::lock_guard lock(mu);
      said += text + "\n";
      ++lines;
    };
    members.cancelled = [this] { return cancel.load(); };
    members.timeout_s = timeout_s;
    thread = std::thread([this, members] { outcome = world.meshes[0]->connect(members); });
  }
  ~ConnectingMesh() {
    cancel = true;
    if (thread.joinable()) thread.join();
  }
  Status let_rank_1_in(const std::function<void(MeshMembers&)>& change = {}) {
    MeshMembers members = members_of(world.endpoints, 1);
    if (change) change(members);
    return world.meshes[1]->connect(members);
  }
  std::string heard() {
    std::lock_guard lock(mu);
    return said;
  }

  double timeout_s = 30;
  MeshWorld world;
  std::atomic<bool> cancel{false};
  Status outcome;
  std::mutex mu;  // guards the two below
  std::string said;
  int lines = 0;
  std::thread thread;
};

}  // namespace

TEST_CASE("handshake: both sides end with the same claim") {
  SocketPair sockets;
  Handshake a = Handshake::connect(&kCredentials, {3, 1, 7, Purpose::kData});
  Claim judged;
  Handshake b = Handshake::accept(&kCredentials, 7, [&](const Claim& claim) {
    judged = claim;
    return Verdict::kWelcome;
  });
  a.step(sockets.a.get());
  b.step(sockets.b.get());
  a.step(sockets.a.get());
  CHECK(a.ready_to_prove());
  CHECK(a.events() == 0);
  b.step(sockets.b.get());
  CHECK(judged.from == -1);  // nothing is judged before it is proven
  shake(a, b, sockets);
  CHECK(a.step(sockets.a.get()) == State::kDone);
  CHECK(b.step(sockets.b.get()) == State::kDone);
  CHECK(judged.from == 3);
  CHECK(judged.to == 1);
  CHECK(judged.purpose == Purpose::kData);
  CHECK(::write(sockets.a.get(), "x", 1) == 1);
  CHECK(read_all(sockets.b.get()) == "x");  // no byte of what follows was taken
}

TEST_CASE("handshake: another secret, job or generation is refused on both sides") {
  Credentials other = kCredentials;
  Claim claim{3, 1, 7, Purpose::kControl};
  const char* expected = "the job secret or the job id differs";
  SUBCASE("secret") { other.secret += "!"; }
  SUBCASE("job") { other.job += "!"; }
  SUBCASE("generation") {
    claim.generation = 6;
    expected = "it belongs to another generation of the job";
  }
  SUBCASE("generation, in the high half of its 64 bits") {
    claim.generation = (uint64_t{1} << 32) + 7;
    expected = "it belongs to another generation of the job";
  }
  SocketPair sockets;
  Handshake a = Handshake::connect(&other, claim), b = acceptor(kCredentials);
  shake(a, b, sockets);
  CHECK(a.step(sockets.a.get()) == State::kFailed);
  CHECK(b.step(sockets.b.get()) == State::kFailed);
  CHECK(a.refused());
  CHECK(a.status().text() == std::string("refused: ") + expected);
  CHECK(b.status().text().find(expected) != std::string::npos);
}

TEST_CASE("handshake: the judge's no reaches the connecting side") {
  SocketPair sockets;
  Handshake a = Handshake::connect(&kCredentials, {3, 1, 7, Purpose::kLocal}),
            b = acceptor(kCredentials, Verdict::kDuplicate);
  shake(a, b, sockets);
  CHECK(a.status().text() == "refused: that rank is connected already");
  CHECK(b.status().text() == "refused rank 3: that rank is connected already");
}

TEST_CASE("handshake: recorded bytes are worth nothing the second time") {
  SocketPair first, second;
  Handshake a = Handshake::connect(&kCredentials, {3, 1, 7, Purpose::kControl}), b = acceptor(kCredentials);
  std::string recorded;
  auto relay = [&](int from, int to, bool record) {
    std::string bytes = read_all(from);
    if (record) recorded += bytes;
    REQUIRE(::write(to, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  };
  for (int round = 0; round < 6; ++round) {
    a.step(first.a.get());
    if (a.ready_to_prove()) a.allow_proof(), a.step(first.a.get());
    relay(first.b.get(), second.a.get(), true);
    b.step(second.b.get());
    relay(second.a.get(), first.b.get(), false);
  }
  REQUIRE(b.step(second.b.get()) == State::kDone);
  REQUIRE(recorded.size() == 116);
  SocketPair again;
  Handshake late = acceptor(kCredentials);
  REQUIRE(::write(again.a.get(), recorded.data(), recorded.size()) == 116);
  CHECK(late.step(again.b.get()) == State::kFailed);
  CHECK(late.status().text() == "refused a peer: the job secret or the job id differs");
}

TEST_CASE("handshake: own bytes sent back prove nothing") {
  SocketPair sockets;
  Handshake a = Handshake::connect(&kCredentials, {3, 1, 7, Purpose::kControl});
  a.step(sockets.a.get());
  std::string hello = read_all(sockets.b.get());
  REQUIRE(::write(sockets.b.get(), hello.data(), hello.size()) == 68);
  CHECK(a.step(sockets.a.get()) == State::kFailed);
  // And an accepting side that answers a proof with that very proof:
  SocketPair other;
  Handshake c = Handshake::connect(&kCredentials, {3, 1, 7, Purpose::kControl});
  c.step(other.a.get());
  hello = read_all(other.b.get());
  hello[40] ^= 1;  // another nonce
  REQUIRE(::write(other.b.get(), hello.data(), hello.size()) == 68);
  c.step(other.a.get());
  REQUIRE(c.ready_to_prove());
  c.allow_proof();
  c.step(other.a.get());
  std::string proof = read_all(other.b.get());
  REQUIRE(proof.size() == 48);
  std::string verdict = std::string(4, '\0') + proof.substr(16);
  REQUIRE(::write(other.b.get(), verdict.data(), verdict.size()) == 36);
  CHECK(c.step(other.a.get()) == State::kFailed);
  CHECK(c.status().text() == "the other side could not prove that it knows the job secret");
}

TEST_CASE("handshake: another build is named on both sides") {
  SocketPair sockets;
  Writer hello;
  hello.put(uint32_t{0x4e4c4348});
  std::string other = "9.8.7+0123456789ab";
  other.resize(kBuildBytes);
  hello.put_raw(other.data(), other.size());
  hello.put_raw(std::string(100, 'x').data(), 100);  // whatever that build says next
  REQUIRE(::write(sockets.a.get(), hello.bytes().data(), hello.size()) == 132);
  Handshake b = acceptor(kCredentials);
  CHECK(b.step(sockets.b.get()) == State::kFailed);
  const std::string own(build_name());
  CHECK(b.status().text().find("the other side is horoclone 9.8.7+0123456789ab, this one is horoclone " + own) == 0);
  std::string answer = read_all(sockets.a.get());
  REQUIRE(answer.size() == 68);
  SocketPair back;
  answer[4] = '\n';
  REQUIRE(::write(back.b.get(), answer.data(), answer.size()) == 68);
  Handshake a = Handshake::connect(&kCredentials, {1, 0, 7, Purpose::kControl});
  CHECK(a.step(back.a.get()) == State::kFailed);
  CHECK(a.status().text().find("is horoclone of an unknown version, this one is horoclone " + own) !=
        std::string::npos);
  CHECK(a.refused());
}

TEST_CASE("handshake: random bytes never get in and never crash") {
  std::mt19937 random(5);
  for (int round = 0; round < 300; ++round) {
    SocketPair sockets;
    std::string bytes(random() % 200, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    if (round % 2) bytes.insert(0, "HCLN\x01\0\0\0\x02\0\0\0", 12);
    REQUIRE(::write(sockets.a.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    Handshake b = acceptor(kCredentials);
    CHECK(b.step(sockets.b.get()) != State::kDone);
  }
}

TEST_CASE("endpoint: comes back as it was; damaged ones are refused") {
  MeshWorld world(1, true);
  const std::string good = world.endpoints[0];
  CHECK(good.size() <= kMaxEndpointBytes);
  auto e = Endpoint::decode(good);
  REQUIRE(e.is_ok());
  CHECK(e.value().encode() == good);
  CHECK(e.value().pid == getpid());
  Endpoint placed = e.value();
  placed.locality = {1, 3, 28};
  CHECK(Endpoint::decode(placed.encode()).value().locality == placed.locality);
  CHECK(e.value().addresses.at(0).is_loopback());
  for (size_t cut = 0; cut < good.size(); ++cut) CHECK_FALSE(Endpoint::decode(good.substr(0, cut)).is_ok());
  CHECK_FALSE(Endpoint::decode(good + "x").is_ok());
  CHECK_FALSE(Endpoint::decode(std::string(5000, 'x')).is_ok());
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    std::string bad = good;
    for (int i = 0; i < 3; ++i) bad[random() % bad.size()] = static_cast<char>(random());
    auto read = Endpoint::decode(bad);
    if (read.is_ok()) CHECK(read.value().encode().size() <= kMaxEndpointBytes);
  }
  std::string newer = good;
  newer[7 + build_name().size()] ^= 1;  // the last character of the digest
  CHECK(Endpoint::decode(newer).status().text().find("the other side is horoclone ") == 0);
  auto outcomes = world.connect([&](MeshMembers& m) { m.endpoints.push_back(newer); });
  CHECK(outcomes[0].code() == Code::kUnsupported);
  CHECK(outcomes[0].culprit() == 1);
}

TEST_CASE("connecting: garbage is hung up on at once and the job goes on") {
  ConnectingMesh connecting;
  const std::string http = "GET / HTTP/1.1\r\nHost: x\r\n\r\n", tls("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11),
                    pickle("\x80\x04\x95\x20\x00\x00\x00\x00", 8), length = std::string(8, '\xff'), noise(1024, '\x5a');
  for (const std::string& bytes : {http, tls, pickle, length, noise}) {
    Fd fd = dial(connecting.world.endpoints[0]);
    REQUIRE(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
    CHECK(is_hung_up(fd.get(), kHelloDeadlineS - 1));  // and not when its time is over
  }
  for (int i = 0; i < 300; ++i) {
    Fd fd = dial(connecting.world.endpoints[0]);
    ::send(fd.get(), http.data(), http.size(), MSG_NOSIGNAL);
  }
  Status one = connecting.let_rank_1_in();
  CHECK_MESSAGE(one.is_ok(), one.text());
  connecting.thread.join();
  CHECK_MESSAGE(connecting.outcome.is_ok(), connecting.outcome.text());
  CHECK(connecting.lines < 10);  // counted, not said one by one
  CHECK(connecting.heard().find("turned away") != std::string::npos);
}

TEST_CASE("connecting: hundreds of silent and slow connections do not keep a rank out; each has five seconds") {
  ConnectingMesh connecting;
  Fd slow = dial(connecting.world.endpoints[0]);
  const TimePoint began = Clock::now();
  REQUIRE(::send(slow.get(), "H", 1, MSG_NOSIGNAL) == 1);
  if (!kSanitized) {  // who find nothing in five seconds in which nothing happens
    CHECK(is_hung_up(slow.get(), 3 * kHelloDeadlineS));
    CHECK(seconds_between(began, Clock::now()) > kHelloDeadlineS - 0.5);
  }
  std::vector<Fd> crowd;
  for (int i = 0; i < 500; ++i) {
    crowd.push_back(dial(connecting.world.endpoints[0]));
    if (i % 2) ::send(crowd.back().get(), "HC", 2, MSG_NOSIGNAL);
  }
  const TimePoint asked = Clock::now();
  Status one = connecting.let_rank_1_in();
  CHECK_MESSAGE(one.is_ok(), one.text());
  CHECK(seconds_between(asked, Clock::now()) < kHelloDeadlineS - 1);  // before the crowd's time is over
  connecting.thread.join();
  CHECK(connecting.outcome.is_ok());
}

TEST_CASE("connecting: where many ranks are expected, many may be about to say who they are") {
  ConnectingMesh connecting(10, 40);
  std::vector<Fd> crowd;
  for (int i = 0; i < 150; ++i) crowd.push_back(dial(connecting.world.endpoints[0]));
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  int turned_away = 0;
  for (const Fd& fd : crowd) turned_away += is_hung_up(fd.get(), 0.003);
  CHECK(turned_away == 0);
}

TEST_CASE("connecting: a rank with another secret hears why, soon, and so does the log") {
  ConnectingMesh connecting(0.3);
  Status one = connecting.let_rank_1_in([](MeshMembers& m) { m.secret = "another secret of the tests"; });
  CHECK(one.code() == Code::kPeerLost);
  CHECK(one.culprit() == 0);
  CHECK(one.text().find("refused: the job secret or the job id differs") != std::string::npos);
  const auto heard = [&](const char* text) { return connecting.heard().find(text) != std::string::npos; };
  const char* const why = "the job secret or the job id differs";
  const char* const who = "1 of 2 ranks missing: rank 1 (";
  for (Deadline deadline = Deadline::in(20); !(heard(why) && heard(who)) && !deadline.passed();) usleep(10'000);
  CHECK(heard(why));
  CHECK(heard(who));
}

TEST_CASE("connecting: a stale rank of an earlier generation is refused") {
  ConnectingMesh connecting;
  uint64_t stale = 0;
  SUBCASE("in the low half of the number") { stale = 6; }
  SUBCASE("in its high half") { stale = (uint64_t{1} << 32) + 7; }
  Status one = connecting.let_rank_1_in([stale](MeshMembers& m) { m.generation = stale; });
  CHECK(one.text().find("refused: it belongs to another generation") != std::string::npos);
}

TEST_CASE(
    "connecting: a second rank 1, a rank nobody expects and a call for another rank are refused; the job goes on") {
  MeshWorld world(3, false);
  std::vector<Status> outcomes(3);
  std::vector<std::thread> threads;
  std::atomic<bool> rank_2_is_missing{false};  // and nobody else
  for (int r : {0, 1}) {
    threads.emplace_back([&, r] {
      MeshMembers members = members_of(world.endpoints, r);
      members.report_after_s = 0.05;
      if (r == 0)
        members.say = [&](const std::string& text) {
          if (text.find("1 of 3 ranks missing") != std::string::npos) rank_2_is_missing = true;
        };
      outcomes[r] = world.meshes[r]->connect(members);
    });
  }
  for (Deadline deadline = Deadline::in(15); !rank_2_is_missing && !deadline.passed();) usleep(1000);
  CHECK(rank_2_is_missing);
  auto verdict_on = [&](const Claim& claim) {
    Fd fd = dial(world.endpoints[0]);
    Handshake impostor = Handshake::connect(&kCredentials, claim);
    for (Deadline deadline = Deadline::in(3); !deadline.passed();) {
      State state = impostor.step(fd.get());
      if (impostor.ready_to_prove()) impostor.allow_proof();
      if (state != State::kPending) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return impostor.status().text();
  };
  CHECK(verdict_on({1, 0, 7, Purpose::kControl}) == "refused: that rank is connected already");
  // A rank whose own bootstrap is over makes a lost connection again, or opens several: it is to try again.
  for (const Purpose purpose : {Purpose::kControl, Purpose::kParallel})
    CHECK(verdict_on({1, 0, 7, purpose, 0, 1, 1}) == "refused: it is about to connect by itself");
  CHECK(verdict_on({1, 0, 7, Purpose::kLocal}) == "refused: no connection from that rank is expected");
  CHECK(verdict_on({9, 0, 7, Purpose::kControl}) == "refused: no connection from that rank is expected");
  CHECK(verdict_on({-1, 0, 7, Purpose::kControl}) == "refused: no connection from that rank is expected");
  CHECK(verdict_on({0, 0, 7, Purpose::kControl}) == "refused: no connection from that rank is expected");
  CHECK(verdict_on({2, 1, 7, Purpose::kControl}) == "refused: another rank answers at this address");
  outcomes[2] = world.meshes[2]->connect(members_of(world.endpoints, 2));
  for (auto& t : threads) t.join();
  for (const Status& s : outcomes) CHECK_MESSAGE(s.is_ok(), s.text());
}

TEST_CASE("connecting: another user's process is turned away from the unix socket") {
  if (geteuid() != 0) {
    MESSAGE("skipped: needs root to become another user");
    return;
  }
  MeshWorld world(2, true);
  std::atomic<bool> has_said{false};
  Status outcome;
  std::thread thread([&] {
    MeshMembers members = members_of(world.endpoints, 0);
    members.say = [&](const std::string& text) {
      if (text.find("another user's process") != std::string::npos) has_said = true;
    };
    members.cancelled = [&] { return has_said.load(); };
    outcome = world.meshes[0]->connect(members);
  });
  auto e = Endpoint::decode(world.endpoints[0]);
  REQUIRE(e.is_ok());
  const std::string name = e.value().unix_name;
  pid_t child = fork();
  if (child == 0) {
    alarm(kChildSeconds);
    if (setresuid(65534, 65534, 65534) != 0) _exit(3);
    auto fd = connect_unix(name);
    char byte;
    pollfd one{fd.is_ok() ? fd.value().get() : -1, POLLIN, 0};
    if (!fd.is_ok() || ::poll(&one, 1, 15'000) != 1) _exit(4);
    _exit(::read(fd.value().get(), &byte, 1) <= 0 ? 0 : 5);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  thread.join();
  CHECK(outcome.code() == Code::kAborted);
  CHECK(outcome.text().find("another user's process") != std::string::npos);
}

TEST_CASE("connect: who is missing is said in time, then an error; cancelling ends it at once") {
  MeshWorld world(3, true);
  std::string said;
  MeshMembers members = members_of(world.endpoints, 1);
  members.timeout_s = 0.8;
  members.report_after_s = 0.2;
  members.say = [&](const std::string& text) { said += text + "\n"; };
  Status late = world.meshes[1]->connect(members);
  CHECK(late.code() == Code::kTimeout);
  CHECK(late.culprit() == 0);
  CHECK(late.text().find("after 0.8 s 2 of 3 ranks missing: rank 0 (") == 0);
  CHECK(late.text().find("no answer yet") != std::string::npos);
  CHECK(late.text().find("has not connected to this rank") != std::string::npos);
  CHECK(said.find("connecting for 0.") == 0);
  CHECK(said.find(" s: 2 of 3 ranks missing") != std::string::npos);

  members.rank = 2;
  members.timeout_s = 30;
  const TimePoint began = Clock::now();
  members.cancelled = [&] { return seconds_between(began, Clock::now()) > 0.2; };
  CHECK(world.meshes[2]->connect(members).code() == Code::kAborted);
  CHECK(seconds_between(began, Clock::now()) < 20);
}

TEST_CASE("connect: a rank that gives up takes the others with it before their deadline") {
  for (bool shared : {true, false}) {
    CAPTURE(shared);
    MeshWorld world(3, shared);  // rank 2 never comes
    std::vector<Status> outcomes(2);
    std::vector<std::thread> threads;
    const TimePoint began = Clock::now();
    for (int r : {0, 1}) {
      threads.emplace_back([&, r] {
        MeshMembers members = members_of(world.endpoints, r);
        if (r == 1) members.cancelled = [&] { return seconds_between(began, Clock::now()) > 0.3; };
        outcomes[r] = world.meshes[r]->connect(members);
        if (r == 1) world.meshes[r].reset();
      });
    }
    for (auto& t : threads) t.join();
    CHECK(outcomes[1].code() == Code::kAborted);
    CHECK(outcomes[0].code() == Code::kPeerLost);
    CHECK(outcomes[0].culprit() == 1);
    CHECK(outcomes[0].text().find("has left while the ranks were still connecting") != std::string::npos);
    CHECK(seconds_between(began, Clock::now()) < 15);
  }
}

TEST_CASE("connect: wrong arguments are told") {
  MeshWorld world(2, false);
  auto outcome = [&](const std::function<void(MeshMembers&)>& change) {
    MeshMembers members = members_of(world.endpoints, 0);
    change(members);
    return world.meshes[0]->connect(members);
  };
  CHECK(outcome([](MeshMembers& m) { m.secret = "short"; }).text().find("HOROCLONE_SECRET") != std::string::npos);
  CHECK(outcome([](MeshMembers& m) { m.rank = 2; }).code() == Code::kInvalidArgument);
  CHECK(outcome([](MeshMembers& m) { m.rank = 1; }).text().find("not this rank's own") != std::string::npos);
  CHECK(outcome([](MeshMembers& m) { m.endpoints[1] = "rubbish"; }).culprit() == 1);
  MeshOptions options = small_options(false);
  options.interfaces = "nonesuch0";
  CHECK(Mesh::listen(options).status().text().find("lo") != std::string::npos);
}

TEST_CASE("connect: too few file descriptors are told before anything fails half-way") {
  MeshWorld world(4, true);
  pid_t child = fork();
  if (child == 0) {
    alarm(kChildSeconds);
    int highest = dup(0);
    rlimit limit{static_cast<rlim_t>(highest + 4), static_cast<rlim_t>(highest + 4)};
    setrlimit(RLIMIT_NOFILE, &limit);
    close(highest);
    Status status = world.meshes[0]->connect(members_of(world.endpoints, 0));
    _exit(status.text().find("too few file descriptors: the limit is") == 0 ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}
