#include "collective/gpu/device_group.h"

#include <algorithm>
#include <thread>

#include "base/thread.h"
#include "collective/shared/shared.h"

namespace hc {

namespace {
constexpr double kFarewellS = 2;  // for what runs on the device, and for the communicator to end in peace
// After an abort, until memory that others have mapped goes although some have not said that they have forgotten it.
// Longer than an abort takes, and than a rank is stopped for that is not lost; it holds up nobody.
constexpr double kForgetS = 30;
constexpr ptrdiff_t kFlightsAtOnce = 4;  // that one look at the device is about
}  // namespace

DeviceGroup::DeviceGroup(const Group& group, DeviceOptions options) : group_(group), options_(std::move(options)) {}

DeviceGroup::~DeviceGroup() {
  Communicators& nccl = state_.nccl;
  if (nccl.world() && flights_land(kFarewellS) && !nccl.was_captured()) {
    nccl.forget_all_memory(options_.init_timeout_s);
    nccl.finish();
  }
  if (state_.peers) leave_peers();
  abort();
}

std::unique_ptr<Collective> DeviceGroup::make_setup(Tag tag) {
  return state_.backend ? nullptr : make_backend_selection(&state_, options_, group_, tag);
}

Status DeviceGroup::check() { return state_.nccl.check(); }

void DeviceGroup::abort() {
  aborted_ = true;
  state_.nccl.abort();
}

// ---- memory that NCCL is told of

bool DeviceGroup::registers() const { return launches_alone() && state_.nccl.registers(); }

void DeviceGroup::launched(Flight flight) {
  // They end in the order of their launches, so one look tells about several.
  while (std::ssize(flights_) >= 2 * kFlightsAtOnce && std::ssize(flights_) % kFlightsAtOnce == 0) {
    auto passed = state_.gpu->passed(*flights_[kFlightsAtOnce - 1].done);
    if (passed.is_ok() && !passed.value()) break;
    flights_.erase(flights_.begin(), flights_.begin() + kFlightsAtOnce);
  }
  flights_.push_back(std::move(flight));
}

bool DeviceGroup::flights_land(double limit_s) {
  const Deadline deadline = Deadline::in(limit_s);
  while (state_.nccl.world() && oldest_flight_s(Clock::now()) > 0 && !deadline.passed() && check().is_ok())
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  return flights_.empty();
}

double DeviceGroup::oldest_flight_s(TimePoint now) {
  while (!flights_.empty()) {
    auto passed = state_.gpu->passed(*flights_.front().done);
    if (passed.is_ok() && !passed.value()) return std::max(1e-9, seconds_between(flights_.front().since, now));
    flights_.pop_front();
  }
  return 0;
}

std::string DeviceGroup::under_way(TimePoint now, double older_than_s, double* longest_s) {
  const double oldest_s = oldest_flight_s(now);
  if (flights_.empty() || oldest_s < older_than_s) return "";
  *longest_s = std::max(*longest_s, oldest_s);
  const Flight& first = flights_.front();
  auto passed = first.input ? state_.gpu->passed(*first.input) : Result<bool>(true);
  const bool starts = passed.is_ok() && passed.value();
  return text_of(first.what, " was launched ", static_cast<int>(oldest_s), " s ago and waits on the GPU for ",
                 starts ? "other ranks" : "what was enqueued before it",
                 flights_.size() > 1 ? text_of(" (behind it: ", flights_.size() - 1, " more)") : "");
}

void DeviceGroup::await_abort(const Deadline& limit) {
  state_.nccl.await_abort(limit);
  if (state_.peers) (void)close_peers(limit);
}

// Once nothing of this rank works with it any more, forgets the others' memory and tells them; false: not so far.
bool DeviceGroup::close_peers(const Deadline& limit) {
  const Gpu::Current current(*state_.gpu);
  while (state_.gpu->api().cuStreamQuery(state_.stream->get()) == kCuNotReady) {
    if (limit.passed()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  state_.peers->close();
  group_.shared_segment->publish(group_.shared_segment->mine().peers_closed, 1);
  return true;
}

// Memory that others have mapped is not given back before they have forgotten it, nor is what this rank still works
// with. After an abort nobody waits for that here: of those who do not say so some have died, and the rest have nothing
// to begin with it any more.
void DeviceGroup::leave_peers() {
  if (!close_peers(Deadline::in(kFarewellS))) return state_.peers->abandon();
  const auto forgotten = [limit_s = aborted_ ? kForgetS : kFarewellS](const SharedSegment& segment) {
    const Deadline limit = Deadline::in(limit_s);
    for (int m = 0; m < segment.size(); ++m)
      while (!segment.flags(m).peers_closed.load(std::memory_order_acquire)) {
        if (limit.passed()) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    return true;
  };
  const std::shared_ptr<PeerMemory> peers(std::move(state_.peers));
  if (!aborted_) {
    if (!forgotten(*group_.shared_segment)) peers->abandon();
    return;
  }
  NamedThread later;
  const Status started = later.start(
      "hc-peers-end", [peers, segment = std::make_shared<const SharedSegment>(*group_.shared_segment), forgotten] {
        Gpu::own_this_thread();
        (void)forgotten(*segment);
      });
  started.is_ok() ? later.detach() : peers->abandon();
}

Status DeviceGroup::prepare_to_capture() {
  if (capture_stream_ || !launches_alone()) return Status::ok();
  auto made = state_.gpu->make_stream();
  HC_TRY(made.status());
  capture_stream_ = made.take();
  return Status::ok();
}

Result<GpuEventPtr> DeviceGroup::capture(Task task, CuStream from) {
  if (!launches_alone() || !state_.nccl.world() || !nccl_does(task, false))
    return error(Code::kInternal, "NCCL does not do what is captured");
  HC_TRY(prepare_to_capture());
  HC_TRY(state_.nccl.until_enqueued(options_.init_timeout_s));  // what was launched before
  auto ready = state_.gpu->record(from);
  HC_TRY(ready.status());
  HC_TRY(state_.gpu->wait(capture_stream_->get(), ready.value()->get()));
  state_.nccl.note_capture();
  state_.nccl.set_flat_only(true);
  std::swap(state_.stream, capture_stream_);
  Status done = run_captured(std::move(task));
  std::swap(state_.stream, capture_stream_);
  state_.nccl.set_flat_only(false);
  HC_TRY(done);
  return state_.gpu->record(capture_stream_->get());
}

Status DeviceGroup::run_captured(Task task) {
  const auto collective = state_.backend->start(std::move(task));
  bool moved = false;
  if (collective->start() == Progress::kFailed) return collective->status();
  HC_TRY(state_.nccl.until_enqueued(options_.init_timeout_s));
  if (const Progress end = collective->step(&moved); end == Progress::kFailed) return collective->status();
  return Status::ok();
}

Result<std::unique_ptr<Collective>> DeviceGroup::make_collective(Task task) {
  GpuBackend& backend = state_.backend && state_.backend->can(task) ? *state_.backend : *staged_;
  return backend.start(std::move(task));
}

}  // namespace hc
