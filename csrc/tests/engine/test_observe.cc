// What the engine tells about itself: the trace's text, the timeline's queue and thread, the recorder, lateness.
#include <doctest/doctest.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include "agreement/straggler_statistics.h"
#include "base/log_lines.h"
#include "engine/record/recorder.h"
#include "engine/record/timeline.h"
#include "engine/watch/stack_request.h"
#include "tests/world.h"

using namespace hc;

namespace {

TimePoint at(int us) { return TimePoint{} + std::chrono::microseconds(us); }

TraceEvent event(TraceEvent::Kind kind, const std::string& name, int us, const char* phase = "", int rank = -1) {
  return {kind, {Op::kAllreduce, 0, name, 0}, rank, phase, phase[0] != '\0', {}, at(us)};
}

size_t times(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t i = text.find(part); i != std::string::npos; i = text.find(part, i + 1)) ++n;
  return n;
}

std::string content_of(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

struct TemporaryFile {
  TemporaryFile() { ::close(::mkstemp(path.data())); }
  ~TemporaryFile() { ::unlink(path.c_str()); }
  std::string path = "/tmp/hc-timeline-XXXXXX";
};

Trace::Origin origin() {
  Trace::Origin o;
  o.start = at(0);
  return o;
}

}  // namespace

TEST_CASE("trace: one operation from its first announcement to its end") {
  using Kind = TraceEvent::Kind;
  Trace trace(origin());
  std::string out;
  trace.add(event(Kind::kAnnounced, "w", 10, "", 1), &out);
  trace.add(event(Kind::kAnnounced, "w", 15, "", 0), &out);
  trace.add(event(Kind::kAgreed, "w", 20), &out);
  trace.add(event(Kind::kStarted, "w", 21, "queue"), &out);
  trace.add(event(Kind::kPhase, "w", 25, "recursive doubling"), &out);
  // The next round is announced while this one runs: in the row of negotiations, so nothing overlaps.
  trace.add(event(Kind::kAnnounced, "w", 27, "", 1), &out);
  trace.add(event(Kind::kDone, "w", 30), &out);
  CHECK(out.find(R"({"ph":"B","name":"NEGOTIATE_ALLREDUCE","ts":10.000,"pid":1,"tid":0})") != std::string::npos);
  CHECK(out.find(R"({"ph":"X","name":"0","ts":15.000,"dur":0,"pid":1,"tid":0})") != std::string::npos);
  CHECK(out.find(R"({"ph":"B","name":"RECURSIVE_DOUBLING_ALLREDUCE","ts":25.000,"pid":1,"tid":1})") !=
        std::string::npos);
  CHECK(times(out, R"("ph":"B")") == 5);  // two negotiations, the operation, its two phases
  CHECK(times(out, R"("ph":"E")") == 4);
  trace.close(at(40), 7, &out);
  CHECK(times(out, R"("ph":"E")") == 5);
  CHECK(out.find(R"("args":{"count":7}})") != std::string::npos);
  CHECK(out.ends_with("]\n"));
}

TEST_CASE("trace: ends without a beginning vanish, a second beginning ends the first, time never goes back") {
  using Kind = TraceEvent::Kind;
  Trace trace(origin());
  std::string out;
  for (const Kind kind : {Kind::kAgreed, Kind::kPhase, Kind::kDone}) trace.add(event(kind, "w", 5), &out);
  CHECK(out.empty());
  trace.add(event(Kind::kStarted, "w", 10, "ring"), &out);
  trace.add(event(Kind::kStarted, "w", 8, "ring"), &out);
  trace.add(event(Kind::kDone, "w", 4), &out);
  CHECK(times(out, R"("ph":"B")") == times(out, R"("ph":"E")"));
  CHECK(out.find("\"ts\":4.000") == std::string::npos);
}

TEST_CASE("trace: unnamed operations of one kind run side by side in rows of their own") {
  using Kind = TraceEvent::Kind;
  Trace trace(origin());
  std::string out;
  TraceEvent first = event(Kind::kStarted, "", 1, "ring"), second = first, third = first;
  second.key.sequence = 1;
  third.key.sequence = 2;
  trace.add(first, &out);
  trace.add(second, &out);
  first.kind = Kind::kDone;
  trace.add(first, &out);
  trace.add(third, &out);  // takes the row that became free
  CHECK(times(out, "\"process_name\"") == 1);
  CHECK(times(out, "\"thread_name\"") == 2);
  CHECK(out.find("allreduce (unnamed)") != std::string::npos);
  CHECK(times(out, "\"args\":{\"sequence\":1}") == 1);  // by which the files of several ranks are matched
}

