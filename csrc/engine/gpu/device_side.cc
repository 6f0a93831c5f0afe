#include "engine/gpu/device_side.h"

#include <algorithm>

#include "base/quoted.h"

namespace hc {

namespace {
constexpr int kRoundsAlone = 3;      // steps of a set of buckets, with nothing else on GPUs among them
constexpr double kTogetherS = 1e-4;  // buckets of the next step that are filled within this time share a group of NCCL
constexpr double kMispredictionS = 0.01;  // rank 0 waits behind a bucket to which it has given a ticket too early
constexpr double kLeftBehindS = 5;        // until what was launched before a rank has left must have ended
constexpr int kMaxMispredictions = 16;    // each doubles the steps until it goes ahead again
}  // namespace

void DeviceSide::take_batch(BatchRunner& runner) {
  if (!device_) device_ = std::make_unique<DeviceGroup>(group_, gpu_.options());
  is_used_ = true;
  if (runner.batch().op == Op::kScatter)
    for (Operation* op : runner.operations())
      if (op && op->work) gpu_.settle(op);
  if (const auto gpu = gpu_.gpu()) device_->use(gpu);
  const Tag tag{static_cast<uint16_t>(context_.generation), members_.id, runner.batch().id, 0};
  runner.use(std::make_unique<DeviceBatch>(device_.get(), tag, &gpu_.memory_pressure(),
                                           [this, ticket = LaunchTicket{members_.id}] {
                                             return order_.tickets().is_next(ticket) && !known_.is_changing();
                                           }));
}

void DeviceSide::batch_over() {
  if (order_.tickets().is_next({members_.id})) order_.tickets().over();
  if (device_ && !device_->reason().empty() && device_->reason() != told_) tell();
}

// How tensors on GPUs are reduced from here on; once, and again when that has changed.
void DeviceSide::tell() {
  told_ = device_->reason();
  const GpuBackend* backend = device_->backend();
  const std::string name = backend ? backend->name() : "host";
  gpu_.note_way(members_.id, {name, told_, device_->kernels_reason()});
  if (members_.group_rank != 0) return;
  if (name != "host" || context_.config.gpu_operations == "host")
    context_.log.debug(members_.prefix(), "tensors on GPUs are reduced by ", told_);
  else
    context_.log.warning(members_.prefix(), "tensors on GPUs travel through host memory, which is slower: ", told_);
  if (!device_->advice().empty()) context_.log.warning(device_->advice());
  if (name == "nccl" && !device_->kernels_reason().empty() && context_.config.gpu_kernels != "off")
    context_.log.warning(members_.prefix(),
                         "this library's kernels for GPUs cannot be used, so what NCCL does not do by itself (16-bit "
                         "integers, averages of integers, Adasum) travels through host memory: ",
                         device_->kernels_reason(), ". `horoclone doctor` tries them");
}

Status DeviceSide::declare(const BucketSet& buckets, bool owned, bool may_persist, Capabilities* mine) {
  mine->registers = owned && device_ && device_->registers();
  mine->knows_some = known_.any();
  if (mine->knows_some && device_->may_forget()) mine->dropped = known_.dropped();
  if (buckets.place.is_host) return Status::ok();
  order_.note_buckets(1);
  if (device_) HC_TRY(device_->prepare_to_capture());
  mine->persistent = may_persist && may_be_persistent(buckets);
  return Status::ok();
}

std::shared_ptr<SetBackend::Confirmation> DeviceSide::confirm(std::shared_ptr<const BucketSet> buckets,
                                                              const Capabilities& all) {
  return known_.change(device_.get(), std::move(buckets), all, [this] { return !has_launches(); });
}

bool DeviceSide::has_launches() const {
  const auto is_here = [](const Operation* op) { return op->work && op->signature().op != Op::kJoin; };
  return has_ready() || std::ranges::any_of(set_.pending().all(), is_here);
}

// The tickets come from rank 0 of the world, which must see who leaves. NCCL must be up, for there is no agreement
// left in which it could be set up, and it must do all of them: the host's collectives have an order of their own.
bool DeviceSide::may_be_persistent(const BucketSet& buckets) const {
  if (!order_.tickets().in_memory() || members_.coordinator_rank() != 0 || !device_) return false;
  Signature s;
  s.reduce = buckets.reduce;
  s.prescale = buckets.prescale;
  s.postscale = buckets.postscale;
  return std::all_of(buckets.buckets.begin(), buckets.buckets.end(), [&](const BucketSet::Bucket& b) {
    Task task;
    task.dtype = b.dtype;
    task.reduce = s.reduce == Reduce::kAverage ? Reduce::kSum : s.reduce;
    task.scale = scale_of(s, b.dtype, members_.size());
    return device_->enqueues(task);
  });
}

void DeviceSide::undeclare(const BucketSet& buckets) {
  if (!buckets.place.is_host) order_.note_buckets(-1);
  known_.drop(buckets);
}

Status DeviceSide::capture(const Submission& s, BucketId bucket, int64_t* handle) {
  auto gpu = gpu_.adopt(s.place.index);
  HC_TRY(gpu.status());
  const Gpu::Current current(*gpu.value(), Gpu::Current::For::kStreams);
  if (!device_ || !device_->backend()) return error(Code::kUnsupported, "NCCL is not up yet. ", kWarmUpBeforeCapture);
  if (!device_->launches_alone())
    return error(Code::kUnsupported,
                 "NCCL does not move its data, and only NCCL's work can be captured: ", device_->reason());
  Intake& intake = set_.parts().intake;
  auto made = intake.make(s, bucket);
  HC_TRY(made.status());
  Operation* op = made.value();
  *handle = op->handle;
  const Task task = set_.task_of(*op);
  auto done =
      nccl_does(task, false)
          ? device_->capture(task, static_cast<CuStream>(s.stream))
          : error(Code::kUnsupported, "NCCL does not do this reduction by itself, and nothing else can be captured");
  auto work = std::make_unique<DeviceWork>();
  work->gpu = gpu.take();
  const Status outcome = done.status();
  if (done.is_ok()) work->done = done.take();
  op->work = std::move(work);
  set_.parts().completion.finish(op, outcome);
  if (!outcome.is_ok()) intake.handles().release(*handle);
  return outcome;
}

// ---- persistent buckets

void DeviceSide::make_ready(Operation* op, size_t flag) {
  ready_.push_back({op, flag});
  filled_[flag] = op->submitted;
  if (!is_leader()) return;
  note_withdrawal();
  // Of a step to which it has gone ahead; also what others have begun of a step that it has withdrawn.
  ready_.back().has_ticket = order_.tickets().contains({members_.id, static_cast<int32_t>(flag)});
  note_round(*op, flag);
}

void DeviceSide::note_round(const Operation& op, size_t flag) {
  Rounds& rounds = rounds_[op.bucket.set];
  if (rounds.filled == 0) {
    rounds.others = order_.others();
    rounds.order.clear();
  }
  const bool together = !rounds.order.empty() && seconds_between(rounds.group_began, op.submitted) < kTogetherS;
  if (together) rounds.order.back().with_next = true;
  if (!together) rounds.group_began = op.submitted;
  rounds.order.push_back({members_.id, static_cast<int32_t>(flag)});
  if (rounds.others != order_.others()) rounds.alone = 0;
  rounds.others = order_.others();
  if (++rounds.filled < buckets_.find(op.bucket.set)->runs.size()) return;
  rounds.filled = 0;
  rounds.is_ahead = false;
  ++rounds.alone;
}

bool DeviceSide::may_leave() {
  if (has_ready()) return false;
  order_.tickets().withdraw_ahead();
  return order_.tickets().kept_back().empty();
}

void DeviceSide::withdraw(Iteration* now) {
  if (!order_.tickets().has_ahead()) return;
  order_.tickets().withdraw_ahead();
  note_withdrawal();
  now->moved = true;
}

// On rank 0, whose next ticket cannot be used yet: what it has filled waits behind what it has not, because it has gone
// ahead and this step differs from the one before.
void DeviceSide::look_for_misprediction(Iteration* now) {
  if (ready_.empty() || !ready_.front().has_ticket || !order_.tickets().next()->ahead) return;
  now->looks_soon = true;
  if (seconds_between(ready_.front().op->submitted, Clock::now()) < kMispredictionS) return;
  ++rounds_[ready_.front().op->bucket.set].mispredictions;
  withdraw(now);
}

void DeviceSide::note_withdrawal() {
  const LaunchTickets& tickets = order_.tickets();
  if (withdrawn_ == tickets.times_withdrawn()) return;
  withdrawn_ = tickets.times_withdrawn();
  for (Ready& ready : ready_) ready.has_ticket = tickets.contains({members_.id, static_cast<int32_t>(ready.flag)});
  for (auto& [set, rounds] : rounds_) {
    rounds.order.clear();
    rounds.is_ahead = false;
    rounds.alone = 0;
  }
}

// On rank 0, which has filled all of a step's buckets. The others may be through the next one before it begins it.
void DeviceSide::give_next_step() {
  for (auto& [set, rounds] : rounds_) {
    const PersistentBuckets::Declared* declared = buckets_.find(set);
    if (rounds.filled != 0 || rounds.is_ahead ||
        rounds.alone < kRoundsAlone << std::min(rounds.mispredictions, kMaxMispredictions) || !order_.may_go_ahead() ||
        !declared || !declared->is_persistent || rounds.order.size() != declared->runs.size())
      continue;
    std::vector<bool> there(rounds.order.size());
    for (const LaunchTicket& ticket : rounds.order)
      there[static_cast<size_t>(ticket.bucket) - declared->first_flag] = true;
    if (std::find(there.begin(), there.end(), false) != there.end()) continue;
    order_.tickets().give_ahead(rounds.order);
    rounds.is_ahead = true;
  }
}

// A launch cannot be taken back. A rank that waits for something else on its GPU before it fills the bucket would wait
// for ever behind it; so rank 0 goes ahead only where steps have had nothing else among their buckets.
bool DeviceSide::may_start(const Ready& ready) {
  if (rounds_[ready.op->bucket.set].alone >= kRoundsAlone) return true;
  const auto& runs = buckets_.find(ready.op->bucket.set)->runs;
  PersistentCollective& arrival = *runs[static_cast<size_t>(ready.op->bucket.index)].collective;
  bool moved = false;
  return arrival.step(&moved) == Progress::kDone && !arrival.withdrawn();
}

DeviceSide::Awaited DeviceSide::awaited_bucket() const {
  const LaunchTicket* ticket = order_.tickets().next();
  if (!ticket || ticket->set != members_.id || ticket->bucket < 0 || launching_) return {};
  const auto flag = static_cast<size_t>(ticket->bucket);
  const BucketId id = buckets_.with_flag(flag);
  if (id.set < 0 || std::any_of(ready_.begin(), ready_.end(), [&](const Ready& r) { return r.flag == flag; }))
    return {};
  const PersistentBuckets::Declared& declared = *buckets_.find(id.set);
  const auto index = static_cast<size_t>(id.index);
  const uint64_t filled = group_.shared_segment->bucket_flags(0, flag).arrived.load(std::memory_order_acquire);
  return {declared.set->buckets[index].name, filled > declared.runs[index].rounds};
}

std::vector<DeviceSide::Late> DeviceSide::late(TimePoint now, double patience_s) const {
  std::vector<Late> all;
  for (const auto& [flag, since] : filled_) {
    const double waited_s = seconds_between(since, now);
    const BucketId id = waited_s < patience_s ? BucketId{} : buckets_.with_flag(flag);
    if (id.set < 0) continue;
    const PersistentBuckets::Declared& d = *buckets_.find(id.set);
    const auto index = static_cast<size_t>(id.index);
    std::vector<int> missing = d.runs[index].collective->late_members();
    if (!missing.empty())
      all.push_back({"allreduce " + in_quotes(d.set->buckets[index].name), waited_s, std::move(missing)});
  }
  return all;
}

// On rank 0. Everything that is ready, in one group for each set of buckets: while one is on its way into NCCL, the
// next gathers.
void DeviceSide::give_tickets() {
  note_withdrawal();
  LaunchTickets& tickets = order_.tickets();
  Ready* before = nullptr;
  LaunchTicket waiting;
  for (Ready& ready : ready_) {
    if (ready.has_ticket || !may_start(ready)) continue;
    if (before) {
      waiting.with_next = before->op->bucket.set == ready.op->bucket.set;
      tickets.give_bucket(waiting);
    }
    waiting = {members_.id, static_cast<int32_t>(ready.flag)};
    ready.has_ticket = true;
    before = &ready;
  }
  if (before) tickets.give_bucket(waiting);
  give_next_step();
}

std::vector<Operation*> DeviceSide::take_back(const SharedSegment& shared_segment, Iteration* now) {
  if (ready_.empty()) return {};
  if (is_leader()) {
    if (!buckets_.anybody_left(shared_segment)) return {};
    withdraw(now);
    if (!order_.tickets().kept_back().empty()) {  // the others believe what they see, so these go first
      now->moved = true;
      return {};
    }
  } else {
    const bool stopped = shared_segment.flags(0).invalidated.load(std::memory_order_acquire) != 0;
    if (!stopped || !leader_stopped_) {
      now->moved = now->moved || stopped;
      leader_stopped_ = stopped;
      return {};
    }
  }
  std::vector<Operation*> back;
  std::erase_if(ready_, [&](const Ready& ready) {
    const bool stays =
        is_leader() ? ready.has_ticket : order_.tickets().contains({members_.id, static_cast<int32_t>(ready.flag)});
    if (!stays) back.push_back(ready.op);
    return !stays;
  });
  return back;
}

std::vector<Operation*> DeviceSide::take_group(std::vector<BucketId>* ids) {
  std::vector<Operation*> operations;
  const LaunchTickets& tickets = order_.tickets();
  for (size_t n = 0; n == 0 || tickets.at(n - 1)->with_next; ++n) {
    const LaunchTicket* ticket = tickets.at(n);
    if (!ticket || ticket->set != members_.id || ticket->bucket < 0) return {};
    const auto flag = static_cast<size_t>(ticket->bucket);
    const auto at = std::find_if(ready_.begin(), ready_.end(), [&](const Ready& r) { return r.flag == flag; });
    const BucketId id = buckets_.with_flag(flag);
    if (at == ready_.end() && (ticket->ahead || id.set < 0 || buckets_.find(id.set)->is_persistent))
      return {};  // it is still to come
    operations.push_back(at == ready_.end() ? nullptr : at->op);
    ids->push_back(id);
  }
  if (!order_.tickets().begin_buckets(operations.size())) return {};
  std::erase_if(ready_, [&](const Ready& r) {
    return std::find(operations.begin(), operations.end(), r.op) != operations.end();
  });
  return operations;
}

std::unique_ptr<BatchRunner> DeviceSide::runner_of(std::vector<Operation*> operations,
                                                   const std::vector<BucketId>& ids) {
  Timeline* timeline = &set_.parts().timeline;
  PlanBatch batch;
  batch.on_device = true;
  batch.tuning = set_.tuning();
  batch.entries.resize(operations.size());
  const Operation* join = set_.pending().join();
  DeviceBatch::StandIns stand_ins;
  if (join && join->work) stand_ins.free = work_of(join)->ready;
  for (size_t e = 0; e < operations.size(); ++e) {
    if (const Operation* op = operations[e]) {
      if (!timeline->on()) continue;
      timeline->agreed(Timeline::key_of(*op), Clock::now());
      timeline->started(*op, "gpu persistent", true, op->submitted);
      continue;
    }
    const BucketSet& set = *buckets_.find(ids[e].set)->set;
    const BucketSet::Bucket& bucket = set.buckets[static_cast<size_t>(ids[e].index)];
    Signature& s = batch.entries[e].signature;
    s.reduce = set.reduce;
    s.prescale = set.prescale;
    s.postscale = set.postscale;
    s.device = 1;
    s.tensors = {{bucket.dtype, bucket.shape}};
    stand_ins.at.push_back(stand_ins.free && device_->is_window(bucket.data) ? bucket.data : nullptr);
  }
  const Tag tag{static_cast<uint16_t>(context_.generation), members_.id, 0, 0};
  auto runner = std::make_unique<BatchRunner>(std::move(batch), std::move(operations), group_, members_.ranks, tag);
  runner->show_in(timeline);
  runner->use(std::make_unique<DeviceBatch>(
      device_.get(), tag, &gpu_.memory_pressure(), [] { return true; }, std::move(stand_ins)));
  return runner;
}

Result<std::unique_ptr<BatchRunner>> DeviceSide::launch(Iteration* now) {
  using Launched = std::unique_ptr<BatchRunner>;
  if (is_leader() && order_.tickets().has_ahead() && buckets_.anybody_left(*group_.shared_segment)) withdraw(now);
  if (!launching_) {
    if (known_.is_changing()) return Launched();
    if (is_leader()) give_tickets();
    const LaunchTicket* ticket = order_.tickets().next();
    if (!ticket || ticket->set != members_.id || ticket->bucket < 0) return Launched();
    std::vector<BucketId> ids;
    std::vector<Operation*> operations = take_group(&ids);
    if (operations.empty()) {
      if (is_leader()) look_for_misprediction(now);
      return Launched();
    }
    launching_tickets_ = operations.size();
    launching_ = runner_of(std::move(operations), ids);
  }
  Progress progress = Progress::kPending;
  {
    const Gpu::Current current(*device_->gpu());
    progress = launching_->step(&now->moved);
  }
  if (progress == Progress::kFailed) return launching_->status();
  if (progress == Progress::kPending) {
    now->looks_soon = true;
    return Launched();
  }
  for (; launching_tickets_; --launching_tickets_) order_.tickets().over();
  now->moved = true;
  return std::move(launching_);
}

void DeviceSide::step(Iteration* now) {
  if (known_.is_changing()) now->looks_soon = true;
  if (!ready_.empty()) {
    const auto back = take_back(*group_.shared_segment, now);
    if (!back.empty() && is_leader()) buckets_.invalidate(group_.shared_segment);
    for (Operation* op : back) set_.announce(op), now->moved = true;  // sent in the next iteration
  }
  while (!context_.has_failed() && !gpu_.has_failed()) {
    auto launched = launch(now);
    if (!launched.is_ok()) return gpu_.fail(launched.status());
    const auto runner = launched.take();
    if (!runner) return;
    Counters::add_locked(context_.counters.bytes_reduced, runner->bytes());
    for (Operation* op : runner->operations()) {
      if (!op) continue;
      Counters::add_locked(context_.counters.persistent);
      set_.complete(op, runner->outcome());
    }
  }
}

// ---- checks and ends

// What NCCL has noticed by itself, and tickets that rank 0 can give no more.
Status DeviceSide::check(const Status& closed) {
  if (!device_) return Status::ok();
  const uint16_t id = members_.id;
  if (Status ok = device_->check(); !ok.is_ok()) {
    gpu_.fail(id ? ok.with(text_of("process set ", id)) : ok);
    return Status::ok();
  }
  HC_TRY(check_order());
  // NCCL waits on the GPU for who has left, and knows no better.
  if (!closed.is_ok() && device_->oldest_flight_s(Clock::now()) > kLeftBehindS) return closed;
  const BatchRunner* runner = set_.batches().runner();
  const bool waits = (id != 0 && runner && !runner->is_on_host()) || !ready_.empty();
  const LaunchTickets& tickets = order_.tickets();
  if (!set_.parts().link.has_left(0) || !waits || (tickets.contains(id) && !tickets.is_held())) return Status::ok();
  return Status(Code::kAborted, text_of(context_.mesh->describe(0), " has shut down, and it orders the work on GPUs"),
                0);
}

// Something of this rank waits behind a bucket that it has not filled and another rank has begun: it will not come to
// fill it.
Status DeviceSide::check_order() const {
  const Awaited bucket = awaited_bucket();
  if (bucket.name.empty()) return Status::ok();
  const bool has_planned = order_.tickets().contains(LaunchTicket{members_.id});
  const TimePoint now = Clock::now();
  const double patience_s = context_.config.stall_check_s;
  for (const Operation* op : set_.pending().all()) {
    const double waited_s = seconds_between(op->submitted, now);
    const bool comes_behind = op->bucket.set >= 0 ? bucket.of_leader : has_planned;
    if (op->work && comes_behind && waited_s >= patience_s)
      return Status(Code::kMismatch,
                    text_of(context_.me(), " has waited ", static_cast<int>(waited_s), " s for ", op->describe(),
                            " on its GPU, which comes behind bucket ", in_quotes(bucket.name),
                            " that another rank has filled and this rank has not: let all ranks call it at the same "
                            "place, before or after the step"),
                    context_.rank());
  }
  return Status::ok();
}

void DeviceSide::note_failure() {
  if (!device_) return;
  if (Status ok = device_->check(); !ok.is_ok()) gpu_.fail(ok);
}

void DeviceSide::abort() {
  launching_.reset();
  ready_.clear();
  if (device_) device_->abort();
}

void DeviceSide::close() {
  launching_.reset();
  device_.reset();
  is_used_ = false;
}

}  // namespace hc
