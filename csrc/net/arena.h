// One rank's shared memory: a memfd, mapped by every rank of the node. The owner reserves a large sparse range once and
// commits pages as it needs them (ENOSPC comes as a Status, never as SIGBUS); nothing is left behind after kill -9.
//
// Layout, the same in every arena so that a peer needs no further address exchange:
//   [0, 4 KiB)                        RankBlock
//   [kRingsOffset, ...)               one outgoing control ring per local rank (net/shm_channel.h)
//   [kSharedSegmentsOffset, ...)      one shared segment per process set (collective/shared/shared.h)
//   [kHeapOffset, end)                blocks handed out by allocate(): gradient buckets
// Threads: allocate/free take a lock; the rest is fixed after construction.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "base/status.h"

namespace hc {

inline constexpr size_t kCacheLine = 128;  // two lines: adjacent-line prefetch counts as sharing
inline constexpr size_t kPage = 4096;
inline constexpr size_t kRingsOffset = kPage;
inline constexpr int kMaxLocalRanks = 256;
inline constexpr size_t kRingBytes = 256u << 10;  // one ring, header included
inline constexpr size_t kSharedSegmentsOffset = kRingsOffset + kMaxLocalRanks * kRingBytes;
inline constexpr size_t kSharedSegmentBytes = 4608u << 10;
inline constexpr int kMaxSharedSegments = 128;  // process sets alive at once
// 641 MiB, sparse.
inline constexpr size_t kHeapOffset = kSharedSegmentsOffset + kMaxSharedSegments * kSharedSegmentBytes;
inline constexpr size_t kMinArenaBytes = kHeapOffset + (64u << 20);

inline constexpr uint64_t kArenaMagic = 0x414e455241434cULL;  // RankBlock::magic

// First page of an arena. Written by its owner, but for `asleep` and `news`; read by peers.
struct RankBlock {
  uint64_t magic;
  uint32_t protocol;
  int32_t rank;
  int32_t pid;
  alignas(kCacheLine) std::atomic<uint32_t> asleep;      // a Sleep of mesh.h
  alignas(kCacheLine) std::atomic<uint64_t> heartbeats;  // counts answers to liveness probes
  // A bit for each local rank that has moved one of our two rings. Peers set it; the owner clears it before it looks at
  // the ring.
  alignas(kCacheLine) std::atomic<uint64_t> news[kMaxLocalRanks / 64];
};
static_assert(sizeof(RankBlock) <= kPage);

// Address space for the arenas of others: three quarters of what a limit leaves, since the program needs some, too.
size_t room_for_arenas();

class Arena {
 public:
  // Creates an arena that this rank owns. bytes >= kMinArenaBytes; only address space is taken until commit(). It is
  // smaller than requested (see bytes()) where the process's address space is limited.
  static Result<std::shared_ptr<Arena>> create(size_t bytes);
  // Maps a peer's arena from the descriptor that it sent, which this takes over. Two ranks in one process share ONE
  // mapping, so that ThreadSanitizer sees that they share memory.
  static Result<std::shared_ptr<Arena>> attach(int fd, size_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* base() const { return base_; }
  size_t bytes() const { return bytes_; }
  int fd() const { return fd_; }
  RankBlock* block() const { return reinterpret_cast<RankBlock*>(base_); }
  bool contains(const void* p, size_t bytes) const {
    auto at = reinterpret_cast<uintptr_t>(p), from = reinterpret_cast<uintptr_t>(base_);
    return at >= from && bytes <= bytes_ && at - from <= bytes_ - bytes;
  }
  size_t offset_of(const void* p) const { return static_cast<const std::byte*>(p) - base_; }

  // Owner only: makes [offset, offset + bytes) usable, or says that memory is short.
  Status commit(size_t offset, size_t bytes);
  // Owner only: a zeroed 4 KiB-aligned block of the heap; freed blocks are reused (and zeroed again).
  Result<std::byte*> allocate(size_t bytes);
  void free(std::byte* block);
  size_t allocated_bytes() const;

  // In a forked child: the same addresses, private, so that views (p.grad) stay readable and the parent is not
  // disturbed.
  void remap_private();

 private:
  Arena() = default;
  struct Mapping;  // shared by every Arena of one process that names the same memfd
  static Result<std::shared_ptr<Mapping>> map(int fd, size_t bytes);
  Status reserve(size_t offset, size_t bytes);
  void zero(size_t offset, size_t bytes);
  std::shared_ptr<Mapping> mapping_;
  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
  int fd_ = -1;
  mutable Mutex mu_;
  std::map<size_t, size_t> free_ HC_GUARDED_BY(mu_);  // offset -> bytes, coalesced; free ranges read as zero
  std::map<size_t, size_t> used_ HC_GUARDED_BY(mu_);
  size_t heap_end_ HC_GUARDED_BY(mu_) = kHeapOffset;  // handed out up to here
};

}  // namespace hc
