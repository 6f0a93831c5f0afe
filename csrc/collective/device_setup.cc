// How the ranks of a process set agree on who moves device memory. Each introduces itself in a record of fixed size, an
// allgather of the host spreads the records, every rank reads the same table and comes to the same answer; where that
// is NCCL, the communicator then comes up without blocking anybody. Resumable like every collective.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "base/thread.h"
#include "collective/device_group.h"

namespace hc {

namespace {

constexpr size_t kReasonBytes = 320;

struct Introduction {
  uint8_t has_device = 0;
  uint8_t has_nccl = 0;
  uint8_t shares_gpus = 0;  // NCCL was told to accept several ranks on one GPU
  uint8_t has_kernels = 0;
  GpuOperations operations = GpuOperations::kAuto;
  int32_t nccl_version = 0;
  CuUuid uuid{};
  NcclId id{};  // of group rank 0
  char reason[kReasonBytes] = {};
};
static_assert(std::is_trivially_copyable_v<Introduction>);

struct Answer {
  DeviceGroup::Way way = DeviceGroup::Way::kHost;
  std::string reason;
  bool for_good = true;  // false: ask again at the next batch
};

// PURE: the same table gives the same answer on every rank.
Answer decide(const std::vector<Introduction>& table, const Group& group) {
  const auto name = [&](size_t r) { return text_of("rank ", group.world_rank[r]); };
  Answer answer;
  for (size_t r = 0; r < table.size(); ++r)
    if (table[r].operations == GpuOperations::kHost) {
      answer.reason = text_of("HOROCLONE_GPU_OPERATIONS is host for ", name(r));
      return answer;
    }
  for (size_t r = 0; r < table.size(); ++r)
    if (!table[r].has_device) {
      answer.reason = text_of(name(r), " has joined and has not used a GPU yet");
      answer.for_good = false;
      return answer;
    }
  for (size_t r = 0; r < table.size(); ++r) {
    if (!table[r].has_nccl) {
      answer.reason = text_of(name(r), ": ", table[r].reason);
      return answer;
    }
    if (table[r].nccl_version != table[0].nccl_version) {
      answer.reason = text_of("NCCL is ", nccl_version_text(table[0].nccl_version), " on ", name(0), " and ",
                              nccl_version_text(table[r].nccl_version), " on ", name(r));
      return answer;
    }
    for (size_t other = 0; other < r; ++other)
      if (group.node[r] == group.node[other] && !table[r].shares_gpus &&
          std::memcmp(&table[r].uuid, &table[other].uuid, sizeof(CuUuid)) == 0) {
        answer.reason = text_of(name(other), " and ", name(r),
                                " use the same GPU, which NCCL refuses; give each rank a GPU of its own with "
                                "torch.cuda.set_device(hvd.local_rank())");
        return answer;
      }
  }
  answer.way = DeviceGroup::Way::kNccl;
  answer.reason = "NCCL " + nccl_version_text(table[0].nccl_version);
  return answer;
}

}  // namespace

class DeviceSetup : public Collective {
 public:
  DeviceSetup(DeviceGroup* device, Tag tag) : device_(*device), table_(device->group_.size), tag_(tag) {
    algorithm_ = "gpu set-up";
  }

  // The kernels may have to be compiled: a thread of its own does that, and everybody waits here.
  Progress start() override {
    if (Status ready = device_.ensure_stream(); !ready.is_ok()) return fail(ready);
    device_.load_nccl();
    Status started = loader_.start("hc-kernels", [this] {
      device_.load_kernels();
      loaded_.store(true);
    });
    return started.is_ok() ? Progress::kPending : fail(started);
  }

  Progress step(bool* moved) override {
    if (loader_.running()) {
      if (!loaded_.load()) return Progress::kPending;
      loader_.join();
      *moved = true;
      if (begin_exchange() == Progress::kFailed) return Progress::kFailed;
    }
    if (exchange_) {
      const Progress progress = exchange_->step(moved);
      if (progress == Progress::kFailed) return fail(exchange_->status());
      if (progress == Progress::kPending) return progress;
      exchange_.reset();
      Status settled = settle();
      if (!settled.is_ok()) return fail(settled);
    }
    return device_.comm_ && comes_up_ ? connecting(moved) : Progress::kDone;
  }

