#include "collective/gpu/device_messages.h"

namespace hc {

Status DeviceMessage::await_ready() {
  auto stream = link_.stream();
  HC_TRY(stream.status());
  return end_.ready ? link_.gpu()->wait(stream.value()->get(), end_.ready) : Status::ok();
}

Status DeviceMessage::record_done() {
  auto done = link_.gpu()->record(link_.stream().value()->get());
  HC_TRY(done.status());
  done_ = done.take();
  link_.launched(done_);
  return Status::ok();
}

namespace {

class NcclMessage : public DeviceMessage {
 public:
  NcclMessage(DeviceLink* link, const MessageEnd& end, int place_of_peer, std::unique_ptr<MessageTicket> ticket)
      : DeviceMessage(link, end), place_of_peer_(place_of_peer), ticket_(std::move(ticket)) {
    algorithm_ = "nccl";
  }

  Progress start() override { return Progress::kPending; }

  Progress step(bool* moved) override {
    if (launched_) return enqueued(moved);
    auto up = link_.is_up();
    if (!up.is_ok()) return fail_on_device(up.status());
    if (!up.value()) return Progress::kPending;
    if (end_.sends && !asked_) {
      asked_ = *moved = true;
      ticket_->ask();
    }
    if (!ticket_->is_next()) return Progress::kPending;
    Status begun = await_ready();
    if (begun.is_ok()) begun = link_.launch(end_.sends, end_.data, end_.bytes, place_of_peer_);
    if (!begun.is_ok()) return fail_on_device(begun);
    launched_ = *moved = true;
    return enqueued(moved);
  }

  bool has_asked() const override { return asked_; }
  bool may_be_given_up() const override { return !launched_ && !ticket_->is_granted(); }

 private:
  Progress enqueued(bool* moved) {
    auto enqueued = link_.is_enqueued();
    if (!enqueued.is_ok()) return fail_on_device(enqueued.status());
    if (!enqueued.value()) return Progress::kPending;
    ticket_->over();
    *moved = true;
    Status recorded = record_done();
    return recorded.is_ok() ? Progress::kDone : fail_on_device(recorded);
  }

  const int place_of_peer_;
  const std::unique_ptr<MessageTicket> ticket_;
  bool asked_ = false, launched_ = false;
};

class StagedMessage : public DeviceMessage {
 public:
  StagedMessage(DeviceLink* link, const MessageEnd& end, HostTransfer transfer)
      : DeviceMessage(link, end), transfer_(std::move(transfer)) {
    algorithm_ = "through host memory";
  }

  Progress start() override {
    Status begun = begin();
    if (!begun.is_ok()) return fail_on_device(begun);
    return end_.sends ? Progress::kPending : start_transfer();
  }

  Progress step(bool* moved) override {
    if (copied_out_) {
      auto passed = link_.gpu()->passed(*copied_out_);
      if (!passed.is_ok()) return fail_on_device(passed.status());
      if (!passed.value()) return Progress::kPending;
      copied_out_.reset();
      *moved = true;
      if (start_transfer() == Progress::kFailed) return Progress::kFailed;
    }
    const Progress progress = moving_->step(moved);
    if (progress == Progress::kFailed) return fail(moving_->status());
    if (progress == Progress::kPending || end_.sends) return progress;
    Status back = copy_in();
    return back.is_ok() ? Progress::kDone : fail_on_device(back);
  }

 private:
  Status begin() {
    auto memory = link_.gpu()->pinned_memory(end_.bytes);
    HC_TRY(memory.status());
    pinned_ = memory.take();
    HC_TRY(await_ready());
    if (!end_.sends) return Status::ok();
    const CuStream stream = link_.stream().value()->get();
    HC_TRY(link_.gpu()->copy_to_host(pinned_->data(), cu_pointer(end_.data), end_.bytes, stream));
    HC_TRY(record_done());
    copied_out_ = done_;
    pinned_->used_until(done_);
    return Status::ok();
  }

  Progress start_transfer() {
    moving_ = transfer_(pinned_->data(), end_.bytes);
    return moving_->start() == Progress::kFailed ? fail(moving_->status()) : Progress::kPending;
  }

  Status copy_in() {
    const CuStream stream = link_.stream().value()->get();
    HC_TRY(link_.gpu()->copy_from_host(cu_pointer(end_.data), pinned_->data(), end_.bytes, stream));
    HC_TRY(record_done());
    pinned_->used_until(done_);
    return Status::ok();
  }

  const HostTransfer transfer_;
  GpuMemoryPtr pinned_;
  GpuEventPtr copied_out_;
  std::unique_ptr<Collective> moving_;  // goes before the memory that it works on
};

}  // namespace

std::unique_ptr<DeviceMessage> make_nccl_message(DeviceLink* link, const MessageEnd& end, int place_of_peer,
                                                 std::unique_ptr<MessageTicket> ticket) {
  return std::make_unique<NcclMessage>(link, end, place_of_peer, std::move(ticket));
}

std::unique_ptr<DeviceMessage> make_staged_message(DeviceLink* link, const MessageEnd& end, HostTransfer transfer) {
  return std::make_unique<StagedMessage>(link, end, std::move(transfer));
}

}  // namespace hc
