// Splits the bytes of the control stream into frames and keeps these until the engine fetches them. Many small frames
// arrive in one buffer; the rest of a large one is read straight into its own memory. It knows memory, not sockets: the
// channel reads into the place that it names.
//
// Thread: the thread that makes progress. Owner: the channel.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <deque>
#include <vector>

#include "base/status.h"
#include "net/frame_signer.h"

namespace hc {

class FrameReader {
 public:
  // key: with which the frames are signed, if they are.
  explicit FrameReader(const std::optional<SipKey>& key);

  // Where the next bytes go.
  iovec place();
  // `bytes` have arrived there. Fails at an impossible length, before anything is allocated for it.
  Status took(size_t bytes);

  // The next complete frame, if one is there.
  bool take(std::vector<uint8_t>* frame);
  bool has_frames() const { return !ready_.empty(); }
  // So many bytes wait to be fetched that no more may be read.
  bool full() const;
  bool between_frames() const { return frame_bytes_ == 0 && header_have_ == 0; }
  // Complete frames so far.
  size_t frames() const { return frames_; }

 private:
  bool reads_into_frame() const;
  Status begin_frame();
  Status end_frame();

  FrameSigner signer_;
  std::vector<uint8_t> buffer_;
  std::vector<uint8_t> frame_;
  size_t frame_have_ = 0;
  uint32_t frame_bytes_ = 0;  // 0: between frames
  ControlHeader header_;      // header_have_ bytes of it are there
  size_t header_have_ = 0;
  std::deque<std::vector<uint8_t>> ready_;
  size_t ready_bytes_ = 0;
  std::vector<std::vector<uint8_t>> spare_;  // emptied frames, used again
  size_t frames_ = 0;
};

}  // namespace hc
