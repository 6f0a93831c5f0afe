// What precedes every control frame on its way. Between hosts it is signed, with a key that only the job's ranks can
// make: who is on the way can neither change a frame nor put one in, send one again or leave one out, and a device that
// changes bits is found as well. In shared memory nothing is between the ranks.
//
// Values. Thread: a signer belongs to one.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/hash.h"
#include "base/siphash.h"

namespace hc {

struct ControlHeader {
  uint32_t bytes = 0;
  uint32_t guard = 0;  // over the other two: a damaged length is known before anybody waits for so many bytes
  uint64_t tag = 0;    // of the frame; 0 in shared memory
};
static_assert(sizeof(ControlHeader) == 16);

// Of the two directions of one channel.
struct FrameKeys {
  SipKey out, in;
};
// secret: the job's. own, peer: what the two ends have told of themselves (MeshMembers::endpoints), which is another
// text for each process and each time that it connects.
FrameKeys frame_keys(const std::string& secret, const std::string& own, const std::string& peer);

// Makes or checks the headers of one direction. The number of a frame is signed with it.
class FrameSigner {
 public:
  explicit FrameSigner(const std::optional<SipKey>& key) : key_(key) {}

  // Of the next frame that is sent.
  ControlHeader sign(std::span<const uint8_t> frame) {
    ControlHeader header;
    header.bytes = static_cast<uint32_t>(frame.size());
    header.tag = tag_of(frame);
    header.guard = guard_of(header);
    ++number_;
    return header;
  }
  // Whether this is the header of the next frame that comes,
  bool is_next(const ControlHeader& header) const { return header.guard == guard_of(header); }
  // and this the frame.
  bool accept(const ControlHeader& header, std::span<const uint8_t> frame) {
    const bool is_right = header.tag == tag_of(frame);
    ++number_;
    return is_right;
  }

  uint32_t guard_of(const ControlHeader& header) const {
    uint64_t hash = 0x454d4152;
    if (key_) {
      SipHash keyed(*key_);
      keyed.add(~number_);  // no frame has this number
      keyed.add(header.bytes);
      keyed.add(header.tag);
      hash = keyed.finish();
    } else {
      mix(&hash, header.bytes);
    }
    return halved(hash);
  }

 private:
  uint64_t tag_of(std::span<const uint8_t> frame) const {
    if (!key_) return 0;
    SipHash hash(*key_);
    hash.add(number_);
    return hash.finish(frame);
  }

  std::optional<SipKey> key_;
  uint64_t number_ = 0;
};

}  // namespace hc
