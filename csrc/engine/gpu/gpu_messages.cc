#include "engine/gpu/gpu_messages.h"

#include <algorithm>

#include "engine/gpu/device_work.h"
#include "engine/gpu/gpu_context.h"

namespace hc {
namespace {

// The place of one message in the order of all work on GPUs.
class TicketOfMessage final : public MessageTicket {
 public:
  TicketOfMessage(LaunchOrder& order, GpuContext& gpu, int sender, int receiver, uint32_t id)
      : order_(order), gpu_(gpu), receiver_(receiver), id_(id), ticket_(LaunchOrder::ticket_of_message(sender, id)) {}
  void ask() override {
    if (Status sent = order_.ask_for_message(receiver_, id_); !sent.is_ok()) gpu_.fail(sent);
  }
  bool is_granted() const override { return order_.tickets().contains(ticket_); }
  bool is_next() const override { return order_.tickets().is_next(ticket_); }
  void over() override { order_.tickets().over(); }

 private:
  LaunchOrder& order_;
  GpuContext& gpu_;
  const int receiver_;
  const uint32_t id_;
  const LaunchTicket ticket_;
};

struct GpuMessage final : BackendMessage {
  LinkCard card;          // of the sender's GPU
  GpuMemoryPtr own_copy;  // of what this rank's GPU has sent to itself
};

// What was sent before somebody's goodbye may still be on its way: tickets, when rank 0 has shut down; when the other
// end has, the ticket that rank 0 gives both, on another channel, however busy rank 0 is.
constexpr double kGraceOfOrdersS = 1, kGraceOfPeerS = 15;

bool is_sent(const Operation* op) { return op->signature().op == Op::kSend; }
const char* words_for(bool is_host) { return is_host ? "in host memory" : "on a GPU"; }

}  // namespace

// ---- which backend

void GpuMessages::announce(const Operation* op, Writer* frame) {
  links_.use(work_of(op)->gpu, gpu_.options());
  links_.card().put_into(frame);
}

std::unique_ptr<BackendMessage> GpuMessages::read(Reader* in) const {
  auto message = std::make_unique<GpuMessage>();
  message->card = LinkCard::read_from(in);
  return message;
}

Status GpuMessages::check_place(const Operation* op, int from, bool is_host) const {
  const bool here = op->work == nullptr;
  if (here == is_host) return Status::ok();
  return Status(Code::kMismatch,
                text_of("rank ", from, " sent a tensor ", words_for(is_host), " with tag ", op->request.sequence,
                        ", rank ", context_.rank(), " receives it ", words_for(here),
                        ". Both ends must be on GPUs or both in host memory: copy the tensor at one end."),
                context_.rank());
}

GpuMessages::Way GpuMessages::choose(const Operation* op, int from, const BackendMessage& message) {
  if (!op->work) return {};  // it takes what comes, and has no GPU to put it on
  links_.use(work_of(op)->gpu, gpu_.options());
  const LinkCard mine = links_.card();
  LinkBackend backend = choose_link_backend(static_cast<const GpuMessage&>(message).card, mine, same_node(from));
  if (backend.by_nccl && link_.has_left(0)) {
    backend.by_nccl = false;
    backend.reason = "rank 0, which orders the work of NCCL, has shut down";
  }
  const bool wished = mine.operations == GpuOperations::kHost || mine.operations == GpuOperations::kPeers;
  if (!backend.by_nccl && backend.refusal.is_ok() && !wished && told_backend_.insert(from).second)
    context_.log.warning(text_of("messages from the GPU of rank ", from,
                                 " travel through host memory, which is slower: ", backend.reason));
  return {backend.by_nccl, std::move(backend.refusal)};
}

Status GpuMessages::prepare(Operation* op, size_t bytes) {
  gpu_.settle(op);
  DeviceWork& work = *work_of(op);
  links_.use(work.gpu, gpu_.options());
  op->results_in_work = true;
  op->first_dimension = {op->received->shape.empty() ? 1 : op->received->shape[0]};
  op->out.assign(1, nullptr);
  if (!bytes) return Status::ok();
  auto stream = links_.to(op->source).stream();
  HC_TRY(stream.status());
  auto memory = work.gpu->device_memory(bytes, stream.value());
  HC_TRY(memory.status());
  work.results = {memory.value()};
  op->out[0] = memory.value()->data();
  return Status::ok();
}

// ---- two ranks

// The lower of the two makes the communicator's id; what it then sends comes behind the answer that the other waits
// for.
Status GpuMessages::want_link(int peer) {
  DeviceLink& link = links_.to(peer);
  if (link.has_begun() || context_.rank() > peer) return Status::ok();
  auto id = link.make_id();
  HC_TRY(id.status());
  Writer frame;
  frame.put(FrameKind::kLinkId);
  frame.put_raw(&id.value(), sizeof(NcclId));
  HC_TRY(link_.send(peer, frame.bytes(), false));
  return link.begin(id.value(), 0);
}

Status GpuMessages::take_link(int from, Reader* in) {
  NcclId id;
  if (!in->take(&id, sizeof(id)) || !links_.in_use() || from > context_.rank() || links_.to(from).has_begun())
    return error(Code::kInternal, "the id of a communicator from rank ", from, " is broken or not expected");
  if (Status begun = links_.to(from).begin(id, 1); !begun.is_ok()) gpu_.fail(begun);
  return Status::ok();
}

class GpuMessages::Transfer final : public BackendTransfer {
 public:
  Transfer(GpuMessages& owner, Operation* op, std::pair<int, uint32_t> peer_and_id, bool by_nccl, HostTransfer transfer)
      : owner_(owner),
        op_(op),
        peer_(peer_and_id.first),
        id_(peer_and_id.second),
        by_nccl_(by_nccl),
        transfer_(std::move(transfer)) {
    owner_.transfers_.push_back(this);
  }
  ~Transfer() override { std::erase(owner_.transfers_, this); }

