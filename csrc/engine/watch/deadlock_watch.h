// Notices ranks that wait for one another for ever. A rank whose threads stand in calls while nothing of it moves tells
// the watcher, the lowest rank that has not left; agreement/deadlock.h finds out who can never go on. They are asked
// where they stand, the watcher says it, and after HOROCLONE_DEADLOCK_TIME_SECONDS it has their calls ended with an
// error. Nothing is sent as long as no rank waits for more than a moment.
//
// Thread: the thread that makes progress. Owner: the engine.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "agreement/deadlock.h"
#include "base/clock.h"
#include "engine/control/control_link.h"
#include "engine/operation/operation.h"
#include "engine/watch/stack_source.h"

namespace hc {

// What the watcher tells all ranks.
struct DeadlockNotice {
  std::set<int> stuck;  // world ranks
  std::string text;     // not empty: end what they wait for with this error
};

class DeadlockWatch {
 public:
  DeadlockWatch(Context& context, ControlLink& link, StackSource& stacks)
      : context_(context), link_(link), stacks_(stacks) {}

  // This rank's side, now and then while something is pending. An error ends the job.
  Status look(TimePoint now, const std::vector<const Operation*>& pending, const MembersOf& members_of);
  // The watcher's: what another rank tells. The same for the error.
  Status take_report(int from, Reader* in, const MembersOf& members_of);
  // A notice that came in; look() gives the answer of who is stuck.
  Status take_notice(Reader* in);
  // What this rank has to do about a notice, which may be its own.
  std::optional<DeadlockNotice> next_notice() { return std::exchange(notice_, std::nullopt); }
  // What this rank has to end of its messages: a moment after the collectives, so that none that it submits then is
  // taken for one of those.
  std::optional<DeadlockNotice> messages_to_end(TimePoint now);
  // It has been said, and still is so: there is no need for another report.
  bool is_said() const { return is_said_; }

 private:
  double patience_s() const;
  bool has_moved(TimePoint now, size_t pending);
  int watcher() const;
  WaitingRank report(TimePoint now, const std::vector<const Operation*>& pending) const;
  Status tell(const WaitingRank& report, const MembersOf& members_of);
  Status evaluate(TimePoint now, const MembersOf& members_of);
  Status notify(DeadlockNotice notice);
  void take_note(DeadlockNotice notice);

  Context& context_;
  ControlLink& link_;
  StackSource& stacks_;
  std::optional<DeadlockNotice> notice_, messages_;
  TimePoint messages_end_{};

  // What this rank tells.
  TimePoint quiet_since_{}, next_tell_{};
  TimePoint works_until_{};  // it was seen that the program does something: not to be looked at before
  uint64_t submitted_ = 0;   // Counters::operations and what was pending, at the last look
  size_t pending_ = 0;
  bool has_told_ = false;
  bool is_stuck_ = false, has_looked_ = false;  // the watcher says so; this rank has looked where it stands
  std::string where_;

  // The watcher.
  WaitingRanks ranks_;
  std::set<int> stuck_;
  bool is_said_ = false;
  TimePoint noticed_{}, next_end_{};
  int ends_ = 0;  // times it was told to end, in vain so far
};

}  // namespace hc
