// Blocks of a range, each an allreduce of its own in place, in one schedule: so block after block streams over the same
// channels without a gap, and no block waits for more than its own release.
#include "collective/channels/striped_allreduce.h"

#include <algorithm>
#include <map>

#include "collective/selection.h"

namespace hc {
namespace {

// The ranks that carry the stripe as a group: its positions are places in `positions`.
Result<Group> stripe_group(const Group& group, std::span<const int> positions) {
  Group stripe;
  stripe.rank = -1;
  stripe.size = static_cast<int>(positions.size());
  for (int i = 0; i < stripe.size; ++i) {
    const int position = positions[i];
    if (position < 0 || position >= group.size)
      return error(Code::kInternal, "striped allreduce: position ", position, " in a group of ", group.size);
    if (position == group.rank) stripe.rank = i;
    stripe.world_rank.push_back(group.world_rank[position]);
    stripe.channel.push_back(group.channel[position]);
    if (position != group.rank && !group.channel[position])
      return Status(Code::kInternal, text_of("striped allreduce: no channel to rank ", group.world_rank[position]),
                    group.world_rank[position]);
  }
  if (stripe.rank < 0)
    return error(Code::kInternal, "striped allreduce: position ", group.rank, " does not carry this stripe");
  return stripe;
}

Status check(const StripeRange& range) {
  if (range.count && !range.data)
    return error(Code::kInvalidArgument, "striped allreduce: no memory for ", range.count, " elements");
  if (range.scale.pre != 1.0)
    return error(Code::kInvalidArgument, "striped allreduce: prescale ", range.scale.pre,
                 " belongs to the stage before");
  if (!is_element_wise(range.reduce))
    return error(Code::kUnsupported, "striped allreduce: Adasum is not a sum of elements");
  return Status::ok();
}

}  // namespace

StripeRange stripe_range_of(const Task& task, std::byte* data, size_t count) {
  StripeRange range;
  range.data = data;
  range.count = count;
  range.dtype = task.dtype;
  range.reduce = task.reduce;
  range.scale = Scale{1.0, task.scale.post, task.scale.divisor};
  range.segment_bytes = task.segment_bytes;
  range.ring_from_bytes = task.ring_from_bytes;
  range.tag = task.tag;
  return range;
}

Stripe stripe_of(const Group& group) {
  std::vector<int> nodes;  // in order of appearance
  std::map<int, std::vector<int>> members;
  for (int p = 0; p < group.size; ++p) {
    if (members[group.node[p]].empty()) nodes.push_back(group.node[p]);
    members[group.node[p]].push_back(p);
  }
  Stripe stripe;
  size_t fewest = static_cast<size_t>(group.size);
  for (const auto& [node, positions] : members) fewest = std::min(fewest, positions.size());
  stripe.stripes = static_cast<int>(fewest);
  const std::vector<int>& local = members[group.node[group.rank]];
  stripe.index = static_cast<int>(std::find(local.begin(), local.end(), group.rank) - local.begin());
  if (stripe.index < stripe.stripes)
    for (int node : nodes) stripe.positions.push_back(members[node][static_cast<size_t>(stripe.index)]);
  return stripe;
}

StripedAllreduce::StripedAllreduce(Task task, const Group& stripe_group, Schedule schedule,
                                   std::vector<size_t> block_ends, std::vector<int> block_begins)
    : runner_(std::move(task), stripe_group, std::move(schedule)),
      block_ends_(std::move(block_ends)),
      block_begins_(std::move(block_begins)) {}

Progress StripedAllreduce::start() { return pass_on(runner_.start()); }
Progress StripedAllreduce::step(bool* moved) { return pass_on(runner_.step(moved)); }

Progress StripedAllreduce::pass_on(Progress progress) {
  return progress == Progress::kFailed ? fail(runner_.status()) : progress;
}

size_t StripedAllreduce::finished() {
  const std::vector<Step>& steps = runner_.schedule().steps;
  while (blocks_finished_ < block_ends_.size()) {
    const size_t next = blocks_finished_ + 1;
    const int end = next < block_begins_.size() ? block_begins_[next] : static_cast<int>(steps.size());
    while (checked_ < end && (steps[checked_].action == Action::kSend || runner_.is_complete(checked_))) ++checked_;
    if (checked_ < end) break;
    ++blocks_finished_;
  }
  return blocks_finished_ ? block_ends_[blocks_finished_ - 1] : 0;
}

Result<std::unique_ptr<StripedAllreduce>> make_striped_allreduce(const StripeRange& range, const Group& group,
                                                                 std::span<const int> positions) {
  HC_TRY(check(range));
  Result<Group> stripe = stripe_group(group, positions);
  if (!stripe.is_ok()) return stripe.status();
  const size_t block = range.block_count ? range.block_count : std::max<size_t>(range.count, 1);
  const bool ring = select_for_block(block * size_of(range.dtype), range.ring_from_bytes) == Algorithm::kRing;
  std::vector<PlacedSchedule> blocks;
  std::vector<size_t> ends;
  for (size_t first = 0; first < range.count; first += block) {
    const AllreduceShape shape{.rank = stripe.value().rank,
                               .size = stripe.value().size,
                               .count = std::min(block, range.count - first),
                               .load = Load::kGate,
                               .in_place = true};
    blocks.push_back({ring ? plan_ring_allreduce(shape) : plan_recursive_doubling(shape), first});
    ends.push_back(first + shape.count);
  }
  std::vector<int> begins;
  Schedule schedule = concatenate(blocks, &begins);
  schedule.name = ring ? "inter-node ring" : "inter-node recursive doubling";
  Task task;
  task.dtype = range.dtype;
  task.reduce = range.reduce;
  task.scale = range.scale;
  task.segment_bytes = range.segment_bytes;
  task.tag = range.tag;
  task.pieces = {Piece{range.data, range.data, range.count}};
  return std::make_unique<StripedAllreduce>(std::move(task), stripe.value(), std::move(schedule), std::move(ends),
                                            std::move(begins));
}

}  // namespace hc