  Progress start() override {
    const bool out = is_sent(op_);
    const int me = owner_.context_.rank();
    DeviceWork& work = *work_of(op_);
    MessageEnd end{out, out ? const_cast<std::byte*>(op_->in[0]) : op_->out[0],
                   bytes_of(out ? op_->signature().tensors[0] : *op_->received), work.ready_event()};
    owner_.links_.use(work.gpu, owner_.gpu_.options());
    DeviceLink& link = owner_.links_.to(peer_);
    message_ = by_nccl_ ? make_nccl_message(&link, end, me < peer_ ? 1 : 0,
                                            std::make_unique<TicketOfMessage>(owner_.order_, owner_.gpu_,
                                                                              out ? me : peer_, peer_, id_))
                        : make_staged_message(&link, end, transfer_);
    if (Status linked = by_nccl_ ? owner_.want_link(peer_) : Status::ok(); !linked.is_ok()) return fail_gpu(linked);
    if (message_->start() != Progress::kFailed) return Progress::kPending;
    return message_->device_failed() ? fail_gpu(message_->status()) : fail(message_->status());
  }

  Progress step(bool* moved) override {
    if (failed_) return Progress::kPending;
    if (is_doomed()) return give_up();
    const Progress progress = message_->step(moved);
    if (progress == Progress::kDone) work_of(op_)->done = message_->done();
    if (progress != Progress::kFailed) return progress;
    return message_->device_failed() ? fail_gpu(message_->status()) : fail(message_->status());
  }

  bool is(int sender, uint32_t id) const {
    return id_ == id && sender == (is_sent(op_) ? owner_.context_.rank() : peer_);
  }