TEST_CASE("trace: with the names of operations a tensor has a process for each operation on it") {
  using Kind = TraceEvent::Kind;
  Trace::Origin with_names = origin();
  with_names.operation_names = true;
  Trace trace(with_names);
  std::string out;
  TraceEvent named = event(Kind::kStarted, "layer.weight", 1, "ring"), unnamed = event(Kind::kStarted, "", 1, "ring");
  unnamed.key.sequence = 17;
  trace.add(named, &out);
  trace.add(unnamed, &out);
  named.key.op = Op::kBroadcast;
  trace.add(named, &out);
  named.key.process_set = 3;
  trace.add(named, &out);
  for (const char* name : {"\"allreduce.layer.weight\"", "\"allreduce.noname.17\"", "\"broadcast.layer.weight\"",
                           "\"broadcast.layer.weight [process set 3]\""})
    CHECK_MESSAGE(out.find(name) != std::string::npos, out);
  CHECK(times(out, "\"process_name\"") == 4);
}

TEST_CASE("trace: spans that are over have a row of their own, and none begins before the file does") {
  Trace trace(origin());
  std::string out;
  for (const int begin : {-50, 100}) {
    TraceEvent span = event(TraceEvent::Kind::kSpan, "FORMED", begin);
    span.seconds = 80e-6;
    span.args = "\"source\":\"memory\"";
    trace.add(span, &out);
  }
  CHECK(out.find(R"({"ph":"X","name":"FORMED","ts":0.000,"dur":30.000,"pid":0,"tid":1,)") != std::string::npos);
  CHECK(out.find(R"("ts":100.000,"dur":80.000,"pid":0,"tid":1,"args":{"source":"memory"}})") != std::string::npos);
  CHECK(times(out, "thread_name") == 1);
}

TEST_CASE("trace: names are escaped") { CHECK(json_text("a\"b\\c\n") == "\"a\\\"b\\\\c\\u000a\""); }

TEST_CASE("timeline: events of several threads, started and stopped in between, give complete files" *
          doctest::test_suite("long")) {
  Timeline timeline;
  TemporaryFile file;
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      while (!over.load())
        if (timeline.on()) timeline.announced({Op::kAllreduce, 0, std::to_string(t), 0}, t, Clock::now());
    });
  for (int round = 0; round < 20; ++round) {
    REQUIRE(timeline.start(file.path, origin(), round % 2 == 0, [](const std::string&) {}).is_ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    timeline.stop();
    CHECK_FALSE(timeline.on());
    const std::string text = content_of(file.path);
    CHECK(text.starts_with("[\n{"));
    CHECK(text.ends_with("]\n"));
  }
  over = true;
  for (auto& thread : threads) thread.join();
}

TEST_CASE("timeline: the engine never waits for the disk; what is dropped is counted") {
  Timeline timeline;
  TemporaryFile pipe;
  ::unlink(pipe.path.c_str());
  REQUIRE(::mkfifo(pipe.path.c_str(), 0600) == 0);
  const int reader = ::open(pipe.path.c_str(), O_RDONLY | O_NONBLOCK);
  REQUIRE(timeline.start(pipe.path, origin(), false, [](const std::string&) {}).is_ok());
  for (int i = 0; i < 300000; ++i) timeline.cycle();  // the writer is stuck until these end: nobody reads the pipe
  std::string text;
  std::thread drain([&] {
    char part[65536];
    while (text.find("dropped_events") == std::string::npos || !text.ends_with("]\n"))
      if (const ssize_t n = ::read(reader, part, sizeof part); n > 0) text.append(part, static_cast<size_t>(n));
  });
  timeline.stop();
  drain.join();
  ::close(reader);
  const size_t shown = times(text, "CYCLE_START");
  CHECK(shown < 300000);
  CHECK(text.find(text_of("\"count\":", 300000 - shown, "}")) != std::string::npos);
}

