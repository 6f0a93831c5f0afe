// Submission, agreement and execution. Waiting, sleeping and failing are in engine_drive.cc.
#include "engine/engine.h"

#include <algorithm>
#include <tuple>

#include "engine/frames.h"

namespace hc {

namespace {

constexpr size_t kPlansAhead = 2;  // batches decided but not finished: what is ready later gathers and gets fused

const char* horovod_name_of(Op op) {  // as in Horovod's messages
  constexpr const char* names[kOpCount] = {"Allreduce", "Allgather", "Broadcast", "Alltoall", "Reducescatter", "Join", "Barrier"};
  return names[static_cast<int>(op)];
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? "," : "") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace

Engine::Engine(Config config)
    : config_(std::move(config)), log_(config_.log_level, config_.log_hide_time) {}

Result<std::unique_ptr<Engine>> Engine::create(Config config) {
  std::unique_ptr<Engine> engine(new Engine(std::move(config)));
  const Config& c = engine->config_;
  MeshOptions options;
  options.shared_memory = c.shared_memory;
  options.arena_bytes = c.arena_bytes;
  options.interfaces = c.interfaces;
  options.socket_buffer_bytes = static_cast<int>(c.socket_buffer_bytes);
  options.keepalive_s = c.keepalive_s;
  options.tcp_streams = c.tcp_streams;
  options.node = c.node;
  if (c.simd != "auto" && !select_simd(c.simd.c_str()))
    return error(Code::kInvalidArgument, "HOROCLONE_SIMD=", c.simd, ": this processor does not have it");
  auto mesh = Mesh::listen(options);
  if (!mesh.is_ok()) return mesh.status();
  engine->mesh_ = mesh.take();
  return engine;
}

Status Engine::connect(const MeshMembers& members) {
  log_.set_rank(members.rank);
  MeshMembers with_log = members;
  with_log.report_after_s = config_.init_report_s;
  with_log.say = [this](const std::string& text) { log_.warning(text); };
  HC_TRY(mesh_->connect(with_log));
  generation_ = members.generation;
  left_.assign(mesh_->size(), false);
  liveness_ = Liveness(mesh_->size(), {config_.liveness_probe_s, config_.liveness_warn_s, config_.liveness_error_s});
  timer_s_ = std::min({1.0, config_.liveness_probe_s, config_.stall_check_s});
  next_timer_ = Clock::now();
  next_stall_report_ = Clock::now();
  std::vector<int> everybody(mesh_->size());
  for (int r = 0; r < mesh_->size(); ++r) everybody[r] = r;
  auto set = make_set(0, everybody);
  if (set->lane) HC_TRY(set->lane->prepare(), "rank ", mesh_->rank());
  sets_[0] = std::move(set);
  HC_TRY(thread_.start("hc-engine", [this] { run(); }));
  connected_.store(true);
  return agree_on_settings(members);
}

// Rank 0's settings that all ranks must share decide for everybody: algorithms and sizes are part of the layout. This is also the
// first operation: nobody uses a lane before everybody has prepared its own.
Status Engine::agree_on_settings(const MeshMembers& members) {
  int64_t table[] = {static_cast<int64_t>(config_.block_bytes), static_cast<int64_t>(config_.segment_bytes), config_.hierarchical_allreduce, config_.shared_memory};
  const int64_t shape[] = {std::size(table)};
  const Submission::Tensor tensor{table, table, shape, DType::kI64};
  Submission s;
  s.op = Op::kBroadcast;
  s.name = "horoclone.settings";
  s.tensors = {&tensor, 1};
  s.will_wait = true;
  int64_t handle = 0;
  HC_TRY(submit(s, &handle));
  bool done = false;
  const Deadline deadline = Deadline::in(members.timeout_s);
  Status outcome;
  while (!done && outcome.is_ok()) {
    outcome = wait(handle, 0.05, &done);
    if (!done && outcome.is_ok() && deadline.passed())
      outcome = error(Code::kTimeout, "init: connected, but not every rank finished its set-up within ", members.timeout_s, " s");
    if (!done && members.cancelled && members.cancelled()) outcome = error(Code::kAborted, "init was interrupted");
  }
  release(handle);
  HC_TRY(outcome);
  if ((table[3] != 0) != config_.shared_memory)
    return error(Code::kMismatch, "HOROCLONE_SHARED_MEMORY is ", config_.shared_memory ? "on" : "off", " for rank ", mesh_->rank(), " and ",
                 table[3] ? "on" : "off", " for rank 0; set it alike for all");
  enter_gate();
  config_.block_bytes = static_cast<size_t>(table[0]);
  config_.segment_bytes = static_cast<size_t>(table[1]);
  config_.hierarchical_allreduce = static_cast<int>(table[2]);
  sets_[0]->two_level = wants_two_level(*sets_[0]);
  gate_.leave();
  return Status::ok();
}

// Several nodes, of which at least one has several ranks that share memory.
bool Engine::wants_two_level(const ProcessSet& set) const {
  const std::vector<int>& node = set.group.node;
  if (config_.hierarchical_allreduce == 0 || !config_.shared_memory || node.empty()) return false;
  std::vector<int> distinct = node;
  std::sort(distinct.begin(), distinct.end());
  const bool repeats = std::adjacent_find(distinct.begin(), distinct.end()) != distinct.end();
  return repeats && distinct.front() != distinct.back();
}

std::unique_ptr<ProcessSet> Engine::make_set(uint16_t id, std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  const int me = mesh_->rank();
  const auto at = std::find(ranks.begin(), ranks.end(), me);
  auto set = std::make_unique<ProcessSet>(id, generation_, ranks, at == ranks.end() ? -1 : static_cast<int>(at - ranks.begin()));
  if (set->group_rank < 0) return set;
  Group& group = set->group;
  group.rank = set->group_rank;
  group.size = set->size();
  group.world_rank = ranks;
  std::vector<std::shared_ptr<Arena>> arenas;
  std::vector<int> positions;
  int my_index = 0;
  for (int position = 0; position < group.size; ++position) {
    const int r = ranks[position];
    group.node.push_back(mesh_->node_of(r));
    group.channel.push_back(r == me ? nullptr : &mesh_->channel(r));
    if (!mesh_->shares_memory(r) || mesh_->node_of(r) != mesh_->node_of(me)) continue;
    if (r == me) my_index = static_cast<int>(arenas.size());
    arenas.push_back(mesh_->arena(r));
    positions.push_back(position);
  }
  if (!arenas.empty()) {
    set->lane = std::make_unique<SharedLane>(std::move(arenas), std::move(positions), my_index, id);
    group.lane = set->lane.get();
  }
  set->two_level = wants_two_level(*set);
  if (set->group_rank == 0) {
    CoordinatorOptions options;
    options.size = set->size();
    options.fusion_bytes = config_.fusion_bytes;
    options.cache_capacity = static_cast<size_t>(config_.cache_capacity);
    options.generation = generation_;
    options.process_set = id;
    options.world_rank = ranks;
    set->coordinator = std::make_unique<Coordinator>(options);
  }
  return set;
}

ProcessSet* Engine::find_set(int id) const {
  auto at = sets_.find(id);
  return at == sets_.end() ? nullptr : at->second.get();
}

// ---- submit -----------------------------------------------------------------------------------------------------------

Status Engine::check(const Submission& s, const ProcessSet& set) const {
  if (set.group_rank < 0)
    return error(Code::kInvalidArgument, horovod_name_of(s.op), ": Rank ", mesh_->rank(), " is not a member of the provided process set.");
  for (const auto& t : s.tensors) {
    for (int64_t d : t.shape)
      if (d < 0) return error(Code::kInvalidArgument, name_of(s.op), " '", s.name, "': negative dimension in ", shape_text(t.shape));
    int64_t count = 1;
    for (int64_t d : t.shape)
      if (__builtin_mul_overflow(count, d, &count)) return error(Code::kInvalidArgument, name_of(s.op), " '", s.name, "': shape ", shape_text(t.shape), " has too many elements");
    if (count && !t.in) return error(Code::kInvalidArgument, name_of(s.op), " '", s.name, "': tensor without memory");
    if ((s.op == Op::kAllreduce || s.op == Op::kBroadcast) && count && !t.out)
      return error(Code::kInvalidArgument, name_of(s.op), " '", s.name, "': no memory for the result");
    if ((s.op == Op::kAllreduce || s.op == Op::kReducescatter) && s.reduce == Reduce::kAverage && t.dtype == DType::kBool)
      return error(Code::kInvalidArgument, name_of(s.op), " '", s.name, "': Average of bool has no meaning; use Sum (or) or Product (and), or convert first");
  }
  if (s.op == Op::kBroadcast && set.position_of(s.root) < 0)
    return error(Code::kInvalidArgument, "broadcast '", s.name, "': root rank ", s.root, " is not a member of process set ", set.id);
  if (s.reduce == Reduce::kAdasum && (s.op == Op::kAllreduce || s.op == Op::kReducescatter))
    return error(Code::kUnsupported, name_of(s.op), " '", s.name, "': Adasum is not available in this version; use op=Average");
  if (s.op == Op::kReducescatter && s.reduce != Reduce::kSum && s.reduce != Reduce::kAverage)
    return error(Code::kInvalidArgument, "Reducescatter currently only supports AVERAGE and SUM.");
  if (s.op != Op::kAlltoall) return Status::ok();
  const auto& t = s.tensors[0];
  if (t.shape.empty()) return error(Code::kInvalidArgument, "alltoall '", s.name, "': the tensor must have at least one dimension");
  const int64_t rows = t.shape[0];
  if (s.splits.empty()) {
    if (rows % set.size()) return error(Code::kInvalidArgument, "alltoall '", s.name, "': first dimension ", rows, " is not divisible by the number of ranks ", set.size(), "; pass splits");
    return Status::ok();
  }
  if (static_cast<int>(s.splits.size()) != set.size())
    return error(Code::kInvalidArgument, "alltoall '", s.name, "': splits has ", s.splits.size(), " entries for ", set.size(), " ranks");
  int64_t sum = 0;
  for (int64_t n : s.splits) {
    if (n < 0) return error(Code::kInvalidArgument, "alltoall '", s.name, "': negative entry in splits");
    sum += n;
  }
  if (sum > rows) return error(Code::kInvalidArgument, "alltoall '", s.name, "': the sum of splits, ", sum, ", exceeds the first dimension ", rows);
  return Status::ok();
}

bool Engine::arena_holds(const Submission& s) const {
  if (s.op != Op::kAllreduce || !mesh_->shares_memory(mesh_->rank()) || s.tensors.empty()) return false;
  const Arena& arena = *mesh_->arena(mesh_->rank());
  return std::all_of(s.tensors.begin(), s.tensors.end(), [&](const Submission::Tensor& t) {
    size_t bytes = size_of(t.dtype);
    for (int64_t d : t.shape) bytes *= static_cast<size_t>(d);
    return t.in == t.out && bytes && arena.contains(t.in, bytes);
  });
}

void Engine::fill(Operation* op, const Submission& s, const ProcessSet& set) {
  op->process_set = set.id;
  op->submitted = Clock::now();
  op->done_callback = s.done;
  op->done_context = s.done_context;
  op->request.name.assign(s.name);
  op->request.sequence = 0;
  Signature& g = op->request.signature;
  g.op = s.op;
  g.reduce = s.reduce;
  g.in_arena = arena_holds(s);
  g.root = s.op == Op::kBroadcast ? set.position_of(s.root) : 0;
  g.prescale = s.prescale;
  g.postscale = s.postscale;
  g.tensors.resize(s.tensors.size());
  for (size_t i = 0; i < s.tensors.size(); ++i) {
    g.tensors[i].dtype = s.tensors[i].dtype;
    g.tensors[i].shape.assign(s.tensors[i].shape.begin(), s.tensors[i].shape.end());
    op->in.push_back(static_cast<const std::byte*>(s.tensors[i].in));
    op->out.push_back(static_cast<std::byte*>(s.tensors[i].out));
  }
  g.splits.assign(s.splits.begin(), s.splits.end());
  if (s.op == Op::kAlltoall && s.splits.empty()) g.splits.assign(set.size(), s.tensors[0].shape[0] / set.size());
}

Status Engine::submit(const Submission& s, int64_t* handle) {
  if (!connected_.load(std::memory_order_acquire))
    return error(Code::kNotInitialized, "Horovod has not been initialized; use hvd.init().");
  {
    std::lock_guard lock(submit_mu_);
    HC_TRY(queue_locked(s, nullptr, handle));
  }
  if (!s.will_wait && sleepers_.load(std::memory_order_seq_cst) > 0) mesh_->wake_self();
  return Status::ok();
}

Status Engine::submit_declared(int process_set, int bucket_set, int bucket, int64_t* handle) {
  if (!connected_.load(std::memory_order_acquire))
    return error(Code::kNotInitialized, "Horovod has not been initialized; use hvd.init().");
  {
    std::lock_guard lock(submit_mu_);
    ProcessSet* set = find_set(process_set);
    if (!set || !set->bucket_sets.contains(bucket_set)) return error(Code::kInvalidArgument, "bucket set ", bucket_set, " was not declared");
    const BucketSet& declared = set->bucket_sets[bucket_set];
    if (bucket < 0 || bucket >= static_cast<int>(declared.buckets.size()))
      return error(Code::kInvalidArgument, "bucket ", bucket, " of ", declared.buckets.size());
    const BucketSet::Bucket& b = declared.buckets[bucket];
    const Submission::Tensor tensor{b.data, b.data, b.shape, b.dtype};
    Submission s;
    s.reduce = declared.reduce;
    s.process_set = process_set;
    s.name = b.name;
    s.prescale = declared.prescale;
    s.postscale = declared.postscale;
    s.tensors = {&tensor, 1};
    const std::pair<int, int> which{bucket_set, bucket};
    HC_TRY(queue_locked(s, &which, handle));
  }
  if (sleepers_.load(std::memory_order_seq_cst) > 0) mesh_->wake_self();
  return Status::ok();
}

// Submit lock held: checks, fills an operation and queues it.
Status Engine::queue_locked(const Submission& s, const std::pair<int, int>* bucket, int64_t* handle) {
  if (!failure_.is_ok()) return failure_.with(text_of(name_of(s.op), s.name.empty() ? "" : " '", s.name, s.name.empty() ? "" : "'"));
  ProcessSet* set = find_set(s.process_set);
  if (!set)
    return error(Code::kInvalidArgument, horovod_name_of(s.op), ": Process set ", s.process_set, " does not exist, or has not been registered.");
  HC_TRY(check(s, *set));
  if (set->join_pending.load(std::memory_order_acquire))
    return error(Code::kInvalidArgument, name_of(s.op), ": rank ", mesh_->rank(), " has joined and submits nothing until join() has returned");
  NameRecord* record = s.name.empty() ? nullptr : &set->record_of(s.op, s.name);
  if (record && record->pending.load(std::memory_order_acquire))
    return error(Code::kInvalidArgument, name_of(s.op), " '", s.name, "': an operation with this name is already pending on rank ",
                 mesh_->rank(), " (Duplicate tensor name). Wait for it first, or give this one another name.");
  Operation* op = handles_.acquire();
  if (!op) return error(Code::kInternal, "more than a million operations are live; wait for some and release their handles");
  fill(op, s, *set);
  if (bucket) std::tie(op->bucket_set, op->bucket) = *bucket;
  if (record) {
    op->name_record = record;
    record->pending.store(op, std::memory_order_release);
  } else {
    op->request.sequence = set->next_sequence(s.op);
  }
  if (s.op == Op::kJoin) set->join_pending.store(true, std::memory_order_release);
  incoming_.push_back(op);
  *handle = op->handle;
  has_incoming_.store(true, std::memory_order_seq_cst);
  counters_.operations.fetch_add(1, std::memory_order_relaxed);
  return Status::ok();
}

// ---- one turn of the engine -------------------------------------------------------------------------------------------

bool Engine::step() {
  bool moved = false;
  counters_.steps.fetch_add(1, std::memory_order_relaxed);
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
  for (auto& [id, set] : sets_) {
    if (set->group_rank < 0) continue;
    if (set->ballot_waits()) {
      send_ballot(*set);
      moved = true;
    }
    if (set->coordinator) decide(*set, &moved);
    run_queue(*set, &moved);
    if (!set->frozen_runs.empty() || set->deferred_join)
      set->run_frozen(&moved, [&](Operation* op, const Status& outcome) {
        counters_.frozen.fetch_add(1, std::memory_order_relaxed);
        complete(*set, op, outcome);
      });
    wake_readers(*set);
  }
  return moved;
}

void Engine::take_incoming(bool* moved) {
  {
    std::lock_guard lock(submit_mu_);
    taken_.swap(incoming_);
    has_incoming_.store(false, std::memory_order_release);
  }
  for (Operation* op : taken_) {
    ProcessSet* set = find_set(op->process_set);
    set->adopt(op);
    *moved = true;
    if (failed_.load() || !set->closed.is_ok())
      complete(*set, op, (failed_.load() ? failure_ : set->closed).with(op->describe()));
    else if (op->bucket_set < 0 || !set->start_frozen(op))
      set->announce(op);
  }
  taken_.clear();
}

void Engine::receive_frames(bool* moved) {
  for (int r = 0; r < mesh_->size(); ++r) {
    if (r == mesh_->rank() || left_[r]) continue;
    // Shared-memory rings move here; sockets moved in poll_mesh. A broken channel is reported there, after its last frames.
    if (mesh_->shares_memory(r)) (void)mesh_->channel(r).progress(moved).is_ok();
    while (!failed_.load(std::memory_order_relaxed) && mesh_->channel(r).receive(&received_)) {
      *moved = true;
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
    Ballot ballot;
    bad = decode(&in, &ballot);
    ProcessSet* set = bad.is_ok() ? find_set(ballot.process_set) : nullptr;
    if (set && set->coordinator && ballot.generation == generation_ && set->position_of(from) == ballot.rank)
      bad = set->coordinator->take(ballot, Clock::now());
  } else if (kind == FrameKind::kPlan) {
    Plan plan;
    bad = decode(&in, &plan);
    ProcessSet* set = bad.is_ok() ? find_set(plan.process_set) : nullptr;
    if (set && set->coordinator_rank() == from && plan.generation == generation_) take_plan(*set, std::move(plan));
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
  } else if (kind != FrameKind::kPong) {
    bad = error(Code::kInternal, "unknown control frame ", static_cast<int>(kind));
  }
  if (!bad.is_ok()) fail_everything(bad.with(text_of("control frame from ", mesh_->describe(from))));
}

Status Engine::send_frame(int to, bool urgent) {
  counters_.control_frames_sent.fetch_add(1, std::memory_order_relaxed);
  counters_.control_bytes_sent.fetch_add(frame_.size(), std::memory_order_relaxed);
  Status sent = mesh_->channel(to).send(frame_.bytes());
  mesh_->wake(to, urgent);
  return sent;
}

void Engine::send_ballot(ProcessSet& set) {
  Status sent;
  if (failed_.load(std::memory_order_relaxed) || !set.closed.is_ok()) {
    // Nobody is there to take it.
  } else if (set.coordinator) {
    sent = set.coordinator->take(set.ballot, Clock::now());
  } else {
    frame_.clear();
    frame_.put(FrameKind::kBallot);
    encode(set.ballot, &frame_);
    sent = send_frame(set.coordinator_rank(), false);
    counters_.ballots_sent.fetch_add(1, std::memory_order_relaxed);
  }
  set.ballot.cached.clear();
  set.ballot.fresh.clear();
  set.ballot.joined = false;
  if (!sent.is_ok()) fail_everything(sent);
}

void Engine::decide(ProcessSet& set, bool* moved) {
  const size_t busy = set.queue.size() + (set.runner ? 1 : 0);
  if (busy >= kPlansAhead || !set.coordinator->anything_ready()) return;
  Plan plan = set.coordinator->decide(kPlansAhead - busy);
  if (plan.batches.empty()) return;
  *moved = true;
  for (PlanBatch& batch : plan.batches)
    if (batch.op == Op::kAllreduce && set.two_level) batch.algorithm = Algorithm::kTwoLevel;
  if (set.size() > 1) {
    frame_.clear();
    frame_.put(FrameKind::kPlan);
    encode(plan, &frame_);
    for (int r : set.ranks) {
      if (r == mesh_->rank() || left_[r]) continue;
      if (Status sent = send_frame(r, false); !sent.is_ok()) return fail_everything(sent);
      counters_.plans_sent.fetch_add(1, std::memory_order_relaxed);
    }
  }
  take_plan(set, std::move(plan));
}

void Engine::take_plan(ProcessSet& set, Plan plan) {
  for (PlanBatch& batch : plan.batches) set.queue.push_back(std::move(batch));
}

void Engine::run_queue(ProcessSet& set, bool* moved) {
  for (int turns = 0; turns < 16 && !failed_.load(std::memory_order_relaxed); ++turns) {
    if (!set.runner) {
      if (set.queue.empty()) break;
      PlanBatch batch = std::move(set.queue.front());
      set.queue.pop_front();
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
      set.runner = std::make_unique<BatchRunner>(std::move(batch), std::move(operations), set.group, set.ranks, config_, tag);
    }
    const Progress progress = set.runner->step(moved);
    if (progress == Progress::kFailed) return fail_everything(Status(set.runner->status()));  // a copy: the runner goes
    if (progress == Progress::kPending) break;
    finish_batch(set);
  }
  // What the leaver had agreed to completes first; what runs frozen either completes or steps back, for the leaver has thawed.
  if (!set.closed.is_ok() && !set.runner && set.queue.empty() && set.frozen_runs.empty())
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
  counters_.batches.fetch_add(1, std::memory_order_relaxed);
  counters_.fused.fetch_add(runner->operations().size(), std::memory_order_relaxed);
  counters_.bytes_reduced.fetch_add(runner->bytes(), std::memory_order_relaxed);
  for (Operation* op : runner->operations())
    if (op) complete(set, op, runner->outcome());
}

void Engine::complete(ProcessSet& set, Operation* op, Status status) {
  set.forget(op);
  op->status = std::move(status);
  if (op->done_callback)
    notifier_.push([call = op->done_callback, context = op->done_context, handle = op->handle, outcome = op->status] {
      call(context, handle, outcome);
    });
  handles_.finished(op);
  gate_.changed();
}

}  // namespace hc
