#include "collective/gpu/communicators.h"

#include <algorithm>
#include <thread>

#include "base/clock.h"

namespace hc {

namespace {
constexpr double kFinishS = 2;  // for a communicator to end in peace
}

void Communicators::load(const std::shared_ptr<Gpu>& gpu, const std::string& library, const std::string& folders) {
  if (sought_ || !gpu) return;
  sought_ = true;
  gpu_ = gpu;
  auto loaded = NcclApi::load(library, folders, gpu->api().version);
  missing_ = loaded.status();
  if (loaded.is_ok()) nccl_ = loaded.take();
}

NcclResult Communicators::begin(int size, const NcclId& id, int rank) {
  const Gpu::Current current(*gpu_);
  NcclConfig config;
  return nccl_->ncclCommInitRankConfig(&world_, size, id, rank, &config);
}

// In the order of their making.
std::vector<NcclHandle> Communicators::all() const {
  std::vector<NcclHandle> all;
  if (world_) all.push_back(world_);
  if (!levels_) return all;
  for (NcclHandle one : levels_->handles())
    if (one) all.push_back(one);
  return all;
}

Status Communicators::check() const {
  for (NcclHandle comm : all()) HC_TRY(check(comm));
  return Status::ok();
}

Status Communicators::check(NcclHandle comm) const {
  const Gpu::Current current(*gpu_);
  return nccl_->is_pending(comm).status();
}

Status Communicators::until_enqueued(double limit_s) const {
  const Gpu::Current current(*gpu_);
  for (const Deadline deadline = Deadline::in(limit_s); !deadline.passed();) {
    auto pending = nccl_->is_pending(world_);
    HC_TRY(pending.status());
    if (!pending.value()) return Status::ok();
    std::this_thread::sleep_for(std::chrono::microseconds(10));
  }
  return error(Code::kTimeout, "NCCL has not enqueued what was captured within ", limit_s, " s");
}

Status Communicators::register_memory(std::byte* at, size_t bytes, std::shared_ptr<void> owner, double limit_s) {
  HC_TRY(until_enqueued(limit_s));  // what was launched before
  Registered made;
  made.is_window = nccl_->registration() == NcclApi::Registration::kWindows;
  made.owner = std::move(owner);
  const Gpu::Current current(*gpu_);
  if (made.is_window)
    HC_TRY(nccl_->check(nccl_->ncclCommWindowRegister(world_, at, bytes, &made.handle, kNcclSymmetric),
                        "ncclCommWindowRegister", world_));
  else
    HC_TRY(nccl_->check(nccl_->ncclCommRegister(world_, at, bytes, &made.handle), "ncclCommRegister", world_));
  HC_TRY(until_enqueued(limit_s));
  if (made.handle) registered_[at] = std::move(made);  // none: NCCL takes it as any memory, which is no error
  return Status::ok();
}

void Communicators::forget_memory(std::byte* at, bool idle, double limit_s) {
  const auto found = registered_.find(at);
  // A graph may still use it, or the device: then it stays until the communicator ends.
  if (found == registered_.end() || !world_ || captured_ || !idle || !until_enqueued(limit_s).is_ok()) return;
  const Gpu::Current current(*gpu_);
  if (found->second.is_window)
    (void)nccl_->ncclCommWindowDeregister(world_, found->second.handle);
  else
    (void)nccl_->ncclCommDeregister(world_, found->second.handle);
  (void)until_enqueued(limit_s).is_ok();
  registered_.erase(found);
}

void Communicators::forget_all_memory(double limit_s) {
  for (auto next = registered_.begin(); next != registered_.end();) forget_memory((next++)->first, true, limit_s);
}

void Communicators::finish() {
  if (levels_) {
    const auto levels = levels_->handles();
    if (!std::all_of(levels.begin(), levels.end(), [this](NcclHandle one) { return !one || finish(one); })) return;
    levels_->forget();
  }
  if (!finish(world_)) return;
  world_ = nullptr;
  registered_.clear();
}

bool Communicators::finish(NcclHandle comm) {
  const Gpu::Current current(*gpu_);
  if (nccl_->ncclCommFinalize(comm) > kNcclSuccess && !check(comm).is_ok()) return false;
  NcclResult state = kNcclInProgress;
  for (const Deadline deadline = Deadline::in(kFinishS); !deadline.passed();) {
    if (nccl_->ncclCommGetAsyncError(comm, &state) != kNcclSuccess || state != kNcclInProgress) break;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  if (state != kNcclSuccess) return false;
  (void)nccl_->ncclCommDestroy(comm);
  return true;
}

void Communicators::abort() {
  const std::vector<NcclHandle> comms = all();
  world_ = nullptr;
  if (levels_) levels_->forget();
  auto registered = std::exchange(registered_, {});  // NCCL forgets it with the communicator; then its owners may
  if (comms.empty()) return;
  const auto end = [gpu = gpu_, nccl = nccl_, comms, registered = std::move(registered)] {
    const Gpu::Current current(*gpu);
    for (NcclHandle comm : comms) (void)nccl->ncclCommAbort(comm);
  };
  // The graphs that hold NCCL's work are the framework's: nobody waits for their end.
  captured_ ? std::thread(end).detach() : end();
}

}  // namespace hc