 private:
  Progress begin_exchange() {
    if (Status ready = introduce(); !ready.is_ok()) return fail(ready);
    Task task;
    task.op = Op::kAllgather;
    task.dtype = DType::kU8;
    task.counts.assign(table_.size(), sizeof(Introduction));
    task.tag = tag_;
    task.pieces = {{reinterpret_cast<const std::byte*>(&mine_), reinterpret_cast<std::byte*>(table_.data()),
                    sizeof(Introduction)}};
    auto made = hc::make_collective(std::move(task), device_.group_);
    if (!made.is_ok()) return fail(made.status());
    exchange_ = made.take();
    if (exchange_->start() == Progress::kFailed) return fail(exchange_->status());
    return Progress::kPending;
  }

  Status introduce() {
    mine_.operations = device_.options_.operations;
    mine_.has_device = device_.gpu_ != nullptr;
    mine_.has_nccl = device_.nccl_ != nullptr;
    mine_.has_kernels = device_.kernels_ != nullptr;
    if (device_.gpu_) mine_.uuid = device_.gpu_->uuid();
    const char* shares = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    mine_.shares_gpus = shares && *shares == '1' && mine_.has_nccl && device_.nccl_->version >= 23003;
    device_.nccl_missing_.text().copy(mine_.reason, kReasonBytes - 1);
    if (!mine_.has_nccl) return Status::ok();
    mine_.nccl_version = device_.nccl_->version;
    if (device_.group_.rank != 0) return Status::ok();
    const NcclApi& nccl = *device_.nccl_;
    return nccl.check(nccl.ncclGetUniqueId(&mine_.id), "ncclGetUniqueId", nullptr);
  }

  Status settle() {
    const Answer answer = decide(table_, device_.group_);
    device_.reason_ = answer.reason;
    device_.refusal_ = Status::ok();
    device_.kernels_everywhere_ =
        std::all_of(table_.begin(), table_.end(), [](const Introduction& one) { return one.has_kernels; });
    if (answer.way == DeviceGroup::Way::kHost) {
      const bool demanded = std::any_of(table_.begin(), table_.end(),
                                        [](const Introduction& one) { return one.operations == GpuOperations::kNccl; });
      if (demanded)
        device_.refusal_ =
            error(Code::kUnsupported, "HOROCLONE_GPU_OPERATIONS=nccl, but NCCL cannot be used: ", answer.reason,
                  ". Set it to auto to reduce through host memory instead.");
      if (answer.for_good) device_.way_ = answer.way;
      return Status::ok();
    }
    const NcclApi& nccl = *device_.nccl_;
    const Gpu::Current current(*device_.gpu_);
    NcclConfig config;
    const NcclResult begun =
        nccl.ncclCommInitRankConfig(&device_.comm_, device_.group_.size, table_[0].id, device_.group_.rank, &config);
    comes_up_ = true;
    deadline_ = Deadline::in(device_.options_.init_timeout_s);
    return nccl.check(begun, "ncclCommInitRankConfig", nullptr).with("HOROCLONE_GPU_OPERATIONS=host goes without NCCL");
  }

  Progress connecting(bool* moved) {
    const NcclApi& nccl = *device_.nccl_;
    NcclResult state = kNcclInProgress;
    const Gpu::Current current(*device_.gpu_);
    Status asked = nccl.check(nccl.ncclCommGetAsyncError(device_.comm_, &state), "ncclCommGetAsyncError", nullptr);
    if (asked.is_ok() && state == kNcclInProgress) {
      if (!deadline_.passed()) return Progress::kPending;
      return fail(error(Code::kTimeout, "NCCL has not connected the ranks' GPUs within ",
                        device_.options_.init_timeout_s,
                        " s; NCCL_DEBUG=INFO shows what it tries, HOROCLONE_GPU_OPERATIONS=host goes without it"));
    }
    if (asked.is_ok()) asked = nccl.check(state, "NCCL could not connect the ranks' GPUs", device_.comm_);
    if (!asked.is_ok())
      return fail(asked.with("NCCL_DEBUG=INFO shows more, HOROCLONE_GPU_OPERATIONS=host goes without it"));
    *moved = true;
    device_.way_ = DeviceGroup::Way::kNccl;
    return Progress::kDone;
  }

  DeviceGroup& device_;
  Introduction mine_;
  std::vector<Introduction> table_;
  const Tag tag_;
  std::atomic<bool> loaded_{false};
  NamedThread loader_;  // runs while the kernels are loaded
  std::unique_ptr<Collective> exchange_;
  bool comes_up_ = false;
  Deadline deadline_ = Deadline::in(0);
};

std::unique_ptr<Collective> DeviceGroup::make_setup(Tag tag) {
  if (way_ != Way::kUnknown) return nullptr;
  return std::make_unique<DeviceSetup>(this, tag);
}

}  // namespace hc
