// Device memory through host memory: copy out, a collective of the host, copy in. For what NCCL does not do (Adasum,
// 16-bit integers, integer averages) and for machines where it cannot be used. Slower, with the host's exact meaning.
// The device's copies are looked at, never waited for.
#include <numeric>

#include "collective/gpu/device_state.h"

namespace hc {

namespace {

struct Extent {
  size_t in = 0, out = 0;  // elements
};

size_t total(const std::vector<size_t>& counts) { return std::accumulate(counts.begin(), counts.end(), size_t{0}); }

}  // namespace

class StagedCollective : public Collective {
 public:
  StagedCollective(Task task, DeviceState* device, const Group& group)
      : task_(std::move(task)), device_(*device), group_(group) {
    algorithm_ = "through host memory";
  }

  Progress start() override {
    Status begun = device_.gpu ? copy_out() : make_host(std::move(task_));  // without a GPU the pieces are host memory
    return begun.is_ok() ? Progress::kPending : fail(begun);
  }

  Progress step(bool* moved) override {
    if (copied_out_) {
      auto passed = device_.gpu->passed(*copied_out_);
      if (!passed.is_ok()) return fail(passed.status());
      if (!passed.value()) return Progress::kPending;
      *moved = true;
      copied_out_.reset();
      if (Status made = make_host(std::move(host_task_)); !made.is_ok()) return fail(made);
    }
    const Progress progress = host_->step(moved);
    if (progress == Progress::kFailed) return fail(host_->status());
    if (progress == Progress::kPending || !device_.gpu) return progress;
    Status back = copy_back();
    return back.is_ok() ? Progress::kDone : fail(back);
  }

 private:
  // How many elements of a piece this rank reads and writes.
  Extent extent_of(const Piece& piece) const {
    const size_t mine = task_.counts.empty() ? 0 : task_.counts[static_cast<size_t>(group_.rank)];
    const bool root = group_.rank == task_.root;
    switch (task_.op) {
      case Op::kBroadcast:
        return {root ? piece.count : 0, piece.count};
      case Op::kAllgather:
        return {mine, total(task_.counts)};
      case Op::kReducescatter:
        return {total(task_.counts), mine};
      case Op::kAlltoall:
        return {total(task_.counts), total(task_.received_counts)};
      case Op::kReduce:
        return {piece.count, root ? piece.count : 0};
      case Op::kGather:
        return {mine, root ? total(task_.counts) : 0};
      case Op::kScatter:
        return {root ? total(task_.counts) : 0, mine};
      case Op::kAllreduce:
      case Op::kBarrier:
      case Op::kJoin:
      case Op::kSend:
      case Op::kReceive:
        break;
    }
    return {piece.count, piece.count};
  }

  // Allreduce and broadcast work in one place; the others have an input and an output side by side.
  bool in_place() const { return task_.op == Op::kAllreduce || task_.op == Op::kBroadcast; }
  size_t input_bytes(const Extent& e) const { return in_place() ? 0 : aligned(e.in * size_of(task_.dtype)); }

  Status copy_out() {
    const size_t item = size_of(task_.dtype);
    size_t bytes = 0;
    for (const Piece& piece : task_.pieces) {
      const Extent e = extent_of(piece);
      bytes += input_bytes(e) + aligned(e.out * item);
    }
    auto memory = device_.gpu->pinned_memory(bytes);
    HC_TRY(memory.status());
    pinned_ = memory.take();
    Task on_host = task_;
    std::byte* at = pinned_->data();
    for (Piece& piece : on_host.pieces) {
      const Extent e = extent_of(piece);
      const std::byte* from = piece.in;
      std::byte* input = at;
      if (piece.in) piece.in = input;
      at += input_bytes(e);
      if (piece.out) piece.out = at;
      at += aligned(e.out * item);
      if (e.in) HC_TRY(device_.gpu->copy_to_host(input, cu_pointer(from), e.in * item, device_.stream->get()));
    }
    auto recorded = device_.gpu->record(device_.stream->get());
    HC_TRY(recorded.status());
    copied_out_ = recorded.take();
    host_task_ = std::move(on_host);
    return Status::ok();
  }

  Status make_host(Task task) {
    auto made = make_collective(std::move(task), group_);
    HC_TRY(made.status());
    host_ = made.take();
    return host_->start() == Progress::kFailed ? host_->status() : Status::ok();
  }

  Status copy_back() {
    const size_t item = size_of(task_.dtype);
    std::byte* at = pinned_->data();
    for (const Piece& piece : task_.pieces) {
      const Extent e = extent_of(piece);
      at += input_bytes(e);
      if (e.out) HC_TRY(device_.gpu->copy_from_host(cu_pointer(piece.out), at, e.out * item, device_.stream->get()));
      at += aligned(e.out * item);
    }
    auto used = device_.gpu->record(device_.stream->get());
    HC_TRY(used.status());
    pinned_->used_until(used.take());
    return Status::ok();
  }

  static constexpr size_t kAlign = 64;
  static size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

  Task task_;
  Task host_task_;
  DeviceState& device_;
  const Group& group_;
  GpuMemoryPtr pinned_;
  GpuEventPtr copied_out_;
  std::unique_ptr<Collective> host_;
};

namespace {

class StagedBackend final : public GpuBackend {
 public:
  StagedBackend(DeviceState* device, const Group& group) : device_(*device), group_(group) {}
  const char* name() const override { return "host"; }
  bool can(const Task&) const override { return true; }
  std::unique_ptr<Collective> start(Task task) override {
    return std::make_unique<StagedCollective>(std::move(task), &device_, group_);
  }
  Order order() const override { return Order::kPlan; }

 private:
  DeviceState& device_;
  const Group& group_;
};

}  // namespace

std::unique_ptr<GpuBackend> make_staged_backend(DeviceState* device, const Group& group) {
  return std::make_unique<StagedBackend>(device, group);
}

}  // namespace hc
