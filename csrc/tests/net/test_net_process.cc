// The mesh between processes: deaths, forks, what stays behind.
#include <fcntl.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <iostream>
#include <thread>

#include "net/socket.h"
#include "tests/net/net_world.h"

using namespace hc;
using namespace hc::net_tests;

namespace {

bool read_exactly(int fd, void* to, size_t bytes) {
  for (size_t got = 0; got < bytes;) {
    ssize_t n = ::read(fd, static_cast<char*>(to) + got, bytes - got);
    if (n <= 0) return false;
    got += n;
  }
  return true;
}

void put_text(int fd, const std::string& text) {
  uint32_t bytes = text.size();
  if (::write(fd, &bytes, 4) != 4 || ::write(fd, text.data(), bytes) != bytes) _exit(90);
}

std::string get_text(int fd) {
  uint32_t bytes = 0;
  if (!read_exactly(fd, &bytes, 4)) return {};
  std::string text(bytes, '\0');
  return read_exactly(fd, text.data(), bytes) ? text : std::string();
}

// Rank 0 is the test's own process, the others are children; two pipes to each.
struct Family {
  // role(mesh, rank, out): what a child does once it is connected; `out` goes to the test.
  template <class Role>
  Family(int size, bool shared, const Role& role) {
    std::cout.flush();  // or every child would print it again
    for (int r = 1; r < size; ++r) {
      int down[2], up[2];
      REQUIRE(pipe2(down, O_CLOEXEC) == 0);
      REQUIRE(pipe2(up, O_CLOEXEC) == 0);
      pid_t pid = fork();
      if (pid == 0) child(r, shared, down[0], up[1], role);
      close(down[0]);
      close(up[1]);
      pids.push_back(pid);
      to_child.emplace_back(down[1]);
      from_child.emplace_back(up[0]);
    }
    auto listening = Mesh::listen(small_options(shared));
    REQUIRE(listening.is_ok());
    mesh = listening.take();
    std::vector<std::string> endpoints = {mesh->endpoint()};
    for (Fd& fd : from_child) endpoints.push_back(get_text(fd.get()));
    for (Fd& fd : to_child) {
      for (const std::string& e : endpoints) put_text(fd.get(), e);
    }
    Status connected = mesh->connect(members_of(endpoints, 0));
    REQUIRE_MESSAGE(connected.is_ok(), connected.text());
    for (Fd& fd : from_child) REQUIRE(get_text(fd.get()) == "connected");
  }
  ~Family() {
    for (pid_t pid : pids) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
  }

  template <class Role>
  [[noreturn]] void child(int rank, bool shared, int in, int out, const Role& role) {
    alarm(kChildSeconds);
    auto listening = Mesh::listen(small_options(shared));
    if (!listening.is_ok()) _exit(91);
    mesh = listening.take();
    put_text(out, mesh->endpoint());
    std::vector<std::string> endpoints;
    for (size_t i = 0, size = to_child_size(); i < size; ++i) endpoints.push_back(get_text(in));
    Status connected = mesh->connect(members_of(endpoints, rank));
    put_text(out, connected.is_ok() ? "connected" : connected.text());
    if (!connected.is_ok()) _exit(92);
    role(*mesh, rank, out);
    mesh->close();
    _exit(0);
  }
  static size_t& to_child_size() {
    static size_t size = 0;
    return size;
  }

  std::unique_ptr<Mesh> mesh;
  std::vector<pid_t> pids;
  std::vector<Fd> to_child, from_child;
};

// Polls until somebody is lost; how long that took is the caller's to measure.
Loss wait_for_loss(Mesh& mesh, double timeout_s = 20) {
  std::vector<Loss> losses;
  bool moved = false;
  for (Deadline deadline = Deadline::in(timeout_s); losses.empty() && !deadline.passed();) {
    if (!mesh.poll(100, &moved, &losses).is_ok()) break;
  }
  return losses.empty() ? Loss{} : losses[0];
}

}  // namespace

TEST_CASE("processes: a rank killed by SIGKILL is lost on every other at once, with what it had sent") {
  for (bool shared : {true, false}) {
    CAPTURE(shared);
    Family::to_child_size() = 3;
    Family family(3, shared, [](Mesh& mesh, int rank, int out) {
      const uint8_t last_words[] = {1, 2, 3};
      if (rank == 1) static_cast<void>(mesh.channel(0).send(last_words));
      put_text(out, "ready");
      Loss loss = wait_for_loss(mesh, 20);
      put_text(out, std::to_string(loss.rank));
      pause();  // the test ends it; leaving now would be a second loss
    });
    for (Fd& fd : family.from_child) REQUIRE(get_text(fd.get()) == "ready");
    const TimePoint killed = Clock::now();
    kill(family.pids[0], SIGKILL);
    std::vector<Loss> losses;
    CHECK(next_frame(*family.mesh, 1, &losses) == std::vector<uint8_t>{1, 2, 3});
    Loss loss = losses.empty() ? wait_for_loss(*family.mesh) : losses[0];
    CHECK(loss.rank == 1);
    CHECK_FALSE(loss.reason.empty());
    MESSAGE("own rank: ", loss.reason);
    CHECK(get_text(family.from_child[1].get()) == "1");
    CHECK(seconds_between(killed, Clock::now()) < 15);  // no silence is waited for; the machine may be busy
  }
}

