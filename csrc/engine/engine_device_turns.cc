// Who gives work on GPUs its turn, and how turns travel: rank 0 of the world orders batches of all process sets and
// messages, all ranks follow (see engine_device.cc). Where all ranks share memory the turns go through rank 0's lane;
// else in frames straight from rank 0, which wake also who sleeps because it has nothing to do itself.
#include <algorithm>

#include "engine/engine.h"

namespace hc {

namespace {

uint32_t device_batches_in(const Plan& plan) {
  return static_cast<uint32_t>(std::count_if(plan.batches.begin(), plan.batches.end(), [](const PlanBatch& batch) {
    return batch.on_device && batch.error == Code::kOk;
  }));
}

}  // namespace

// On rank 0, turns that travel in shared memory. In the same step in which they were given: it may be the last one for
// a while.
void Engine::pass_turns_on() {
  if (!device_turns_.kept_back()) return;
  if (!device_turns_.pass_on(left_)) waits_on_device_ = true;
  wake_readers(*sets_[0]);
}

bool Engine::has_part_in(const DeviceTurn& turn) const {
  if (turn.set == kMessageStream) return messages_.expects_turn(turn.sender, static_cast<uint32_t>(turn.bucket));
  const ProcessSet* set = find_set(turn.set);
  return set && set->group_rank >= 0;
}

// On the others.
void Engine::take_turns(bool* moved) {
  if (device_turns_.take([this](const DeviceTurn& turn) { return has_part_in(turn); })) *moved = true;
}

// On the coordinator, before the plan goes out.
void Engine::note_turns_before(const ProcessSet& set, Plan* plan) {
  if (set.id != 0 || device_turns_.in_memory()) return;
  if (const uint32_t count = device_batches_in(*plan)) plan->turns = device_turns_.plan(count);
}

// Called with each plan of the global set on every rank, and with plans of other sets on their coordinator.
void Engine::order_device_batches(ProcessSet& set, const Plan& plan) {
  const uint32_t count = device_batches_in(plan);
  if (!count) return;
  if (set.id == 0 && !device_turns_.in_memory()) {
    if (mesh_->rank() == 0)
      device_turns_.add({0}, count);
    else
      device_turns_.take_plan(count, mesh_->rank(), plan.turns);
  } else if (mesh_->rank() == 0) {
    grant_device_turns(set.id, count);
  } else if (set.id != 0) {
    frame_.clear();
    frame_.put(FrameKind::kDeviceAsk);
    frame_.put(set.id);
    frame_.put(count);
    if (Status sent = send_frame(0, true); !sent.is_ok()) fail_everything(sent);
  }
}

// On rank 0 of the world.
void Engine::grant_device_turns(uint16_t id, uint32_t count) {
  ProcessSet* set = find_set(id);
  if (!set) return;
  if (device_turns_.in_memory()) return device_turns_.give({id}, count, set->group_rank >= 0);
  for (const int r : set->ranks) {
    if (r == mesh_->rank())
      device_turns_.add({id}, count);
    else if (!left_[r])
      if (Status sent = send_turn(r, {id}, count); !sent.is_ok()) return fail_everything(sent);
  }
}

// On the sender of a message that both ends are ready for.
void Engine::ask_message_turn(int receiver, uint32_t id) {
  if (mesh_->rank() == 0) return grant_message_turn(0, receiver, id);
  frame_.clear();
  frame_.put(FrameKind::kMessageAsk);
  frame_.put(static_cast<int32_t>(receiver));
  frame_.put(id);
  // Not fail_everything: a message is on its way up the stack.
  if (Status sent = send_frame(0, true); !sent.is_ok()) device_failed(sent);
}

// On rank 0 of the world.
void Engine::grant_message_turn(int sender, int receiver, uint32_t id) {
  const DeviceTurn turn{kMessageStream, static_cast<int32_t>(id), static_cast<uint16_t>(sender)};
  const int me = mesh_->rank();
  if (device_turns_.in_memory()) return device_turns_.give(turn, 1, me == sender || me == receiver);
  for (const int r : {sender, receiver}) {
    if (r == me)
      device_turns_.add(turn, 1);
    else if (!left_[r])
      if (Status sent = send_turn(r, turn, 1); !sent.is_ok()) return device_failed(sent);
  }
}

Status Engine::send_turn(int rank, const DeviceTurn& turn, uint32_t count) {
  const uint32_t after = device_turns_.given_to(rank, count);
  frame_.clear();
  frame_.put(FrameKind::kDeviceTurn);
  frame_.put(word_of(turn));
  frame_.put(count);
  frame_.put(after);
  return send_frame(rank, true);
}

Status Engine::take_device_frame(FrameKind kind, int from, Reader* in) {
  constexpr uint32_t kMost = 1u << 16;
  if (kind == FrameKind::kDeviceTurn) return take_turn_frame(from, in);
  if (kind == FrameKind::kMessageAsk) {
    const auto receiver = in->get<int32_t>();
    const auto id = in->get<uint32_t>();
    if (!in->ok() || receiver < 0 || receiver >= mesh_->size() || mesh_->rank() != 0)
      return error(Code::kInternal, "a broken frame about a message between devices");
    grant_message_turn(from, receiver, id);
    return Status::ok();
  }
  const auto id = in->get<uint16_t>();
  const auto count = in->get<uint32_t>();
  if (!in->ok() || count > kMost) return error(Code::kInternal, "a broken frame about turns on devices");
  const ProcessSet* set = find_set(id);
  if (mesh_->rank() == 0 && set && set->coordinator_rank() == from) grant_device_turns(id, count);
  return Status::ok();
}

Status Engine::take_turn_frame(int from, Reader* in) {
  constexpr uint32_t kMost = 1u << 16;
  const DeviceTurn turn = hc::turn_of(in->get<uint64_t>());
  const auto count = in->get<uint32_t>();
  const auto after = in->get<uint32_t>();
  if (!in->ok() || count > kMost || from != 0) return error(Code::kInternal, "a broken frame about turns on devices");
  device_turns_.take_given(turn, count, after, has_part_in(turn));
  return Status::ok();
}

}  // namespace hc
