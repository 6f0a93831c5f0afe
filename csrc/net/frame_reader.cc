#include "net/frame_reader.h"

#include <algorithm>
#include <cstring>

#include "net/channel.h"

namespace hc {
namespace {

constexpr size_t kFrameBufferBytes = 16u << 10;
constexpr size_t kMaxReadyBytes = 64u << 20;  // frames that the engine has not fetched; then reading stops
constexpr size_t kSpareFrames = 8;
constexpr size_t kSpareBytes = 64u << 10;  // larger frames are not kept for reuse

}  // namespace

FrameReader::FrameReader(const std::optional<SipKey>& key) : signer_(key), buffer_(kFrameBufferBytes) {}

bool FrameReader::full() const { return ready_bytes_ > kMaxReadyBytes; }

bool FrameReader::reads_into_frame() const {
  return frame_bytes_ > 0 && frame_bytes_ - frame_have_ >= kFrameBufferBytes;
}

iovec FrameReader::place() {
  if (reads_into_frame()) return {frame_.data() + frame_have_, frame_bytes_ - frame_have_};
  return {buffer_.data(), buffer_.size()};
}

Status FrameReader::took(size_t bytes) {
  if (reads_into_frame()) {
    frame_have_ += bytes;
    return frame_have_ == frame_bytes_ ? end_frame() : Status::ok();
  }
  const uint8_t* at = buffer_.data();
  const uint8_t* const end = at + bytes;
  while (at < end) {
    if (frame_bytes_ == 0) {
      size_t take = std::min<size_t>(sizeof(header_) - header_have_, end - at);
      std::memcpy(reinterpret_cast<std::byte*>(&header_) + header_have_, at, take);
      at += take;
      header_have_ += take;
      if (header_have_ < sizeof(header_)) break;
      HC_TRY(begin_frame());
    }
    size_t take = std::min<size_t>(frame_bytes_ - frame_have_, end - at);
    std::memcpy(frame_.data() + frame_have_, at, take);
    at += take;
    frame_have_ += take;
    if (frame_have_ == frame_bytes_) HC_TRY(end_frame());
  }
  return Status::ok();
}

// The header is complete: find memory for what follows.
Status FrameReader::begin_frame() {
  header_have_ = 0;
  if (!signer_.is_next(header_))
    return error(Code::kInternal, "sent a damaged control header (", header_.bytes, " bytes announced)");
  frame_bytes_ = header_.bytes;
  if (frame_bytes_ == 0 || frame_bytes_ > kMaxControlBytes) {
    return error(Code::kPeerLost, "sent a control frame of ", frame_bytes_, " bytes; allowed are 1 to ",
                 kMaxControlBytes);
  }
  if (!spare_.empty()) {
    frame_ = std::move(spare_.back());
    spare_.pop_back();
  }
  frame_.resize(frame_bytes_);
  frame_have_ = 0;
  return Status::ok();
}

Status FrameReader::end_frame() {
  if (!signer_.accept(header_, frame_)) {
    return error(Code::kInternal, "sent a control frame that was changed on its way: its ", frame_.size(),
                 " bytes have another signature. A network card, a switch or a proxy between the two hosts is faulty, "
                 "or somebody there is in the stream");
  }
  ready_bytes_ += frame_.size();
  ready_.push_back(std::move(frame_));
  frame_.clear();
  frame_bytes_ = 0;
  ++frames_;
  return Status::ok();
}

bool FrameReader::take(std::vector<uint8_t>* frame) {
  if (ready_.empty()) return false;
  frame->swap(ready_.front());
  if (spare_.size() < kSpareFrames && ready_.front().capacity() <= kSpareBytes)
    spare_.push_back(std::move(ready_.front()));
  ready_.pop_front();
  ready_bytes_ -= frame->size();
  return true;
}

}  // namespace hc
