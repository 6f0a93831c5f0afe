// A channel moves bytes between two ranks: small control frames in order, and large data transfers that are matched by
// tag. There are three implementations (TCP, rings in shared memory, messages of MPI or libfabric); every algorithm and
// every control message uses this interface.
//
// Thread: the thread that makes progress makes every call. Nothing here blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"

namespace hc {

// Precedes every data segment (16 bytes). A receiver matches generation, process set and batch, in the order of
// posting; the offset must then be equal, else the stream is broken and the channel fails. Only the low 16 bits of the
// generation are sent: they are a filter inside a connection whose handshake has proved all 64.
struct Tag {
  uint16_t generation = 0;
  uint16_t process_set = 0;
  uint32_t batch = 0;
  uint64_t offset = 0;
  // A stream of a declared bucket: process_set is kBucketStreams and the number of the set. What arrives there before
  // its receive is limited by the buckets alone: who has not heard from all members yet must go on reading.
  static constexpr uint16_t kBucketStreams = 0x8000;
  bool is_of_bucket() const { return (process_set & 0xc000) == kBucketStreams; }
  bool same_stream(const Tag& o) const {
    return generation == o.generation && process_set == o.process_set && batch == o.batch;
  }
};

// One data segment, at most kMaxTransferBytes. Owned by the caller, who keeps it and its memory alive until `done` or
// until `forget` has returned.
struct Transfer {
  Tag tag;
  std::byte* data = nullptr;  // read by a send, written by a receive
  size_t bytes = 0;
  size_t moved = 0;  // bytes so far, for the channel's use and for progress reports
  bool done = false;
};

inline constexpr size_t kMaxControlBytes = 16u << 20;     // larger frames are refused before allocation
inline constexpr size_t kMaxTransferBytes = 4u << 20;     // one data segment
inline constexpr size_t kMaxUnexpectedBytes = 64u << 20;  // data that arrived before its receive was posted

class Channel {
 public:
  // Transfers of one direction that an operation posts at once. With 4 of 128 KiB a link of 10 Gbit/s ran dry while a
  // rank summed (docs/performance.md, between two hosts); on a long way sends wait for what acknowledges them.
  static constexpr size_t kInFlight = 16, kInFlightOnLongWays = 256;

  virtual ~Channel() = default;

  // Queues a copy of one control frame (1 .. kMaxControlBytes bytes). Control frames keep their order.
  virtual Status send(std::span<const uint8_t> frame) = 0;
  // The next complete control frame, if one is there.
  virtual bool receive(std::vector<uint8_t>* frame) = 0;

  // Data. Transfers of one stream (same tag but for the offset) are matched in the order of posting on both sides;
  // different streams never hold each other up: a segment without a posted receive is kept aside, up to
  // kMaxUnexpectedBytes.
  virtual void post_send(Transfer* transfer) = 0;
  virtual void post_receive(Transfer* transfer) = 0;
  // Withdraws a transfer that is not done because the operation was aborted. If it is half moved, the channel breaks on
  // purpose.
  virtual void forget(Transfer* transfer) = 0;

  // Moves what can be moved now. Sets *moved when anything did. An error is final: the peer is lost.
  virtual Status progress(bool* moved) = 0;
  // Nothing queued by send/post_send is waiting to leave; on a long way, all of it has arrived: a packet that is lost
  // is not sent again by who has closed its connections.
  virtual bool flushed() = 0;
  virtual size_t sends_in_flight() const { return kInFlight; }
};

}  // namespace hc
