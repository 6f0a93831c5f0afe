// Servers and workers of a parameter server in one process, over real sockets. The register is played by the test.
#include <doctest/doctest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "net/socket.h"
#include "server/client.h"
#include "server/server.h"

namespace hc::server_tests {
namespace {

const Credentials kJob{"sixteen bytes or more", "ps:test"};
constexpr double kSilenceS = 5;

struct Node {
  explicit Node(int32_t index, const Credentials& credentials = kJob, double silence_s = kSilenceS) {
    auto started =
        Server::start({credentials, index, 1, 100 + static_cast<uint64_t>(index), 64 << 20, silence_s, "lo"});
    REQUIRE_MESSAGE(started.is_ok(), started.status().text());
    server = started.take();
  }
  Connection::Target target(int32_t index) const {
    return {Endpoint::decode(server->endpoint()).take(), index, 100 + static_cast<uint64_t>(index)};
  }
  std::unique_ptr<Server> server;
};

TableSpec spec_of(int32_t workers, int32_t staleness) {
  TableSpec spec;
  spec.name = "t";
  spec.dim = 4;
  spec.workers = workers;
  spec.staleness = staleness;
  return spec;
}

struct Worker {
  explicit Worker(int32_t rank, double silence_s = kSilenceS, std::string table = "t")
      : client({kJob, 1000 + static_cast<uint64_t>(rank), rank, silence_s, 1}), rank(rank), table(std::move(table)) {
    client.route(0, 0);
  }
  std::vector<Failure> run(Call& call, double limit_s = 10) {
    return client.run(call, limit_s, [] { return false; });
  }
  void open(TableSpec spec) {
    spec.name = table;
    Writer text, place;
    spec.write(&text);
    place.put(rank);
    Call make(Verb::kTable, 1, table_hash(table), {text.bytes().begin(), text.bytes().end()});
    REQUIRE(run(make).empty());
    Call enter(Verb::kRegister, 1, table_hash(table), {place.bytes().begin(), place.bytes().end()});
    REQUIRE(run(enter).empty());
  }
  Call push_call(const std::vector<int64_t>& ids, const std::vector<float>& ones) {
    Call call(Verb::kPush, 1, table_hash(table), 0, {ids, 4, ones.data(), nullptr});
    call.clocks()[0] = clock++;
    return call;
  }
  std::vector<Failure> push(const std::vector<int64_t>& ids, double limit_s = 10) {
    const std::vector<float> ones(ids.size() * 4, 1.0f);
    Call call = push_call(ids, ones);
    return run(call, limit_s);
  }
  std::vector<float> pull(const std::vector<int64_t>& ids, std::vector<Failure>* failures, double limit_s = 10) {
    std::vector<float> out(ids.size() * 4, -1.0f);
    Call call(Verb::kPull, 1, table_hash(table), 0, {ids, 4, nullptr, out.data()});
    call.clocks()[0] = clock;
    *failures = run(call, limit_s);
    return out;
  }
  Client client;
  int32_t rank;
  std::string table;
  int64_t clock = 0;
};

void expect_event(Server& server, EventKind kind) {
  Event event;
  REQUIRE(server.events().next(10, &event));
  CHECK(event.kind == kind);
}

TEST_CASE("a worker without the secret is refused, one with it pulls what it has pushed") {
  Node node(0);
  REQUIRE(node.server->set_role(0, Role::kPrimary).is_ok());
  Client stranger({{"another secret of any kind", "ps:test"}, 5, 0, kSilenceS, 1});
  CHECK_FALSE(stranger.connect(node.target(0), 3).is_ok());
  Worker worker(0);
  REQUIRE(worker.client.connect(node.target(0), 5).is_ok());
  worker.open(spec_of(1, -1));
  REQUIRE(worker.push({7, 8, 7}).empty());
  std::vector<Failure> failures;
  CHECK(worker.pull({8, 7, 9}, &failures) == std::vector<float>{1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0});
  CHECK(failures.empty());
}

TEST_CASE("a worker gets in past unauthenticated connections that say nothing, however many") {
  Node node(0);
  REQUIRE(node.server->set_role(0, Role::kPrimary).is_ok());
  const Endpoint endpoint = Endpoint::decode(node.server->endpoint()).take();
  std::vector<Fd> idle;
  for (int i = 0; i < 150; ++i) {
    idle.push_back(connect_unix(endpoint.unix_name).take());
    REQUIRE(idle.back());
  }
  Worker worker(0);
  CHECK(worker.client.connect(node.target(0), 4).is_ok());  // those have 5 s
}

TEST_CASE(
    "a backup has what was acknowledged, and goes on when the primary is gone; a change that is told again counts "
    "once") {
  Node first(0), second(1);
  REQUIRE(first.server->set_role(0, Role::kPrimary).is_ok());
  Worker worker(0);
  for (int32_t i : {0, 1}) REQUIRE(worker.client.connect((i ? second : first).target(i), 5).is_ok());
  worker.open(spec_of(1, -1));
  std::vector<int64_t> ids(3000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i * 7919);
  REQUIRE(worker.push(ids).empty());
  // Pushes go on while the second server is given its copy.
  std::atomic<bool> attached{false};
  std::thread joining([&] {
    const Status status = first.server->attach(0, second.target(1), 20);
    CHECK_MESSAGE(status.is_ok(), status.text());
    attached = true;
  });
  float pushes = 1;
  while (!attached) {
    REQUIRE(worker.push(ids).empty());
    ++pushes;
  }
  joining.join();
  REQUIRE(worker.push(ids).empty());
  ++pushes;
  CHECK(second.server->partition(0).value()->role() == Role::kBackup);

  const std::vector<float> ones(ids.size() * 4, 1.0f);
  Call last = worker.push_call(ids, ones);
  REQUIRE(worker.run(last).empty());
  ++pushes;
  first.server->stop();
  expect_event(*second.server, EventKind::kPrimaryLost);
  REQUIRE(second.server->set_role(0, Role::kPrimary).is_ok());
  worker.client.route(0, 1);
  // The same change once more, as a worker does that has not seen the answer.
  Call again(Verb::kPush, 1, table_hash("t"), 0, {ids, 4, ones.data(), nullptr});
  again.number(last.sequence());
  REQUIRE(worker.run(again).empty());
  std::vector<Failure> failures;
  const std::vector<float> rows = worker.pull(ids, &failures);
  REQUIRE(failures.empty());
  CHECK(rows == std::vector<float>(ids.size() * 4, pushes));
}

TEST_CASE("a primary that has lost its backup acknowledges nothing before it is decided who goes on") {
  Node first(0), second(1);
  REQUIRE(first.server->set_role(0, Role::kPrimary).is_ok());
  Worker worker(0);
  REQUIRE(worker.client.connect(first.target(0), 5).is_ok());
  worker.open(spec_of(1, -1));
  REQUIRE(first.server->attach(0, second.target(1), 20).is_ok());
  second.server->stop();
  expect_event(*first.server, EventKind::kBackupLost);
  const std::vector<Failure> failures = worker.push({1}, 0.5);
  REQUIRE(failures.size() == 1);
  CHECK(failures[0].status.code() == Code::kTimeout);
  CHECK(failures[0].status.text().find("register") != std::string::npos);
  SUBCASE("it goes on alone") {
    REQUIRE(first.server->set_role(0, Role::kPrimary).is_ok());
    CHECK(worker.push({1}).empty());
  }
  SUBCASE("the other one goes on") {
    REQUIRE(first.server->set_role(0, Role::kNone).is_ok());
    const std::vector<Failure> elsewhere = worker.push({1});
    REQUIRE(elsewhere.size() == 1);
    CHECK(elsewhere[0].retry);
  }
}

TEST_CASE("a primary that is stopped acknowledges nothing that its backup does not have") {
  for (int round = 0; round < 4; ++round) {
    Node first(0), second(1);
    REQUIRE(first.server->set_role(0, Role::kPrimary).is_ok());
    Worker worker(0);
    for (int32_t i : {0, 1}) REQUIRE(worker.client.connect((i ? second : first).target(i), 5).is_ok());
    worker.open(spec_of(1, -1));
    REQUIRE(first.server->attach(0, second.target(1), 20).is_ok());
    std::atomic<int> acknowledged{0};
    std::thread pushing([&] {
      for (;;) {
        const std::vector<Failure> failures = worker.push({7});
        if (!failures.empty()) {
          CHECK_MESSAGE(failures[0].retry, failures[0].status.text());
          return;
        }
        ++acknowledged;
      }
    });
    while (acknowledged < 50) std::this_thread::yield();
    first.server->stop();
    pushing.join();
    expect_event(*second.server, EventKind::kPrimaryLost);
    REQUIRE(second.server->set_role(0, Role::kPrimary).is_ok());
    worker.client.route(0, 1);
    std::vector<Failure> failures;
    const std::vector<float> rows = worker.pull({7}, &failures);
    REQUIRE(failures.empty());
    const auto pushed = static_cast<float>(acknowledged.load());
    CHECK(rows[0] >= pushed);
    CHECK(rows[0] <= pushed + 1);  // of the last one nobody has seen the answer
  }
}

TEST_CASE("a pull that staleness holds up ends with the name of the worker that is missing; one that leaves frees it") {
  Node node(0);
  REQUIRE(node.server->set_role(0, Role::kPrimary).is_ok());
  Worker quick(0);
  REQUIRE(quick.client.connect(node.target(0), 5).is_ok());
  quick.open(spec_of(2, 0));
  REQUIRE(quick.push({1}).empty());
  std::vector<Failure> failures;
  quick.pull({1}, &failures, 0.3);
  REQUIRE(failures.size() == 1);
  CHECK(failures[0].status.text().find("rank 1 never came") != std::string::npos);
  {
    Worker slow(1);
    REQUIRE(slow.client.connect(node.target(0), 5).is_ok());
    slow.open(spec_of(2, 0));
    quick.pull({1}, &failures, 0.3);
    REQUIRE(failures.size() == 1);
    CHECK(failures[0].status.text().find("rank 1 is at step 0") != std::string::npos);
    std::thread leaves([&] { slow.client.close(); });
    CHECK(quick.pull({1}, &failures) == std::vector<float>{1, 1, 1, 1});
    leaves.join();
  }
  CHECK(failures.empty());
}

TEST_CASE("a pull that waits hears of it, however much others change in that partition") {
  constexpr double kShortS = 0.6;
  Node node(0, kJob, kShortS);
  REQUIRE(node.server->set_role(0, Role::kPrimary).is_ok());
  Worker waiting(0, kShortS), busy(1, kShortS, "u");
  for (Worker* one : {&waiting, &busy}) REQUIRE(one->client.connect(node.target(0), 5).is_ok());
  waiting.open(spec_of(2, 0));
  busy.open(spec_of(2, -1));
  REQUIRE(waiting.push({1}).empty());
  std::atomic<bool> over{false};
  std::thread pushing([&] {
    while (!over) REQUIRE(busy.push({1}).empty());
  });
  std::vector<Failure> failures;
  waiting.pull({1}, &failures, 3 * kShortS);
  over = true;
  pushing.join();
  REQUIRE(failures.size() == 1);
  CHECK_MESSAGE(failures[0].status.text().find("rank 1 never came") != std::string::npos, failures[0].status.text());
}

}  // namespace
}  // namespace hc::server_tests
