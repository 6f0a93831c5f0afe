#include "collective/gpu/device_group.h"

#include <algorithm>
#include <thread>

#include "collective/shared/shared.h"

namespace hc {

namespace {
constexpr double kFarewellS = 2;  // for what runs on the device, and for the communicator to end in peace
}

DeviceGroup::DeviceGroup(const Group& group, DeviceOptions options) : group_(group), options_(std::move(options)) {}

DeviceGroup::~DeviceGroup() {
  if (comm_ && flights_land(kFarewellS) && !captured_) {
    for (auto next = registered_.begin(); next != registered_.end();) forget_memory((next++)->first);
    finish_communicators();
    if (!comm_) registered_.clear();
  }
  if (peers_) leave_peers();
  abort();
  if (stream_) gpu_->end_stream(stream_);
  if (capture_stream_) gpu_->end_stream(capture_stream_);
}

Status DeviceGroup::ensure_stream() {
  if (stream_ || !gpu_) return Status::ok();
  auto made = gpu_->make_stream();
  HC_TRY(made.status());
  stream_ = made.value();
  return Status::ok();
}

void DeviceGroup::load_nccl() {
  if (nccl_sought_ || !gpu_) return;
  nccl_sought_ = true;
  auto loaded = NcclApi::load(options_.nccl_library, options_.nccl_folders, gpu_->api().version);
  nccl_missing_ = loaded.status();
  if (loaded.is_ok()) nccl_ = loaded.take();
}

void DeviceGroup::load_kernels() {
  if (!gpu_ || kernels_ || options_.operations == GpuOperations::kHost) return;
  auto loaded = gpu_->kernels(options_.kernels);
  kernels_missing_ = loaded.status();
  if (loaded.is_ok()) kernels_ = loaded.value();
}

double DeviceGroup::oldest_flight_s(TimePoint now) {
  while (!flights_.empty()) {
    auto passed = gpu_->passed(*flights_.front().done);
    if (passed.is_ok() && !passed.value()) return std::max(1e-9, seconds_between(flights_.front().since, now));
    flights_.pop_front();
  }
  return 0;
}

Status DeviceGroup::check() {
  for (NcclHandle comm : communicators()) HC_TRY(check(comm));
  return Status::ok();
}

Status DeviceGroup::check(NcclHandle comm) {
  const Gpu::Current current(*gpu_);
  return nccl_->is_pending(comm).status();
}

// In the order of their making.
std::vector<NcclHandle> DeviceGroup::communicators() const {
  std::vector<NcclHandle> all;
  if (comm_) all.push_back(comm_);
  if (!levels_) return all;
  for (NcclHandle one : levels_->handles())
    if (one) all.push_back(one);
  return all;
}

void DeviceGroup::abort() {
  aborted_ = true;
  const std::vector<NcclHandle> comms = communicators();
  comm_ = nullptr;
  if (levels_) levels_->forget();
  auto registered = std::exchange(registered_, {});  // NCCL forgets it with the communicator; then its owners may
  if (comms.empty()) return;
  const auto end = [gpu = gpu_, nccl = nccl_, comms, registered = std::move(registered)] {
    const Gpu::Current current(*gpu);
    for (NcclHandle comm : comms) (void)nccl->ncclCommAbort(comm);
  };
  // NCCL tells the device to stop, then waits for the end of all graphs that hold its work: they are the framework's.
  captured_ ? std::thread(end).detach() : end();
}

// Memory that others have mapped is not given back before they have forgotten it, nor is what this rank still works
// with.
void DeviceGroup::leave_peers() {
  const Deadline deadline = Deadline::in(kFarewellS);
  const auto wait_until = [&](auto&& over) {
    while (!over() && !deadline.passed()) std::this_thread::sleep_for(std::chrono::microseconds(100));
    return over();
  };
  const bool idle = wait_until([&] {
    const Gpu::Current current(*gpu_);
    return gpu_->api().cuStreamQuery(stream_) != kCuNotReady;
  });
  if (!idle) return peers_->abandon();
  peers_->close();
  SharedLane& lane = *group_.lane;
  lane.publish(lane.mine().peers_closed, 1);
  (void)wait_until([&] {
    if (aborted_) return true;
    for (int m = 0; m < lane.size(); ++m)
      if (!lane.flags(m).peers_closed.load(std::memory_order_acquire)) return false;
    return true;
  });
  peers_.reset();
}

// In peace: every rank has the data, nobody reads from this one any more.
void DeviceGroup::finish_communicators() {
  if (levels_) {
    const auto levels = levels_->handles();
    if (!std::all_of(levels.begin(), levels.end(), [this](NcclHandle one) { return !one || finish(one); })) return;
    levels_->forget();
  }
  if (finish(comm_)) comm_ = nullptr;
}

bool DeviceGroup::finish(NcclHandle comm) {
  const Gpu::Current current(*gpu_);
  if (nccl_->ncclCommFinalize(comm) > kNcclSuccess && !check(comm).is_ok()) return false;
  NcclResult state = kNcclInProgress;
  for (const Deadline deadline = Deadline::in(kFarewellS); !deadline.passed();) {
    if (nccl_->ncclCommGetAsyncError(comm, &state) != kNcclSuccess || state != kNcclInProgress) break;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  if (state != kNcclSuccess) return false;
  (void)nccl_->ncclCommDestroy(comm);
  return true;
}

Status DeviceGroup::until_enqueued() {
  const Gpu::Current current(*gpu_);
  for (const Deadline deadline = Deadline::in(options_.init_timeout_s); !deadline.passed();) {
    auto pending = nccl_->is_pending(comm_);
    HC_TRY(pending.status());
    if (!pending.value()) return Status::ok();
    std::this_thread::sleep_for(std::chrono::microseconds(10));
  }
  return error(Code::kTimeout, "NCCL has not enqueued what was captured within ", options_.init_timeout_s, " s");
}

Status DeviceGroup::prepare_to_capture() {
  if (capture_stream_ || way_ != Way::kNccl) return Status::ok();
  auto made = gpu_->make_stream();
  HC_TRY(made.status());
  capture_stream_ = made.value();
  return Status::ok();
}

Result<GpuEventPtr> DeviceGroup::capture(Task task, CuStream from) {
  if (!comm_ || !nccl_does(task, false)) return error(Code::kInternal, "NCCL does not do what is captured");
  HC_TRY(prepare_to_capture());
  HC_TRY(until_enqueued());  // what was launched before
  auto ready = gpu_->record(from);
  HC_TRY(ready.status());
  HC_TRY(gpu_->wait(capture_stream_, ready.value()->get()));
  captured_ = flat_only_ = true;
  std::swap(stream_, capture_stream_);
  Status done = run_captured(std::move(task));
  std::swap(stream_, capture_stream_);
  flat_only_ = false;
  HC_TRY(done);
  return gpu_->record(capture_stream_);
}

Status DeviceGroup::run_captured(Task task) {
  const auto collective = make_nccl_collective(std::move(task), this, group_);
  bool moved = false;
  if (collective->start() == Progress::kFailed) return collective->status();
  HC_TRY(until_enqueued());
  if (const Progress end = collective->step(&moved); end == Progress::kFailed) return collective->status();
  return Status::ok();
}

Result<std::unique_ptr<Collective>> DeviceGroup::make_collective(Task task) {
  if (enqueues(task) && task.reduce == Reduce::kAdasum) return make_device_adasum(std::move(task), this, group_);
  if (enqueues(task)) return make_nccl_collective(std::move(task), this, group_);
  if (way_ == Way::kPeers && peers_do(task)) return make_peers_collective(std::move(task), this, group_);
  return make_staged_collective(std::move(task), this, group_);
}

}  // namespace hc
