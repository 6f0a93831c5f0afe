// Messages between GPUs. They are announced and matched as all others are; then both ends launch NCCL's send or receive
// when rank 0 gives this message its ticket among all work on GPUs, or the payload goes through host memory.
// docs/decisions/nccl.md has the argument why nobody waits for ever.
#include <algorithm>

#include "engine/point_to_point/messages.h"

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

// What was sent before somebody's goodbye may still be on its way: tickets, when rank 0 has shut down; when the other
// end has, the ticket that rank 0 gives both, on another channel, however busy rank 0 is.
constexpr double kGraceOfOrdersS = 1, kGraceOfPeerS = 15;

bool is_sent(const Operation* op) { return op->signature().op == Op::kSend; }
CuEvent ready_of(const Operation* op) { return op->device->ready ? op->device->ready->get() : op->device->ready_given; }
const char* words_for(bool on_device) { return on_device ? "on a GPU" : "in host memory"; }

}  // namespace

// ---- which backend

void Messages::put_place(const Operation* op, Writer* frame) {
  frame->put(op->device != nullptr);
  if (!op->device) return;
  links_.use(op->device->gpu, gpu_.options());
  links_.card().put_into(frame);
}

Status Messages::check_place(const Operation* op, const Announced& message) const {
  const bool here = op->device != nullptr;
  if (here == message.on_device) return Status::ok();
  return Status(Code::kMismatch,
                text_of("rank ", message.from, " sent a tensor ", words_for(message.on_device), " with tag ",
                        op->request.sequence, ", rank ", context_.rank(), " receives it ", words_for(here),
                        ". Both ends must be on GPUs or both in host memory: copy the tensor at one end."),
                context_.rank());
}

Result<LinkBackend> Messages::choose_backend_of(const Operation* op, const Announced& message) {
  LinkBackend backend;
  if (!op->device) return backend;  // it takes what comes, and has no GPU to put it on
  links_.use(op->device->gpu, gpu_.options());
  const LinkCard mine = links_.card();
  backend = choose_link_backend(message.card, mine, same_node(message.from));
  if (backend.by_nccl && link_.has_left(0)) {
    backend.by_nccl = false;
    backend.reason = "rank 0, which orders the work of NCCL, has shut down";
  }
  const bool wished = mine.operations == GpuOperations::kHost || mine.operations == GpuOperations::kPeers;
  if (!backend.by_nccl && backend.refusal.is_ok() && !wished && told_backend_.insert(message.from).second)
    context_.log.warning(text_of("messages from the GPU of rank ", message.from,
                                 " travel through host memory, which is slower: ", backend.reason));
  return backend;
}

Status Messages::prepare_on_device(Operation* op, size_t bytes) {
  gpu_.settle(op);
  links_.use(op->device->gpu, gpu_.options());
  op->result_on_device = true;
  op->first_dimension = {op->received->shape.empty() ? 1 : op->received->shape[0]};
  op->out.assign(1, nullptr);
  if (!bytes) return Status::ok();
  auto stream = links_.to(op->source).stream();
  HC_TRY(stream.status());
  auto memory = op->device->gpu->device_memory(bytes, stream.value());
  HC_TRY(memory.status());
  op->device->results = {memory.value()};
  op->out[0] = memory.value()->data();
  return Status::ok();
}

// ---- two ranks

