#include "engine/sets/negotiator.h"

#include <algorithm>
#include <utility>

#include "agreement/frame_budget.h"
#include "collective/selection.h"

namespace hc {

namespace {
// Requests fill up to this size: what takes longer to move had better start.
constexpr size_t kFillBytes = 256 * kKiB;
constexpr int kLooksWithoutNews = 48;  // some microseconds: a Python loop submits faster
}  // namespace

Negotiator::Negotiator(Context& context, ControlLink& link, Timeline& timeline, const Members& members,
                       StragglerStatistics* stragglers, const std::vector<int>& node, bool one_node)
    : context_(context),
      link_(link),
      timeline_(timeline),
      members_(members),
      one_node_(one_node),
      tree_(ControlTree::make(node, context.config.control_fanout)) {
  requests_.generation = members.generation;
  requests_.process_set = members.id;
  requests_.rank = members.group_rank;
  if (tree_ && !tree_->children(members.group_rank).empty())
    aggregator_ = std::make_unique<RequestAggregator>(
        RequestAggregatorOptions{tree_, members.group_rank, members.generation, members.id});
  if (members.group_rank != 0) return;
  CoordinatorOptions options;
  options.size = members.size();
  options.fuse_groups = !context.config.disable_group_fusion;
  options.part_bytes = one_node ? 0 : context.config.partition_bytes;
  options.cache_capacity = static_cast<size_t>(context.config.cache_capacity);
  options.generation = members.generation;
  options.process_set = members.id;
  options.world_rank = members.ranks;
  options.tree = tree_;
  watch_ = std::make_unique<TimelineWatch>(&timeline, members.id, members.ranks);
  options.watch = watch_.get();
  options.stragglers = stragglers;
  coordinator_ = std::make_unique<Coordinator>(options);
}

int Negotiator::parent() const {
  return tree_ ? members_.ranks[static_cast<size_t>(tree_->parent(members_.group_rank))] : members_.coordinator_rank();
}

void Negotiator::announce(Operation* op) {
  op->cache_id = cache_.announce(op->request, &requests_);
  for (const TensorMeta& t : op->signature().tensors)
    request_bytes_ += static_cast<size_t>(t.count()) * size_of(t.dtype);
}

bool Negotiator::should_coalesce() {
  if (requests_.joined || request_bytes_ > kFillBytes) return false;
  const size_t announced = requests_.cached.size() + requests_.fresh.size();
  looks_without_news_ = announced == requests_seen_ ? looks_without_news_ + 1 : 0;
  requests_seen_ = announced;
  return looks_without_news_ < kLooksWithoutNews;
}

Status Negotiator::send_requests(bool reachable) {
  Status sent;
  if (!reachable) {
    // Nobody is there to take them.
  } else if (aggregator_) {
    sent = aggregator_->take(requests_, Clock::now());
  } else if (coordinator_) {
    sent = give_to_coordinator(requests_);
  } else {
    sent = send({&requests_, 1});
  }
  requests_.cached.clear();
  requests_.fresh.clear();
  requests_.joined = false;
  requests_.on_bypass = false;
  request_bytes_ = requests_seen_ = 0;
  looks_without_news_ = 0;
  return sent;
}

Status Negotiator::give_to_coordinator(const RequestList& requests) {
  // A session of the bypass must be over on every member before the next one opens.
  bypass_news_ = bypass_news_ || requests.on_bypass;
  news_ = true;
  return coordinator_->take(requests, Clock::now());
}

Status Negotiator::take(int from, const RequestList& requests) {
  const int position = members_.position_of(from);
  if (tree_) {
    if (position <= 0 || tree_->parent(position) != members_.group_rank || requests.rank >= members_.size() ||
        !tree_->is_below(requests.rank, position))
      return error(Code::kInternal,
                   "a request list that is for another rank; is HOROCLONE_CONTROL_FANOUT the same for all?");
    return aggregator_->take(requests, Clock::now());
  }
  return coordinator_ && position == requests.rank ? give_to_coordinator(requests) : Status::ok();
}

// On group rank 0 the top of the tree: to its coordinator.
Status Negotiator::pass_up(bool reachable) {
  std::vector<RequestList> requests = aggregator_->collect();
  if (!reachable) return Status::ok();
  if (!coordinator_) return send(requests);
  if (holds_nothing_ != timeline_.on()) {
    holds_nothing_ = timeline_.on();
    HC_TRY(tell_to_flush(holds_nothing_ ? 2 : 0));
  }
  for (const RequestList& each : requests) HC_TRY(give_to_coordinator(each));
  return Status::ok();
}

// In one frame, or in as many as it takes. The requests may be used up.
Status Negotiator::send(std::span<RequestList> requests) {
  size_t in_frame = 0;
  const auto flush = [&] {
    Counters::add(context_.counters.request_lists_sent);
    return link_.send(parent(), link_.anybody_left());
  };
  Writer* frame = &link_.begin(FrameKind::kRequests);
  const auto add = [&](const RequestList& one, size_t bytes) {
    if (in_frame > 0 && frame->size() + bytes > kFrameBudget) {
      HC_TRY(flush());
      frame = &link_.begin(FrameKind::kRequests);
      in_frame = 0;
    }
    encode(one, frame);
    in_frame++;
    return Status::ok();
  };
  for (RequestList& each : requests) {
    const size_t bytes = encoded_bytes(each);
    if (bytes <= kFrameBudget) {
      HC_TRY(add(each, bytes));
    } else {
      for (const RequestList& part : parts_of(std::move(each), kFrameBudget)) HC_TRY(add(part, encoded_bytes(part)));
    }
  }
  return in_frame > 0 ? flush() : Status::ok();
}

bool Negotiator::may_decide() { return news_ = coordinator_->anything_ready(); }

bool Negotiator::should_batch(double delay_ms, TimePoint* next_batch_due) {
  if (delay_ms <= 0) return false;
  const TimePoint now = Clock::now();
  if (!delays_batch_) {
    delays_batch_ = true;
    batch_due_ = now + std::chrono::microseconds(static_cast<int64_t>(delay_ms * 1000));
  }
  if (now >= batch_due_) return false;
  *next_batch_due = std::min(*next_batch_due, batch_due_);
  return true;
}

Plan Negotiator::decide(size_t room) {
  Plan plan = coordinator_->decide(room);
  delays_batch_ = delays_batch_ && coordinator_->anything_ready();  // what there was no room for has waited already
  return plan;
}

void Negotiator::set_sizes(const Tuning& tuning) {
  if (!coordinator_) return;
  coordinator_->set_fusion_bytes(tuning.fusion_bytes);
  coordinator_->set_arena_fusion_bytes(most_fused_in_arenas(one_node_, tuning.ring_from_bytes));
}

Status Negotiator::pass_down(const Plan& plan, std::span<const uint8_t> frame) {
  if (aggregator_) aggregator_->pass(plan);
  if (std::exchange(until_plan_, false)) aggregator_->hold_nothing(holds_nothing_, Clock::now());
  const auto send_to = [&](int position) {
    const int r = members_.ranks[static_cast<size_t>(position)];
    if (r == context_.rank() || link_.has_left(r)) return Status::ok();
    Counters::add(context_.counters.plans_sent);
    return link_.send(r, frame, false);
  };
  if (tree_) {
    for (int child : tree_->children(members_.group_rank)) HC_TRY(send_to(child));
  } else if (coordinator_) {
    for (int position = 0; position < members_.size(); ++position) HC_TRY(send_to(position));
  }
  return Status::ok();
}

bool Negotiator::leave(int position, const std::string& text) {
  if (aggregator_) aggregator_->leave(Clock::now());
  // A member higher up may leave while its last plan is still on the way through the one between: that one tells.
  if (!coordinator_) return !follows(position);
  coordinator_->leave(position, text);
  news_ = true;
  return true;
}

void Negotiator::end_deadlock(const std::vector<int>& stuck, const std::string& text) {
  coordinator_->end_deadlock(stuck, text);
  news_ = true;
}

Status Negotiator::tell_parent_left(int rank, const std::string& text) {
  if (!tree_ || tree_->children(members_.group_rank).empty()) return Status::ok();
  Writer& frame = link_.begin(FrameKind::kParentLeft);
  frame.put(members_.id);
  frame.put(static_cast<int32_t>(rank));
  frame.put_text(text);
  for (int position : tree_->children(members_.group_rank)) {
    const int r = members_.ranks[static_cast<size_t>(position)];
    if (!link_.has_left(r)) HC_TRY(link_.send(r, true));
  }
  return Status::ok();
}

Status Negotiator::tell_to_flush(uint8_t how) {
  const TimePoint now = Clock::now();
  if (how == 1)
    aggregator_->flush_held(now);
  else
    aggregator_->hold_nothing(how == 2, now);
  Writer& frame = link_.begin(FrameKind::kFlushHeld);
  frame.put(members_.id);
  frame.put(how);
  for (int position = 1; position < members_.size(); ++position) {
    const int r = members_.ranks[static_cast<size_t>(position)];
    if (!tree_->children(position).empty() && !link_.has_left(r)) HC_TRY(link_.send(r, true));
  }
  return Status::ok();
}

Status Negotiator::take_flush_frame(int from, uint8_t how) {
  if (how > 2) return error(Code::kInternal, "a frame about held requests is broken");
  if (!aggregator_ || members_.coordinator_rank() != from) return Status::ok();
  if (how == 1) {
    aggregator_->flush_held(Clock::now());
    return Status::ok();
  }
  holds_nothing_ = how == 2;
  aggregator_->hold_nothing(holds_nothing_ || until_plan_, Clock::now());
  return Status::ok();
}

void Negotiator::hold_nothing_until_plan() {
  if (!aggregator_) return;
  until_plan_ = true;
  aggregator_->hold_nothing(true, Clock::now());
}

Status Negotiator::flush_held(TimePoint now, double patience_s) {
  next_flush_ = now + std::chrono::milliseconds(static_cast<int64_t>(patience_s * 1000));
  return tell_to_flush(1);
}

}  // namespace hc
