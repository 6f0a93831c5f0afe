// A shared segment is a group's part of the node's shared memory: per member flags and staging, at the same offset in
// every member's arena. Every word but one is written by its owner only and counts up for ever, so no flag is ever
// reset and none is missed.
//
// Thread: the thread that makes progress. Owner: the engine's process set.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/settings_table.h"
#include "collective/shared/level_schedule.h"
#include "net/arena.h"

namespace hc {

// One in-place operation after another on one set of flags.
struct InPlaceFlags {
  alignas(kCacheLine) std::atomic<uint64_t> arrived;   // operations entered; `offset` is valid
  std::atomic<uint64_t> offset;                        // my buffer's offset in my arena, for the operation just entered
  std::atomic<uint64_t> last;                          // what `arrived` was when I found that I was the last
  alignas(kCacheLine) std::atomic<uint64_t> finished;  // operations of which my slice is written everywhere
  std::atomic<uint64_t> stages;  // where there are levels: kMaxLevelStages an operation, fewer in the last one
};

struct StageCounter {
  alignas(kCacheLine) std::atomic<uint64_t> blocks;
};

inline constexpr size_t kTicketsKept = 64;

// First page of a shared segment. Each counter has its own cache lines, since its readers spin on it.
struct SegmentFlags {
  alignas(kCacheLine) std::atomic<uint64_t> flat;      // flat operations whose payload is published
  alignas(kCacheLine) std::atomic<uint64_t> filled;    // blocks whose contribution is in the buffer
  alignas(kCacheLine) std::atomic<uint64_t> reduced;   // blocks of which my slice is reduced
  alignas(kCacheLine) std::atomic<uint64_t> consumed;  // blocks that I shall not read again
  // Not 0: this member has no persistent operation under way and will enter no other (it has joined or is leaving).
  alignas(kCacheLine) std::atomic<uint64_t> invalidated;
  InPlaceFlags in_place;  // of the negotiated in-place operations
  // Rounds of device memory (peers.cc): whose input lies in my memory; after which I read nobody's memory.
  alignas(kCacheLine) std::atomic<uint64_t> peers_filled;
  alignas(kCacheLine) std::atomic<uint64_t> peers_taken;
  std::atomic<uint64_t> peers_closed;  // 1: I have forgotten the others' device memory
  alignas(kCacheLine)
      std::atomic<uint64_t> bypass_closed;  // I enter no round of the bypass before this one (bypass_rounds.h)
  alignas(kCacheLine) std::atomic<uint64_t> bypass_summed;  // the newest round of which my half is summed (halves.h)
  // Launch tickets (engine/gpu/launch_tickets.h): given by rank 0 of the world, in its shared segment; taken by each
  // member.
  alignas(kCacheLine) std::atomic<uint64_t> tickets_given;
  std::atomic<uint64_t> tickets[kTicketsKept];
  alignas(kCacheLine) std::atomic<uint64_t> tickets_taken;
  // Two halves: the number of the newest persistent bucket on GPUs that I have begun, and how many words of rank 0's
  // list I must read before I begin another, which rank 0 writes.
  alignas(kCacheLine) std::atomic<uint64_t> buckets_begun;
  StageCounter stages[kMaxLevelStages - 1];  // blocks of which I have done a stage between filled and consumed
};

// One member's part of a round of the bypass. Two of them, used alternately.
struct BypassCell {
  alignas(kCacheLine) std::atomic<uint64_t> round;  // in which the rest holds; 0: it is being written
  std::atomic<uint64_t> cache_id, sequence, signature;
  std::atomic<uint64_t> last;  // the round in which this member found that it was the last to come
  std::byte inline_payload[kCacheLine -
                           5 * sizeof(uint64_t)];  // a payload that fits: its reader misses one cache line, not two
};
static_assert(sizeof(BypassCell) == kCacheLine);

// Larger payloads go one behind the other into a ring. It is larger than it need be: to write lines that the other core
// still has in its cache takes half as long again as lines that both have dropped (docs/decisions/bypass.md).
inline constexpr size_t kBypassBytes = 64u << 10;
inline constexpr size_t kBypassRingBytes = 12 * kBypassBytes;
inline constexpr size_t kHalfBytes = 512u << 10;  // one half of a large allreduce of two members (halves.h)

inline constexpr size_t kFlatBufferBytes = kMaxFlatBytes;  // two of them, used alternately
inline constexpr int kBlockBuffers = 4;
inline constexpr size_t kBlockBufferBytes = 512u << 10;
inline constexpr size_t kBypassOffset = kPage + 2 * kFlatBufferBytes + kBlockBuffers * kBlockBufferBytes;
inline constexpr size_t kBypassRingOffset = kBypassOffset + kPage;
inline constexpr size_t kHalfOffset = kBypassRingOffset + kBypassRingBytes;
inline constexpr size_t kBucketFlagsOffset = kHalfOffset + kHalfBytes;
inline constexpr size_t kMaxPersistentBuckets = 4096;
static_assert(kBucketFlagsOffset + kMaxPersistentBuckets * sizeof(InPlaceFlags) <= kSharedSegmentBytes);
static_assert(sizeof(SegmentFlags) <= kPage);
static_assert(2 * sizeof(BypassCell) <= kPage);

class SharedSegment {
 public:
  // arenas: one per member, in the order of `positions` (their group ranks); number: which of the arena's shared
  // segments; levels: of the members.
  SharedSegment(std::vector<std::shared_ptr<Arena>> arenas, std::vector<int> positions, int my_index, int number,
                Levels levels = {});
  // Owner only, before any member uses the shared segment: makes its pages usable and zero.
  Status prepare();

