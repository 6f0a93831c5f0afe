#include "net/framed_channel.h"

#include <algorithm>
#include <cstring>

namespace hc {
namespace {

constexpr size_t kControlOutBytes = 16u << 10;  // more memory than this is given back once it is empty
constexpr size_t kPassBytes = 8u << 20;    // one progress() reads about this much, so that every channel gets its turn
constexpr size_t kSendBatch = 8;           // transfers in one write,
constexpr size_t kSendBytes = 256u << 10;  // while they have less than this: they have just been read for their sums
constexpr double kLonelyEndS = 1.0;        // the data line ended and the control line did not: then it is a loss
constexpr size_t kSmallBytes = 32u << 10;  // a transfer that is copied at once rather than waited for
constexpr size_t kCopiedBytes = 128u << 10;    // of small transfers, at one time
constexpr size_t kLastBytes = 256u << 10;      // of large ones, before this rank would sleep
constexpr size_t kAskAfterBytes = 256u << 10;  // written between two queries of what is acknowledged
constexpr double kBytesPerUs = 1250;           // a link of 10 Gbit/s; how soon to ask again while more is missing
constexpr int kAskAgainUs = 50, kAskAgainMaxUs = 1000;
constexpr size_t kControlLooseBytes = 64u << 10;  // kept before the next query of what is acknowledged

}  // namespace

FramedChannel::FramedChannel(int rank, std::string peer, Traffic* traffic, const std::optional<FrameKeys>& keys)
    : rank_(rank),
      peer_(std::move(peer)),
      has_sums_(keys.has_value()),
      traffic_(traffic),
      frames_out_(keys ? std::optional(keys->out) : std::nullopt),
      frames_in_(keys ? std::optional(keys->in) : std::nullopt),
      inbox_(keys.has_value()) {}

void FramedChannel::fail(Code code, const std::string& reason) {
  if (!failed_.is_ok()) return;
  reason_ = reason;
  failed_ = Status(code, peer_ + ": " + reason, rank_);
  traffic_->failed_channels.add(1);
  let_go_of_written();
  // Whoever posted them learns it from progress(); their memory is not touched again.
  stranded_ |= released_ < sends_.size();
  sends_.clear();
  control_out_.clear();
  kept_control_.clear();
  control_sent_ = send_moved_ = released_ = written_ = kept_bytes_ = kept_from_ = 0;
  down_[0] = down_[1] = false;
  note_lingering();
}

// The peer will not ask for them: it has left, with all that it needed, or is lost.
void FramedChannel::let_go_of_written() {
  for (; released_ < written_; ++released_) {
    Outgoing& one = sends_[released_];
    if (!one.transfer) continue;
    one.transfer->done = true;
    one.transfer = nullptr;
    traffic_->segments_sent.add(1);
  }
  note_lingering();
}

// True: the line is down until there is another stream, which is no failure.
bool FramedChannel::broke(Line line, const IoResult& result) {
  if (!failed_.is_ok() || goodbye_ || lost_ || !will_remake(line, result)) return false;
  take_down(line);
  return true;
}

void FramedChannel::take_down(Line line) {
  down_[static_cast<int>(line)] = true;
  down_at_[static_cast<int>(line)] = Clock::now();
  note_lingering();
  settle();
}

void FramedChannel::take_up(Line line) {
  down_[static_cast<int>(line)] = false;
  note_lingering();
  settle();
}

// A rank that shuts down does not wait for a peer that cannot be reached.
bool FramedChannel::flushed() {
  if (!failed_.is_ok()) return true;
  const auto is_hopeless = [&](Line line) {
    return is_down(line) && seconds_between(down_at_[static_cast<int>(line)], Clock::now()) > soon_up_s_;
  };
  const auto has_arrived = [&](Line line) { return !is_far() || refresh(line) == 0; };
  return ((control_out_.empty() && has_arrived(Line::kControl)) || is_hopeless(Line::kControl)) &&
         ((unwritten() == 0 && !has_copied() && has_arrived(Line::kData)) || is_hopeless(Line::kData)) &&
         (!is_down() || is_hopeless(Line::kControl) || is_hopeless(Line::kData));
}

// Nothing is connected again for somebody who is leaving.
void FramedChannel::expect_close() {
  goodbye_ = true;
  control_over_ |= is_down(Line::kControl);
  data_ended_ |= is_down(Line::kData);
  down_[0] = down_[1] = false;
  let_go_of_written();
  settle();
}

void FramedChannel::keep_sent(size_t tail_bytes, double soon_up_s) {
  keeps_ = true;
  tail_bytes_ = tail_bytes;
  soon_up_s_ = soon_up_s;
}

uint64_t FramedChannel::refresh(Line line) {
  const int at = static_cast<int>(line);
  if (is_down(line) || position_[at] == acknowledged_[at]) return position_[at] - acknowledged_[at];
  asked_at_[at] = position_[at];
  const uint64_t missing = std::min(unacknowledged(line), position_[at]);
  acknowledged_[at] = std::max(acknowledged_[at], position_[at] - missing);
  if (line == Line::kData) {
    drop_acknowledged();
  } else {
    kept_from_ = kept_control_.size() - (position_[at] - acknowledged_[at]);
    if (kept_from_ == kept_control_.size() || 2 * kept_from_ > kept_control_.size()) {
      kept_control_.erase(kept_control_.begin(), kept_control_.begin() + static_cast<std::ptrdiff_t>(kept_from_));
      kept_from_ = 0;
    }
    if (kept_control_.empty() && kept_control_.capacity() > 2 * kControlLooseBytes) kept_control_.shrink_to_fit();
  }
  return position_[at] - acknowledged_[at];
}

Status FramedChannel::go_on(Line line, uint64_t received) {
  const int at = static_cast<int>(line);
  if (received < acknowledged_[at] || received > position_[at]) {
    return error(Code::kPeerLost, "its connection was made again, but it has ", received, " bytes where ",
                 acknowledged_[at], " to ", position_[at], " were sent; a proxy may have lost the others");
  }
  down_[at] = false;
  acknowledged_[at] = received;
  if (line == Line::kControl) {
    const size_t again = static_cast<size_t>(position_[at] - received);
    control_out_.erase(control_out_.begin(), control_out_.begin() + static_cast<std::ptrdiff_t>(control_sent_));
    control_out_.insert(control_out_.begin(), kept_control_.end() - static_cast<std::ptrdiff_t>(again),
                        kept_control_.end());
    kept_control_.clear();
    kept_from_ = control_sent_ = 0;
  } else {
    uint64_t first = position_[at] - send_moved_;  // where the one begins that is to be written next
    for (size_t i = written_; i-- > 0;) {
      Outgoing& one = sends_[i];
      if (one.end <= received) break;
      first = one.end - one.bytes();
      written_ = i;
    }
    for (; released_ < written_; ++released_) copy_rest(&sends_[released_]);  // the peer has all of these: nothing
    released_ = std::min(released_, written_);
    send_moved_ = static_cast<size_t>(received - first);
    drop_acknowledged();
  }
  position_[at] = received;
  note_lingering();
  return Status::ok();
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
  if (is_down(line)) return false;
  if (line == Line::kControl) return !control_over_ && !frames_in_.full();
  return failed_.is_ok() && !data_ended_ && !inbox_.blocked();
}

bool FramedChannel::wants_write(Line line) const {
  if (!failed_.is_ok() || is_down(line)) return false;
  return line == Line::kControl ? !control_out_.empty() : unwritten() > 0;
}

Status FramedChannel::send(std::span<const uint8_t> frame) {
  if (frame.empty() || frame.size() > kMaxControlBytes) {
    return error(Code::kInternal, "a control frame of ", frame.size(), " bytes; allowed are 1 to ", kMaxControlBytes);
  }
  if (!failed_.is_ok()) return goodbye_ || held_back() ? Status::ok() : failed_;
  ControlHeader header = frames_out_.sign(frame);
  const auto* start = reinterpret_cast<const uint8_t*>(&header);
  size_t moved = 0;
  if (control_out_.empty() && !is_down(Line::kControl)) {
    const iovec parts[2] = {{&header, sizeof(header)}, {const_cast<uint8_t*>(frame.data()), frame.size()}};
    IoResult result = write(Line::kControl, parts);
    if (result.what == Io::kFailed && !broke(Line::kControl, result)) {
      break_line(std::strerror(result.error_number));
      settle();
      return goodbye_ ? Status::ok() : verdict();
    }
    moved = result.bytes;
  }
  if (moved < sizeof(header)) control_out_.insert(control_out_.end(), start + moved, start + sizeof(header));
  const size_t from = moved > sizeof(header) ? moved - sizeof(header) : 0;
  if (moved > 0) {
    keep_control({start, std::min(moved, sizeof(header))});
    keep_control(frame.first(from));
  }
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
  Outgoing& one = sends_.emplace_back();
  one.transfer = transfer;
  one.header.bytes = static_cast<uint32_t>(transfer->bytes);
  if (unwritten() > 1) return;
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
  const auto sent = std::find_if(sends_.begin() + static_cast<std::ptrdiff_t>(released_), sends_.end(),
                                 [&](const Outgoing& one) { return one.transfer == transfer; });
  const auto index = static_cast<size_t>(sent - sends_.begin());
  if (sent != sends_.end() && index < written_) {  // the peer expects it; what comes before it must be done first
    for (; released_ <= index; ++released_) copy_rest(&sends_[released_]);
    note_lingering();
    return;
  }
  const bool half_sent = sent != sends_.end() && index == written_ && send_moved_ > 0;
  if (half_sent || !inbox_.forget(transfer)) {
    fail(Code::kAborted, "a transfer was withdrawn half-way, the data line cannot go on");
    inbox_.forget_all();
    settle();
    return;
  }
  if (sent != sends_.end()) sends_.erase(sent);
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
  lost_ = true;
  down_[0] = down_[1] = false;  // what is left there is taken in
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
      if (broke(Line::kControl, result)) return true;
      if (lost_) return any;
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
    taken_[0] += result.bytes;
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
    if (result.what == Io::kWouldBlock || (lost_ && result.what != Io::kMoved)) break;
    any = true;
    if (result.what != Io::kMoved && broke(Line::kData, result)) break;
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
    taken_[1] += result.bytes;
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

void FramedChannel::keep_control(std::span<const uint8_t> bytes) {
  position_[0] += bytes.size();
  if (!keeps_) return;
  kept_control_.insert(kept_control_.end(), bytes.begin(), bytes.end());
  if (kept_control_.size() - kept_from_ > kControlLooseBytes) refresh(Line::kControl);
}

bool FramedChannel::flush_control() {
  if (control_out_.empty() || is_down(Line::kControl)) return false;
  const iovec part{control_out_.data() + control_sent_, control_out_.size() - control_sent_};
  IoResult result = write(Line::kControl, {&part, 1});
  if (result.what == Io::kFailed) {
    if (!broke(Line::kControl, result)) break_line(std::strerror(result.error_number));
    return true;
  }
  keep_control(std::span<const uint8_t>(control_out_).subspan(control_sent_, result.bytes));
  control_sent_ += result.bytes;
  traffic_->bytes_sent.add(result.bytes);
  if (control_sent_ == control_out_.size()) {
    control_out_.clear();
    control_sent_ = 0;
    if (control_out_.capacity() > kControlOutBytes) control_out_.shrink_to_fit();
  }
  return result.bytes > 0;
}

// The first transfers that are not written as parts: header, payload, header, payload ... from where the first stands.
size_t FramedChannel::gather(std::span<iovec> parts) {
  size_t n = 0, skip = send_moved_, bytes = 0;
  for (size_t i = written_; i < sends_.size() && n + 2 <= parts.size() && (bytes < kSendBytes || !has_sums_); ++i) {
    Outgoing& one = sends_[i];
    if (one.header.guard == 0) {  // as late as this, so that the kernel finds the bytes in the caches
      const Transfer& t = *one.transfer;
      one.header = {t.tag, t.bytes, has_sums_ ? sum_of(t.data, t.bytes) : 0};
    }
    if (skip < sizeof(SegmentHeader)) {
      parts[n++] = {reinterpret_cast<std::byte*>(&one.header) + skip, sizeof(SegmentHeader) - skip};
    }
    size_t payload_skip = skip > sizeof(SegmentHeader) ? skip - sizeof(SegmentHeader) : 0;
    if (one.header.bytes > payload_skip) parts[n++] = {one.payload(payload_skip), one.header.bytes - payload_skip};
    bytes += one.header.bytes - payload_skip;
    skip = 0;
  }
  return n;
}

void FramedChannel::note_written(size_t bytes) {
  while (bytes > 0 && unwritten() > 0) {
    Outgoing& one = sends_[written_];
    const size_t take = std::min(bytes, one.bytes() - send_moved_);
    send_moved_ += take;
    bytes -= take;
    position_[1] += take;
    if (one.transfer)
      one.transfer->moved = send_moved_ > sizeof(SegmentHeader) ? send_moved_ - sizeof(SegmentHeader) : 0;
    if (send_moved_ < one.bytes()) break;
    one.end = position_[1];
    ++written_;
    send_moved_ = 0;
  }
}

bool FramedChannel::flush_data() {
  bool any = false;
  while (unwritten() > 0 && !is_down(Line::kData)) {
    iovec parts[2 * kSendBatch];
    IoResult result = write(Line::kData, {parts, gather(parts)});
    if (result.what == Io::kFailed) {
      if (!broke(Line::kData, result)) break_line(std::strerror(result.error_number));
      return true;
    }
    if (result.bytes == 0) break;
    any = true;
    traffic_->bytes_sent.add(result.bytes);
    note_written(result.bytes);
    release_written(tail_bytes_);
  }
  if (released_ < written_) any |= release_written(tail_bytes_);
  return any;
}

int FramedChannel::look_again_us() {
  if (!lingers_) return 0;
  refresh(Line::kData);
  if (release_written(std::max(tail_bytes_, kLastBytes))) return 1;
  const double missing = static_cast<double>(position_[1] - acknowledged_[1]) - static_cast<double>(kLastBytes);
  return std::clamp(static_cast<int>(missing / kBytesPerUs), kAskAgainUs, kAskAgainMaxUs);
}

// Its memory is the caller's again; what the peer may still ask for is copied.
void FramedChannel::copy_rest(Outgoing* one) {
  if (!one->transfer) return;
  Transfer* const transfer = one->transfer;
  const uint64_t payload_at = one->end - one->header.bytes;
  one->copied_from =
      acknowledged_[1] > payload_at ? static_cast<size_t>(std::min(acknowledged_[1], one->end) - payload_at) : 0;
  if (const size_t bytes = one->header.bytes - one->copied_from; keeps_ && bytes > 0) {
    one->copy.reset(new std::byte[bytes]);
    std::memcpy(one->copy.get(), transfer->data + one->copied_from, bytes);
  }
  one->kept = sizeof(Outgoing) + one->header.bytes - one->copied_from;
  kept_bytes_ += one->kept;
  one->transfer = nullptr;
  transfer->done = true;
  traffic_->segments_sent.add(1);
}

// Of the transfers that are written, those in front are done whose bytes are acknowledged, or copied: small ones, and
// the last `tail_bytes` before nothing follows. Returns whether any is. Asking costs a system call: while data comes
// in, this rank is busy with that.
bool FramedChannel::release_written(size_t tail_bytes) {
  bool any = false;
  bool asked = !keeps_ || (inbox_.waiting() && position_[1] - asked_at_[1] < kAskAfterBytes);
  if (!keeps_) acknowledged_[1] = position_[1] - send_moved_;
  while (released_ < written_) {
    Outgoing& one = sends_[released_];
    if (one.transfer && one.end > acknowledged_[1]) {
      const bool cheap = one.header.bytes <= kSmallBytes
                             ? kept_bytes_ + one.header.bytes <= kCopiedBytes
                             : unwritten() == 0 && position_[1] - acknowledged_[1] <= tail_bytes;
      if (!cheap) {
        if (asked) break;
        asked = true;
        refresh(Line::kData);
        continue;
      }
    }
    copy_rest(&one);
    ++released_;
    any = true;
  }
  if (!keeps_) drop_acknowledged();
  note_lingering();
  return any;
}

void FramedChannel::drop_acknowledged() {
  while (released_ > 0 && sends_.front().end <= acknowledged_[1]) {
    kept_bytes_ -= sends_.front().kept;
    sends_.pop_front();
    --released_;
    --written_;
  }
}

// Something waits for an acknowledgement, which ends no sleep.
void FramedChannel::note_lingering() {
  const bool lingers = released_ < written_ && !is_down(Line::kData);
  if (lingers == lingers_) return;
  lingers_ = lingers;
  traffic_->lingering.add(lingers ? 1 : ~uint64_t{0});
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
