// Notices ranks that wait for one another for ever. A rank whose threads stand in calls while nothing of it moves tells
// the watcher, the lowest rank that has not left; agreement/deadlock.h finds out who can never go on. They are asked
// where they stand, the watcher says it, and after HOROCLONE_DEADLOCK_TIME_SECONDS it has their calls ended with an
// error. Nothing is sent as long as no rank waits for more than a moment.
//
// A second one of the engine looks for circles through several worlds of the processes (process_worlds.h): it is told
// what all of them wait for, and what it finds is ended by each of them.
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
#include "engine/watch/process_worlds.h"
#include "engine/watch/stack_source.h"

namespace hc {

class DeadlockWatch {
 public:
  enum class Scope { kWorld, kBetweenWorlds };
  DeadlockWatch(Context& context, ControlLink& link, StackSource& stacks, Scope scope)
      : context_(context), link_(link), stacks_(stacks), scope_(scope) {}

  // This rank's side, now and then while something is pending. An error ends the job.
  Status look(TimePoint now, const std::vector<const Operation*>& pending, const MembersOf& members_of);
  // The same, of the worlds of this process together.
  Status look(TimePoint now, WorldWaits waits);
  // What this world waits for, for the other look(): as of the last one.
  WorldWaits shown(TimePoint now, const std::vector<const Operation*>& pending, const MembersOf& members_of) const;
  // The watcher has been told of something that may no longer be.
  bool has_told() const { return has_told_; }
  // A notice about a circle through this world and others.
  void take_notice_of_worlds(DeadlockNotice notice);
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
  const std::set<int>& stuck() const { return stuck_; }

 private:
  double patience_s() const;
  bool has_moved(TimePoint now, size_t pending);
  Status go_on(TimePoint now, WaitingRank mine, const std::vector<int>& threads, TimePoint seen,
               const MembersOf& members_of);
  int watcher() const;
  WaitingRank report(TimePoint now, const std::vector<const Operation*>& pending) const;
  Status tell(const WaitingRank& report, const MembersOf& members_of);
  Status evaluate(TimePoint now, const MembersOf& members_of);
  Status evaluate_worlds(TimePoint now);
  void say(const std::string& text, double limit_s) const;
  Status notify(DeadlockNotice notice);
  void take_note(DeadlockNotice notice);

  Context& context_;
  ControlLink& link_;
  StackSource& stacks_;
  const Scope scope_;
  std::optional<DeadlockNotice> notice_, messages_;
  TimePoint messages_end_{};

  // What this rank tells.
  TimePoint quiet_since_{}, next_tell_{};
  TimePoint works_until_{};  // it was seen that the program does something: not to be looked at before
  uint64_t submitted_ = 0;   // Counters::operations and what was pending, at the last look
  size_t pending_ = 0;
  bool has_told_ = false;
  TimePoint stuck_since_{};
  bool is_stuck_ = false, has_looked_ = false;  // the watcher says so; this rank has looked where it stands
  std::string where_;

  // The watcher.
  WaitingRanks ranks_;
  std::set<int> stuck_;
  bool is_said_ = false;
  TimePoint noticed_{}, next_end_{};
  int ends_ = 0;  // times it was told to end, in vain so far
  using Versions = std::map<int, uint64_t>;
  Versions versions_, said_, ended_;  // of the worlds' circle: as it is, as it was said, and told to end
};

}  // namespace hc
