#include "engine/sets/process_set.h"

#include <algorithm>

#include "agreement/mismatch.h"
#include "agreement/signature_table.h"
#include "collective/selection.h"

namespace hc {

namespace {

constexpr size_t kPlansAhead = 2;  // batches decided but not finished: what is ready later waits and gets fused
constexpr int kBatchesAtOnce = 16;
constexpr int kMostTold = 16;  // members of a set of which each tells every other one that it has filled a bucket
constexpr int kFewSmall = 4;   // buckets of less than a quarter of a batch of them

}  // namespace

ProcessSet::ProcessSet(const SetParts& parts, std::shared_ptr<SetIntake> intake, size_t* total_pending)
    : parts_(parts), intake_(std::move(intake)), pending_(total_pending), backend_(parts.backend.make_set(*this)) {
  const Members& m = members();
  if (!m.has_me()) return;
  const Mesh& mesh = *parts.context.mesh;
  const int me = mesh.rank();
  group_.rank = m.group_rank;
  group_.size = m.size();
  group_.world_rank = m.ranks;
  std::vector<std::shared_ptr<Arena>> arenas;
  std::vector<int> positions;
  std::vector<Locality> places;
  int my_index = 0;
  for (int position = 0; position < group_.size; ++position) {
    const int r = m.ranks[static_cast<size_t>(position)];
    group_.node.push_back(mesh.node_of(r));
    group_.channel.push_back(r == me ? nullptr : &parts.context.mesh->channel(r));
    if (!mesh.shares_memory(r) || mesh.node_of(r) != mesh.node_of(me)) continue;
    if (r == me) my_index = static_cast<int>(arenas.size());
    arenas.push_back(mesh.arena(r));
    positions.push_back(position);
    places.push_back(mesh.locality_of(r));
  }
  if (!arenas.empty()) {
    shared_ =
        std::make_unique<SharedSegment>(std::move(arenas), std::move(positions), my_index, m.id, levels_of(places));
    group_.shared_segment = shared_.get();
    bypass_.attach(shared_.get(), parts.context.config.bypass, is_on_one_node());
    limit_bypass();
  }
  may_be_two_level_ = mesh.every_rank_shares() && layout_of(group_.node) == Layout::kSeveralNodesOfSeveral;
  negotiator_ = std::make_unique<Negotiator>(parts.context, parts.link, parts.timeline, m, &intake_->stragglers,
                                             group_.node, is_on_one_node());
  set_tuning(parts.tuner.agreed());  // not the newest, which ranks may have learnt of at different moments
}

Status ProcessSet::prepare() { return shared_ ? shared_->prepare() : Status::ok(); }

void ProcessSet::set_tuning(const Tuning& tuning) {
  tuning_ = tuning;
  if (negotiator_) negotiator_->set_sizes(tuning);
}

void ProcessSet::limit_bypass() { bypass_.set_flat_bytes(parts_.tuner.flat_bytes_at_init()); }

// ---- operations come in, and end

void ProcessSet::refuse(Operation* op, const Status& reason) {
  pending_.add(op);
  complete(op, reason.with(op->describe()));
}

void ProcessSet::take(Operation* op) {
  if (parts_.context.has_failed()) return refuse(op, parts_.intake.failure());
  if (!closed_.is_ok()) return refuse(op, closed_);
  pending_.add(op);
  const bool entered = op->bucket.set >= 0 ? enter_bucket(op) : enter_bypass(op);
  if (!entered) announce(op);
  // A coordinator shows what all ranks announce, when their requests come.
  if (parts_.timeline.on() && (entered || !negotiator_->is_coordinator()))
    parts_.timeline.announced(Timeline::key_of(*op), parts_.context.rank(), op->submitted);
}

void ProcessSet::end_pending(const Status& reason) {
  while (!pending_.all().empty()) {
    Operation* op = pending_.all().back();
    complete(op, reason.with(op->describe()));
  }
}

void ProcessSet::announce(Operation* op) {
  // Nobody may wait for this rank in a round while it waits for the coordinator. With a round under way: when it is
  // over.
  if (bypass_.is_busy())
    negotiator_->announce_bypass();
  else
    bypass_.close();
  if (op->signature().op == Op::kJoin) {
    pending_.expect_join(op);
    deferred_join_ = op;  // run_arrivals() goes on with it
    return;
  }
  negotiator_->announce(op);
  pending_.expect(op);
}

Task ProcessSet::task_of(const Operation& op) const {
  const Signature& s = op.signature();
  Task task;
  task.dtype = s.tensors[0].dtype;
  task.reduce = s.reduce == Reduce::kAverage ? Reduce::kSum : s.reduce;
  task.scale = scale_of(s, task.dtype, members().size());
  task.pieces = {{op.in[0], op.out[0], static_cast<size_t>(s.tensors[0].count())}};
  return task;
}

bool ProcessSet::enter_bucket(Operation* op) {
  const PersistentBuckets::Declared* d = buckets_.find(op->bucket.set);
  const bool between_nodes = d && d->is_between_nodes;
  // What overtakes what is the coordinator's to decide. And who waits for this rank in the plan is told not to.
  if (between_nodes && (d->anybody_left || op->signature().priority != 0)) leave_buckets(op->bucket.set);
  // Where the backend works, rank 0 decides for all whether a bucket starts without a plan.
  auto* run = buckets_.enter(op->bucket, shared_.get(), !op->work, [&](size_t flag) {
    if (op->work) return make_persistent_arrival(group_, flag);
    Task task = task_of(*op);
    if (!between_nodes) return make_persistent_allreduce(std::move(task), group_, flag);
    const Tuning& tuning = parts_.tuner.agreed();  // for ever: a search that changes it is in no step with this
    task.segment_bytes = tuning.segment_bytes;
    task.ring_from_bytes = tuning.ring_from_bytes;
    task.tag = {static_cast<uint16_t>(parts_.context.generation),
                static_cast<uint16_t>(Tag::kBucketStreams | members().id), 0, 0};
    return make_persistent_between_nodes(std::move(task), group_, flag, may_be_two_level_ && tuning.two_level);
  });
  if (!run) return false;
  if (op->work)
    backend_->make_ready(op, buckets_.find(op->bucket.set)->flag_of(op->bucket.index));
  else
    arrivals_.emplace_back(op, run);
  return true;
}

// What `op` has to do if every rank has submitted the same; fails where nobody could.
Result<Task> ProcessSet::bypass_task_of(Operation* op) const {
  const Signature& s = op->signature();
  if (s.op == Op::kAllreduce) return task_of(*op);
  if (s.op == Op::kBarrier) {
    Task task;
    task.op = Op::kBarrier;
    return task;
  }
  const std::vector<const Signature*> alike(static_cast<size_t>(members().size()), &s);
  Agreement agreed =
      agree({s.op, op->request.name.empty(), op->request.sequence, op->request.name}, alike, {members().ranks});
  if (agreed.error != Code::kOk) return Status(agreed.error, agreed.text);
  return BatchRunner::task_if_alike(op, std::move(agreed.rows), group_, members().ranks);
}

bool ProcessSet::enter_bypass(Operation* op) {
  if (!bypass_.is_on() || pending_.size() != 1 || batches_.has_work() || !bypass_.takes(*op)) return false;
  const uint32_t cached = negotiator_->cache().find(op->request);
  if (cached == kNoCacheId) return false;
  Result<Task> task = bypass_task_of(op);
  if (!task.is_ok()) return false;  // the negotiation says why
  const BypassKey key{cached, op->request.sequence, hash_of(op->signature())};
  keep_repeat(*op, key, task.value());
  auto round = bypass_.enter(task.take(), group_, key);
  if (!round) return false;
  arrivals_.emplace_back(op, std::move(round));
  return true;
}

// ---- one iteration

Status ProcessSet::step(Iteration* now) {
  if (negotiator_->has_requests()) {
    if (now->may_coalesce && negotiator_->should_coalesce()) {
      now->coalesces = true;
    } else {
      HC_TRY(negotiator_->send_requests(is_reachable()));
      now->moved = true;
    }
  }
  if (negotiator_->has_news_from_below()) {
    HC_TRY(negotiator_->pass_up(is_reachable()));
    now->moved = true;
  }
  if (negotiator_->is_coordinator() && (negotiator_->has_news() || tuning_revision_ != parts_.tuner.revision()))
    HC_TRY(decide(now));
  if (batches_.has_work()) HC_TRY(run_batches(now));
  if (!closed_.is_ok()) end_after_close(now);
  if (!arrivals_.empty() || deferred_join_) HC_TRY(run_arrivals(now));
  if (backend_->is_used()) backend_->step(now);
  wake_readers();
  return Status::ok();
}

Status ProcessSet::decide(Iteration* now) {
  const Tuning& newest = parts_.tuner.newest();
  const uint64_t revision = parts_.tuner.revision();
  const size_t busy = batches_.busy();
  const bool may_run = busy < kPlansAhead && negotiator_->may_decide() &&
                       !negotiator_->should_batch(newest.batching_delay_ms, &now->next_batch_due);
  // New settings ride with batches, for which every member knows the set; in the world, where coordinators of other
  // sets wait for them, also alone.
  const bool is_world = members().id == 0;
  const bool differs = tuning_ != newest;
  if (!differs) tuning_revision_ = revision;
  const bool tunes = differs && (may_run || is_world) && !parts_.context.has_failed();
  if (!may_run && !tunes) return Status::ok();
  if (tunes) negotiator_->set_sizes(newest);
  Plan plan = negotiator_->decide(may_run ? kPlansAhead - busy : 0);
  if (plan.batches.empty() && !(tunes && is_world)) return Status::ok();
  if (tunes) plan.tuning = newest;
  if (negotiator_->take_bypass_news()) bypass_.reset_trial();
  if (bypass_.suits(plan, pending_, negotiator_->coordinator()->pending(), static_cast<size_t>(members().size())))
    plan.bypass_round = bypass_.fresh_round();
  now->moved = true;
  for (PlanBatch& batch : plan.batches)
    if (batch.algorithm == Algorithm::kAuto)
      batch.algorithm = algorithm_in_plan(batch.op, may_be_two_level_ && newest.two_level);
  parts_.backend.note_before(members(), &plan);
  if (members().size() > 1) {
    Writer frame;
    frame.put(FrameKind::kPlan);
    encode(plan, &frame);
    HC_TRY(negotiator_->pass_down(plan, frame.bytes()));
  }
  HC_TRY(parts_.backend.order(members(), plan));
  adopt(std::move(plan));
  return Status::ok();
}

Status ProcessSet::take_plan(int from, Plan plan, std::span<const uint8_t> frame) {
  if (members().group_rank <= 0 || negotiator_->parent() != from) return Status::ok();
  HC_TRY(negotiator_->pass_down(plan, frame));
  if (members().id == 0) HC_TRY(parts_.backend.order(members(), plan));
  adopt(std::move(plan));
  return Status::ok();
}

void ProcessSet::adopt(Plan plan) {
  if (parts_.timeline.on()) {
    if (parts_.timeline.marks_cycles()) parts_.timeline.cycle();
    for (PlanBatch& batch : plan.batches) batch.planned = Clock::now();
  }
  if (plan.tuning) {
    tuning_ = *plan.tuning;
    if (members().id == 0) parts_.tuner.adopt(*plan.tuning);
    parts_.tuner.note_plan();
  }
  for (PlanBatch& batch : plan.batches) {
    batch.tuning = tuning_;
    batches_.add(std::move(batch));
  }
  if (plan.bypass_round) bypass_.open(*plan.bypass_round, pending_);
}

// The operation that a plan entry means on this rank; null when this rank did not submit it (it has joined).
Operation* ProcessSet::match(Op op, const PlanEntry& entry) {
  if (op == Op::kJoin) return pending_.join();
  PlanCache& cache = negotiator_->cache();
  const bool learns = entry.assigned && entry.cache_id != kNoCacheId;
  if (entry.unnamed) {
    Operation* found = pending_.unnamed(op, entry.sequence);
    if (found && learns) cache.learn(found->request, entry.cache_id);
    return found;
  }
  Operation* found =
      entry.name.empty() ? pending_.by_cache_id(entry.cache_id) : parts_.intake.find_named(*intake_, op, entry.name);
  if (learns && found) cache.learn(found->request, entry.cache_id);
  if (learns && !found) cache.learn(entry);
  return found;
}

// Makes the runner of the batch that comes next, or takes up the one that this is a later part of.
Status ProcessSet::begin_batch(PlanBatch batch) {
  if (batch.part.index != 0) {
    if (batches_.resume(batch)) return Status::ok();
    return error(Code::kInternal, "a plan names part ", batch.part.index, " of batch ", batch.part.first,
                 ", which this rank does not have in parts");
  }
  std::vector<Operation*> operations;
  operations.reserve(batch.entries.size());
  for (const PlanEntry& entry : batch.entries) {
    Operation* op = match(batch.op, entry);
    if (!op && entry.unnamed) parts_.intake.skip_sequence(*intake_, batch.op, entry.sequence);
    // An early failure may not mean this rank's own announcement, which came later.
    const auto& struck = entry.failed_on;
    if (!struck.empty() && std::find(struck.begin(), struck.end(), members().group_rank) == struck.end()) op = nullptr;
    operations.push_back(op);
  }
  if (batch.op == Op::kJoin) operations.assign(1, pending_.join());
  const Tag tag{static_cast<uint16_t>(parts_.context.generation), members().id, batch.id, 0};
  const TimePoint planned = batch.planned;
  auto runner = std::make_unique<BatchRunner>(std::move(batch), std::move(operations), group_, members().ranks, tag);
  runner->show_in(&parts_.timeline);
  if (runner->batch().on_device && runner->batch().error == Code::kOk) backend_->take_batch(*runner);
  batches_.begin(std::move(runner));
  note_batch(planned);
  return Status::ok();
}

Status ProcessSet::run_batches(Iteration* now) {
  for (int n = 0; n < kBatchesAtOnce && !parts_.context.has_failed() && !parts_.backend.has_failed(); ++n) {
    if (!batches_.runner()) {
      if (batches_.planned() == 0) break;
      HC_TRY(begin_batch(batches_.take_next()));
    }
    BatchRunner& runner = *batches_.runner();
    const Progress progress = runner.step(&now->moved);
    if (progress == Progress::kFailed) {
      const Status& why = runner.status();
      if (!runner.is_on_host()) {
        parts_.backend.fail(why);
        return Status::ok();
      }
      if (why.code() != Code::kInternal || why.culprit() >= 0) return why;
      // The other ranks read it, too.
      return Status(why.code(), text_of(parts_.context.me(), ": ", why.text()), parts_.context.rank());
    }
    if (progress == Progress::kPending) {
      now->looks_soon = now->looks_soon || !runner.is_on_host();
      break;
    }
    if (runner.has_more())
      batches_.put_aside();
    else
      finish_batch();
  }
  return Status::ok();
}

// What the leaver had agreed to completes first; what is entered without a plan either completes or steps back, for the
// leaver enters nothing any more.
void ProcessSet::end_after_close(Iteration* now) {
  if (!batches_.is_idle() || !arrivals_.empty() || backend_->has_ready() || pending_.size() == 0) return;
  end_pending(closed_);
  now->moved = true;
}

void ProcessSet::wake_members() {
  for (int position : shared_->positions()) {
    const int r = members().ranks[static_cast<size_t>(position)];
    if (r != parts_.context.rank()) parts_.context.mesh->wake(r, false);
  }
}

void ProcessSet::finish_batch() {
  const auto runner = batches_.take_runner();
  if (!runner->is_on_host()) backend_->batch_over();
  Counters& counters = parts_.context.counters;
  Counters::add_locked(counters.batches);
  Counters::add_locked(counters.fused, runner->operations().size());
  Counters::add_locked(counters.bytes_reduced, runner->bytes());
  for (Operation* op : runner->operations())
    if (op) complete(op, runner->outcome());
}

Status ProcessSet::run_arrivals(Iteration* now) {
  for (size_t i = 0; i < arrivals_.size();) {
    const Progress progress = arrivals_[i].collective->step(&now->moved);
    if (progress == Progress::kPending) {
      ++i;
      continue;
    }
    // Others are in the same bucket, from which there is no way back.
    if (progress == Progress::kFailed && !arrivals_[i].round) return arrivals_[i].collective->status();
    Arrival run = std::move(arrivals_[i]);
    arrivals_.erase(arrivals_.begin() + static_cast<std::ptrdiff_t>(i));
    now->moved = true;
    const BucketId bucket = run.op->bucket;
    if (run.collective->withdrawn()) {
      if (PersistentBuckets::Declared* d = bucket.set >= 0 ? buckets_.find(bucket.set) : nullptr) {
        leave_buckets(bucket.set);
        d->is_persistent = false;
      }
      announce(run.op);
      continue;
    }
    // A round is over: what was announced while it was under way others may wait for, instead of entering the next.
    if (bucket.set < 0 && pending_.size() > 1) bypass_.close();
    Counters& counters = parts_.context.counters;
    Counters::add_locked(bucket.set >= 0 ? counters.persistent : counters.bypassed);
    note_persistent(run.op, *run.collective);
    Counters::add_locked(counters.bytes_reduced, run.round ? run.op->bytes() : run.bytes);
    complete(run.op, run.collective->status());
  }
  if (!deferred_join_ || !arrivals_.empty() || !backend_->may_leave()) return Status::ok();
  deferred_join_ = nullptr;
  leave_shared_rounds();
  negotiator_->announce_join();
  now->moved = true;
  return Status::ok();
}

// ---- declared buckets

Status ProcessSet::declare(int id, std::shared_ptr<const BucketSet> buckets, bool owned, Capabilities* mine) {
  using Scope = PersistentBuckets::Scope;
  const bool is_host = buckets->place.is_host;
  const Scope scope = is_on_one_node()                              ? Scope::kNode
                      : is_host && persists_between_nodes(*buckets) ? Scope::kNodes
                                                                    : Scope::kNone;
  auto added = buckets_.add(id, buckets, scope, scope == Scope::kNone ? nullptr : shared_.get());
  HC_TRY(added.status());
  const bool has_flags = added.value()->has_flags && parts_.context.config.persistent_buckets;
  mine->numbers = static_cast<int64_t>(added.value()->first_flag) * 4 + static_cast<int64_t>(scope);
  mine->between_nodes = scope == Scope::kNodes;
  HC_TRY(backend_->declare(*buckets, owned, has_flags, mine));
  if (!is_host) return Status::ok();
  const Mesh& mesh = *parts_.context.mesh;
  const Arena* arena = mesh.shares_memory(mesh.rank()) ? mesh.arena(mesh.rank()).get() : nullptr;
  const bool anywhere = scope == Scope::kNodes && !(may_be_two_level_ && parts_.tuner.agreed().two_level);
  // Settings that are searched for come with plans, and what MPI or libfabric has begun cannot be withdrawn.
  const bool may_persist =
      scope != Scope::kNodes || (!mesh.has_mpi() && !mesh.has_fabric() && !parts_.tuner.is_searching());
  mine->persistent = has_flags && may_persist &&
                     std::all_of(buckets->buckets.begin(), buckets->buckets.end(), [&](const BucketSet::Bucket& b) {
                       return b.bytes() && (anywhere || (arena && arena->contains(b.data, b.bytes())));
                     });
  return Status::ok();
}

std::shared_ptr<SetBackend::Confirmation> ProcessSet::confirm(int id, const Capabilities& all) {
  PersistentBuckets::Declared* d = buckets_.find(id);
  d->is_persistent = all.persistent && members().size() > 1;
  return backend_->confirm(d->set, all);
}

void ProcessSet::undeclare(int id) {
  const bool used = std::any_of(pending_.all().begin(), pending_.all().end(),
                                [&](const Operation* op) { return op->bucket.set == id; });
  const PersistentBuckets::Declared* d = buckets_.find(id);
  // The late operations, also those that are not taken yet, find it; it goes with the process set. One that did not
  // would be negotiated, while the other ranks, who have their bucket, wait for it in the plan.
  if (!d) return;
  if (d->is_between_nodes) leave_buckets(id);  // the others still have theirs, and may wait for this rank's in the plan
  if (used || parts_.intake.is_pending(*intake_, id)) return;
  if (!std::ranges::all_of(d->runs, [](const auto& run) { return !run.collective || run.collective->is_at_rest(); }))
    return;
  backend_->undeclare(*d->set);
  buckets_.remove(id);
  parts_.intake.undeclare(*intake_, id);
}

// ---- ends

Status ProcessSet::peer_left(int rank, const std::string& text) {
  const int position = members().position_of(rank);
  if (position < 0 || !members().has_me() || negotiator_->leave(position, text)) return Status::ok();
  return parent_left(rank, text);
}

Status ProcessSet::parent_left(int rank, const std::string& text) {
  if (!closed_.is_ok()) return Status::ok();
  closed_ = Status(Code::kAborted, text, rank);
  return negotiator_->tell_parent_left(rank, text);
}

void ProcessSet::leave_shared_rounds() {
  bypass_.close();
  buckets_.invalidate(shared_.get());
  leave_buckets();
}

// Between nodes, the same on every member: whether these buckets may go without a plan. Many small ones are faster with
// one, which fuses them. Only in the set of all ranks: the number of another set, once it was removed, is given again,
// and what was sent for a round that nobody entered could be taken for the new one's.
bool ProcessSet::persists_between_nodes(const BucketSet& set) const {
  const size_t small = parts_.tuner.agreed().ring_from_bytes / 4;
  const auto few = std::ranges::count_if(set.buckets, [&](const auto& b) { return b.bytes() < small; }) <= kFewSmall;
  return few && members().id == 0 && members().size() <= kMostTold;
}

// Tells the others how far this rank has come in its declared buckets, of which it enters none without a plan any more.
// A peer to which that cannot be sent is lost, which is noticed elsewhere.
void ProcessSet::leave_buckets(int only) {
  const auto left = buckets_.leave(only);
  if (left.empty()) return;
  Writer& frame = parts_.link.begin(FrameKind::kBucketsLeft);
  frame.put(members().id);
  for (const auto& [id, d] : left) {
    frame.put(static_cast<int32_t>(id));
    frame.put(static_cast<uint32_t>(d->runs.size()));
    for (const auto& run : d->runs) frame.put(run.rounds);
  }
  for (const int r : members().ranks)
    if (r != parts_.context.rank() && !parts_.link.has_left(r)) (void)parts_.link.send(r, true);
}

Status ProcessSet::take_buckets_left(int from, Reader* in) {
  const int position = members().position_of(from);
  while (in->ok() && in->remaining() > 0) {
    const int id = in->get<int32_t>();
    const auto count = in->get<uint32_t>();
    std::vector<uint64_t> rounds(count <= kMaxPersistentBuckets ? count : 0);
    for (uint64_t& one : rounds) one = in->get<uint64_t>();
    if (!in->ok() || position < 0 || !buckets_.member_left(position, id, rounds))
      return error(Code::kInternal, "a frame about declared buckets is broken");
  }
  return Status::ok();
}

void ProcessSet::close() {
  batches_.begin(nullptr);
  arrivals_.clear();
  buckets_.end_runs();
  backend_->close();
}

void ProcessSet::fail(const Status& reason) {
  std::string during;
  if (const BatchRunner* runner = batches_.runner()) {
    const size_t n = runner->operations().size();
    during = text_of(" (batch ", runner->batch().id, ", ", n, n == 1 ? " operation" : " operations", ", under way)");
  }
  batches_.clear();
  arrivals_.clear();
  buckets_.end_runs();
  deferred_join_ = nullptr;
  while (!pending_.all().empty()) {
    Operation* op = pending_.all().back();
    complete(op, reason.with(text_of(op->describe(), op->batch ? during : "")));
  }
}

}  // namespace hc
