#include "engine/sets/device_side.h"

#include <algorithm>

namespace hc {

void DeviceSide::put_on_device(BatchRunner& runner) {
  if (!device_) device_ = std::make_unique<DeviceGroup>(group_, gpu_.options());
  if (runner.batch().op == Op::kScatter)
    for (Operation* op : runner.operations())
      if (op && op->device) gpu_.settle(op);
  if (const auto gpu = gpu_.gpu()) device_->use(gpu);
  const Tag tag{static_cast<uint16_t>(context_.generation), members_.id, runner.batch().id, 0};
  runner.on_device(std::make_unique<DeviceBatch>(
      device_.get(), tag, [this, ticket = LaunchTicket{members_.id}] { return order_.tickets().is_next(ticket); }));
}

void DeviceSide::batch_over() {
  if (order_.tickets().is_next({members_.id})) order_.tickets().over();
  if (!device_ || device_->reason().empty() || members_.group_rank != 0 || device_->reason() == told_) return;
  told_ = device_->reason();
  const bool on_gpu = device_->backend() == DeviceBackend::kNccl || device_->backend() == DeviceBackend::kPeers;
  if (on_gpu || context_.config.gpu_operations == "host")
    context_.log.debug("process set ", members_.id, ": tensors on GPUs are reduced by ", told_);
  else
    context_.log.warning("process set ", members_.id,
                         ": tensors on GPUs travel through host memory, which is slower: ", told_);
}

// The tickets come from rank 0 of the world, which must see the arrivals. NCCL must be up, for there is no agreement
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

// What NCCL does not take works as any other memory does.
void DeviceSide::register_buckets(const BucketSet& buckets) {
  for (const auto& memory : buckets.memory) {
    const Status told = device_->register_memory(memory->data(), memory->bytes(), memory);
    if (told.is_ok()) continue;
    context_.log.warning("process set ", members_.id, ": NCCL does not register the buckets: ", told.text(),
                         ". HOROCLONE_GPU_REGISTER=0 goes without");
    return;
  }
  if (!buckets.memory.empty())
    context_.log.debug("process set ", members_.id, ": NCCL knows ", buckets.memory.size(), " buckets in advance");
}

void DeviceSide::forget_buckets(const BucketSet& buckets) {
  if (!device_) return;
  for (const auto& memory : buckets.memory) device_->forget_memory(memory->data());
}

Result<GpuEventPtr> DeviceSide::capture(const Task& task, CuStream from) {
  if (!nccl_does(task, false))
    return error(Code::kUnsupported, "NCCL does not do this reduction by itself, and nothing else can be captured");
  return device_->capture(task, from);
}

void DeviceSide::make_ready(Operation* op, size_t flag) {
  ready_.push_back({op, flag});
  if (context_.rank() == 0) order_.tickets().give({members_.id, static_cast<int32_t>(flag)}, 1, true);
}

std::unique_ptr<BatchRunner> DeviceSide::runner_of(Operation* op, const Tuning& tuning, Timeline* timeline) {
  PlanBatch batch;
  batch.on_device = true;
  batch.tuning = tuning;
  batch.entries.resize(1);
  const Tag tag{static_cast<uint16_t>(context_.generation), members_.id, 0, 0};
  auto runner =
      std::make_unique<BatchRunner>(std::move(batch), std::vector<Operation*>{op}, group_, members_.ranks, tag);
  runner->show_in(timeline);
  runner->on_device(std::make_unique<DeviceBatch>(device_.get(), tag, [] { return true; }));
  return runner;
}

Result<std::unique_ptr<BatchRunner>> DeviceSide::launch(const Tuning& tuning, Timeline* timeline, Iteration* now) {
  using Launched = std::unique_ptr<BatchRunner>;
  if (!launching_) {
    const LaunchTicket* ticket = order_.tickets().next();
    if (ready_.empty() || !ticket || ticket->set != members_.id || ticket->bucket < 0) return Launched();
    const auto at = std::find_if(ready_.begin(), ready_.end(),
                                 [&](const Ready& r) { return r.flag == static_cast<size_t>(ticket->bucket); });
    if (at == ready_.end()) return Launched();  // this rank has not seen all arrivals yet
    Operation* op = at->op;
    ready_.erase(at);
    launching_ = runner_of(op, tuning, timeline);
  }
  const Progress progress = launching_->step(&now->moved);
  if (progress == Progress::kFailed) return launching_->status();
  if (progress == Progress::kPending) {
    now->looks_soon = true;
    return Launched();
  }
  order_.tickets().over();
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
