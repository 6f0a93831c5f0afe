// Ballots on their way up and plans on their way down, between ranks: straight to and from group rank 0, or along a
// tree of ranks that combine (combiner.h). Thread: the driving thread.
#include <algorithm>

#include "agreement/frame_budget.h"
#include "agreement/frames.h"
#include "engine/engine.h"

namespace hc {

Status Engine::take_ballots(int from, Reader* in) {
  while (in->ok() && in->remaining() > 0) {
    Ballot ballot;
    HC_TRY(decode(in, &ballot));
    ProcessSet* set = find_set(ballot.process_set);
    if (!set || set->group_rank < 0 || ballot.generation != generation_) continue;
    const int position = set->position_of(from);
    if (set->tree) {
      if (position <= 0 || set->tree->parent(position) != set->group_rank || ballot.rank >= set->size() ||
          !set->tree->is_below(ballot.rank, position))
        return error(Code::kInternal,
                     "a ballot that is for another rank; is HOROCLONE_CONTROL_FANOUT the same for all?");
      HC_TRY(set->combiner->take(ballot, Clock::now()));
    } else if (set->coordinator && position == ballot.rank) {
      HC_TRY(set->take_ballot(ballot));
    }
  }
  return Status::ok();
}

// On group rank 0 the top of the tree: to its coordinator.
void Engine::send_up(ProcessSet& set) {
  std::vector<Ballot> ballots = set.combiner->collect();
  if (failed_.load(std::memory_order_relaxed) || !set.closed.is_ok()) return;
  Status sent;
  if (set.coordinator) {
    if (set.shows_all != timeline_.on()) {
      set.shows_all = timeline_.on();
      sent = tell_to_show(set, set.shows_all ? 2 : 0);
    }
    for (const Ballot& ballot : ballots)
      if (sent.is_ok()) sent = set.take_ballot(ballot);
  } else {
    sent = send_ballots(set, ballots);
  }
  if (!sent.is_ok()) fail_everything(sent);
}

// In one frame, or in as many as it takes. The ballots may be used up.
Status Engine::send_ballots(ProcessSet& set, std::span<Ballot> ballots) {
  const auto begin = [this] {
    frame_.clear();
    frame_.put(FrameKind::kBallot);
  };
  const auto send = [&] {
    counters_.ballots_sent.fetch_add(1, std::memory_order_relaxed);
    return send_frame(set.above(), !departure_.empty());
  };
  begin();
  size_t ballots_in_frame = 0;
  const auto add = [&](const Ballot& ballot, size_t bytes) {
    if (ballots_in_frame > 0 && frame_.size() + bytes > kFrameBudget) {
      HC_TRY(send());
      begin();
      ballots_in_frame = 0;
    }
    encode(ballot, &frame_);
    ballots_in_frame++;
    return Status::ok();
  };
  for (Ballot& ballot : ballots) {
    const size_t bytes = encoded_bytes(ballot);
    if (bytes <= kFrameBudget) {
      HC_TRY(add(ballot, bytes));
    } else {
      for (const Ballot& part : parts_of(std::move(ballot), kFrameBudget)) HC_TRY(add(part, encoded_bytes(part)));
    }
  }
  return ballots_in_frame > 0 ? send() : Status::ok();
}

Status Engine::send_down(ProcessSet& set, const Plan& plan, std::span<const uint8_t> frame) {
  if (set.combiner) set.combiner->pass(plan);
  frame_.clear();
  frame_.put_raw(frame.data(), frame.size());
  const auto send = [&](int position) {
    const int r = set.ranks[position];
    if (r == mesh_->rank() || left_[r]) return Status::ok();
    counters_.plans_sent.fetch_add(1, std::memory_order_relaxed);
    return send_frame(r, false);
  };
  if (set.tree) {
    for (int child : set.tree->children(set.group_rank)) HC_TRY(send(child));
  } else {
    for (int position = 0; position < set.size(); ++position) HC_TRY(send(position));
  }
  return Status::ok();
}

// ---- what combiners hold, shown where somebody must know who is missing

Status Engine::tell_to_show(ProcessSet& set, uint8_t how) {
  const TimePoint now = Clock::now();
  if (how == 1)
    set.combiner->reveal(now);
  else
    set.combiner->show_all(how == 2, now);
  frame_.clear();
  frame_.put(FrameKind::kShow);
  frame_.put(set.id);
  frame_.put(how);
  for (int position = 1; position < set.size(); ++position) {
    const int r = set.ranks[position];
    if (!set.tree->children(position).empty() && !left_[r]) HC_TRY(send_frame(r, true));
  }
  return Status::ok();
}

Status Engine::take_show_frame(int from, Reader* in) {
  ProcessSet* set = find_set(in->get<uint16_t>());
  const auto how = in->get<uint8_t>();
  if (!in->ok() || how > 2) return error(Code::kInternal, "a frame about what to show is broken");
  if (!set || !set->combiner || set->coordinator_rank() != from) return Status::ok();
  if (how == 1)
    set->combiner->reveal(Clock::now());
  else
    set->combiner->show_all(how == 2, Clock::now());
  return Status::ok();
}

// Half-way to a stall report everybody shows what it holds, so that the report knows who is missing and since when.
void Engine::reveal_late(TimePoint now) {
  const double patience_s = config_.stall_check_s / 2;
  for (auto& [id, set] : sets_) {
    if (!set->combiner || !set->coordinator || now < set->next_reveal) continue;
    const bool late = std::any_of(set->pending.begin(), set->pending.end(), [&](const Operation* op) {
      return op->batch == 0 && seconds_between(op->submitted, now) >= patience_s;
    });
    if (!late) continue;
    set->next_reveal = now + std::chrono::milliseconds(static_cast<int64_t>(patience_s * 1000));
    if (Status told = tell_to_show(*set, 1); !told.is_ok()) return fail_everything(told);
  }
}

}  // namespace hc
