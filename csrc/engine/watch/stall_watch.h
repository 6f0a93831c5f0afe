// Reports stalls: which operations wait, for whom, for how long, and what the late ranks are doing instead. After
// HOROVOD_STALL_SHUTDOWN_TIME_SECONDS it ends the job. Each late rank is asked once per report; the report has its
// answer, or says that there was none.
//
// Thread: the thread that makes progress. Owner: the engine.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "engine/control/control_link.h"
#include "engine/intake/flight_records.h"
#include "engine/intake/intake.h"
#include "engine/watch/stack_request.h"
#include "engine/watch/stack_source.h"

namespace hc {

// What waits longer than it should.
struct Stalls {
  std::string lines;   // one for each operation; empty: nothing
  std::set<int> late;  // world ranks that are waited for
  double longest_s = 0;
};

// What this rank itself has not seen to end.
struct OwnWork {
  std::vector<const Operation*> pending;
  std::string launched;  // on a GPU; empty: nothing
};

class StallWatch {
 public:
  StallWatch(Context& context, ControlLink& link, const Intake& intake, FlightRecords& records, StackSource& stacks)
      : context_(context), link_(link), intake_(intake), records_(records), stack_source_(stacks) {}
  static constexpr auto kAnswerMs = std::chrono::milliseconds(20);  // between two looks for answers
  void start() { next_report_ = Clock::now(); }

  bool is_due(TimePoint now) const { return !context_.config.stall_check_disable && now >= next_report_; }
  // mine: for this rank's answer when it is late itself. An error: why the job ends.
  Status report(TimePoint now, Stalls stalls, const OwnWork& mine);
  // The report waits for answers: look again in some milliseconds.
  bool awaits_answers() const { return stack_request_.is_open(); }

  // Frames of other ranks' reports, and of their answers to mine.
  Status answer(int from, bool asked, const OwnWork& mine);
  // Another rank's report of a stall, of which this one will be a part, was seen lately.
  bool was_asked(TimePoint now) const {
    return asked_at_ != TimePoint{} && seconds_between(asked_at_, now) < 3 * context_.config.stall_check_s;
  }
  void take_answer(int from, std::string text) { stack_request_.answer(from, std::move(text)); }

 private:
  Status ask(const std::set<int>& late, TimePoint now, const OwnWork& mine);
  std::string what_this_rank_does(const OwnWork& mine);

  Context& context_;
  ControlLink& link_;
  const Intake& intake_;
  FlightRecords& records_;
  StackSource& stack_source_;
  StackRequest stack_request_;
  TimePoint next_report_{}, asked_at_{};
};

}  // namespace hc
