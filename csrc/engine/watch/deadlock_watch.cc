#include "engine/watch/deadlock_watch.h"

#include <algorithm>

namespace hc {

namespace {

constexpr double kQuietPeriodS = 2;  // without progress, before anybody is told
constexpr double kAnswerS = 1;       // for ranks to say where they stand
constexpr double kKnownS = 1;        // after which what they had begun without a message is known
constexpr double kAwaitedS = 1;      // since a thread's last look: it waits in slices
constexpr double kMessagesLaterS = 0.3;
constexpr double kAgainS = 0.5;      // between two reports of a rank that is known to be stuck
constexpr int kPollsLimit = 10;      // times the limit for a rank that polls: it may work between
constexpr int kMaxEnds = 5;          // a second apart; if calls still have not ended, the job does
constexpr double kAskAgainS = 2;     // where ranks stand, if they have not answered
constexpr size_t kMaxAwaited = 256;  // threads of one rank

const MembersOf kKnownMembers = [](uint16_t) { return std::span<const int>(); };  // each call has its own

std::chrono::milliseconds in_ms(double s) { return std::chrono::milliseconds(static_cast<int64_t>(s * 1000)); }

// Its data moves: the others are there.
bool is_under_way(const Operation* op) {
  return op->batch != 0 || op->traces.started.load(std::memory_order_relaxed) != 0;
}

// Of the threads that stand in calls; 0: a framework's program does.
std::vector<int> threads_of(const std::vector<const Operation*>& pending, TimePoint now) {
  std::vector<int> threads;
  for (const Operation* op : pending)
    if (op->is_awaited(now, kAwaitedS) || op->is_polled(now))
      threads.push_back(op->tell.call ? 0 : op->traces.awaited.thread.load(std::memory_order_relaxed));
  return threads;
}

}  // namespace

double DeadlockWatch::patience_s() const {
  const double limit_s = context_.config.deadlock_s;
  return limit_s > 0 ? std::min(kQuietPeriodS, limit_s / 2) : kQuietPeriodS;
}

bool DeadlockWatch::has_moved(TimePoint now, size_t pending) {
  const uint64_t submitted = context_.counters.operations.load(std::memory_order_relaxed);
  if (submitted == submitted_ && pending == pending_) return false;
  submitted_ = submitted;
  pending_ = pending;
  quiet_since_ = now;
  return true;
}

int DeadlockWatch::watcher() const {
  int rank = 0;
  while (rank != context_.rank() && link_.has_left(rank)) ++rank;
  return rank;
}

Status DeadlockWatch::look(TimePoint now, const std::vector<const Operation*>& pending, const MembersOf& members_of) {
  WaitingRank mine;
  if (!has_moved(now, pending.size()) && seconds_between(quiet_since_, now) >= patience_s() && now >= works_until_)
    mine = report(now, pending);
  return go_on(now, std::move(mine), threads_of(pending, now), now, members_of);
}

Status DeadlockWatch::look(TimePoint now, WorldWaits waits) {
  WaitingRank mine;
  if (!waits.moves && seconds_between(waits.quiet_since, now) >= patience_s() && now >= works_until_) {
    mine = std::move(waits.rank);
    mine.quiet_s = seconds_between(waits.quiet_since, now);
  }
  return go_on(now, std::move(mine), waits.threads, waits.at, kKnownMembers);
}

WorldWaits DeadlockWatch::shown(TimePoint now, const std::vector<const Operation*>& pending,
                                const MembersOf& members_of) const {
  WorldWaits waits;
  waits.at = now;
  waits.quiet_since = quiet_since_;
  waits.submitted = submitted_;
  if (pending.empty()) return waits;
  waits.rank = report(now, pending);
  waits.moves = waits.rank.awaited.empty() && waits.rank.submitted.empty() && waits.rank.joined.empty();
  for (AwaitedCall& call : waits.rank.awaited) {
    const std::span<const int> members = members_of(call.process_set);
    call.members.assign(members.begin(), members.end());
    waits.moves = waits.moves || members.empty();  // it is being removed
  }
  waits.threads = threads_of(pending, now);
  return waits;
}

// seen: when it was seen what this rank waits for.
Status DeadlockWatch::go_on(TimePoint now, WaitingRank mine, const std::vector<int>& threads, TimePoint seen,
                            const MembersOf& members_of) {
  if (mine.awaited.empty()) {
    is_stuck_ = has_looked_ = false;
    return std::exchange(has_told_, false) ? tell(mine, members_of) : Status::ok();
  }
  if (is_stuck_ && !has_looked_ && seen >= stuck_since_) {
    StackSource::Standing standing = stacks_.look(threads);
    next_tell_ = now;
    if (!standing.is_still) {
      is_stuck_ = false;
      works_until_ = now + in_ms(mine.quiet_s);
      has_told_ = false;
      return tell({}, members_of);
    }
    has_looked_ = true;
    where_ = std::move(standing.where);
  }
  if (has_told_ && now < next_tell_) return Status::ok();
  mine.has_looked = has_looked_;
  if (has_looked_) mine.where = where_;
  has_told_ = true;
  next_tell_ = now + in_ms(is_stuck_ ? kAgainS : mine.quiet_s);  // ever more rarely
  return tell(mine, members_of);
}

// Without awaited calls when nothing is known to be awaited, or something moves.
WaitingRank DeadlockWatch::report(TimePoint now, const std::vector<const Operation*>& pending) const {
  WaitingRank mine;
  mine.quiet_s = seconds_between(quiet_since_, now);
  std::vector<const Operation*> awaited;
  for (const Operation* op : pending) {
    const bool waits = op->is_awaited(now, kAwaitedS) || op->is_polled(now);
    if (waits && is_under_way(op)) return {};
    if (waits) awaited.push_back(op);
    if (waits && !op->is_awaited(now, kAwaitedS)) mine.polls = true;
    if (is_message(op->signature().op)) continue;
    if (op->signature().op == Op::kJoin)
      mine.joined.push_back(op->process_set);
    else
      mine.submitted.push_back(key_of_call(op->process_set, op->request));
  }
  std::sort(mine.submitted.begin(), mine.submitted.end());
  std::sort(awaited.begin(), awaited.end(),
            [](const Operation* a, const Operation* b) { return a->submitted < b->submitted; });
  awaited.resize(std::min(awaited.size(), kMaxAwaited));
  for (const Operation* op : awaited) {
    const Signature& s = op->signature();
    mine.awaited.push_back({s.op, op->process_set, key_of_call(op->process_set, op->request),
                            is_message(s.op) ? s.root : -1, op->describe()});
  }
  return mine;
}

Status DeadlockWatch::tell(const WaitingRank& report, const MembersOf& members_of) {
  if (const int to = watcher(); to != context_.rank()) {
    encode(report, &link_.begin(scope_ == Scope::kWorld ? FrameKind::kWaiting : FrameKind::kWaitingInWorlds));
    return link_.send(to, true);
  }
  if (report.awaited.empty())
    ranks_.erase(context_.rank());
  else
    ranks_[context_.rank()] = report;
  return evaluate(Clock::now(), members_of);
}

// ---- the watcher

Status DeadlockWatch::take_report(int from, Reader* in, const MembersOf& members_of) {
  WaitingRank report;
  HC_TRY(decode(in, &report));
  if (report.awaited.empty())
    ranks_.erase(from);
  else
    ranks_[from] = std::move(report);
  return evaluate(Clock::now(), members_of);
}

Status DeadlockWatch::evaluate(TimePoint now, const MembersOf& members_of) {
  std::erase_if(ranks_, [&](const auto& entry) { return link_.has_left(entry.first); });
  if (scope_ == Scope::kBetweenWorlds) return evaluate_worlds(now);
  std::set<int> stuck = find_deadlock(ranks_, members_of);
  if (stuck.empty()) {
    stuck_.clear();
    is_said_ = false;
    return Status::ok();
  }
  if (stuck != stuck_) {
    stuck_ = std::move(stuck);
    noticed_ = now;
    next_end_ = {};
    ends_ = 0;
    return notify({stuck_, ""});
  }
  double quiet_s = 1e9;
  bool has_looked = true, polls = false;
  for (int rank : stuck_) {
    polls = polls || ranks_.at(rank).polls;
    quiet_s = std::min(quiet_s, ranks_.at(rank).quiet_s);
    has_looked = has_looked && ranks_.at(rank).has_looked;
  }
  if (!has_looked && seconds_between(noticed_, now) < kAnswerS) return Status::ok();
  const double limit_s = context_.config.deadlock_s * (polls ? kPollsLimit : 1);
  const std::string text = describe_deadlock(ranks_, stuck_, members_of);
  if (!std::exchange(is_said_, true)) say(text, limit_s);
  // By now what they do without messages is known to the coordinators.
  const bool is_known = seconds_between(noticed_, now) >= kKnownS;
  if (limit_s <= 0 || quiet_s < limit_s || !is_known || now < next_end_) return Status::ok();
  if (++ends_ > kMaxEnds) return Status(Code::kAborted, text, context_.rank());
  next_end_ = now + in_ms(1);
  return notify({stuck_, text});
}

// What is said and ended here goes through several coordinators, so that nothing may be guessed: all ranks have looked
// where they stand, and a circle of which they tell the same is said once and ended once. It lasts until then: nobody
// in it can go on.
Status DeadlockWatch::evaluate_worlds(TimePoint now) {
  std::set<int> stuck = find_deadlock(ranks_, kKnownMembers);
  if (stuck.empty() || !is_between_worlds(ranks_, stuck)) {
    stuck_.clear();
    is_said_ = false;
    return Status::ok();
  }
  double quiet_s = 1e9;
  bool has_looked = true, polls = false;
  Versions versions;
  for (int rank : stuck) {
    const WaitingRank& waiting = ranks_.at(rank);
    versions[rank] = waiting.version;
    polls = polls || waiting.polls;
    quiet_s = std::min(quiet_s, waiting.quiet_s);
    has_looked = has_looked && waiting.has_looked;
  }
  if (stuck != stuck_ || versions != versions_) {
    stuck_ = std::move(stuck);
    versions_ = std::move(versions);
    noticed_ = now;
    return notify({stuck_, ""});
  }
  if (!has_looked) {
    if (seconds_between(noticed_, now) < kAskAgainS) return Status::ok();
    noticed_ = now;
    return notify({stuck_, ""});
  }
  const double limit_s = context_.config.deadlock_s * (polls ? kPollsLimit : 1);
  const std::string text = describe_deadlock(ranks_, stuck_, kKnownMembers);
  is_said_ = true;
  // Not again when more ranks have come to wait for the same circle.
  if (said_.empty() || !std::includes(versions_.begin(), versions_.end(), said_.begin(), said_.end()))
    say(text, limit_s);
  said_ = versions_;
  const bool is_known = seconds_between(noticed_, now) >= kKnownS;
  if (limit_s <= 0 || quiet_s < limit_s || !is_known) return Status::ok();
  if (ended_ == versions_)
    return seconds_between(next_end_, now) < kMaxEnds ? Status::ok() : Status(Code::kAborted, text, context_.rank());
  ended_ = versions_;
  next_end_ = now;
  return notify({stuck_, text});
}

void DeadlockWatch::say(const std::string& text, double limit_s) const {
  context_.log.warning(text, limit_s > 0 ? text_of(" If nothing changes, these calls fail after ", limit_s,
                                                   " s (HOROCLONE_DEADLOCK_TIME_SECONDS).")
                                         : " They wait without an end (HOROCLONE_DEADLOCK_TIME_SECONDS=0).");
}

// To every rank: it may be the coordinator of a process set.
Status DeadlockWatch::notify(DeadlockNotice notice) {
  Writer& frame = link_.begin(scope_ == Scope::kWorld ? FrameKind::kDeadlock : FrameKind::kDeadlockOfWorlds);
  frame.put(static_cast<uint32_t>(notice.stuck.size()));
  for (int rank : notice.stuck) frame.put(static_cast<int32_t>(rank));
  frame.put_text(notice.text);
  for (int r = 0; r < context_.mesh->size(); ++r)
    if (r != context_.rank() && !link_.has_left(r)) HC_TRY(link_.send(r, true));
  take_note(std::move(notice));
  return Status::ok();
}

Status DeadlockWatch::take_notice(Reader* in) {
  DeadlockNotice notice;
  const auto n = in->get<uint32_t>();
  for (uint32_t i = 0; i < n && in->ok(); ++i) notice.stuck.insert(in->get<int32_t>());
  notice.text = in->get_text();
  if (!in->ok()) return error(Code::kInternal, "a frame about a deadlock is broken");
  take_note(std::move(notice));
  return Status::ok();
}

void DeadlockWatch::take_note(DeadlockNotice notice) {
  const bool was_stuck = std::exchange(is_stuck_, notice.stuck.contains(context_.rank()));
  if (is_stuck_ && !was_stuck) stuck_since_ = Clock::now();
  if (scope_ == Scope::kWorld)
    take_notice_of_worlds(std::move(notice));
  else
    notice_ = std::move(notice);
}

void DeadlockWatch::take_notice_of_worlds(DeadlockNotice notice) {
  if (notice.stuck.contains(context_.rank()) && !notice.text.empty()) {
    messages_ = notice;
    messages_end_ = Clock::now() + in_ms(kMessagesLaterS);
  }
  notice_ = std::move(notice);
}

std::optional<DeadlockNotice> DeadlockWatch::messages_to_end(TimePoint now) {
  if (!messages_ || now < messages_end_) return std::nullopt;
  // Not one that it has submitted since.
  const bool has_moved = context_.counters.operations.load(std::memory_order_relaxed) != submitted_ ||
                         quiet_since_ > messages_end_ - in_ms(kMessagesLaterS);
  std::optional<DeadlockNotice> ended = std::exchange(messages_, std::nullopt);
  return has_moved ? std::nullopt : ended;
}

}  // namespace hc
