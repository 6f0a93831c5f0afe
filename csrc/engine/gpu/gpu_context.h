// The engine's backend for GPUs: which one this rank works on, memory on it that NCCL can be told of, the order of
// launches, messages, and what has gone wrong there.
//
// Thread: as of Backend. Owner: the engine.
#pragma once

#include <map>
#include <memory>

#include "base/mutex.h"
#include "collective/gpu/device_group.h"
#include "engine/context.h"
#include "engine/gpu/device_work.h"
#include "engine/gpu/gpu_messages.h"
#include "engine/gpu/launch_order.h"
#include "engine/operation/backend.h"
#include "engine/operation/memory_pressure.h"
#include "engine/tune/tuner.h"

namespace hc {

// What to do before a step is captured into a CUDA graph; the end of an error.
inline constexpr const char* kWarmUpBeforeCapture =
    "Run at least two whole steps (forward, backward, optimizer.step()) on every rank before the capture";

class GpuContext final : public Backend {
 public:
  GpuContext(Context& context, const Tuner& tuner, ControlLink& link, const Intake& intake)
      : context_(context),
        tuner_(tuner),
        link_(link),
        intake_(intake),
        order_(context, link, intake),
        messages_(context, link, *this, order_) {
    kept_back_ = &order_.tickets().kept_back();
  }

  std::unique_ptr<SetBackend> make_set(ProcessSet& set) override;
  MessageBackend& messages() override { return messages_; }
  LaunchOrder& launch_order() { return order_; }

  // The GPU that this rank works on; the first index decides. Unsupported for another one. Any thread.
  Result<std::shared_ptr<Gpu>> adopt(int index);
  std::shared_ptr<Gpu> gpu() const;  // null: none yet; any thread
  // The event is recorded here because only the caller knows that its stream has been given all work.
  Result<std::unique_ptr<BackendWork>> prepare(const Submission& s, bool* captured) override;
  // Something has come for an operation that had offered its GPU.
  void settle(Operation* op);
  DeviceOptions options() const;

  Status wait_on_stream(const Operation* op, int64_t handle, void* stream) const override;
  Status copy_result(Operation* op, int64_t handle, size_t i, void* to, size_t bytes, void* stream) const override;

  Result<std::shared_ptr<Memory>> allocate(int index, size_t bytes) override;
  bool find_memory(BucketSet* buckets) override;
  MemoryPressure& memory_pressure() override { return pressure_; }
  void trim_memory() override {
    if (const auto gpu = this->gpu()) gpu->trim();
  }

  // How a process set's tensors on GPUs are reduced: "nccl", "peers" or "host", and why; why our kernels are not used.
  struct Way {
    std::string backend, reason, no_kernels;
  };
  void note_way(int process_set, Way way);
  std::string json() const override;

  void enter_thread() override { Gpu::own_this_thread(); }
  // NCCL notices a dead peer before the mesh does, or after, and does not say which one.
  void fail(const Status& status) override;
  Status blame(TimePoint now) const override;

  void attach(SharedSegment* world) override { order_.tickets().attach(world); }
  void note_before(const Members& set, Plan* plan) override { order_.note_before(set, plan); }
  Status order(const Members& set, const Plan& plan) override { return order_.order(set, plan); }
  Status take_frame(FrameKind kind, int from, Reader* in) override {
    return order_.take_frame(kind, from, in, [this](const LaunchTicket& ticket) { return has_part_in(ticket); });
  }
  bool take_tickets() override {
    LaunchTickets& tickets = order_.tickets();
    return tickets.has_news() && tickets.take([this](const LaunchTicket& ticket) { return has_part_in(ticket); });
  }
  bool pass_on() override { return order_.tickets().pass_on(link_.left()); }
  void stop_ahead() override { order_.stop_ahead(); }
  void drop_set(uint16_t process_set) override { order_.tickets().drop(process_set); }

  bool has_flights() const override { return messages_.links().has_flights(); }
  double oldest_flight_s(TimePoint now) override { return messages_.links().oldest_flight_s(now); }
  std::string under_way(TimePoint now, double older_than_s, double* longest_s) override {
    return messages_.links().under_way(now, older_than_s, longest_s);
  }
  void mark_awaited(TimePoint now, double older_than_s, std::vector<bool>* waits) override {
    messages_.links().each_late(now, older_than_s, [&](int peer) { (*waits)[static_cast<size_t>(peer)] = true; });
  }
  void note_failure() override {
    if (Status ok = messages_.links().check(); !ok.is_ok()) fail(ok);
  }
  void await_abort(const Deadline& limit) override { messages_.links().await_abort(limit); }
  void abort() override {
    messages_.links().abort();
    order_.tickets().clear();
  }
  void close() override;

 private:
  std::unique_ptr<DeviceWork> offer(int index);
  Status refuse_captured(const Submission& s, Gpu& gpu) const;
  Result<std::shared_ptr<const NcclApi>> nccl_of_memory(const Gpu& gpu) HC_REQUIRES(mu_);
  bool has_part_in(const LaunchTicket& ticket) const;

  Context& context_;
  const Tuner& tuner_;
  ControlLink& link_;
  const Intake& intake_;
  LaunchOrder order_;
  GpuMessages messages_;
  MemoryPressure pressure_;
  mutable Mutex mu_;
  std::shared_ptr<Gpu> gpu_ HC_GUARDED_BY(mu_);
  // What somebody may send can be taken there, while there is no gpu_.
  std::shared_ptr<Gpu> offered_gpu_ HC_GUARDED_BY(mu_);
  std::shared_ptr<const NcclApi> memory_nccl_ HC_GUARDED_BY(mu_);          // null: not looked for, or not found
  std::map<std::byte*, std::weak_ptr<Memory>> memory_ HC_GUARDED_BY(mu_);  // of allocate()
  std::map<int, Way> ways_ HC_GUARDED_BY(mu_);

  TimePoint failed_at_{};  // who is to blame for failure_ may still be on its way here
};

}  // namespace hc
