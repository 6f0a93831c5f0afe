#include "engine/gpu/known_buckets.h"

#include <algorithm>

namespace hc {

namespace {
constexpr size_t kMaxDropped = 62;  // sets of buckets that the ranks agree on at a time
constexpr double kChangesWithinS = 30;
}  // namespace

class KnownBuckets::Change final : public SetBackend::Confirmation, public std::enable_shared_from_this<Change> {
 public:
  Change(KnownBuckets& owner, DeviceGroup* device, std::function<bool()> may_begin)
      : owner_(owner),
        device_(*device),
        may_begin_(std::move(may_begin)),
        limit_s_(std::min(owner.context_.config.init_timeout_s, kChangesWithinS)),
        limit_(Deadline::in(limit_s_)) {}

  void forget(const std::byte* at) {
    steps_.push_back([this, at]() -> Result<bool> {
      if (device_.oldest_flight_s(Clock::now()) > 0) return false;
      leaving_ = device_.begin_forgetting(at);
      return true;
    });
    steps_.push_back([this]() -> Result<bool> {
      leaving_.reset();
      ++forgotten_;
      return true;
    });
    ++to_forget_;
  }
  // What NCCL does not take works as any other memory does. All are tried on every rank, so that the calls stay alike.
  void tell(std::shared_ptr<const BucketSet> buckets) {
    for (const auto& memory : buckets->memory) {
      steps_.push_back([this, memory]() -> Result<bool> {
        HC_TRY(device_.begin_telling(memory->data(), memory->bytes(), memory));
        return true;
      });
      steps_.push_back([this] { return device_.is_told(); });
    }
    told_ = buckets->memory.size();
  }

  Result<bool> step() override {
    if (!begun_) {
      if (!limit_.passed() && (owner_.is_changing() || !may_begin_())) return false;
      begun_ = true;
      owner_.changes_ = weak_from_this();
      limit_ = Deadline::in(limit_s_);
    }
    const bool is_late = limit_.passed();
    while (true) {
      auto over = device_.is_pending();
      if (over.is_ok() && over.value() && !is_late) return false;
      if (over.is_ok() && over.value()) over = late();
      if (over.is_ok() && steps_.empty()) break;
      if (over.is_ok()) over = steps_.front()();
      if (over.is_ok() && !over.value() && !is_late) return false;
      if (over.is_ok() && !over.value()) over = late();
      if (!over.is_ok() && forgotten_ < to_forget_) return over.status();
      if (!over.is_ok()) failed_ = over.status();
      if (steps_.empty()) break;
      steps_.pop_front();
    }
    report();
    return true;
  }

 private:
  Status late() const {
    if (forgotten_ < to_forget_)
      return error(Code::kTimeout, "work on the GPU has not ended within ", limit_s_,
                   " s, so NCCL cannot forget memory");
    return error(Code::kTimeout, "NCCL has not done within ", limit_s_, " s what it was called for");
  }
  void report() const {
    if (!failed_.is_ok())
      owner_.context_.log.warning(owner_.members_.prefix(), "NCCL does not register all buckets: ", failed_.text(),
                                  ". HOROCLONE_GPU_REGISTER=0 goes without");
    else if (told_)
      owner_.context_.log.debug(owner_.members_.prefix(), "NCCL knows ", told_, " buckets in advance");
  }

  KnownBuckets& owner_;
  DeviceGroup& device_;
  const std::function<bool()> may_begin_;
  const double limit_s_;
  Deadline limit_;
  bool begun_ = false;
  std::deque<std::function<Result<bool>()>> steps_;  // each says whether it is over; NCCL then has to do it
  std::shared_ptr<void> leaving_;                    // what NCCL is forgetting
  size_t forgotten_ = 0, to_forget_ = 0, told_ = 0;
  Status failed_;
};

int64_t KnownBuckets::dropped() const {
  int64_t bits = 0;
  for (size_t i = 0; i < std::min(known_.size(), kMaxDropped); ++i)
    if (known_[i].dropped) bits |= int64_t{1} << i;
  return bits;
}

void KnownBuckets::drop(const BucketSet& buckets) {
  for (Known& one : known_)
    if (one.buckets.get() == &buckets) one.dropped = true;
}

std::shared_ptr<SetBackend::Confirmation> KnownBuckets::change(DeviceGroup* device,
                                                               std::shared_ptr<const BucketSet> buckets,
                                                               const SetBackend::Capabilities& all,
                                                               std::function<bool()> may_begin) {
  if (!all.dropped && !(all.registers && !buckets->memory.empty())) return nullptr;
  auto change = std::make_shared<Change>(*this, device, std::move(may_begin));
  std::vector<Known> kept;
  for (size_t i = 0; i < known_.size(); ++i) {
    if (i >= kMaxDropped || !(all.dropped >> i & 1)) {
      kept.push_back(std::move(known_[i]));
      continue;
    }
    for (const auto& memory : known_[i].buckets->memory) change->forget(memory->data());
  }
  known_ = std::move(kept);
  if (all.registers && !buckets->memory.empty()) {
    change->tell(buckets);
    known_.push_back({std::move(buckets)});
  }
  return change;
}

}  // namespace hc
