// One call of a worker, cut up by partition. It keeps what is done, so that it can be run again for the rest.
//
// Thread: one at a time. Owner: the program, for the length of the call.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "server/frames.h"
#include "server/shard.h"

namespace hc {

class Call {
 public:
  // What goes with a list of ids: `floats` numbers for each, in `in` (a change) or `out` (a pull).
  struct Rows {
    std::span<const int64_t> ids;
    uint32_t floats = 0;
    const float* in = nullptr;
    float* out = nullptr;
  };
  // The memory of `rows` lives as long as the call. Where an id comes twice, a push adds up its gradients.
  Call(Verb verb, uint32_t partitions, uint64_t table, uint32_t flags, const Rows& rows);
  // The same payload to every partition.
  Call(Verb verb, uint32_t partitions, uint64_t table, std::vector<uint8_t> payload);

  // By partition: the step that the frame speaks of. After kRegister: where the rank's clocks stand.
  std::vector<int64_t>& clocks() { return clocks_; }
  bool changes_rows() const { return verb_ == Verb::kPush || verb_ == Verb::kAssign || verb_ == Verb::kRows; }
  void number(uint64_t sequence) { sequence_ = sequence; }
  uint64_t sequence() const { return sequence_; }

  uint32_t partitions() const { return static_cast<uint32_t>(parts_.size()); }
  bool is_done(uint32_t partition) const { return parts_[partition].done; }
  FrameHeader header(uint32_t partition) const;
  // The two pieces of a partition's payload; numbers are gathered in `scratch`.
  std::span<const uint8_t> ids(uint32_t partition) const;
  std::span<const uint8_t> values(uint32_t partition, Buffer* scratch) const;
  // Of a reply that is no error.
  Status take(uint32_t partition, const FrameHeader& header, std::span<const uint8_t> payload);

 private:
  struct Part {
    std::vector<int64_t> ids;
    std::vector<uint32_t> places;  // of the ids in the caller's list
    bool done = false;
  };
  const Verb verb_;
  const uint64_t table_;
  const uint32_t flags_ = 0;
  const Rows rows_;
  const std::vector<uint8_t> payload_;
  uint64_t sequence_ = 0;
  std::vector<Part> parts_;
  std::vector<int64_t> clocks_;
};

}  // namespace hc
