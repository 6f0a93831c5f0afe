#include "net/framed_channel.h"

#include <algorithm>
#include <cstring>

namespace hc {
namespace {

constexpr size_t kControlOutBytes = 16u << 10;  // more memory than this is given back once it is empty
constexpr size_t kPassBytes = 8u << 20;  // one progress() reads about this much, so that every channel gets its turn
constexpr size_t kSendBatch = 8;         // transfers in one write
constexpr double kLonelyEndS = 1.0;      // the data line ended and the control line did not: then it is a loss

}  // namespace

FramedChannel::FramedChannel(int rank, std::string peer, Traffic* traffic)
    : rank_(rank), peer_(std::move(peer)), traffic_(traffic) {}

void FramedChannel::fail(Code code, const std::string& reason) {
  if (!failed_.is_ok()) return;
  reason_ = reason;
  failed_ = Status(code, peer_ + ": " + reason, rank_);
  traffic_->failed_channels.add(1);
  // Whoever posted them learns it from progress(); their memory is not touched again.
  stranded_ |= !sends_.empty();
  sends_.clear();
  control_out_.clear();
  control_sent_ = send_moved_ = 0;
}

// A socket broke: the peer closed both, and on the control line there may be its reason, yet unread.
void FramedChannel::break_line(const std::string& reason) {
  if (!failed_.is_ok()) return;
  hold_until_ = Clock::now() + std::chrono::milliseconds(static_cast<int>(kLonelyEndS * 1000));
  fail(Code::kPeerLost, reason);
}

bool FramedChannel::held_back() const {
  return !failed_.is_ok() && !control_over_ && !goodbye_ && Clock::now() < hold_until_;
}

// Frames that the peer managed to send come first: among them may be its goodbye, or why it left.
Status FramedChannel::verdict() const {
  if (failed_.is_ok() || has_frames() || held_back()) return Status::ok();
  if (goodbye_ && !stranded_ && !inbox_.waiting()) return Status::ok();
  return failed_;
}

bool FramedChannel::wants_read(Line line) const {
  if (line == Line::kControl) return !control_over_ && !frames_in_.full();
  return failed_.is_ok() && !data_ended_ && !inbox_.blocked();
}

bool FramedChannel::wants_write(Line line) const {
  if (!failed_.is_ok()) return false;
  return line == Line::kControl ? !control_out_.empty() : !sends_.empty();
}

Status FramedChannel::send(std::span<const uint8_t> frame) {
  if (frame.empty() || frame.size() > kMaxControlBytes) {
    return error(Code::kInternal, "a control frame of ", frame.size(), " bytes; allowed are 1 to ", kMaxControlBytes);
  }
  if (!failed_.is_ok()) return goodbye_ || held_back() ? Status::ok() : failed_;
  uint32_t bytes = static_cast<uint32_t>(frame.size());
  const auto* length = reinterpret_cast<const uint8_t*>(&bytes);
  size_t moved = 0;
  if (control_out_.empty()) {
    const iovec parts[2] = {{&bytes, sizeof(bytes)}, {const_cast<uint8_t*>(frame.data()), frame.size()}};
    IoResult result = write(Line::kControl, parts);
    if (result.what == Io::kFailed) {
      break_line(std::strerror(result.error_number));
      settle();
      return goodbye_ ? Status::ok() : verdict();
    }
    moved = result.bytes;
  }
  if (moved < sizeof(bytes)) control_out_.insert(control_out_.end(), length + moved, length + sizeof(bytes));
  const size_t from = moved > sizeof(bytes) ? moved - sizeof(bytes) : 0;
  if (from < frame.size()) control_out_.insert(control_out_.end(), frame.begin() + from, frame.end());
  traffic_->frames_sent.add(1);
  traffic_->bytes_sent.add(moved);
  settle();
  return Status::ok();
}

bool FramedChannel::receive(std::vector<uint8_t>* frame) {
  const bool was_full = frames_in_.full();
  if (!frames_in_.take(frame)) return false;
  traffic_->frames_taken.add(1);
  if (was_full) {
    settle();
    look_again();
  }
  return true;
}

void FramedChannel::post_send(Transfer* transfer) {
  transfer->moved = 0;
  transfer->done = false;
  if (transfer->bytes > kMaxTransferBytes) {
    fail(Code::kInternal, text_of("a transfer of ", transfer->bytes, " bytes; allowed are ", kMaxTransferBytes));
  }
  if (!failed_.is_ok()) {
    stranded_ = true;
    return;
  }
  sends_.push_back(transfer);
  if (sends_.size() > 1) return;
  flush_data();
  settle();
}

void FramedChannel::post_receive(Transfer* transfer) {
  if (Status status = inbox_.post(transfer); !status.is_ok()) fail(status.code(), status.text());
  settle();
  look_again();
}

void FramedChannel::forget(Transfer* transfer) {
  if (transfer->done) return;
  const bool half_sent = !sends_.empty() && sends_.front() == transfer && send_moved_ > 0;
  if (half_sent || !inbox_.forget(transfer)) {
    fail(Code::kAborted, "a transfer was withdrawn half-way, the data line cannot go on");
    inbox_.forget_all();
    settle();
    return;
  }
  std::erase(sends_, transfer);
}

Status FramedChannel::progress(bool* moved) {
  bool any = read_control();
  if (failed_.is_ok()) {
    any |= read_data();
    any |= flush_control();
    any |= flush_data();
    any |= check_ended();
  }
  if (any) *moved = true;
  settle();
  return verdict();
}

void FramedChannel::lose(const std::string& reason) {
  for (bool moved = true; moved;) {
    moved = read_control();
    if (failed_.is_ok()) moved |= read_data();
  }
  control_over_ = true;
  fail(Code::kPeerLost, reason);
  settle();
}

// Returns whether a complete frame or a part of one came in.
bool FramedChannel::read_control() {
  bool any = false;
  for (size_t total = 0; total < kPassBytes && wants_read(Line::kControl);) {
    const iovec part = frames_in_.place();
    IoResult result = read(Line::kControl, {&part, 1});
    if (result.what == Io::kWouldBlock) break;
    if (result.what != Io::kMoved) {
      control_over_ = true;
      control_ended_at_ = Clock::now();
      if (result.what == Io::kFailed) {
        fail(Code::kPeerLost, std::strerror(result.error_number));
      } else if (!frames_in_.between_frames()) {
        fail(Code::kPeerLost, "closed its connection in the middle of a frame");
      }  // else check_ended() decides: the data line may hold what it sent last
      return true;
    }
    any = true;
    total += result.bytes;
    traffic_->bytes_received.add(result.bytes);
    bytes_received_ += result.bytes;
    const size_t before = frames_in_.frames();
    const Status status = frames_in_.took(result.bytes);
    traffic_->frames_received.add(frames_in_.frames() - before);
    if (!status.is_ok()) {
      control_over_ = true;
      fail(status.code(), status.text());
      return true;
    }
    if (result.bytes < part.iov_len) break;  // there was no more
  }
  return any;
}

bool FramedChannel::read_data() {
  bool any = false;
  for (size_t total = 0; total < kPassBytes && wants_read(Line::kData);) {
    auto places = inbox_.places();
    size_t wanted = 0;
    for (const iovec& p : places) wanted += p.iov_len;
    IoResult result = read(Line::kData, places);
    if (result.what == Io::kWouldBlock) break;
    any = true;
    if (result.what == Io::kFailed) {
      break_line(std::strerror(result.error_number));
      break;
    }
    if (result.what == Io::kEnded) {
      data_ended_ = true;
      data_ended_at_ = Clock::now();
      if (!inbox_.between_segments()) break_line("closed its connection in the middle of a data segment");
      break;
    }
    total += result.bytes;
    traffic_->bytes_received.add(result.bytes);
    bytes_received_ += result.bytes;
    if (control_over_) control_ended_at_ = Clock::now();
    const size_t before = inbox_.segments();
    const bool expected = inbox_.waiting();
    if (Status status = inbox_.took(result.bytes); !status.is_ok()) fail(status.code(), status.text());
    traffic_->segments_received.add(inbox_.segments() - before);
    if (result.bytes < wanted) break;
    if (expected && !inbox_.waiting()) break;  // its owner may post the next receives; else they are copied twice
  }
  return any;
}

bool FramedChannel::flush_control() {
  if (control_out_.empty()) return false;
  const iovec part{control_out_.data() + control_sent_, control_out_.size() - control_sent_};
  IoResult result = write(Line::kControl, {&part, 1});
  if (result.what == Io::kFailed) {
    break_line(std::strerror(result.error_number));
    return true;
  }
  control_sent_ += result.bytes;
  traffic_->bytes_sent.add(result.bytes);
  if (control_sent_ == control_out_.size()) {
    control_out_.clear();
    control_sent_ = 0;
    if (control_out_.capacity() > kControlOutBytes) control_out_.shrink_to_fit();
  }
  return result.bytes > 0;
}

// The first transfers of the queue as parts: header, payload, header, payload ... from where the first one stands.
size_t FramedChannel::gather(std::span<iovec> parts, std::span<SegmentHeader> headers) const {
  size_t n = 0, skip = send_moved_;
  for (size_t i = 0; i < std::min(sends_.size(), headers.size()); ++i) {
    const Transfer& t = *sends_[i];
    headers[i] = {t.tag, static_cast<uint32_t>(t.bytes), SegmentHeader::kGuard};
    if (skip < sizeof(SegmentHeader)) {
      parts[n++] = {reinterpret_cast<std::byte*>(&headers[i]) + skip, sizeof(SegmentHeader) - skip};
    }
    size_t payload_skip = skip > sizeof(SegmentHeader) ? skip - sizeof(SegmentHeader) : 0;
    if (t.bytes > payload_skip) parts[n++] = {t.data + payload_skip, t.bytes - payload_skip};
    skip = 0;
  }
  return n;
}

bool FramedChannel::flush_data() {
  bool any = false;
  while (!sends_.empty()) {
    iovec parts[2 * kSendBatch];
    SegmentHeader headers[kSendBatch];
    IoResult result = write(Line::kData, {parts, gather(parts, headers)});
    if (result.what == Io::kFailed) {
      break_line(std::strerror(result.error_number));
      return true;
    }
    if (result.bytes == 0) break;
    any = true;
    traffic_->bytes_sent.add(result.bytes);
    for (size_t left = result.bytes; left > 0 && !sends_.empty();) {
      Transfer* t = sends_.front();
      size_t take = std::min(left, sizeof(SegmentHeader) + t->bytes - send_moved_);
      send_moved_ += take;
      left -= take;
      t->moved = send_moved_ > sizeof(SegmentHeader) ? send_moved_ - sizeof(SegmentHeader) : 0;
      if (send_moved_ < sizeof(SegmentHeader) + t->bytes) break;
      sends_.pop_front();
      send_moved_ = 0;
      t->done = true;
      traffic_->segments_sent.add(1);
    }
  }
  return any;
}

// A peer closes both lines at once, but they are two streams: the end of one may overtake what comes on the other, be
// it a goodbye or the last segments of a collective that is over for the peer.
bool FramedChannel::check_ended() {
  const bool silent = control_over_ && !goodbye_ && seconds_between(control_ended_at_, Clock::now()) >= kLonelyEndS;
  if (control_over_ && (data_ended_ || silent)) {
    fail(Code::kPeerLost, "closed its connection without a goodbye");
    return true;
  }
  if (!data_ended_ || goodbye_) return false;
  if (seconds_between(data_ended_at_, Clock::now()) < kLonelyEndS) return false;
  fail(Code::kPeerLost, "closed its data connection");
  return true;
}

}  // namespace hc
