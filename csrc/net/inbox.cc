#include "net/inbox.h"

#include <algorithm>
#include <cstring>

namespace hc {

namespace {
// Towards the limit.
size_t counted_bytes(const SegmentHeader& header) { return header.tag.is_of_bucket() ? 0 : header.bytes; }
}  // namespace

Status check_header(const SegmentHeader& header) {
  if (header.guard == header.guard_of() && header.bytes <= kMaxTransferBytes) return Status::ok();
  return error(Code::kInternal, "sent a damaged data header (", header.bytes, " bytes announced)");
}

std::span<const iovec> Inbox::places() {
  if (blocked_) return {};
  size_t n = 0;
  if (active_) {
    std::byte* to = into_ ? into_->data : aside_->data.get();
    places_[n++] = {to + got_, current_.bytes - got_};
    if (into_ && posted_.empty()) return {places_, n};  // the next receive is not posted yet; it may soon be
  }
  places_[n++] = {reinterpret_cast<std::byte*>(&header_) + header_bytes_, sizeof(header_) - header_bytes_};
  return {places_, n};
}

Status Inbox::took(size_t bytes) {
  if (active_) {
    size_t payload = std::min(bytes, current_.bytes - got_);
    if (has_sums_) hash_.add((into_ ? into_->data : aside_->data.get()) + got_, payload);
    got_ += payload;
    bytes -= payload;
    if (into_) into_->moved = got_;
    if (got_ == current_.bytes) HC_TRY(end_segment());
  }
  header_bytes_ += bytes;
  if (header_bytes_ < sizeof(header_)) return Status::ok();
  return begin_segment();
}

Status Inbox::end_segment() {
  if (has_sums_) HC_TRY(check_sum(current_, halved(hash_.finish())));
  if (into_) into_->done = true;
  into_ = nullptr;
  active_ = false;
  ++segments_;
  return Status::ok();
}

std::string text_of_batch(const Tag& tag) {
  return text_of("batch ", tag.batch, tag.process_set ? text_of(" of process set ", tag.process_set) : "");
}

Status check_match(const SegmentHeader& header, const Transfer& transfer) {
  if (header.tag.offset == transfer.tag.offset && header.bytes == transfer.bytes) return Status::ok();
  return error(Code::kInternal, "data out of step in ", text_of_batch(header.tag), ": ", header.bytes,
               " bytes at offset ", header.tag.offset, " arrived where ", transfer.bytes, " bytes at offset ",
               transfer.tag.offset, " were due");
}

Status check_sum(const SegmentHeader& header, uint32_t sum) {
  if (sum == header.sum) return Status::ok();
  return error(Code::kInternal, "sent data that was changed on its way: the ", header.bytes, " bytes at offset ",
               header.tag.offset, " of ", text_of_batch(header.tag),
               " have another checksum. A network card, a switch or a proxy between the two hosts is faulty");
}

// The header is complete: find a home for what follows.
Status Inbox::begin_segment() {
  HC_TRY(check_header(header_));
  auto match =
      std::find_if(posted_.begin(), posted_.end(), [&](const Transfer* t) { return t->tag.same_stream(header_.tag); });
  if (match != posted_.end()) {
    HC_TRY(check_match(header_, **match));
    into_ = *match;
    posted_.erase(match);
  } else if (!header_.tag.is_of_bucket() && kept_bytes_ + header_.bytes > limit_ && kept_bytes_ > 0) {
    blocked_ = true;
    return Status::ok();
  } else {
    // Not zeroed: every byte will be written before it is read.
    kept_.push_back({header_, std::unique_ptr<std::byte[]>(new std::byte[header_.bytes])});
    aside_ = std::prev(kept_.end());
    kept_bytes_ += counted_bytes(header_);
  }
  blocked_ = false;
  current_ = header_;
  header_bytes_ = 0;
  got_ = 0;
  hash_ = {};
  active_ = true;
  return current_.bytes == 0 ? end_segment() : Status::ok();
}

Status Inbox::post(Transfer* transfer) {
  transfer->moved = 0;
  transfer->done = false;
  auto match =
      std::find_if(kept_.begin(), kept_.end(), [&](const Kept& k) { return k.header.tag.same_stream(transfer->tag); });
  if (match == kept_.end()) {
    posted_.push_back(transfer);
    return blocked_ ? begin_segment() : Status::ok();
  }
  HC_TRY(check_match(match->header, *transfer));
  const bool arriving = active_ && !into_ && aside_ == match;
  const size_t there = arriving ? got_ : match->header.bytes;
  if (there > 0) std::memcpy(transfer->data, match->data.get(), there);
  transfer->moved = there;
  if (arriving) {
    into_ = transfer;  // the rest goes straight into place
  } else {
    transfer->done = true;
  }
  kept_bytes_ -= counted_bytes(match->header);
  kept_.erase(match);
  return blocked_ ? begin_segment() : Status::ok();
}

bool Inbox::forget(Transfer* transfer) {
  if (active_ && into_ == transfer) return false;
  std::erase(posted_, transfer);
  return true;
}

}  // namespace hc