 private:
  // Without rank 0, which can give no more tickets, a message goes through host memory, at both ends: the other one may
  // have done so, and have left then. Who leaves has ended its messages, so without its other end this one's ticket is
  // given or will be: it is given up only to wait for no fault for ever.
  bool is_doomed() {
    if (!message_->may_be_given_up()) return false;
    const bool unordered = owner_.link_.has_left(0), alone = owner_.link_.has_left(peer_);
    const bool counted_on = is_sent(op_) && message_->has_asked();
    if (!unordered && (counted_on || !alone)) return false;
    const TimePoint now = Clock::now();
    if (doomed_ == TimePoint{}) doomed_ = now;
    return seconds_between(doomed_, now) >= (unordered ? kGraceOfOrdersS : kGraceOfPeerS);
  }

  Progress give_up() {
    if (!owner_.link_.has_left(0)) {
      outcome_ = Status(Code::kAborted, text_of(op_->describe(), ": it has shut down"), peer_);
      return Progress::kDone;
    }
    by_nccl_ = false;
    if (start() == Progress::kFailed) return fail_gpu(status_);
    return Progress::kPending;
  }

  // The engine ends a moment later.
  Progress fail_gpu(const Status& status) {
    failed_ = true;
    owner_.gpu_.fail(status.with(op_->describe()));
    return Progress::kPending;
  }

  GpuMessages& owner_;
  Operation* const op_;
  const int peer_;
  const uint32_t id_;
  bool by_nccl_;
  const HostTransfer transfer_;
  std::unique_ptr<DeviceMessage> message_;
  bool failed_ = false;
  TimePoint doomed_{};  // since when somebody it needs has left
};

std::unique_ptr<BackendTransfer> GpuMessages::make(Operation* op, std::pair<int, uint32_t> peer_and_id, bool is_direct,
                                                   HostTransfer transfer) {
  return std::make_unique<Transfer>(*this, op, peer_and_id, is_direct, std::move(transfer));
}

bool GpuMessages::expects_ticket(int sender, uint32_t id) const {
  return std::any_of(transfers_.begin(), transfers_.end(), [&](const Transfer* t) { return t->is(sender, id); });
}

// ---- to oneself

Result<std::unique_ptr<BackendMessage>> GpuMessages::to_self(Operation* op, bool copies) {
  auto message = std::make_unique<GpuMessage>();
  const size_t bytes = bytes_of(op->signature().tensors[0]);
  if (!copies || !bytes) return std::unique_ptr<BackendMessage>(std::move(message));
  DeviceWork& work = *work_of(op);
  links_.use(work.gpu, gpu_.options());
  auto stream = links_.to(context_.rank()).stream();
  HC_TRY(stream.status());
  auto memory = work.gpu->device_memory(bytes, stream.value());
  HC_TRY(memory.status());
  message->own_copy = memory.take();
  HC_TRY(work.gpu->wait(stream.value()->get(), work.ready_event()));
  HC_TRY(work.gpu->copy(message->own_copy->at(), cu_pointer(op->in[0]), bytes, stream.value()->get()));
  auto done = work.gpu->record(stream.value()->get());
  HC_TRY(done.status());
  work.done = done.take();
  return std::unique_ptr<BackendMessage>(std::move(message));
}

Status GpuMessages::copy_to_self(Operation* op, const BackendMessage& message, const Operation* source) {
  const GpuMemoryPtr& own_copy = static_cast<const GpuMessage&>(message).own_copy;
  DeviceWork& work = *work_of(op);
  Gpu& gpu = *work.gpu;
  auto stream = links_.to(context_.rank()).stream();
  HC_TRY(stream.status());
  if (const CuEvent ready = work.ready_event()) HC_TRY(gpu.wait(stream.value()->get(), ready));
  if (source) HC_TRY(gpu.wait(stream.value()->get(), work_of(source)->ready_event()));
  const std::byte* from = source ? source->in[0] : own_copy->data();
  HC_TRY(gpu.copy(cu_pointer(op->out[0]), cu_pointer(from), bytes_of(*op->received), stream.value()->get()));
  auto done = gpu.record(stream.value()->get());
  HC_TRY(done.status());
  if (source) work_of(source)->done = done.value();
  work.done = done.take();
  return Status::ok();
}

}  // namespace hc