TEST_CASE("timeline: a listener gets the events of its own rank, with a file or without one") {
  Timeline timeline;
  TemporaryFile file;
  const TraceKey key{Op::kAllreduce, 0, "x\"y", 0};
  timeline.announced(key, 1, at(1));
  CHECK_FALSE(timeline.on());
  timeline.listen(1);
  for (const bool writes : {false, true}) {
    if (writes) REQUIRE(timeline.start(file.path, origin(), false, [](const std::string&) {}).is_ok());
    CHECK(timeline.on());
    timeline.announced(key, 0, at(1));
    timeline.announced(key, 1, at(2));
    timeline.cycle();
    timeline.step(7, at(3));
    timeline.span("RECOVERY", at(4), 0.5, "\"generation\":2");
    CHECK(timeline.heard() ==
          "[\"announced\",\"allreduce\",0,\"x\\\"y\",0,\"\",{},2000,0.000]\n"
          "[\"step\",\"allreduce\",0,\"\",7,\"\",{},3000,0.000]\n"
          "[\"span\",\"allreduce\",0,\"RECOVERY\",0,\"\",{\"generation\":2},4000,500000.000]\n");
    timeline.stop();
    CHECK(timeline.on());  // for its listener
  }
  CHECK(times(content_of(file.path), "\"step\":7") == 1);
  for (int i = 0; i < 70000; ++i) timeline.step(1, at(i));
  CHECK(timeline.heard().ends_with(text_of("[\"dropped\",", 70000 - 65536, "]\n")));
  timeline.stop_listening();
  CHECK_FALSE(timeline.on());
  CHECK(timeline.heard().empty());
}

