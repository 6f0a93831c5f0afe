// Named threads, CPU masks and the logger.
#include <doctest/doctest.h>

#include <pthread.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "base/log.h"
#include "base/thread.h"

using namespace hc;

TEST_CASE("a named thread has its name, cut at 15 characters, and takes no signal") {
  char name[32] = "";
  sigset_t blocked;
  NamedThread thread;
  CHECK_FALSE(thread.running());
  CHECK(thread
            .start("hc-engine-of-rank-7",
                   [&] {
                     pthread_getname_np(pthread_self(), name, sizeof name);
                     pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
                   })
            .is_ok());
  thread.join();
  CHECK_FALSE(thread.running());
  CHECK(std::string(name) == "hc-engine-of-ra");
  CHECK(sigismember(&blocked, SIGINT) == 1);
  CHECK(sigismember(&blocked, SIGTERM) == 1);

  sigset_t own;
  pthread_sigmask(SIG_BLOCK, nullptr, &own);
  CHECK(sigismember(&own, SIGINT) == 0);
}

TEST_CASE("the destructor, a second start and an assignment wait for the thread") {
  std::atomic<int> ended{0};
  auto body = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ++ended;
  };
  {
    NamedThread thread;
    CHECK(thread.start("a", body).is_ok());
    CHECK(thread.start("b", body).is_ok());
    CHECK(ended == 1);
    NamedThread other;
    CHECK(other.start("c", body).is_ok());
    thread = std::move(other);
    CHECK(ended >= 2);
  }
  CHECK(ended == 3);
}

TEST_CASE("a thread can be kept on one CPU, and a CPU that is not there is an error") {
  const std::vector<int> before = allowed_cpus();
  REQUIRE_FALSE(before.empty());
  NamedThread thread;
  std::vector<int> inside;
  Status set, missing;
  CHECK(thread
            .start("hc-pin",
                   [&] {
                     const int cpu = before.back(), nowhere = 8191, negative = -1;
                     set = set_allowed_cpus({&cpu, 1});
                     inside = allowed_cpus();
                     missing = set_allowed_cpus({&nowhere, 1});
                     if (missing.is_ok()) return;
                     missing = set_allowed_cpus({&negative, 1});
                   })
            .is_ok());
  thread.join();
  CHECK(set.is_ok());
  CHECK(inside == std::vector<int>{before.back()});
  CHECK(missing.code() == Code::kInvalidArgument);
  CHECK(allowed_cpus() == before);
}

TEST_CASE("the affinity list has one CPU for each local rank") {
  CHECK(cpu_of_local_rank("4, 0,17", 0).take() == 4);
  CHECK(cpu_of_local_rank("4, 0,17", 1).take() == 0);
  CHECK(cpu_of_local_rank("4, 0,17", 2).take() == 17);
  CHECK(cpu_of_local_rank("4,0", 2).status().code() == Code::kInvalidArgument);
  for (const char* bad : {"", "a", "1x", "-1", ",1"})
    CHECK(cpu_of_local_rank(bad, 0).status().code() == Code::kInvalidArgument);
}

TEST_CASE("a logger writes whole lines with its rank, and only what is severe enough") {
  int pipe_fd[2];
  REQUIRE(pipe(pipe_fd) == 0);
  Logger logger(LogLevel::kInfo, /*hide_time=*/true, pipe_fd[1]);
  logger.debug("not this");
  logger.info("before the rank is known");
  logger.set_rank(3);
  CHECK_FALSE(logger.wants(LogLevel::kTrace));

  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&logger, t] {
      for (int i = 0; i < 50; ++i) logger.warning("thread ", t, " line ", i, " ", std::string(100, '.'));
    });
  for (auto& thread : threads) thread.join();
  close(pipe_fd[1]);

  std::string all;
  char buffer[4096];
  for (ssize_t got; (got = read(pipe_fd[0], buffer, sizeof buffer)) > 0;) all.append(buffer, static_cast<size_t>(got));
  close(pipe_fd[0]);
  CHECK(all.starts_with("[horoclone] info: before the rank is known\n[horoclone] [rank 3] warning: thread "));
  int lines = 0, whole = 0;
  for (size_t at = 0; at < all.size(); ++lines) {
    const size_t end = all.find('\n', at);
    REQUIRE(end != std::string::npos);
    const std::string line = all.substr(at, end - at);
    whole += line.starts_with("[horoclone] [rank 3] warning: thread ") && line.ends_with(" " + std::string(100, '.'));
    at = end + 1;
  }
  CHECK(lines == 201);
  CHECK(whole == 200);
}

TEST_CASE("a log line has its time unless that is hidden") {
  int pipe_fd[2];
  REQUIRE(pipe(pipe_fd) == 0);
  Logger logger(LogLevel::kError, /*hide_time=*/false, pipe_fd[1]);
  logger.error("x");
  char line[128] = "";
  const ssize_t got = read(pipe_fd[0], line, sizeof line - 1);
  close(pipe_fd[0]);
  close(pipe_fd[1]);
  const std::string text(line, static_cast<size_t>(got));
  CHECK(text.size() == std::string("[2026-01-31 12:34:56.789012] [horoclone] error: x\n").size());
  CHECK(text.starts_with("[20"));
  CHECK(text.ends_with("] [horoclone] error: x\n"));
}
