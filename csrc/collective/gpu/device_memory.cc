// Memory that NCCL is told of in advance, so that it need not copy through buffers of its own: windows from 2.27 on,
// single buffers from 2.19 on. A rank tells it at the same place as the others.
#include <thread>

#include "collective/gpu/device_group.h"

namespace hc {

namespace {
constexpr double kIdleS = 2;  // for what still works on memory that is to be forgotten
}

bool DeviceGroup::registers() const {
  return way_ == Way::kNccl && nccl_->registration() != NcclApi::Registration::kNone;
}

Status DeviceGroup::register_memory(std::byte* at, size_t bytes, std::shared_ptr<void> owner) {
  if (!registers()) return error(Code::kUnsupported, "this NCCL registers no memory");
  HC_TRY(until_enqueued());  // what was launched before
  Registered made;
  made.is_window = nccl_->registration() == NcclApi::Registration::kWindows;
  made.owner = std::move(owner);
  {
    const Gpu::Current current(*gpu_);
    if (made.is_window)
      HC_TRY(nccl_->check(nccl_->ncclCommWindowRegister(comm_, at, bytes, &made.handle, kNcclSymmetric),
                          "ncclCommWindowRegister", comm_));
    else
      HC_TRY(nccl_->check(nccl_->ncclCommRegister(comm_, at, bytes, &made.handle), "ncclCommRegister", comm_));
    HC_TRY(until_enqueued());
  }
  if (made.handle) registered_[at] = std::move(made);  // none: NCCL takes it as any memory, which is no error
  return Status::ok();
}

bool DeviceGroup::flights_land(double limit_s) {
  const Deadline deadline = Deadline::in(limit_s);
  while (comm_ && oldest_flight_s(Clock::now()) > 0 && !deadline.passed() && check().is_ok())
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  return flights_.empty();
}

void DeviceGroup::forget_memory(std::byte* at) {
  const auto found = registered_.find(at);
  // A graph may still use it, or the device: then it stays until the communicator ends.
  if (found == registered_.end() || !comm_ || captured_ || !flights_land(kIdleS) || !until_enqueued().is_ok()) return;
  const Gpu::Current current(*gpu_);
  if (found->second.is_window)
    (void)nccl_->ncclCommWindowDeregister(comm_, found->second.handle);
  else
    (void)nccl_->ncclCommDeregister(comm_, found->second.handle);
  (void)until_enqueued().is_ok();
  registered_.erase(found);
}

}  // namespace hc