TEST_CASE("log: lines that somebody takes do not go to stderr, and none is lost where he is slow or gone") {
  LogLines lines;
  std::vector<LogLine> left;
  const auto line = [](const char* text, int64_t second) {
    return LogLine{LogLevel::kWarning, 3, second * 1'000'000'000, text};
  };
  CHECK_FALSE(lines.give(line("nobody takes it", 1), &left));
  lines.begin();
  CHECK(lines.give(line("one", 1), &left));
  CHECK(lines.give(line("two", 4), &left));
  CHECK_FALSE(lines.give(line("three", 7), &left));  // the first has waited for too long
  REQUIRE(left.size() == 2);
  CHECK(left[1].text == "two");
  CHECK(lines.give(line("four", 8), &left));
  lines.end();
  CHECK_FALSE(lines.give(line("five", 8), &left));
  const std::vector<LogLine> taken = lines.take();
  REQUIRE(taken.size() == 1);
  CHECK(taken[0].text == "four");
  CHECK(lines.take().empty());
  lines.begin();
  std::thread waits([&] { CHECK(lines.take().size() == 1); });
  CHECK(lines.give(line("six", 9), &left));
  waits.join();
}

Recorder::Entry entry_of(const Operation& op, uint64_t call) {
  return {op.signature(), op.request.name, op.process_set, false, op.submitted, call, 0};
}

TEST_CASE("recorder: keeps the newest, in order, and leaves those that were pushed out alone") {
  Recorder recorder;
  std::vector<std::unique_ptr<Operation>> operations;
  for (uint64_t i = 0; i < Recorder::kKept + 10; ++i) {
    auto op = std::make_unique<Operation>();
    op->request.name = "t" + std::to_string(i);
    op->request.signature.tensors = {{DType::kF16, {2, static_cast<int64_t>(i)}}};
    op->submitted = Clock::now();
    op->traces.record = recorder.submitted(entry_of(*op, i + 1));
    operations.push_back(std::move(op));
  }
  recorder.done(operations[3]->traces.record, Code::kPeerLost,
                processor_ticks());  // no longer kept: its place is another's
  recorder.agreed(*operations[20], processor_ticks());
  recorder.done(operations[20]->traces.record, Code::kMismatch, processor_ticks());
  const std::string json = recorder.json();
  CHECK(times(json, "\"number\"") == Recorder::kKept);
  CHECK(json.find("\"t9\"") == std::string::npos);
  CHECK(json.find("\"t10\"") < json.find("\"t11\""));
  CHECK(json.find("peer lost") == std::string::npos);
  CHECK(times(json, "\"state\":\"mismatch\"") == 1);
  CHECK(json.find("\"shape\":[2,20]") != std::string::npos);
  CHECK(recorder.submissions() == Recorder::kKept + 10);
}

TEST_CASE("straggler statistics and stack requests: who was last, who has answered") {
  StragglerStatistics stragglers(3);
  stragglers.last_was(1, 0.25);
  stragglers.last_was(1, 0.5);
  CHECK(stragglers.json({4, 7, 9}) == R"([{"rank":7,"times":2,"seconds":0.75}])");
  StackRequest stack_request;
  stack_request.open(at(0));
  stack_request.ask(2);
  stack_request.ask(5);
  stack_request.answer(2, "sleeps\nFile x");
  stack_request.answer(3, "was not asked");
  CHECK_FALSE(stack_request.complete(at(10)));
  CHECK(stack_request.complete(at(2000000)));
  CHECK(stack_request.text() == "\n  rank 2 sleeps\n    File x\n  rank 5 has not answered (stopped? very busy?)");
  stack_request.open(at(0));
  for (int rank : {1, 2, 3, 4, 6}) stack_request.ask(rank);
  for (int rank : {1, 3, 4}) stack_request.answer(rank, text_of("sleeps ", rank, "\nFile x\nFile y"));
  stack_request.answer(2, "waits\nFile z");
  CHECK(stack_request.text() ==
        "\n  rank 1 sleeps 1\n  rank 3 sleeps 3\n  rank 4 sleeps 4\n    ranks 1,3,4:\n    File x\n    File y"
        "\n  rank 2 waits\n    File z\n  rank 6 has not answered (stopped? very busy?)");
}

TEST_CASE("engine: a timeline, records and metrics are asked for while other threads submit") {
  TemporaryFile file;
  World world(2, {{"HOROVOD_TIMELINE", "DYNAMIC"}});
  Status outcome = world.each([&](Engine& engine, int rank) {
    std::thread asker([&] {
      for (int i = 0; i < 20; ++i) {
        if (rank == 0) CHECK(engine.start_timeline(file.path, true).is_ok());
        CHECK(engine.flight_record("test").find("\"operations\"") != std::string::npos);
        CHECK(engine.counters_json().find("last_ready") != std::string::npos);
        if (rank == 0) CHECK(engine.stop_timeline().is_ok());
      }
    });
    std::vector<float> v(100, 1.0f);
    for (int i = 0; i < 300; ++i) {
      int64_t handle = 0;
      REQUIRE(submit(engine, Op::kAllreduce, i % 2 ? "named" : "", v, &v, {100}, &handle).is_ok());
      REQUIRE(finish(engine, handle).is_ok());
      engine.release(handle);
    }
    asker.join();
  });
  CHECK_MESSAGE(outcome.is_ok(), outcome.text());
  CHECK(content_of(file.path).ends_with("]\n"));
}

TEST_CASE("engine: clocks of ranks without shared memory are compared when every rank writes a timeline") {
  TemporaryFile file;
  World world(
      3, {{"HOROVOD_TIMELINE", "DYNAMIC"}, {"HOROCLONE_TIMELINE_ALL_RANKS", "1"}, {"HOROCLONE_SHARED_MEMORY", "0"}});
  Status outcome = world.each([&](Engine& engine, int rank) {
    CHECK(engine.start_timeline(file.path, false).is_ok());
    CHECK(engine.stop_timeline().is_ok());
    std::vector<float> v(4, 1.0f);
    int64_t handle = 0;
    REQUIRE(submit(engine, Op::kAllreduce, "x", v, &v, {4}, &handle).is_ok());  // nobody leaves while clocks are asked
    REQUIRE(finish(engine, handle).is_ok());
    engine.release(handle);
    if (rank == 0) return;
    const std::string path = text_of(file.path, ".rank", rank);
    const std::string text = content_of(path);
    ::unlink(path.c_str());
    const size_t error = text.find("clock_error_micros\":");
    REQUIRE(error != std::string::npos);
    CHECK(std::atof(text.c_str() + error + 20) < 1e6);  // measured (unknown is 1e15)
  });
  CHECK_MESSAGE(outcome.is_ok(), outcome.text());
}