  int size() const { return static_cast<int>(bases_.size()); }
  int index() const { return my_index_; }
  SegmentFlags& flags(int member) const { return *reinterpret_cast<SegmentFlags*>(bases_[member]); }
  SegmentFlags& mine() const { return flags(my_index_); }
  InPlaceFlags& in_place_flags(int member) const { return flags(member).in_place; }
  // Flags of their own for each bucket of a persistent plan, so that buckets need no order among themselves.
  InPlaceFlags& bucket_flags(int member, size_t bucket) const {
    return reinterpret_cast<InPlaceFlags*>(bases_[member] + kBucketFlagsOffset)[bucket];
  }
  // Owner only: makes the flags of buckets [first, first + count) usable.
  Status prepare_buckets(size_t first, size_t count);
  std::byte* flat_buffer(int member, uint64_t round) const {
    return bases_[member] + kPage + (round & 1) * kFlatBufferBytes;
  }
  std::byte* block_buffer(int member, uint64_t block) const {
    return bases_[member] + kPage + 2 * kFlatBufferBytes + (block % kBlockBuffers) * kBlockBufferBytes;
  }
  BypassCell& bypass_cell(int member, uint64_t place) const {
    return reinterpret_cast<BypassCell*>(bases_[member] + kBypassOffset)[place & 1];
  }
  std::byte* bypass_ring(int member) const { return bases_[member] + kBypassRingOffset; }
  std::byte* half(int member) const { return bases_[member] + kHalfOffset; }
  std::byte* arena_base(int member) const { return arenas_[member]->base(); }
  const Arena& arena(int member) const { return *arenas_[member]; }
  const std::vector<int>& positions() const { return positions_; }
  const Levels& levels() const { return levels_; }
  // What this member does in an operation by levels on `count` elements or fewer, to be cut there. Allgather: `count`
  // is the number of members times that of a slot. To find it takes longer than a small operation, so it is kept.
  std::shared_ptr<const std::vector<LevelStage>> level_stages(Op op, int root, size_t count, size_t item);

  // Publishes: everything written before is visible to whoever sees the counter. The engine then rings sleepers.
  void publish(std::atomic<uint64_t>& counter, uint64_t value) {
    counter.store(value, std::memory_order_release);
    published_ = true;
  }
  // Publishes what all members wait for, and rings the others only if this member is the last, so that nobody is woken
  // to find that another member is late. there(m): member m has published, read in sequentially consistent order, so
  // that of several last members at least one sees all. True when this member was the last.
  template <class There>
  bool publish_to_all(std::atomic<uint64_t>& counter, uint64_t value, There&& there) {
    counter.exchange(value, std::memory_order_seq_cst);
    for (int m = 0; m < size(); ++m)
      if (m != my_index_ && !there(m)) return false;
    return published_ = true;
  }
  // A counter that counts up by one.
  void publish_to_all(std::atomic<uint64_t> SegmentFlags::* counter, uint64_t value) {
    publish_to_all(mine().*counter, value,
                   [&](int m) { return (flags(m).*counter).load(std::memory_order_seq_cst) >= value; });
  }
  // Whether anything that a sleeping member may wait for was published since the last call.
  bool take_published() { return std::exchange(published_, false); }

  // Totals of what this member has entered so far; equal on all members between operations.
  uint64_t flat_total = 0;
  uint64_t block_total = 0;
  uint64_t in_place_total = 0;
  uint64_t peers_total = 0;

 private:
  std::vector<std::shared_ptr<Arena>> arenas_;
  std::vector<int> positions_;
  std::vector<std::byte*> bases_;
  int my_index_;
  size_t offset_;
  Levels levels_;
  std::map<std::array<size_t, 3>, std::shared_ptr<const std::vector<LevelStage>>> level_stages_;
  bool published_ = false;
};

}  // namespace hc
