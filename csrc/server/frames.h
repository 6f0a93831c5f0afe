// What workers and servers of a parameter server say to each other: a header of fixed size and a payload behind it.
// Values only. Thread: any.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>

#include "base/hash.h"

namespace hc {

inline constexpr uint32_t kFrameMagic = 0x53504348;  // "HCPS"
inline constexpr uint64_t kMaxPayload = 1ull << 30;
// A side that waits says so this often, as a part of the silence after which a link is given up.
inline constexpr double kSignsOfLife = 0.25;

enum class Verb : uint16_t {
  kReply,      // code, payload: rows, or a text when the code is an error
  kWaiting,    // the reply will come
  kElsewhere,  // the reply: this server is not the primary of that partition; payload: a text
  kHello,      // this connection is of that worker
  kGoodbye,    // the worker ends
  kAsk,        // payload: a question to the server's program, and its answer
  kPull,       // payload: ids; the reply: rows
  // What changes a shard. The primary passes all of it on to the backup, in the order in which it did it itself.
  kTable,     // payload: a TableSpec
  kRegister,  // payload: rank; the reply's clock: where the rank's clock stands
  kPush,      // payload: ids, gradients
  kAssign,    // payload: ids, weights
  kRows,      // payload: ids, weights with state
  kLeave,     // the worker will not come back
  // The primary's stream to its backup, besides.
  kReplica,   // from here on this connection is one; answered with one reply
  kMetadata,  // payload: what a shard knows besides rows
  kPing,
  kVerbs
};

struct FrameHeader {
  uint32_t magic = kFrameMagic;
  Verb verb = Verb::kReply;
  uint16_t code = 0;  // kReply: hc::Code
  uint32_t partition = 0;
  uint32_t flags = 0;
  uint64_t table = 0;     // hash of its name
  uint64_t worker = 0;    // random number of a life of a worker
  uint64_t sequence = 0;  // of what a worker changes in this partition, ascending; the stream's replies: frames done
  int64_t clock = 0;      // steps that the worker had finished in this table
  uint64_t count = 0;     // rows
  uint64_t bytes = 0;     // of the payload
  uint64_t limit_ms = 0;  // for how long to wait for others
  // What follows is the connection's: it finds bytes that changed between two hosts.
  uint64_t sum = 0;    // of the payload; 0 through a unix socket
  uint64_t guard = 0;  // over what stands before it

  uint64_t guard_of() const { return hash_of_bytes(this, offsetof(FrameHeader, guard)); }
};
static_assert(sizeof(FrameHeader) == 88 && std::is_trivially_copyable_v<FrameHeader>);

inline constexpr uint32_t kOnlyNew = 1;  // kAssign: leave alone what exists
inline constexpr uint32_t kAlone = 2;    // kPush: does not count as a step of the worker

// Bytes that are used again and never filled with zeros.
class Buffer {
 public:
  // May throw bad_alloc.
  uint8_t* sized(size_t bytes) {
    if (bytes > room_) data_ = std::make_unique_for_overwrite<uint8_t[]>(room_ = std::max(bytes, 2 * room_));
    size_ = bytes;
    return data_.get();
  }
  uint8_t* data() { return data_.get(); }
  std::span<const uint8_t> bytes() const { return {data_.get(), size_}; }

 private:
  std::unique_ptr<uint8_t[]> data_;
  size_t room_ = 0, size_ = 0;
};

}  // namespace hc
