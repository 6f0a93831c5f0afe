#include "collective/gpu/device_link.h"

#include <algorithm>
#include <thread>

namespace hc {

namespace {
constexpr double kLinkFarewellS = 2;  // for what runs on the device, and for a communicator to end in peace
}

void LinkCard::put_into(Writer* frame) const {
  frame->put(operations);
  frame->put(nccl_version);
  frame->put_raw(&place, sizeof(place));
}

LinkCard LinkCard::read_from(Reader* frame) {
  LinkCard card;
  card.operations = frame->get<GpuOperations>();
  card.nccl_version = frame->get<int32_t>();
  frame->take(&card.place, sizeof(card.place));
  return card;
}

LinkBackend choose_link_backend(const LinkCard& sender, const LinkCard& receiver, bool same_node) {
  LinkBackend backend;
  const auto either = [&](GpuOperations wants) { return sender.operations == wants || receiver.operations == wants; };
  const bool demanded = either(GpuOperations::kNccl);
  if (either(GpuOperations::kHost) || (either(GpuOperations::kPeers) && !demanded)) {
    backend.reason = "HOROCLONE_GPU_OPERATIONS says so";
    return backend;
  }
  if (!sender.nccl_version || !receiver.nccl_version)
    backend.reason = text_of("the ", sender.nccl_version ? "receiver" : "sender", " has no NCCL that can be used");
  else if (sender.nccl_version != receiver.nccl_version)
    backend.reason = text_of("NCCL is ", nccl_version_text(sender.nccl_version), " at the sender and ",
                             nccl_version_text(receiver.nccl_version), " at the receiver");
  else if (same_node && nccl_refuses(sender.place, receiver.place))
    backend.reason = "both ends use the same GPU, which NCCL refuses";
  backend.by_nccl = backend.reason.empty();
  if (demanded && !backend.by_nccl)
    backend.refusal =
        error(Code::kUnsupported, "HOROCLONE_GPU_OPERATIONS=nccl, but NCCL cannot be used: ", backend.reason,
              ". Set it to auto to go through host memory instead");
  return backend;
}

// ---- one peer

DeviceLink::~DeviceLink() {
  const Deadline deadline = Deadline::in(kLinkFarewellS);
  while (oldest_flight_s(Clock::now()) > 0 && !deadline.passed())
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  if (comm_ && up_ && oldest_flight_s(Clock::now()) == 0 && comm_->finish(kLinkFarewellS)) comm_.reset();
  abort();
}

Result<GpuStreamPtr> DeviceLink::stream() {
  if (!stream_) {
    auto made = gpu_->make_stream();
    HC_TRY(made.status());
    stream_ = made.take();
  }
  return stream_;
}

Result<NcclId> DeviceLink::make_id() const {
  NcclId id;
  HC_TRY(nccl_->check(nccl_->ncclGetUniqueId(&id), "ncclGetUniqueId", nullptr));
  return id;
}

Status DeviceLink::begin(const NcclId& id, int place) {
  begun_ = true;
  deadline_ = Deadline::in(init_timeout_s_);
  comm_ = std::make_unique<NcclComm>(nccl_, gpu_);
  return comm_->begin(2, id, place, "horoclone messages")
      .with("the communicator of two ranks; HOROCLONE_GPU_OPERATIONS=host goes without NCCL");
}

Result<bool> DeviceLink::is_up() {
  if (up_ || !begun_) return up_;
  auto enqueued = is_enqueued();
  HC_TRY(enqueued.status(), "NCCL could not connect two ranks' GPUs");
  up_ = enqueued.value();
  if (!up_ && deadline_.passed())
    return error(Code::kTimeout, "NCCL has not connected two ranks' GPUs within ", init_timeout_s_,
                 " s; NCCL_DEBUG=INFO shows what it tries, HOROCLONE_GPU_OPERATIONS=host goes without it");
  return up_;
}

Status DeviceLink::launch(bool sends, std::byte* data, size_t bytes, int place_of_peer) {
  return comm_->launch({[=, stream = stream_->get()](const NcclApi& nccl, NcclHandle comm) {
    return nccl.check(sends ? nccl.ncclSend(data, bytes, kNcclU8, place_of_peer, comm, stream)
                            : nccl.ncclRecv(data, bytes, kNcclU8, place_of_peer, comm, stream),
                      sends ? "ncclSend" : "ncclRecv", comm);
  }});
}

Result<bool> DeviceLink::is_enqueued() {
  if (!comm_) return error(Code::kAborted, "the communicator of two ranks has ended");
  auto pending = comm_->is_pending();
  HC_TRY(pending.status());
  return !pending.value();
}

double DeviceLink::oldest_flight_s(TimePoint now) {
  while (!flights_.empty()) {
    auto passed = gpu_->passed(*flights_.front().done);
    if (passed.is_ok() && !passed.value()) return std::max(1e-9, seconds_between(flights_.front().since, now));
    flights_.pop_front();
  }
  return 0;
}

Status DeviceLink::check() { return comm_ ? comm_->check() : Status::ok(); }

void DeviceLink::abort() {
  if (comm_) comm_->abort();
}

void DeviceLink::await_abort(const Deadline& limit) {
  if (comm_) comm_->await_abort(limit);
}

// ---- all peers

void DeviceLinks::use(const std::shared_ptr<Gpu>& gpu, const DeviceOptions& options) {
  if (gpu_) return;
  gpu_ = gpu;
  options_ = options;
  if (options.operations == GpuOperations::kHost || options.operations == GpuOperations::kPeers) return;
  auto loaded = NcclApi::load(options.nccl_library, options.nccl_folders, gpu->api().platform);
  if (loaded.is_ok()) nccl_ = loaded.take();
}

LinkCard DeviceLinks::card() const {
  LinkCard card;
  card.operations = options_.operations;
  card.nccl_version = nccl_ ? nccl_->version : 0;
  card.place = NcclPlace::of(gpu_->uuid(), card.nccl_version);
  return card;
}

DeviceLink& DeviceLinks::to(int peer) {
  auto& link = links_[peer];
  if (!link) link = std::make_unique<DeviceLink>(gpu_, nccl_, options_.init_timeout_s);
  return *link;
}

bool DeviceLinks::has_flights() const {
  return std::any_of(links_.begin(), links_.end(), [](const auto& entry) { return entry.second->has_flights(); });
}

double DeviceLinks::oldest_flight_s(TimePoint now) {
  double oldest = 0;
  for (const auto& [peer, link] : links_) oldest = std::max(oldest, link->oldest_flight_s(now));
  return oldest;
}

std::string DeviceLinks::under_way(TimePoint now, double older_than_s, double* longest_s) {
  std::string text;
  for (const auto& [peer, link] : links_)
    if (const double s = link->oldest_flight_s(now); s > 0 && s >= older_than_s) {
      *longest_s = std::max(*longest_s, s);
      text += text_of(text.empty() ? "" : "; ", "a message between this rank and rank ", peer, " was launched ",
                      static_cast<int>(s), " s ago and has not ended on the GPU");
    }
  return text;
}

void DeviceLinks::each_late(TimePoint now, double older_than_s, const std::function<void(int peer)>& tell) {
  for (const auto& [peer, link] : links_)
    if (link->oldest_flight_s(now) >= older_than_s) tell(peer);
}

Status DeviceLinks::check() {
  for (const auto& [peer, link] : links_) HC_TRY(link->check(), "messages between this rank and rank ", peer);
  return Status::ok();
}

void DeviceLinks::abort() {
  for (const auto& [peer, link] : links_) link->abort();
}

void DeviceLinks::await_abort(const Deadline& limit) {
  for (const auto& [peer, link] : links_) link->await_abort(limit);
}

void DeviceLinks::leave() {
  links_.clear();
  nccl_.reset();
  gpu_.reset();
}

}  // namespace hc