// The lower of the two makes the communicator's id; what it then sends comes behind the answer that the other waits
// for.
Status Messages::want_link(int peer) {
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

Status Messages::take_link_id(int from, Reader* in) {
  NcclId id;
  if (!in->take(&id, sizeof(id)) || !links_.in_use() || from > context_.rank() || links_.to(from).has_begun())
    return error(Code::kInternal, "the id of a communicator from rank ", from, " is broken or not expected");
  if (Status begun = links_.to(from).begin(id, 1); !begun.is_ok()) gpu_.fail(begun);
  return Status::ok();
}

std::unique_ptr<MessageTicket> Messages::ticket_of(bool sends, int peer, uint32_t id) {
  return std::make_unique<TicketOfMessage>(order_, gpu_, sends ? context_.rank() : peer, peer, id);
}

Status Messages::begin_on_device(Operation* op, int peer, uint32_t id, bool by_nccl) {
  const bool out = is_sent(op);
  const TensorMeta& meta = out ? op->signature().tensors[0] : *op->received;
  MessageEnd end{out, out ? const_cast<std::byte*>(op->in[0]) : op->out[0],
                 static_cast<size_t>(meta.count()) * size_of(meta.dtype), ready_of(op)};
  links_.use(op->device->gpu, gpu_.options());
  DeviceLink& link = links_.to(peer);
  std::unique_ptr<DeviceMessage> message;
  if (by_nccl)
    message = make_nccl_message(&link, end, context_.rank() < peer ? 1 : 0, ticket_of(out, peer, id));
  else
    message = make_staged_message(&link, end, [this, out, peer, id](std::byte* at, size_t bytes) {
      return transfer_of(out, at, bytes, {peer, id});
    });
  Moving& moving = moving_.emplace_back(Moving{op, peer, id, nullptr, message.get()});
  moving.transfer = std::move(message);
  Status begun = by_nccl ? want_link(peer) : Status::ok();
  const bool on_device = !begun.is_ok();
  if (begun.is_ok() && moving.transfer->start() == Progress::kFailed) begun = moving.transfer->status();
  if (begun.is_ok() || !(on_device || moving.on_device->device_failed())) return begun;
  moving.failed = true;
  gpu_.fail(begun.with(op->describe()));
  return Status::ok();
}

Progress Messages::step_on_device(Moving* moving, bool* moved) {
  if (moving->failed) return Progress::kPending;
  const Progress progress = moving->transfer->step(moved);
  if (progress == Progress::kDone) moving->op->device->done = moving->on_device->done();
  if (progress != Progress::kFailed || !moving->on_device->device_failed()) return progress;
  moving->failed = true;
  gpu_.fail(moving->transfer->status().with(moving->op->describe()));
  return Progress::kPending;
}

// Without rank 0, which can give no more tickets, a message goes through host memory, at both ends: the other one may
// have done so, and have left then. Who leaves has ended its messages, so without its other end this one's ticket is
// given or will be: it is given up only to wait for no fault for ever. True: `moving` is no more.
bool Messages::given_up(Moving* moving) {
  if (!moving->on_device || moving->failed || !moving->on_device->may_be_given_up()) return false;
  const bool unordered = link_.has_left(0), alone = link_.has_left(moving->peer);
  const bool counted_on = is_sent(moving->op) && moving->on_device->has_asked();
  if (!unordered && (counted_on || !alone)) return false;
  const TimePoint now = Clock::now();
  if (moving->doomed == TimePoint{}) moving->doomed = now;
  if (seconds_between(moving->doomed, now) < (unordered ? kGraceOfOrdersS : kGraceOfPeerS)) return false;
  Operation* op = moving->op;
  const int peer = moving->peer;
  const uint32_t id = moving->id;
  moving_.erase(moving_.begin() + (moving - moving_.data()));
  if (!unordered)
    complete(op, Status(Code::kAborted, text_of(op->describe(), ": it has shut down"), peer));
  else if (Status begun = begin_on_device(op, peer, id, false); !begun.is_ok())
    gpu_.fail(begun);
  return true;
}

bool Messages::expects_ticket(int sender, uint32_t id) const {
  return std::any_of(moving_.begin(), moving_.end(), [&](const Moving& m) {
    return m.on_device && m.id == id && (is_sent(m.op) ? sender == context_.rank() : sender == m.peer);
  });
}

bool Messages::waits_on_device() const {
  return std::any_of(moving_.begin(), moving_.end(), [](const Moving& m) { return m.on_device != nullptr; });
}

// ---- to oneself

// So that the send is done before anybody receives.
Status Messages::copy_own(Operation* op, Announced* message) {
  const TensorMeta& meta = message->meta;
  const size_t bytes = static_cast<size_t>(meta.count()) * size_of(meta.dtype);
  if (!bytes) return Status::ok();
  links_.use(op->device->gpu, gpu_.options());
  Gpu& gpu = *op->device->gpu;
  auto stream = links_.to(context_.rank()).stream();
  HC_TRY(stream.status());
  auto memory = gpu.device_memory(bytes, stream.value());
  HC_TRY(memory.status());
  message->own_copy = memory.take();
  HC_TRY(gpu.wait(stream.value(), ready_of(op)));
  HC_TRY(gpu.copy(message->own_copy->at(), cu_pointer(op->in[0]), bytes, stream.value()));
  auto done = gpu.record(stream.value());
  HC_TRY(done.status());
  message->own_copy->used_until(done.value());
  op->device->done = done.take();
  return Status::ok();
}

// source: the send, where it was too large to be copied before.
Status Messages::copy_to_self(Operation* op, const Announced& message, Operation* source) {
  const size_t bytes = static_cast<size_t>(message.meta.count()) * size_of(message.meta.dtype);
  Gpu& gpu = *op->device->gpu;
  auto stream = links_.to(context_.rank()).stream();
  HC_TRY(stream.status());
  if (const CuEvent ready = ready_of(op)) HC_TRY(gpu.wait(stream.value(), ready));
  if (source) HC_TRY(gpu.wait(stream.value(), ready_of(source)));
  const std::byte* from = source ? source->in[0] : message.own_copy->data();
  HC_TRY(gpu.copy(cu_pointer(op->out[0]), cu_pointer(from), bytes, stream.value()));
  auto done = gpu.record(stream.value());
  HC_TRY(done.status());
  if (message.own_copy) message.own_copy->used_until(done.value());
  if (source) source->device->done = done.value();
  op->device->done = done.take();
  return Status::ok();
}

}  // namespace hc