TEST_CASE("processes: a child that a rank forked keeps its sockets open, yet the rank's death is seen") {
  int over[2];  // its end tells the grandchild that the test is over
  REQUIRE(pipe2(over, O_CLOEXEC) == 0);
  const Fd reads(over[0]), test_goes_on(over[1]);
  Family::to_child_size() = 2;
  Family family(2, true, [&](Mesh& mesh, int, int out) {
    pid_t grandchild = fork();
    if (grandchild == 0) {
      alarm(kChildSeconds);
      close(over[1]);
      char byte;
      (void)!::read(over[0], &byte, 1);  // never told the mesh, so it holds copies of everything
      _exit(0);
    }
    put_text(out, "ready");
    wait_for_loss(mesh);
  });
  REQUIRE(get_text(family.from_child[0].get()) == "ready");
  kill(family.pids[0], SIGKILL);
  Loss loss = wait_for_loss(*family.mesh);
  CHECK(loss.rank == 1);
  CHECK(loss.reason == "has ended");  // who, and its process, is in front of it
}

// As one whose core is being written, or whose memory is being returned.
TEST_CASE("processes: one that ends is lost while its connections are open yet") {
  Family::to_child_size() = 2;
  Family family(2, true, [](Mesh& mesh, int, int out) {
    put_text(out, "ready");
    wait_for_loss(mesh);
  });
  REQUIRE(get_text(family.from_child[0].get()) == "ready");
  const pid_t pid = family.pids[0];
  CHECK(family.mesh->process_state(1) == ProcessState::kRuns);
  CHECK_FALSE(family.mesh->look_at_processes());
  if (ptrace(PTRACE_SEIZE, pid, nullptr, PTRACE_O_TRACEEXIT) != 0) {
    MESSAGE("not tried: this machine allows no ptrace");
    return;
  }
  kill(pid, SIGKILL);
  int status = 0;
  REQUIRE(waitpid(pid, &status, 0) == pid);
  const int event = status >> 8;
  REQUIRE(event == (SIGTRAP | PTRACE_EVENT_EXIT << 8));  // until PTRACE_CONT it is on its way out
  CHECK(family.mesh->process_state(1) == ProcessState::kEnds);
  CHECK(wait_for_loss(*family.mesh, 0.1).rank == -1);
  CHECK(family.mesh->look_at_processes());
  const Loss loss = wait_for_loss(*family.mesh);
  CHECK(loss.rank == 1);
  CHECK(loss.reason == "has ended");
  ptrace(PTRACE_CONT, pid, nullptr, 0);
}

TEST_CASE("processes: memory is shared between them, in place") {
  Family::to_child_size() = 2;
  Family family(2, true, [](Mesh& mesh, int, int out) {
    std::byte* theirs = mesh.arena(0)->base() + kHeapOffset;
    for (int i = 0; i < 4096; ++i) theirs[i] = std::byte{42};
    auto own = mesh.arena(1)->allocate(4096);
    if (!own.is_ok()) _exit(93);
    own.value()[7] = std::byte{43};
    put_text(out, std::to_string(mesh.arena(1)->offset_of(own.value())));
    wait_for_loss(mesh, 20);
  });
  auto block = family.mesh->arena(0)->allocate(4096);
  REQUIRE(block.is_ok());
  const size_t offset = std::stoul(get_text(family.from_child[0].get()));
  CHECK(block.value()[4095] == std::byte{42});
  CHECK(family.mesh->arena(1)->base()[offset + 7] == std::byte{43});
}

TEST_CASE("processes: a forked child lets go of everything and the parent does not notice") {
  for (bool shared : {true, false}) {
    CAPTURE(shared);
    MeshWorld world(2, shared);
    world.must_connect();
    pid_t child = fork();
    if (child == 0) {
      alarm(kChildSeconds);
      bool moved = false;
      std::vector<Loss> losses;
      for (auto& mesh : world.meshes) mesh->after_fork_child();
      const bool closed = world.meshes[0]->poll(0, &moved, &losses).code() == Code::kNotInitialized;
      if (shared) world.meshes[0]->arena(1)->base()[kRingsOffset + 10] = std::byte{1};  // a private copy by now
      for (auto& mesh : world.meshes) mesh.reset();
      _exit(closed ? 0 : 1);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    std::vector<Loss> losses;
    const uint8_t byte = 9;
    for (int round = 0; round < 3; ++round) {
      for (int r : {0, 1}) {
        REQUIRE(world.meshes[r]->channel(1 - r).send({&byte, 1}).is_ok());
        REQUIRE(next_frame(*world.meshes[1 - r], r, &losses, 2) == std::vector<uint8_t>{9});
      }
    }
    CHECK(losses.empty());
  }
}
