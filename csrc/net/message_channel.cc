#include "net/message_channel.h"

#include <algorithm>
#include <cstring>

namespace hc {
namespace {

// Tags up to 32767 are all that MPI promises. Stale messages of a life that broke off must not meet a later one's.
constexpr int kLives = 3;
constexpr int kTagsPerLife = 10000;
constexpr double kLetGoS = 1.0;
constexpr size_t kSpare = 16;

}  // namespace

MessageChannel::MessageChannel(int rank, FramedChannel* control, std::shared_ptr<MessageLibrary> library,
                               Traffic* traffic, uint64_t generation)
    : rank_(rank),
      control_(control),
      library_(std::move(library)),
      traffic_(traffic),
      // The low half counts; the high half is that of whoever counts, and changes the remainder.
      tag_base_(static_cast<int>(static_cast<uint32_t>(generation) % kLives) * kTagsPerLife) {}

int MessageChannel::data_tag(uint32_t number) const {
  return tag_base_ + 1 + static_cast<int>(number % (kTagsPerLife - 1));
}

Status MessageChannel::use(bool on) {
  if (on && !listening_) {
    listening_ = true;
    for (size_t index = 0; index < kNotices; ++index) HC_TRY(post_notice(index));
  }
  on_ = on;
  return Status::ok();
}

Status MessageChannel::post_notice(size_t index) {
  return library_->receive(&notices_[index], sizeof(Notice), rank_, notice_tag(), &notice_requests_[index]);
}

void MessageChannel::fail(const Status& status) {
  if (!failed_.is_ok()) return;
  failed_ =
      Status(status.code(), text_of(control_->peer(), ": data through ", library_->name(), ": ", status.text()), rank_);
}

bool MessageChannel::is_over(MessageRequest* request) {
  bool done = false;
  Status status = library_->test(request, &done);
  if (!status.is_ok()) fail(status);
  return done && status.is_ok();
}

// Whatever became of it.
bool MessageChannel::is_released(MessageRequest* request) {
  bool done = *request == MessageRequest{};
  if (!done) (void)library_->test(request, &done);
  return done;
}

void MessageChannel::post_send(Transfer* transfer) {
  if (!on_) return control_->post_send(transfer);
  transfer->moved = 0;
  transfer->done = false;
  if (transfer->bytes > kMaxTransferBytes)
    fail(error(Code::kInternal, "a transfer of ", transfer->bytes, " bytes; allowed are ", kMaxTransferBytes));
  if (!failed_.is_ok()) return;
  if (spare_.empty()) spare_.emplace_back();
  leaving_.splice(leaving_.end(), spare_, spare_.begin());
  Leaving& out = leaving_.back();
  out.notice_request = out.data_request = {};
  out.notice.header = {transfer->tag, transfer->bytes, sum_of(transfer->data, transfer->bytes)};
  const bool rides = transfer->bytes <= kInlineBytes;
  out.transfer = rides ? nullptr : transfer;
  if (rides && transfer->bytes > 0) std::memcpy(out.notice.data, transfer->data, transfer->bytes);
  Status status = library_->send(&out.notice, bytes_of(out.notice.header), rank_, notice_tag(), &out.notice_request);
  if (status.is_ok() && !rides)
    status = library_->send(transfer->data, transfer->bytes, rank_, data_tag(sent_number_++), &out.data_request);
  if (!status.is_ok()) return fail(status);
  traffic_->segments_sent.add(1);
  traffic_->bytes_sent.add(sizeof(SegmentHeader) + transfer->bytes);
  if (!rides) return;
  transfer->moved = transfer->bytes;
  transfer->done = true;
}

void MessageChannel::post_receive(Transfer* transfer) {
  if (!on_) return control_->post_receive(transfer);
  transfer->moved = 0;
  transfer->done = false;
  auto match =
      std::find_if(kept_.begin(), kept_.end(), [&](const Kept& k) { return k.header.tag.same_stream(transfer->tag); });
  if (match == kept_.end()) {
    posted_.push_back(transfer);
    return;
  }
  if (match->data) kept_bytes_ -= match->header.bytes;
  Status status = deliver(match->header, match->data.get(), match->number, transfer);
  kept_.erase(match);
  if (!status.is_ok()) fail(status);
}

// `data`: it has come already; else segment `number` follows.
Status MessageChannel::deliver(const SegmentHeader& header, const std::byte* data, uint32_t number,
                               Transfer* transfer) {
  HC_TRY(check_match(header, *transfer));
  if (header.bytes <= kInlineBytes) {
    if (header.bytes > 0) std::memcpy(transfer->data, data, header.bytes);
    transfer->moved = header.bytes;
    transfer->done = true;
    return Status::ok();
  }
  arriving_.push_back({transfer, header, {}});
  return library_->receive(transfer->data, transfer->bytes, rank_, data_tag(number), &arriving_.back().request);
}

Status MessageChannel::take(const Notice& notice) {
  const SegmentHeader& header = notice.header;
  HC_TRY(check_header(header));
  traffic_->segments_received.add(1);
  traffic_->bytes_received.add(sizeof(SegmentHeader) + header.bytes);
  const bool rides = header.bytes <= kInlineBytes;
  if (rides) HC_TRY(check_sum(header, sum_of(notice.data, header.bytes)));
  const uint32_t number = rides ? 0 : received_number_++;
  auto match =
      std::find_if(posted_.begin(), posted_.end(), [&](const Transfer* t) { return t->tag.same_stream(header.tag); });
  if (match != posted_.end()) {
    Transfer* transfer = *match;
    posted_.erase(match);
    return deliver(header, notice.data, number, transfer);
  }
  Kept kept{header, nullptr, number};
  if (rides) {
    kept.data.reset(new std::byte[header.bytes]);
    if (header.bytes > 0) std::memcpy(kept.data.get(), notice.data, header.bytes);
    kept_bytes_ += header.bytes;
  }
  kept_.push_back(std::move(kept));
  return Status::ok();
}

bool MessageChannel::take_notices() {
  bool any = false;
  while (failed_.is_ok() && kept_bytes_ <= kMaxUnexpectedBytes && is_over(&notice_requests_[next_notice_])) {
    any = true;
    Status status = take(notices_[next_notice_]);
    if (status.is_ok()) status = post_notice(next_notice_);
    if (!status.is_ok()) fail(status);
    next_notice_ = (next_notice_ + 1) % kNotices;
  }
  return any;
}

bool MessageChannel::finish_arriving() {
  bool any = false;
  while (failed_.is_ok() && !arriving_.empty() && is_over(&arriving_.front().request)) {
    Transfer* transfer = arriving_.front().transfer;
    if (Status status = check_sum(arriving_.front().header, sum_of(transfer->data, transfer->bytes)); !status.is_ok()) {
      fail(status);
      return true;
    }
    arriving_.pop_front();
    transfer->moved = transfer->bytes;
    transfer->done = true;
    any = true;
  }
  return any;
}

bool MessageChannel::finish_leaving() {
  bool any = false;
  while (failed_.is_ok() && !leaving_.empty()) {
    Leaving& out = leaving_.front();
    if (out.transfer) {
      if (!is_over(&out.data_request)) break;
      out.transfer->moved = out.transfer->bytes;
      out.transfer->done = true;
      out.transfer = nullptr;
      any = true;
    }
    if (!is_over(&out.notice_request)) break;
    any = true;
    if (spare_.size() < kSpare)
      spare_.splice(spare_.end(), leaving_, leaving_.begin());
    else
      leaving_.pop_front();
  }
  return any;
}

Status MessageChannel::progress(bool* moved) {
  Status status = control_->progress(moved);
  if (listening_ && failed_.is_ok()) {
    library_->progress();
    bool any = take_notices();
    any |= finish_arriving();
    any |= finish_leaving();
    if (any) *moved = true;
  }
  // Whatever the library says first: why a peer has gone is what control says.
  return status.is_ok() ? failed_ : status;
}

// A library cannot take back what the peer has begun to read or write; then the operation's end is waited for, not for
// ever.
void MessageChannel::forget(Transfer* transfer) {
  if (transfer->done) return;
  if (std::erase(posted_, transfer) > 0) return;
  auto in = std::find_if(arriving_.begin(), arriving_.end(), [&](const Arriving& a) { return a.transfer == transfer; });
  auto out = std::find_if(leaving_.begin(), leaving_.end(), [&](const Leaving& l) { return l.transfer == transfer; });
  if (in == arriving_.end() && out == leaving_.end()) return control_->forget(transfer);
  if (in != arriving_.end()) {
    (void)library_->cancel_receive(&in->request, kLetGoS);
    arriving_.erase(in);
  } else {
    if (!library_->cancel_send(&out->data_request, kLetGoS)) out->data_request = {};  // it goes on by itself
    out->transfer = nullptr;
  }
  fail(error(Code::kAborted, "a transfer was withdrawn half-way, the stream cannot go on"));
}

void MessageChannel::close() {
  if (!listening_) return;
  listening_ = on_ = false;
  posted_.clear();
  for (MessageRequest& request : notice_requests_) (void)library_->cancel_receive(&request, kLetGoS);
  for (Arriving& one : arriving_) (void)library_->cancel_receive(&one.request, kLetGoS);
  arriving_.clear();
  // Notices are small enough to have left already. What has not keeps its memory for good.
  for (Deadline deadline = Deadline::in(kLetGoS);;) {
    library_->progress();
    std::erase_if(leaving_,
                  [&](Leaving& out) { return is_released(&out.notice_request) && is_released(&out.data_request); });
    if (leaving_.empty() || deadline.passed()) break;
  }
  std::erase_if(leaving_, [&](Leaving& out) {
    return library_->cancel_send(&out.notice_request, 0) && library_->cancel_send(&out.data_request, 0);
  });
  if (!leaving_.empty()) static_cast<void>(new std::list<Leaving>(std::move(leaving_)));
}

}  // namespace hc
