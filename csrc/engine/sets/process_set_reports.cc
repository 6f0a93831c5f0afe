// A process set's reports about itself: to the flight recorder and the timeline, to stall reports, to people.
#include <algorithm>

#include "agreement/deadlock.h"
#include "base/clock.h"
#include "base/quoted.h"
#include "engine/sets/process_set.h"

namespace hc {

namespace {

constexpr size_t kShownPending = 20;  // pending operations in a description
constexpr double kFlushesApartS = 1;
constexpr double kOthersSpeakS = 2;  // after rank 0 of a set, about what has been launched

std::vector<int> world_ranks(const std::vector<int>& group_ranks, const Members& members) {
  std::vector<int> ranks;
  for (int g : group_ranks) ranks.push_back(members.ranks[static_cast<size_t>(g)]);
  return ranks;
}

}  // namespace

// The batch under way has just begun.
void ProcessSet::note_batch(TimePoint planned) {
  const uint64_t now = processor_ticks();
  Timeline& timeline = parts_.timeline;
  const uint64_t started = parts_.context.rank_metrics.at(now);
  for (Operation* op : batches_.runner()->operations()) {
    if (!op) continue;
    op->traces.started.store(started, std::memory_order_relaxed);
    parts_.intake.recorder().agreed(*op, now);
    if (!timeline.on()) continue;
    const TimePoint at = planned == TimePoint{} ? Clock::now() : planned;
    if (!negotiator_->is_coordinator()) timeline.agreed(Timeline::key_of(*op), at);  // it showed it when it decided
    timeline.started(*op, "queue", false, at);
  }
}

void ProcessSet::show_persistent(const Operation& op, const ArrivalCollective& run) {
  const ArrivalCollective::Arrival& arrival = run.arrival();
  const TimePoint at = arrival.last < 0 ? op.submitted : arrival.at;
  parts_.timeline.agreed(Timeline::key_of(op), at);
  parts_.timeline.started(op, run.algorithm(), true, at);
}

// Only a coordinator knows who is missing in what is agreed on. Of what needs no plan nobody does; the lowest of the
// ranks that wait speaks for them.
void ProcessSet::find_stalls(TimePoint now, bool asked, Stalls* stalls) const {
  const double patience_s = parts_.context.config.stall_check_s;
  const auto add = [&](const std::vector<int>& missing, double waited_s) {
    stalls->late.insert(missing.begin(), missing.end());
    stalls->longest_s = std::max(stalls->longest_s, waited_s);
  };
  if (negotiator_ && negotiator_->is_coordinator())
    for (const Stall& stall : negotiator_->coordinator()->stalled(now, patience_s)) {
      const std::vector<int> missing = world_ranks(stall.missing, members());
      stalls->lines += text_of("\n  ", stall.name, " (", static_cast<int>(stall.waited_s), " s): missing ",
                               ranks_text(missing), "; ready ", ranks_text(world_ranks(stall.present, members())));
      if (members().id) stalls->lines += "; process set of " + ranks_text(members().ranks);
      if (!stall.hint.empty()) stalls->lines += "; " + stall.hint;
      add(missing, stall.waited_s);
    }
  const auto add_arrival = [&](const std::string& what, double waited_s, const std::vector<int>& late) {
    int speaker = 0;
    while (std::find(late.begin(), late.end(), speaker) != late.end()) ++speaker;
    if (late.empty() || speaker != members().group_rank) return;
    const std::vector<int> missing = world_ranks(late, members());
    stalls->lines += text_of("\n  ", what, " (", static_cast<int>(waited_s), " s): missing ", ranks_text(missing));
    add(missing, waited_s);
  };
  for (const Arrival& run : arrivals_)
    if (const double waited_s = seconds_between(run.op->submitted, now); waited_s >= patience_s)
      add_arrival(run.op->describe(), waited_s, run.collective->late_members());
  for (const SetBackend::Late& one : backend_->late(now, patience_s)) add_arrival(one.what, one.waited_s, one.missing);
  // What every rank has launched and the device does not end. Rank 0 asks all, and others speak where it has not.
  const double later_s = members().group_rank == 0 ? 0 : kOthersSpeakS;
  if (asked && members().group_rank != 0) return;
  double waited_s = 0;
  const std::string launched = backend_->under_way(now, patience_s + later_s, &waited_s);
  if (launched.empty()) return;
  stalls->lines += text_of("\n  on the GPU of rank ", parts_.context.rank(), ", ", launched);
  add(members().ranks, waited_s);
}

Status ProcessSet::flush_held_requests_if_late(TimePoint now) {
  if (!negotiator_ || !negotiator_->may_flush_held(now)) return Status::ok();
  const double patience_s = parts_.context.config.stall_check_s / 2;
  const bool late = std::any_of(pending_.all().begin(), pending_.all().end(), [&](const Operation* op) {
    return op->batch == 0 && seconds_between(op->submitted, now) >= patience_s;
  });
  return late ? negotiator_->flush_held(now, patience_s) : Status::ok();
}

Status ProcessSet::flush_held_requests(bool steps_back) {
  if (steps_back && backend_->may_leave()) leave_shared_rounds();
  negotiator_->hold_nothing_until_plan();  // who steps back announces a moment later
  const TimePoint now = Clock::now();
  return negotiator_->may_flush_held(now) ? negotiator_->flush_held(now, kFlushesApartS) : Status::ok();
}

void ProcessSet::end_deadlock(const std::set<int>& stuck, const std::string& text) {
  if (!negotiator_->is_coordinator()) return;
  std::vector<int> positions;
  for (int rank : stuck)
    if (const int position = members().position_of(rank); position >= 0) positions.push_back(position);
  negotiator_->end_deadlock(positions, text);
}

Status ProcessSet::end_refused() {
  Iteration now;
  while (batches_.next_is_refused()) {
    HC_TRY(begin_batch(batches_.take_next()));
    if (batches_.runner()->step(&now.moved) == Progress::kPending) break;
    finish_batch();
  }
  return Status::ok();
}

void ProcessSet::mark_awaited(TimePoint now, std::vector<bool>* waits) {
  const double patience_s = parts_.context.config.liveness_probe_s;
  const bool late =
      std::any_of(pending_.all().begin(), pending_.all().end(),
                  [&](const Operation* op) { return seconds_between(op->submitted, now) >= patience_s; }) ||
      backend_->oldest_flight_s(now) >= patience_s;
  if (late)
    for (int r : members().ranks) (*waits)[static_cast<size_t>(r)] = true;
}

std::string ProcessSet::describe(TimePoint now) const {
  std::string text = text_of("\n", members().prefix(), members().size(), " ranks, ", pending_.size(),
                             " operations pending, ", batches_.planned(), " batches planned");
  if (batches_.runner()) text += text_of(", batch ", batches_.runner()->batch().id, " under way");
  size_t shown = 0;
  for (const Operation* op : pending_.all()) {
    if (++shown > kShownPending) break;
    text += text_of("\n  ", op->describe(), " for ", seconds_between(op->submitted, now), " s",
                    op->batch ? text_of(", in batch ", op->batch) : ", not agreed yet");
  }
  if (!negotiator_ || !negotiator_->is_coordinator()) return text;
  for (const Stall& stall : negotiator_->coordinator()->stalled(now, 0.0)) {
    text += text_of("\n  ", stall.name, " misses ranks");
    for (int r : world_ranks(stall.missing, members())) text += " " + std::to_string(r);
  }
  return text;
}

}  // namespace hc
