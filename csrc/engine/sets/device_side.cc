#include "engine/sets/device_side.h"

#include <algorithm>

namespace hc {

namespace {
constexpr size_t kMostDropped = 62;  // sets of buckets that the ranks agree on at a time
constexpr int kRoundsAlone = 3;      // steps of a set of buckets, with nothing else on GPUs among them
}

void DeviceSide::put_on_device(BatchRunner& runner) {
  if (!device_) device_ = std::make_unique<DeviceGroup>(group_, gpu_.options());
  if (runner.batch().op == Op::kScatter)
    for (Operation* op : runner.operations())
      if (op && op->device) gpu_.settle(op);
  if (const auto gpu = gpu_.gpu()) device_->use(gpu);
  const Tag tag{static_cast<uint16_t>(context_.generation), members_.id, runner.batch().id, 0};
  runner.on_device(std::make_unique<DeviceBatch>(
      device_.get(), tag, &gpu_.relief(),
      [this, ticket = LaunchTicket{members_.id}] { return order_.tickets().is_next(ticket); }));
}

void DeviceSide::batch_over() {
  if (order_.tickets().is_next({members_.id})) order_.tickets().over();
  if (device_ && !device_->reason().empty() && device_->reason() != told_) tell();
}

// How tensors on GPUs are reduced from here on; once, and again when that has changed.
void DeviceSide::tell() {
  told_ = device_->reason();
  const DeviceBackend backend = device_->backend();
  const bool nccl = backend == DeviceBackend::kNccl, peers = backend == DeviceBackend::kPeers;
  gpu_.note_way(members_.id, {nccl ? "nccl" : peers ? "peers" : "host", told_, device_->kernels_reason()});
  if (members_.group_rank != 0) return;
  if (nccl || peers || context_.config.gpu_operations == "host")
    context_.log.debug("process set ", members_.id, ": tensors on GPUs are reduced by ", told_);
  else
    context_.log.warning("process set ", members_.id,
                         ": tensors on GPUs travel through host memory, which is slower: ", told_);
  if (nccl && !device_->kernels_reason().empty() && context_.config.gpu_kernels != "off")
    context_.log.warning("process set ", members_.id,
                         ": this library's kernels for GPUs cannot be used, so what NCCL does not do by itself (16-bit "
                         "integers, averages of integers, Adasum) travels through host memory: ",
                         device_->kernels_reason(), ". `horoclone doctor` tries them");
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

// What NCCL does not take works as any other memory does. All are tried on every rank, so that the calls stay alike.
void DeviceSide::register_buckets(std::shared_ptr<const BucketSet> buckets) {
  Status failed;
  for (const auto& memory : buckets->memory) {
    Status told = device_->register_memory(memory->data(), memory->bytes(), memory);
    if (!told.is_ok()) failed = std::move(told);
  }
  if (!failed.is_ok())
    context_.log.warning("process set ", members_.id, ": NCCL does not register all buckets: ", failed.text(),
                         ". HOROCLONE_GPU_REGISTER=0 goes without");
  else if (!buckets->memory.empty())
    context_.log.debug("process set ", members_.id, ": NCCL knows ", buckets->memory.size(), " buckets in advance");
  if (!buckets->memory.empty()) registered_.push_back({std::move(buckets)});
}

void DeviceSide::drop_buckets(const BucketSet& buckets) {
  for (Registered& one : registered_)
    if (one.buckets.get() == &buckets) one.dropped = true;
}

int64_t DeviceSide::dropped() const {
  int64_t bits = 0;
  for (size_t i = 0; i < std::min(registered_.size(), kMostDropped); ++i)
    if (registered_[i].dropped) bits |= int64_t{1} << i;
  return device_->may_forget() ? bits : 0;
}

Status DeviceSide::forget_dropped(int64_t on_all_ranks) {
  std::vector<Registered> kept;
  for (size_t i = 0; i < registered_.size(); ++i) {
    if (i >= kMostDropped || !(on_all_ranks >> i & 1)) {
      kept.push_back(std::move(registered_[i]));
      continue;
    }
    for (const auto& memory : registered_[i].buckets->memory) HC_TRY(device_->forget_memory(memory->data()));
  }
  registered_ = std::move(kept);
  return Status::ok();
}

Result<GpuEventPtr> DeviceSide::capture(const Task& task, CuStream from) {
  if (!nccl_does(task, false))
    return error(Code::kUnsupported, "NCCL does not do this reduction by itself, and nothing else can be captured");
  return device_->capture(task, from);
}

// ---- persistent buckets

void DeviceSide::make_ready(Operation* op, size_t flag) {
  ready_.push_back({op, flag});
  filled_[flag] = op->submitted;
  if (is_leader()) note_round(op->bucket.set);
}

void DeviceSide::note_round(int set) {
  Rounds& rounds = rounds_[set];
  if (rounds.filled == 0) rounds.others = order_.others();
  if (rounds.others != order_.others()) rounds.alone = 0;
  rounds.others = order_.others();
  if (++rounds.filled < buckets_.find(set)->runs.size()) return;
  rounds.filled = 0;
  ++rounds.alone;
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

std::string DeviceSide::awaited_bucket() const {
  const LaunchTicket* ticket = order_.tickets().next();
  if (!ticket || ticket->set != members_.id || ticket->bucket < 0 || launching_) return "";
  const auto flag = static_cast<size_t>(ticket->bucket);
  const BucketId id = buckets_.with_flag(flag);
  if (id.set < 0 || std::any_of(ready_.begin(), ready_.end(), [&](const Ready& r) { return r.flag == flag; })) return "";
  return buckets_.find(id.set)->set->buckets[static_cast<size_t>(id.index)].name;
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
      all.push_back({text_of("allreduce '", d.set->buckets[index].name, "'"), waited_s, std::move(missing)});
  }
  return all;
}

// On rank 0. Everything that is ready, in one group for each set of buckets: while one is on its way into NCCL, the next
// gathers.
void DeviceSide::give_tickets() {
  LaunchTickets& tickets = order_.tickets();
  Ready* before = nullptr;
  LaunchTicket waiting;
  for (Ready& ready : ready_) {
    if (ready.has_ticket || !may_start(ready)) continue;
    if (before) {
      waiting.with_next = before->op->bucket.set == ready.op->bucket.set;
      tickets.give(waiting, 1, true);
    }
    waiting = {members_.id, static_cast<int32_t>(ready.flag)};
    ready.has_ticket = true;
    before = &ready;
  }
  if (before) tickets.give(waiting, 1, true);
}

std::vector<Operation*> DeviceSide::take_back(const SharedSegment& shared_segment, Iteration* now) {
  if (ready_.empty()) return {};
  if (is_leader()) {
    if (!buckets_.anybody_left(shared_segment)) return {};
    if (order_.tickets().kept_back()) {  // the others believe what they see, so these go first
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
    const bool stays = is_leader() ? ready.has_ticket
                                   : order_.tickets().contains({members_.id, static_cast<int32_t>(ready.flag)});
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
    if (at == ready_.end() && (id.set < 0 || buckets_.find(id.set)->is_persistent)) return {};  // it is still to come
    operations.push_back(at == ready_.end() ? nullptr : at->op);
    ids->push_back(id);
  }
  std::erase_if(ready_, [&](const Ready& r) {
    return std::find(operations.begin(), operations.end(), r.op) != operations.end();
  });
  return operations;
}

std::unique_ptr<BatchRunner> DeviceSide::runner_of(std::vector<Operation*> operations, const std::vector<BucketId>& ids,
                                                   const Tuning& tuning, Timeline* timeline) {
  PlanBatch batch;
  batch.on_device = true;
  batch.tuning = tuning;
  batch.entries.resize(operations.size());
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
  }
  const Tag tag{static_cast<uint16_t>(context_.generation), members_.id, 0, 0};
  auto runner = std::make_unique<BatchRunner>(std::move(batch), std::move(operations), group_, members_.ranks, tag);
  runner->show_in(timeline);
  runner->on_device(std::make_unique<DeviceBatch>(device_.get(), tag, &gpu_.relief(), [] { return true; }));
  return runner;
}

Result<std::unique_ptr<BatchRunner>> DeviceSide::launch(const Tuning& tuning, Timeline* timeline, Iteration* now) {
  using Launched = std::unique_ptr<BatchRunner>;
  if (!launching_) {
    if (is_leader()) give_tickets();
    const LaunchTicket* ticket = order_.tickets().next();
    if (!ticket || ticket->set != members_.id || ticket->bucket < 0) return Launched();
    std::vector<BucketId> ids;
    std::vector<Operation*> operations = take_group(&ids);
    if (operations.empty()) return Launched();
    launching_tickets_ = operations.size();
    launching_ = runner_of(std::move(operations), ids, tuning, timeline);
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

void DeviceSide::abort() {
  launching_.reset();
  ready_.clear();
  if (device_) device_->abort();
}

void DeviceSide::close() {
  launching_.reset();
  device_.reset();
}

}  // namespace hc
