// Writes what happens to operations in Chrome's trace event format (a JSON array, one event per line), which Perfetto
// and chrome://tracing open. Each tensor is a "process"; its even rows show its negotiation, its odd rows its
// execution. PURE: events and times go in, text comes out. Thread: one at a time (Timeline's writer). Owner: Timeline.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/dtype.h"

namespace hc {

// Which operation an event belongs to.
struct TraceKey {
  Op op = Op::kAllreduce;
  uint16_t process_set = 0;
  std::string name;  // empty: unnamed, told apart by
  uint64_t sequence = 0;
};

struct TraceEvent {
  enum class Kind : uint8_t {
    kAnnounced,  // `rank` is ready; the first one opens NEGOTIATE_<OP>
    kAgreed,     // ends NEGOTIATE_<OP>
    kStarted,    // opens <OP> and in it `phase`
    kPhase,      // the next phase of it
    kDone,       // ends it; `args` are the members of a JSON object
    kCycle,      // one coordinated step
    kSpan,       // key.name from `time` on for `seconds`, which this file is told about afterwards
    kStep,       // the training step key.sequence begins
  };
  Kind kind = Kind::kCycle;
  TraceKey key;
  int rank = -1;              // world rank
  const char* phase = "";     // "recursive doubling" is shown as RECURSIVE_DOUBLING; lives for ever
  bool of_operation = false;  // the phase's name is <phase>_<OP>
  std::string args;
  TimePoint time{};
  double seconds = 0;
};

std::string json_text(std::string_view text);  // quoted and escaped
// For who makes spans of events: [kind, operation, process set, name, sequence, phase, {args}, ns of the monotonic
// clock, microseconds] and a newline. "" of what is not about operations, steps and recoveries.
std::string event_line(const TraceEvent& event);

class Trace {
 public:
  struct Origin {
    TimePoint start{};         // time 0 of the file
    int64_t epoch_micros = 0;  // the same moment, since 1970
    int rank = 0, size = 1;
    bool operation_names = false;  // allreduce.NAME and allreduce.noname.17, not NAME and allreduce (unnamed)
    bool all_ranks = false;        // one file per rank: process numbers and names must differ between them
    double clock_ahead_s = 0;      // rank 0's monotonic clock minus mine,
    double clock_error_s = 0;      // give or take this much
  };
  explicit Trace(const Origin& origin) : origin_(origin) {}
  void open(std::string* out);
  void add(const TraceEvent& event, std::string* out);
  // Ends the array and everything that is still open, so that every begin has its end.
  void close(TimePoint now, uint64_t dropped, std::string* out);

 private:
  struct Track {  // a process
    int pid = 0;
    std::vector<bool> busy[2];  // rows taken, of negotiations and of runs
  };
  struct Flight {  // a row with something open
    Track* track = nullptr;
    int row = 0, kind = 0;
    bool in_phase = false;
    double last_us = 0;
    std::string op;  // ALLREDUCE
  };
  using Flights = std::unordered_map<std::string, Flight>;

  Track& track_of(const TraceKey& key, std::string* out);
  Flight& take_row(const TraceKey& key, int kind, Flights* flights, const std::string& id, std::string* out);
  void begin(Flight* f, const std::string& name, TimePoint at, std::string* out, std::string_view args = {});
  void end(Flight* f, TimePoint at, std::string_view args, std::string* out);
  void add_span(const TraceEvent& event, std::string* out);
  void begin_phase(Flight* f, const TraceEvent& event, std::string* out);
  void finish(Flights* flights, const std::string& id, TimePoint at, std::string_view args, std::string* out);
  double stamp(Flight* f, TimePoint at);
  double micros(TimePoint at) const { return seconds_between(origin_.start, at) * 1e6; }
  int pid_base() const { return origin_.all_ranks ? origin_.rank * 1000000 : 0; }
  void metadata(int pid, const char* what, std::string_view args, std::string* out);
  void name_rows(const Flight& f, std::string* out);

  const Origin origin_;
  bool has_spans_ = false;  // their row has its name
  std::unordered_map<std::string, Track> tracks_;
  Flights negotiating_, running_;
};

}  // namespace hc
