// The one main() of hc_tests. A watchdog ends a run in which one test case takes longer than HC_TEST_CASE_SECONDS (300;
// the longest takes 30 under a sanitizer): it names the case and, where gdb is installed, says where its threads are.
// A signal from outside would not: the threads of the core take none, and ThreadSanitizer holds others back.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

namespace {

using WatchClock = std::chrono::steady_clock;

std::mutex mu;
std::condition_variable ended;
bool over = false;
std::string running;  // the test case; empty: none
WatchClock::time_point since;

struct Watch : doctest::IReporter {
  explicit Watch(const doctest::ContextOptions&) {}
  void test_case_start(const doctest::TestCaseData& test) override {
    std::lock_guard lock(mu);
    running = test.m_name;
    since = WatchClock::now();
  }
  void test_case_end(const doctest::CurrentTestCaseStats&) override {
    std::lock_guard lock(mu);
    running.clear();
  }
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
};
REGISTER_LISTENER("watch", 0, Watch);

// One line for each thread, from where it is to where it began, without the standard library: a log may be cut short.
void print_threads() {
  const std::string command =
      "timeout 60 gdb -batch -p " + std::to_string(getpid()) +
      " -ex 'thread apply all bt 30' 2>/dev/null | awk '"
      R"(/^Thread /{if (line) print line; gsub(/[):"]/, "", $NF); line = "HANG " $NF ":"; next})"
      R"(/^#/{f = $3 == "in" ? $4 : $2; if (f !~ /^(std::|__|\?\?)/) line = line " " f})"
      R"(END{if (line) print line})"
      "' >&2";
  if (std::system(command.c_str()) != 0) std::fprintf(stderr, "HANG: gdb did not say where the threads are\n");
}

// Sleeps until a case could have hung: while others fork, a thread had better do nothing.
void watch(std::chrono::seconds limit) {
  std::unique_lock lock(mu);
  while (!over) {
    const auto now = WatchClock::now();
    if (running.empty() || now - since < limit) {
      ended.wait_until(lock, (running.empty() ? now : since) + limit);
      continue;
    }
    std::fprintf(stderr, "\nHANG: \"%s\" has been running for more than %d s\n", running.c_str(),
                 static_cast<int>(limit.count()));
    print_threads();
    std::fflush(nullptr);
    std::_Exit(3);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const char* limit = std::getenv("HC_TEST_CASE_SECONDS");
  std::thread watchdog(watch, std::chrono::seconds(limit ? std::atoi(limit) : 300));
  const int code = doctest::Context(argc, argv).run();
  {
    std::lock_guard lock(mu);
    over = true;
  }
  ended.notify_all();
  watchdog.join();
  return code;
}
