// Matches arriving data segments with posted receives. Unexpected segments, for which nothing is posted yet, are kept
// here, up to kMaxUnexpectedBytes besides those of declared buckets; then no more bytes are read until a receive takes
// some. It knows memory, not sockets: the channel reads into the places that it names.
//
// Thread: the thread that makes progress. Owner: the channel.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <span>

#include "net/segment.h"

namespace hc {

// check_header: what arrived is a header at all. check_match: it is the segment that `transfer` expects. check_sum: its
// bytes, which have this sum, are those that were sent.
Status check_header(const SegmentHeader& header);
Status check_match(const SegmentHeader& header, const Transfer& transfer);
Status check_sum(const SegmentHeader& header, uint32_t sum);

class Inbox {
 public:
  // has_sums: the headers have the sums of their payloads.
  explicit Inbox(bool has_sums, size_t unexpected_limit = kMaxUnexpectedBytes)
      : has_sums_(has_sums), limit_(unexpected_limit) {}

  // Where the next bytes go: the rest of the current segment and, if a receive for another one is posted, the next
  // header, so that one system call takes both. Empty while blocked.
  std::span<const iovec> places();
  // `bytes` arrived there.
  Status took(size_t bytes);

  Status post(Transfer* transfer);
  // False when the transfer is half-filled: then nothing may be read any more.
  bool forget(Transfer* transfer);
  void forget_all() { posted_.clear(); }

  bool blocked() const { return blocked_; }
  bool between_segments() const { return !active_ && header_bytes_ == 0; }
  bool waiting() const { return !posted_.empty() || (active_ && into_); }
  size_t kept_bytes() const { return kept_bytes_; }
  size_t segments() const { return segments_; }

 private:
  struct Kept {
    SegmentHeader header;
    std::unique_ptr<std::byte[]> data;
  };
  Status begin_segment();
  Status end_segment();

  const bool has_sums_;
  const size_t limit_;
  std::deque<Transfer*> posted_;
  std::list<Kept> kept_;
  size_t kept_bytes_ = 0;
  size_t segments_ = 0;
  bool blocked_ = false;  // header_ is complete, its segment has no room

  SegmentHeader header_;  // the next one, header_bytes_ of it are there
  size_t header_bytes_ = 0;

  bool active_ = false;  // a segment's bytes are arriving:
  SegmentHeader current_;
  size_t got_ = 0;
  MemoryHash hash_;                  // of these bytes, taken while they are in the caches
  Transfer* into_ = nullptr;         // a posted receive,
  std::list<Kept>::iterator aside_;  // or kept aside
  iovec places_[2] = {};
};

}  // namespace hc
