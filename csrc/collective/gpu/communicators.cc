#include "collective/gpu/communicators.h"

#include <algorithm>

namespace hc {

namespace {
constexpr double kFinishS = 2;  // for a communicator to end in peace
}

void Communicators::load(const std::shared_ptr<Gpu>& gpu, const std::string& library, const std::string& folders) {
  if (sought_ || !gpu) return;
  sought_ = true;
  gpu_ = gpu;
  auto loaded = NcclApi::load(library, folders, gpu->api().platform);
  missing_ = loaded.status();
  if (loaded.is_ok()) nccl_ = loaded.take();
}

Status Communicators::begin(int size, const NcclId& id, int rank, const std::string& name) {
  world_ = std::make_unique<NcclComm>(nccl_, gpu_);
  return world_->begin(size, id, rank, name);
}

Status Communicators::check() const {
  if (world_) HC_TRY(world_->check());
  if (!levels_) return Status::ok();
  for (NcclComm* one : levels_->comms())
    if (one) HC_TRY(one->check());
  return Status::ok();
}

Status Communicators::until_enqueued(double limit_s) const { return world_->until_over(limit_s); }

// ---- memory that NCCL was told of

bool Communicators::is_window(const std::byte* at) const {
  return std::any_of(registered_.begin(), registered_.end(),
                     [&](const Registered& one) { return one.at == at && is_of_window(one); });
}

Status Communicators::begin_telling(std::byte* at, size_t bytes, std::shared_ptr<void> owner) {
  const bool is_window = nccl_->registration() == NcclApi::Registration::kWindows;
  // Also what fails stays: NCCL may still write to it.
  registered_.push_back({at, bytes, std::make_shared<void*>(nullptr), is_window, std::move(owner)});
  return tell(registered_.back());
}

// No window, and no error: this communicator has none (ranks that do not all reach each other's memory, say). A buffer
// is each rank's own business.
Result<bool> Communicators::is_told() {
  Registered& last = registered_.back();
  if (!last.is_window || *last.handle || !nccl_->registers_buffers()) return true;
  last.is_window = false;
  HC_TRY(tell(last));
  return false;
}

Status Communicators::tell(const Registered& made) {
  return world_->call([at = made.at, bytes = made.bytes, handle = made.handle, window = made.is_window](
                          const NcclApi& nccl, NcclHandle comm) {
    if (window)
      return nccl.check(nccl.ncclCommWindowRegister(comm, at, bytes, handle.get(), kNcclSymmetric),
                        "ncclCommWindowRegister", comm);
    return nccl.check(nccl.ncclCommRegister(comm, at, bytes, handle.get()), "ncclCommRegister", comm);
  });
}

std::shared_ptr<void> Communicators::begin_forgetting(const std::byte* at) {
  const auto known =
      std::find_if(registered_.begin(), registered_.end(), [&](const Registered& one) { return one.at == at; });
  if (known == registered_.end() || !world_ || captured_) return nullptr;
  forget(*known);
  std::shared_ptr<void> owner = std::move(known->owner);
  registered_.erase(known);
  return owner;
}

void Communicators::forget(const Registered& known) {
  if (!*known.handle) return;
  (void)world_->call([handle = known.handle, window = known.is_window](const NcclApi& nccl, NcclHandle comm) {
    (void)(window ? nccl.ncclCommWindowDeregister(comm, *handle) : nccl.ncclCommDeregister(comm, *handle));
    return Status::ok();
  });
}

void Communicators::forget_all_memory(double limit_s) {
  while (world_ && !captured_ && !registered_.empty() && until_enqueued(limit_s).is_ok()) {
    forget(registered_.front());
    if (!until_enqueued(limit_s).is_ok()) return;
    registered_.erase(registered_.begin());
  }
}

// ---- ends

void Communicators::finish() {
  if (levels_) {
    const auto levels = levels_->comms();
    if (!std::all_of(levels.begin(), levels.end(), [](NcclComm* one) { return !one || one->finish(kFinishS); })) return;
    levels_.reset();
  }
  if (!world_ || !world_->finish(kFinishS)) return;
  world_.reset();
  registered_.clear();
}

void Communicators::abort() {
  if (levels_) levels_->abort();
  // NCCL forgets memory with the communicator; then its owners may go.
  if (world_) world_->abort(std::make_shared<std::vector<Registered>>(std::exchange(registered_, {})));
  if (captured_) {  // the graphs that hold NCCL's work are the framework's: nobody waits for their end
    if (levels_) levels_->forget();
    if (world_) world_->forget();
  }
  if (world_) aborted_world_ = std::move(world_);
  if (levels_) aborted_levels_ = std::move(levels_);
}

void Communicators::await_abort(const Deadline& limit) {
  if (aborted_levels_) aborted_levels_->await_abort(limit);
  if (aborted_world_) aborted_world_->await_abort(limit);
}

}  // namespace hc
