// One turn of the engine: take what was submitted, exchange ballots and plans, run the batches, complete the
// operations. Thread: the thread that drives.
#include <algorithm>

#include "agreement/frames.h"
#include "engine/engine.h"

namespace hc {

namespace {

constexpr size_t kPlansAhead = 2;  // batches decided but not finished: what is ready later gathers and gets fused

}  // namespace

bool Engine::step() {
  try {
    return advance();
  } catch (const std::exception& e) {
    fail_after(e);
    return true;
  }
}

bool Engine::advance() {
  bool moved = false;
  counters_.steps.fetch_add(1, std::memory_order_relaxed);
  next_gathered_ = TimePoint::max();
  waits_on_device_ = !device_failure_.is_ok();
  fills_ = false;
  if (!mesh_->all_shared() || ++turn_ % 1024 == 0) poll_mesh(&moved);
  if (has_abort_.load(std::memory_order_acquire)) {
    std::string text;
    {
      std::lock_guard lock(abort_mu_);
      text.swap(abort_text_);
      has_abort_.store(false);
    }
    fail_everything(Status(Code::kAborted, text, mesh_->rank()));
    return true;
  }
  if (has_incoming_.load(std::memory_order_acquire)) take_incoming(&moved);
  receive_frames(&moved);
  take_turns(&moved);
  for (auto& [id, set] : sets_) {
    if (set->group_rank < 0) continue;
    if (set->ballot_waits()) {
      if (may_fill_ && set->ballot_fills()) {
        fills_ = true;
      } else {
        send_ballot(*set);
        moved = true;
      }
    }
    if (set->combiner && set->combiner->has_news()) {
      send_up(*set);
      moved = true;
    }
    if (set->coordinator) decide(*set, &moved);
    run_queue(*set, &moved);
    if (!set->frozen_runs.empty() || set->deferred_join)
      set->run_frozen(&moved, [&](Operation* op, const FrozenCollective& run) {
        (op->bucket_set >= 0 ? counters_.frozen : counters_.express).fetch_add(1, std::memory_order_relaxed);
        if (!op->device) counters_.bytes_reduced.fetch_add(op->bytes(), std::memory_order_relaxed);
        note_frozen(*set, *op, run);
        op->device ? arm(*set, op) : complete(*set, op, run.status());
      });
    launch_armed(*set, &moved);
    wake_readers(*set);
  }
  pass_turns_on();
  if (Status stepped = messages_.step(&moved); !stepped.is_ok()) fail_everything(stepped);
  waits_on_device_ = waits_on_device_ || messages_.waits_on_device();
  pass_turns_on();  // those that messages of rank 0 have asked for
  return moved;
}

void Engine::take_incoming(bool* moved) {
  if (taken_.empty()) {  // else an exception has left some
    std::lock_guard lock(submit_mu_);
    taken_.swap(incoming_);
    has_incoming_.store(false, std::memory_order_release);
  }
  while (next_taken_ < taken_.size()) {
    Operation* op = taken_[next_taken_++];
    ProcessSet* set = find_set(op->process_set);
    *moved = true;
    if (is_message(op->signature().op)) {
      Status sent;
      if (failed_.load())
        finish(op, failure_.with(op->describe()));
      else
        sent = messages_.submit(op);
      if (!sent.is_ok()) fail_everything(sent);
      continue;
    }
    set->adopt(op);
    if (failed_.load() || !set->closed.is_ok()) {
      complete(*set, op, (failed_.load() ? failure_ : set->closed).with(op->describe()));
      continue;
    }
    const bool frozen = op->bucket_set >= 0 ? set->start_frozen(op) : set->start_express(op);
    if (!frozen) set->announce(op);
    // A coordinator shows what all ranks announce, when their ballots come.
    if (timeline_.on() && (frozen || !set->coordinator))
      timeline_.announced(Timeline::key_of(*op), mesh_->rank(), op->submitted);
  }
  taken_.clear();
  next_taken_ = 0;
}

void Engine::receive_frames(bool* moved) {
  // Shared-memory rings move here; sockets moved in poll_mesh. A broken channel is reported there, after its last
  // frames.
  if (mesh_->progress_shared()) *moved = true;
  if (!mesh_->has_frames()) return;
  for (int r = 0; r < mesh_->size(); ++r) {
    if (r == mesh_->rank() || left_[r]) continue;
    while (!failed_.load(std::memory_order_relaxed) && mesh_->channel(r).receive(&received_)) {
      *moved = true;
      count_between_nodes(r, received_.size());
      liveness_.heard(r);
      handle_frame(r, received_);
      if (left_[r]) break;
    }
  }
}

void Engine::handle_frame(int from, std::span<const uint8_t> frame) {
  Reader in(frame);
  const auto kind = in.get<FrameKind>();
  Status bad;
  if (kind == FrameKind::kBallot) {
    bad = take_ballots(from, &in);
  } else if (kind == FrameKind::kPlan) {
    Plan plan;
    bad = decode(&in, &plan);
    ProcessSet* set = bad.is_ok() ? find_set(plan.process_set) : nullptr;
    if (set && set->group_rank > 0 && set->above() == from && plan.generation == generation_) {
      if (set->combiner) bad = send_down(*set, plan, frame);
      if (set->id == 0) order_device_batches(*set, plan);
      take_plan(*set, std::move(plan));
    }
  } else if (kind == FrameKind::kShow) {
    bad = take_show_frame(from, &in);
  } else if ((kind >= FrameKind::kMessage && kind <= FrameKind::kMessageWithdrawn) || kind == FrameKind::kLinkId) {
    bad = messages_.handle(from, kind, &in);
  } else if (kind == FrameKind::kGoodbye) {
    peer_left(from, in.get_text());
  } else if (kind == FrameKind::kAbort) {
    const auto code = in.get<Code>();
    const auto culprit = in.get<int32_t>();
    fail_everything(Status(code == Code::kOk ? Code::kAborted : code, in.get_text(), culprit));
  } else if (kind == FrameKind::kPing) {
    frame_.clear();
    frame_.put(FrameKind::kPong);
    bad = send_frame(from, false);
  } else if (kind == FrameKind::kDeviceAsk || kind == FrameKind::kDeviceTurn || kind == FrameKind::kMessageAsk) {
    bad = take_device_frame(kind, from, &in);
  } else if (kind != FrameKind::kPong) {
    bad = take_report_frame(kind, from, &in);
  }
  if (!bad.is_ok()) fail_everything(bad.with(text_of("control frame from ", mesh_->describe(from))));
}

void Engine::count_between_nodes(int peer, size_t frame_bytes) {
  if (mesh_->shares_memory(peer)) return;
  counters_.between_nodes_frames.fetch_add(1, std::memory_order_relaxed);
  counters_.between_nodes_bytes.fetch_add(frame_bytes, std::memory_order_relaxed);
}

Status Engine::send_frame(int to, bool urgent) {
  counters_.control_frames_sent.fetch_add(1, std::memory_order_relaxed);
  counters_.control_bytes_sent.fetch_add(frame_.size(), std::memory_order_relaxed);
  count_between_nodes(to, frame_.size());
  Status sent = mesh_->channel(to).send(frame_.bytes());
  mesh_->wake(to, urgent);
  // A peer that has closed may have said goodbye first, in a frame not read yet: Mesh::poll tells which, after its last
  // words.
  return sent.code() == Code::kPeerLost ? Status::ok() : sent;
}

void Engine::send_ballot(ProcessSet& set) {
  Status sent;
  if (failed_.load(std::memory_order_relaxed) || !set.closed.is_ok()) {
    // Nobody is there to take it.
  } else if (set.combiner) {
    sent = set.combiner->take(set.ballot, Clock::now());
  } else if (set.coordinator) {
    sent = set.take_ballot(set.ballot);
  } else {
    sent = send_ballots(set, {&set.ballot, 1});
  }
  set.ballot_sent();
  if (!sent.is_ok()) fail_everything(sent);
}

void Engine::decide(ProcessSet& set, bool* moved) {
  const size_t busy = set.queue.size() + (set.runner ? 1 : 0);
  const bool may_run = busy < kPlansAhead && set.coordinator->anything_ready() && !gathers(set);
  // New settings ride with batches, for which every member knows the set; in the world, where coordinators of other
  // sets wait for them, also alone.
  const bool tunes = set.tuning != tuning_ && (may_run || set.id == 0) && !failed_.load(std::memory_order_relaxed);
  if (!may_run && !tunes) return;
  if (tunes) tell_sizes(&set, tuning_);
  Plan plan = set.coordinator->decide(may_run ? kPlansAhead - busy : 0);
  set.gathering = set.gathering && set.coordinator->anything_ready();  // what there was no room for has waited already
  if (plan.batches.empty() && !(tunes && set.id == 0)) return;
  if (tunes) plan.tuning = tuning_;
  if (set.suits_express(plan)) plan.express_turn = set.express.fresh_turn();
  *moved = true;
  for (PlanBatch& batch : plan.batches)
    if (batch.op == Op::kAllreduce && batch.algorithm == Algorithm::kAuto && set.may_be_two_level && tuning_.two_level)
      batch.algorithm = Algorithm::kTwoLevel;
  note_turns_before(set, &plan);
  if (set.size() > 1) {
    Writer frame;
    frame.put(FrameKind::kPlan);
    encode(plan, &frame);
    if (Status sent = send_down(set, plan, frame.bytes()); !sent.is_ok()) return fail_everything(sent);
  }
  order_device_batches(set, plan);
  take_plan(set, std::move(plan));
}

// Whether what is ready waits for company. The window opens with the first operation that is ready.
bool Engine::gathers(ProcessSet& set) {
  if (tuning_.window_ms <= 0) return false;
  const TimePoint now = Clock::now();
  if (!set.gathering) {
    set.gathering = true;
    set.gathered_at = now + std::chrono::microseconds(static_cast<int64_t>(tuning_.window_ms * 1000));
  }
  if (now >= set.gathered_at) return false;
  next_gathered_ = std::min(next_gathered_, set.gathered_at);
  return true;
}

void Engine::take_plan(ProcessSet& set, Plan plan) {
  if (timeline_.on()) {
    if (timeline_.marks_cycles()) timeline_.cycle();
    for (PlanBatch& batch : plan.batches) batch.planned = Clock::now();
  }
  if (plan.tuning) {
    set.tuning = *plan.tuning;
    if (set.id == 0) adopt(*plan.tuning);
    tuned_ = true;
  }
  for (PlanBatch& batch : plan.batches) {
    batch.tuning = set.tuning;
    set.queue.push_back(std::move(batch));
  }
  if (plan.express_turn) set.open_express(*plan.express_turn);
}

// Makes the set's runner of a batch whose turn it is, or takes up the one that this is a later part of.
Status Engine::begin_batch(ProcessSet& set, PlanBatch batch) {
  if (batch.part.index != 0) {
    auto at = set.cut.find(batch.part.first);
    if (at == set.cut.end() || at->second->batch().part.index + 1 != batch.part.index)
      return error(Code::kInternal, "a plan names part ", batch.part.index, " of batch ", batch.part.first,
                   ", which this rank does not have in parts");
    set.runner = std::move(at->second);
    set.cut.erase(at);
    set.runner->next_part(batch.id);
    return Status::ok();
  }
  std::vector<Operation*> operations;
  operations.reserve(batch.entries.size());
  for (const PlanEntry& entry : batch.entries) {
    Operation* op = set.match(batch.op, entry, [&](Op kind, const std::string& name) {
      std::lock_guard lock(submit_mu_);
      return set.find_named(kind, name);
    });
    if (!op && entry.unnamed && entry.failed_on.empty()) {
      std::lock_guard lock(submit_mu_);
      set.skip_sequence(batch.op, entry.sequence);
    }
    // An early failure may not mean this rank's own announcement, which came later.
    const auto& struck = entry.failed_on;
    if (!struck.empty() && std::find(struck.begin(), struck.end(), set.group_rank) == struck.end()) op = nullptr;
    operations.push_back(op);
  }
  if (batch.op == Op::kJoin) operations.assign(1, set.join);
  const Tag tag{static_cast<uint16_t>(generation_), set.id, batch.id, 0};
  const TimePoint planned = batch.planned;
  set.runner = std::make_unique<BatchRunner>(std::move(batch), std::move(operations), set.group, set.ranks, tag);
  set.runner->show_in(&timeline_);
  if (set.runner->batch().on_device && set.runner->batch().error == Code::kOk) put_on_device(set);
  note_batch(set, planned);
  return Status::ok();
}

void Engine::run_queue(ProcessSet& set, bool* moved) {
  for (int turns = 0; turns < 16 && !failed_.load(std::memory_order_relaxed) && device_failure_.is_ok(); ++turns) {
    if (!set.runner) {
      if (set.queue.empty()) break;
      PlanBatch batch = std::move(set.queue.front());
      set.queue.pop_front();
      if (Status begun = begin_batch(set, std::move(batch)); !begun.is_ok()) return fail_everything(begun);
    }
    const Progress progress = set.runner->step(moved);
    if (progress == Progress::kFailed) {
      const Status why = set.runner->status();  // a copy: the runner goes
      if (set.runner->is_on_device()) return device_failed(why);
      if (why.code() != Code::kInternal || why.culprit() >= 0) return fail_everything(why);
      return fail_everything(  // the other ranks read it, too
          Status(why.code(), text_of(mesh_->describe(mesh_->rank()), ": ", why.text()), mesh_->rank()));
    }
    if (progress == Progress::kPending) {
      waits_on_device_ = waits_on_device_ || set.runner->is_on_device();
      break;
    }
    if (set.runner->has_more()) {
      const uint32_t id = set.runner->batch().part.first;
      set.cut[id] = std::move(set.runner);
    } else {
      finish_batch(set);
    }
  }
  // What the leaver had agreed to completes first; what runs frozen either completes or steps back, for the leaver has
  // thawed.
  const bool busy = set.runner || !set.queue.empty() || !set.cut.empty() || !set.frozen_runs.empty();
  if (!set.closed.is_ok() && !busy && set.armed.empty() && !set.armed_runner)
    while (!set.pending.empty()) {
      Operation* op = set.pending.back();
      complete(set, op, set.closed.with(op->describe()));
      *moved = true;
    }
}

// Whoever sleeps and waits for what this rank has just published.
void Engine::wake_readers(ProcessSet& set) {
  if (!set.lane || !set.lane->take_published()) return;
  for (int position : set.lane->positions())
    if (set.ranks[position] != mesh_->rank()) mesh_->wake(set.ranks[position], false);
}

void Engine::finish_batch(ProcessSet& set) {
  auto runner = std::move(set.runner);
  if (runner->is_on_device()) device_batch_over(set);
  counters_.batches.fetch_add(1, std::memory_order_relaxed);
  counters_.fused.fetch_add(runner->operations().size(), std::memory_order_relaxed);
  counters_.bytes_reduced.fetch_add(runner->bytes(), std::memory_order_relaxed);
  for (Operation* op : runner->operations())
    if (op) complete(set, op, runner->outcome());
}

void Engine::complete(ProcessSet& set, Operation* op, Status status) {
  set.forget(op);
  finish(op, std::move(status));
}

void Engine::finish(Operation* op, Status status) {
  note_done(*op, status);
  op->status = std::move(status);
  std::function<void()> tell;  // made before `op` may be recycled, run after its result may be taken
  if (op->done_callback)
    tell = [call = op->done_callback, context = op->done_context, handle = op->handle, outcome = op->status] {
      call(context, handle, outcome);
    };
  handles_.finished(op);
  if (tell) notifier_.push(std::move(tell));
  gate_.changed();
}

}  // namespace hc
