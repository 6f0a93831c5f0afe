#include "engine/gpu/launch_order.h"

#include <algorithm>

namespace hc {

namespace {

constexpr uint32_t kMaxTickets = 1u << 16;  // in one frame

uint32_t device_batches_in(const Plan& plan) {
  return static_cast<uint32_t>(std::count_if(plan.batches.begin(), plan.batches.end(), [](const PlanBatch& batch) {
    return batch.on_device && batch.error == Code::kOk;
  }));
}

}  // namespace

void LaunchOrder::note_before(const Members& set, Plan* plan) {
  if (set.id != 0 || tickets_.in_memory()) return;
  if (const uint32_t count = device_batches_in(*plan)) plan->tickets = tickets_.plan(count);
}

Status LaunchOrder::order(const Members& set, const Plan& plan) {
  const uint32_t count = device_batches_in(plan);
  if (!count) return Status::ok();
  const int me = context_.rank();
  if (set.id == 0 && !tickets_.in_memory()) {
    if (me == 0)
      tickets_.add({0}, count);
    else
      tickets_.take_plan(count, me, plan.tickets);
    return Status::ok();
  }
  if (me == 0) return grant(set.id, count);
  if (set.id == 0) return Status::ok();
  Writer& frame = link_.begin(FrameKind::kDeviceAsk);
  frame.put(set.id);
  frame.put(count);
  return link_.send(0, true);
}

// On rank 0 of the world.
Status LaunchOrder::grant(uint16_t id, uint32_t count) {
  const auto set = intake_.find(id);
  if (!set) return Status::ok();
  if (tickets_.in_memory()) {
    others_ += count;
    tickets_.give({id}, count, set->members.ranks);
    return Status::ok();
  }
  for (const int r : set->members.ranks) {
    if (r == context_.rank())
      tickets_.add({id}, count);
    else if (!link_.has_left(r))
      HC_TRY(send(r, {id}, count));
  }
  return Status::ok();
}

Status LaunchOrder::ask_for_message(int receiver, uint32_t id) {
  if (context_.rank() == 0) return grant_message(0, receiver, id);
  Writer& frame = link_.begin(FrameKind::kMessageAsk);
  frame.put(static_cast<int32_t>(receiver));
  frame.put(id);
  return link_.send(0, true);
}

// On rank 0 of the world.
Status LaunchOrder::grant_message(int sender, int receiver, uint32_t id) {
  const LaunchTicket ticket = ticket_of_message(sender, id);
  const int me = context_.rank();
  if (tickets_.in_memory()) {
    ++others_;
    const int ends[] = {sender, receiver};
    tickets_.give(ticket, 1, ends);
    return Status::ok();
  }
  for (const int r : {sender, receiver}) {
    if (r == me)
      tickets_.add(ticket, 1);
    else if (!link_.has_left(r))
      HC_TRY(send(r, ticket, 1));
  }
  return Status::ok();
}

Status LaunchOrder::send(int rank, const LaunchTicket& ticket, uint32_t count) {
  const uint32_t after = tickets_.given_to(rank, count);
  Writer& frame = link_.begin(FrameKind::kLaunchTicket);
  frame.put(word_of(ticket));
  frame.put(count);
  frame.put(after);
  return link_.send(rank, true);
}

Status LaunchOrder::take_request(FrameKind kind, int from, Reader* in) {
  if (kind == FrameKind::kMessageAsk) {
    const auto receiver = in->get<int32_t>();
    const auto id = in->get<uint32_t>();
    if (!in->ok() || receiver < 0 || receiver >= context_.mesh->size() || context_.rank() != 0)
      return error(Code::kInternal, "a broken frame about a message between devices");
    return grant_message(from, receiver, id);
  }
  const auto id = in->get<uint16_t>();
  const auto count = in->get<uint32_t>();
  if (!in->ok() || count > kMaxTickets) return error(Code::kInternal, "a broken frame about launch tickets");
  const auto set = intake_.find(id);
  if (context_.rank() == 0 && set && set->members.coordinator_rank() == from) return grant(id, count);
  return Status::ok();
}

Status LaunchOrder::read_ticket(int from, Reader* in, Given* given) const {
  given->ticket = ticket_of(in->get<uint64_t>());
  given->count = in->get<uint32_t>();
  given->after = in->get<uint32_t>();
  if (!in->ok() || given->count > kMaxTickets || from != 0)
    return error(Code::kInternal, "a broken frame about launch tickets");
  return Status::ok();
}

}  // namespace hc
