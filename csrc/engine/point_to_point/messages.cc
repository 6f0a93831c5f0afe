// See messages.h.
#include "engine/point_to_point/messages.h"

#include <algorithm>
#include <cstring>

#include "collective/channels/schedule_runner.h"

namespace hc {
namespace {

constexpr uint32_t kElsewhere = 0xffffffffu;  // in the place of the payload's length

bool sends(const Operation* op) { return op->signature().op == Op::kSend; }
int peer_of(const Operation* op) { return op->signature().root; }

bool read_meta(Reader* in, TensorMeta* meta) {
  const auto dtype = in->get<uint8_t>(), dimensions = in->get<uint8_t>();
  if (dtype >= kDTypeCount || dimensions > kMaxDimensions) return false;
  meta->dtype = static_cast<DType>(dtype);
  meta->shape.resize(dimensions);
  auto bytes = static_cast<int64_t>(size_of(meta->dtype));
  for (int64_t& d : meta->shape) {
    d = in->get<int64_t>();
    if (d < 0 || (d > 0 && (__builtin_mul_overflow(bytes, d, &bytes) || bytes > kMaxTensorBytes))) return false;
  }
  return in->ok();
}

}  // namespace

// ---- sending

Status Messages::submit(Operation* op) {
  op->pending_at = operations_.size();
  operations_.push_back(op);
  const int peer = peer_of(op);
  const auto& members = members_of(op->process_set);
  const bool gone = peer >= 0 ? link_.has_left(peer) : std::all_of(members.begin(), members.end(), [&](int r) {
    return r != context_.rank() && link_.has_left(r);
  });
  if (gone && members.size() > 1) {
    complete(op, Status(Code::kAborted, op->describe() + ": it has shut down", peer));
    return Status::ok();
  }
  if (sends(op)) {
    if (peer == context_.rank()) return send_to_self(op);
    outboxes_[peer].queued.push_back(op);
    return pump(peer);
  }
  const Address address{op->process_set, static_cast<int64_t>(op->request.sequence)};
  Mailbox& box = mailboxes_[address];
  auto first = std::find_if(box.announced.begin(), box.announced.end(),
                            [&](const Announced& a) { return peer < 0 || a.from == peer; });
  if (first == box.announced.end()) {
    box.receives.push_back(op);
    return Status::ok();
  }
  Announced message = std::move(*first);
  box.announced.erase(first);
  if (box.is_empty()) mailboxes_.erase(address);
  return match(op, std::move(message));
}

Status Messages::pump(int to) {
  Outbox& box = outboxes_[to];
  while (!box.queued.empty() && box.unanswered < kAnnouncementsAhead) {
    Operation* op = box.queued.front();
    box.queued.pop_front();
    HC_TRY(announce(op));
  }
  return Status::ok();
}

Status Messages::announce(Operation* op) {
  const TensorMeta& meta = op->signature().tensors[0];
  const int to = peer_of(op);
  const size_t bytes = bytes_of(meta);
  Outbox& box = outboxes_[to];
  const bool eager = bytes <= (op->work ? 0 : kEagerBytes) && box.eager_bytes + bytes <= kEagerWindow;
  const uint32_t id = next_id_++;
  Writer frame;
  frame.put(FrameKind::kMessage);
  frame.put(op->process_set);
  frame.put(static_cast<int64_t>(op->request.sequence));
  frame.put(id);
  frame.put(meta.dtype);
  frame.put(static_cast<uint8_t>(meta.shape.size()));
  for (int64_t d : meta.shape) frame.put(d);
  frame.put(op->work != nullptr);
  if (op->work) backend_.announce(op, &frame);
  frame.put(eager ? static_cast<uint32_t>(bytes) : kElsewhere);
  if (eager && bytes) frame.put_raw(op->in[0], bytes);
  ++box.unanswered;
  if (eager) box.eager_bytes += bytes;
  sent_[id] = {op, to, eager ? bytes : 0};
  return link_.send(to, frame.bytes(), false);
}

// Copied and done at once, so that a rank may send to itself before it receives; what is too large for that waits.
Status Messages::send_to_self(Operation* op) {
  Announced message;
  message.from = context_.rank();
  message.id = next_id_++;
  message.meta = op->signature().tensors[0];
  const size_t bytes = bytes_of(message.meta);
  const Address address{op->process_set, static_cast<int64_t>(op->request.sequence)};
  message.here = self_bytes_ + bytes <= kSelfBufferBytes;
  if (op->work) {
    auto made = backend_.to_self(op, message.here);
    HC_TRY(made.status());
    message.elsewhere = made.take();
  }
  if (message.here) {
    if (!op->work) message.payload.assign(op->in[0], op->in[0] + bytes);
    self_bytes_ += bytes;
    complete(op, Status::ok());
  } else {
    sent_[message.id] = {op, context_.rank(), 0};
  }
  return arrived(address, std::move(message));
}

// ---- receiving

Status Messages::arrived(const Address& address, Announced message) {
  Mailbox& box = mailboxes_[address];
  auto first = std::find_if(box.receives.begin(), box.receives.end(),
                            [&](Operation* op) { return peer_of(op) < 0 || peer_of(op) == message.from; });
  if (first == box.receives.end()) {
    box.announced.push_back(std::move(message));
    return Status::ok();
  }
  Operation* op = *first;
  box.receives.erase(first);
  if (box.is_empty()) mailboxes_.erase(address);
  return match(op, std::move(message));
}

// Finds the place for the message, or says why there is none.
Status Messages::prepare(Operation* op, const Announced& message) {
  op->received = message.meta;
  op->source = message.from;
  const size_t bytes = bytes_of(message.meta);
  if (!op->signature().tensors.empty()) {
    const TensorMeta& wanted = op->signature().tensors[0];
    if (wanted.dtype == message.meta.dtype && wanted.count() == message.meta.count())
      return backend_.check_place(op, message.from, !message.elsewhere);
    return Status(
        Code::kMismatch,
        text_of("rank ", message.from, " sent ", text_of_tensor(message.meta), " with tag ", op->request.sequence,
                ", rank ", context_.rank(), " receives it into ", text_of_tensor(wanted),
                ". Both must have one dtype and number of elements; pass no tensor to recv() to take what "
                "comes."),
        context_.rank());
  }
  if (message.elsewhere && op->work) return backend_.prepare(op, bytes);
  if (message.elsewhere && message.from == context_.rank()) return backend_.check_place(op, message.from, false);
  auto memory = Memory::make_private(bytes);
  if (!memory)
    return error(Code::kInternal, "no memory on rank ", context_.rank(), " for a message of ", bytes, " bytes of rank ",
                 message.from);
  op->results = {memory};
  op->first_dimension = {message.meta.shape.empty() ? 1 : message.meta.shape[0]};
  op->out.assign(1, memory->data());
  return Status::ok();
}

Status Messages::match(Operation* op, Announced message) {
  Status fits = prepare(op, message);
  const size_t bytes = bytes_of(message.meta);
  const bool local = message.from == context_.rank();
  MessageBackend::Way way;
  if (fits.is_ok() && message.elsewhere && !message.here && !local) {
    way = backend_.choose(op, message.from, *message.elsewhere);
    fits = way.refusal;
  }
  if (local && message.here) self_bytes_ -= bytes;
  if (!fits.is_ok()) {
    complete(op, fits.with(op->describe()));
    if (!local) return answer(message.from, FrameKind::kMessageRefused, message.id, fits);
  } else if (message.here) {
    if (message.elsewhere && bytes)
      HC_TRY(backend_.copy_to_self(op, *message.elsewhere, nullptr));
    else if (bytes)
      std::memcpy(op->out[0], message.payload.data(), bytes);
    complete(op, Status::ok());
    return local ? Status::ok() : answer(message.from, FrameKind::kMessageTaken, message.id, {});
  } else if (!local) {
    // The answer comes first: a link's first frame means nothing to who does not know what for.
    HC_TRY(answer(message.from, FrameKind::kMessageWanted, message.id, {}, way.is_direct));
    return begin_transfer(op, message.from, message.id, op->work && message.elsewhere, way.is_direct);
  }
  auto waiting = sent_.find(message.id);  // sent to oneself and not copied
  if (waiting == sent_.end()) return Status::ok();
  Operation* source = waiting->second.op;
  sent_.erase(waiting);
  if (fits.is_ok()) {
    if (message.elsewhere)
      HC_TRY(backend_.copy_to_self(op, *message.elsewhere, source));
    else
      std::memcpy(op->out[0], source->in[0], bytes);
    complete(op, Status::ok());
  }
  complete(source, fits.with(source->describe()));
  return Status::ok();
}

std::unique_ptr<Collective> Messages::transfer_of(bool sends, std::byte* at, size_t bytes,
                                                  std::pair<int, uint32_t> which) {
  const auto [peer, id] = which;
  Group pair;
  pair.size = 2;
  pair.world_rank = {context_.rank(), peer};
  pair.channel = {nullptr, &context_.mesh->channel(peer)};
  Task task;
  task.dtype = DType::kU8;
  task.pieces = {{sends ? at : nullptr, sends ? nullptr : at, bytes}};
  task.segment_bytes = context_.config.segment_bytes;
  task.tag = Tag{static_cast<uint16_t>(context_.generation), kMessageStream, id, 0};
  Schedule schedule{.name = "message", .rounds = 1};
  Step step{.action = sends ? Action::kSend : Action::kReceive, .peer = 1, .round = 1, .count = bytes};
  step.from = {Place::kInput, 0};
  step.to = {Place::kOutput, 0};
  schedule.add(step);
  return std::make_unique<ScheduleRunner>(std::move(task), pair, std::move(schedule));
}

Status Messages::begin_transfer(Operation* op, int peer, uint32_t id, bool by_backend, bool is_direct) {
  const bool out = sends(op);
  if (by_backend) {
    auto transfer = backend_.make(op, {peer, id}, is_direct, [this, out, peer, id](std::byte* at, size_t bytes) {
      return transfer_of(out, at, bytes, {peer, id});
    });
    BackendTransfer* const end = transfer.get();
    moving_.push_back({op, peer, id, std::move(transfer), end});
    return end->start() == Progress::kFailed ? end->status() : Status::ok();
  }
  const size_t bytes = bytes_of(out ? op->signature().tensors[0] : *op->received);
  std::byte* const at = out ? const_cast<std::byte*>(op->in[0]) : op->out[0];
  op->traces.started.store(context_.rank_metrics.now(), std::memory_order_relaxed);
  moving_.push_back({op, peer, id, transfer_of(out, at, bytes, {peer, id})});
  if (moving_.back().transfer->start() == Progress::kFailed) return moving_.back().transfer->status();
  return Status::ok();
}

// ---- frames

Status Messages::answer(int to, FrameKind kind, uint32_t id, const Status& reason, bool is_direct) {
  Writer frame;
  frame.put(kind);
  frame.put(id);
  if (kind == FrameKind::kMessageWanted) frame.put(is_direct);
  if (kind == FrameKind::kMessageRefused) {
    frame.put(reason.code());
    frame.put_text(reason.text());
  }
  return link_.send(to, frame.bytes(), false);
}

Status Messages::handle(int from, FrameKind kind, Reader* in) {
  if (kind == FrameKind::kMessage) return read_announcement(from, in);
  if (kind == FrameKind::kLinkId) return backend_.take_link(from, in);
  return kind == FrameKind::kMessageWithdrawn ? withdrawn(from, in) : answered(from, kind, in);
}

Status Messages::read_announcement(int from, Reader* in) {
  const auto process_set = in->get<uint16_t>();
  const auto tag = in->get<int64_t>();
  Announced message;
  message.from = from;
  message.id = in->get<uint32_t>();
  const bool read = read_meta(in, &message.meta);
  if (in->get<bool>()) message.elsewhere = backend_.read(in);
  const auto length = in->get<uint32_t>();
  message.here = length != kElsewhere;
  if (read && message.here && length <= kEagerBytes && length == bytes_of(message.meta)) {
    message.payload.resize(length);
    if (length) in->take(message.payload.data(), length);
  } else if (!read || message.here) {
    in->fail();
  }
  if (!in->ok()) return error(Code::kInternal, "the announcement of a message from rank ", from, " is broken");
  return arrived({process_set, tag}, std::move(message));
}

Status Messages::answered(int from, FrameKind kind, Reader* in) {
  const auto id = in->get<uint32_t>();
  auto at = sent_.find(id);
  if (!in->ok() || at == sent_.end() || at->second.to != from)
    return error(Code::kInternal, "rank ", from, " answered message ", id, ", which it was not sent");
  const Sent sent = at->second;
  sent_.erase(at);
  Outbox& box = outboxes_[from];
  --box.unanswered;
  box.eager_bytes -= sent.eager_bytes;
  if (!sent.op) {
    if (kind == FrameKind::kMessageWanted) HC_TRY(answer(from, FrameKind::kMessageWithdrawn, id, {}));
  } else if (kind == FrameKind::kMessageWanted) {
    const bool is_direct = in->get<bool>();
    HC_TRY(begin_transfer(sent.op, from, id, sent.op->work != nullptr, is_direct));
  } else if (kind == FrameKind::kMessageTaken) {
    complete(sent.op, Status::ok());
  } else {
    const auto code = in->get<Code>();
    const std::string text = in->get_text();
    complete(sent.op, Status(code == Code::kOk ? Code::kMismatch : code, text, from).with(sent.op->describe()));
  }
  return pump(from);
}

Status Messages::withdrawn(int from, Reader* in) {
  const auto id = in->get<uint32_t>();
  auto at = std::find_if(moving_.begin(), moving_.end(),
                         [&](const Moving& m) { return m.peer == from && m.id == id && !sends(m.op); });
  if (at == moving_.end()) return Status::ok();
  Operation* op = at->op;
  moving_.erase(at);
  complete(op, error(Code::kAborted, op->describe(), ": the sender has given it up, or its process set was removed"));
  return Status::ok();
}

// ---- progress and ends

Status Messages::step(bool* moved) {
  for (size_t i = 0; i < moving_.size();) {
    const Progress progress = moving_[i].transfer->step(moved);
    if (progress == Progress::kFailed) return moving_[i].transfer->status().with(moving_[i].op->describe());
    if (progress == Progress::kPending) {
      ++i;
      continue;
    }
    *moved = true;
    Operation* op = moving_[i].op;
    Status outcome = moving_[i].by_backend ? moving_[i].by_backend->outcome() : Status::ok();
    moving_.erase(moving_.begin() + static_cast<std::ptrdiff_t>(i));
    complete(op, std::move(outcome));
  }
  return Status::ok();
}

bool Messages::looks_soon() const {
  return std::any_of(moving_.begin(), moving_.end(), [](const Moving& m) { return m.by_backend != nullptr; });
}

void Messages::complete(Operation* op, Status status) {
  operations_.back()->pending_at = op->pending_at;
  operations_[op->pending_at] = operations_.back();
  operations_.pop_back();
  completion_.finish(op, std::move(status));
}

// Ends sends that nobody has answered and receives that nothing has matched.
void Messages::drop_waiting(const std::function<bool(const Operation*)>& which, const Status& reason) {
  std::vector<Operation*> dropped;
  auto take = [&](Operation* op) {
    if (!which(op)) return false;
    dropped.push_back(op);
    return true;
  };
  for (auto& [id, sent] : sent_)
    if (sent.op && take(sent.op)) sent.op = nullptr;
  for (auto& [rank, box] : outboxes_) std::erase_if(box.queued, take);
  for (auto& [address, box] : mailboxes_) std::erase_if(box.receives, take);
  for (Operation* op : dropped) complete(op, reason.with(op->describe()));
}

void Messages::peer_left(int rank, const std::string& text) {
  drop_waiting(
      [&](const Operation* op) {
        if (peer_of(op) >= 0) return peer_of(op) == rank;
        const auto& members = members_of(op->process_set);
        return std::all_of(members.begin(), members.end(),
                           [&](int r) { return r == context_.rank() || link_.has_left(r); });
      },
      Status(Code::kAborted, text, rank));
  std::erase_if(sent_, [&](const auto& entry) { return entry.second.to == rank; });
}

void Messages::set_removed(uint16_t process_set, const Status& reason) {
  drop_waiting([&](const Operation* op) { return op->process_set == process_set; }, reason);
  std::erase_if(mailboxes_, [&](const auto& entry) { return entry.first.first == process_set; });
}

void Messages::end_deadlock(const std::set<int>& stuck, const Status& reason) {
  drop_waiting(
      [&](const Operation* op) {
        if (peer_of(op) >= 0) return stuck.contains(peer_of(op));
        const auto& members = members_of(op->process_set);
        return std::all_of(members.begin(), members.end(), [&](int r) { return stuck.contains(r); });
      },
      reason);
}

void Messages::fail_all(const Status& reason) {
  moving_.clear();
  sent_.clear();
  outboxes_.clear();
  mailboxes_.clear();
  self_bytes_ = 0;
  while (!operations_.empty()) {
    Operation* op = operations_.back();
    complete(op, reason.with(op->describe()));
  }
}

void Messages::mark_awaited(TimePoint now, double older_than_s, std::vector<bool>* waits) const {
  for (const Operation* op : operations_) {
    if (seconds_between(op->submitted, now) < older_than_s) continue;
    if (peer_of(op) >= 0)
      (*waits)[static_cast<size_t>(peer_of(op))] = true;
    else
      for (int r : members_of(op->process_set)) (*waits)[static_cast<size_t>(r)] = true;
  }
}

std::string Messages::stalled(TimePoint now, double older_than_s, double* longest_s, std::set<int>* late) const {
  std::string report;
  for (const Operation* op : operations_) {
    const double waited_s = seconds_between(op->submitted, now);
    const bool moves = std::any_of(moving_.begin(), moving_.end(), [&](const Moving& m) { return m.op == op; });
    if (waited_s < older_than_s || moves) continue;
    *longest_s = std::max(*longest_s, waited_s);
    const int peer = peer_of(op);
    if (peer >= 0) late->insert(peer);
    report += text_of("\n  ", op->describe(), " of rank ", context_.rank(), " (", static_cast<int>(waited_s), " s): ");
    if (sends(op))
      report += text_of("rank ", peer, " has not called recv() from rank ", context_.rank(), " with this tag");
    else if (peer < 0)
      report += "no rank has called send() with this tag";
    else
      report += text_of("rank ", peer, " has not called send() to rank ", context_.rank(), " with this tag");
  }
  return report;
}

}  // namespace hc
