// A channel to a rank of the same node, over byte rings in shared memory: each rank writes into its own arena and reads
// from the peer's. One ring pair (kRingBytes) holds a ring for control and one for data. The only system call is the
// doorbell of a peer that sleeps while it waits.
//
// Thread: the thread that makes progress. Owner: the mesh.
#pragma once

#include <atomic>
#include <memory>

#include "net/arena.h"
#include "net/framed_channel.h"
#include "net/mesh.h"

namespace hc {

// First bytes of a ring pair; all zero is a valid empty pair. Cursors count bytes for ever, [0] control, [1] data.
struct RingHeader {
  alignas(kCacheLine) std::atomic<uint64_t> head[2];     // written by the sender
  alignas(kCacheLine) std::atomic<uint64_t> tail[2];     // written by the receiver
  alignas(kCacheLine) std::atomic<uint32_t> starved[2];  // set by a sender that found no room, cleared by the receiver
};
inline constexpr size_t kRingHeaderBytes = 512;
inline constexpr size_t kControlRingBytes = (64u << 10) - kRingHeaderBytes;
inline constexpr size_t kDataRingBytes = 192u << 10;
static_assert(sizeof(RingHeader) <= kRingHeaderBytes);
static_assert(kRingHeaderBytes + kControlRingBytes + kDataRingBytes == kRingBytes);

// Wakes a sleeping local peer by its asleep word and its eventfd. fd -1: does nothing.
class Doorbell {
 public:
  Doorbell() = default;
  Doorbell(std::atomic<uint32_t>* asleep, int fd, Traffic* traffic) : asleep_(asleep), fd_(fd), traffic_(traffic) {}
  // No wake-up is lost: the ringer's store of news and its load of the word, the sleeper's store of the word and its
  // look for news, are all sequentially consistent, so at least one side sees the other.
  void ring(bool even_if_idle) const {
    if (fd_ < 0) return;
    const auto state = static_cast<Sleep>(asleep_->load(std::memory_order_seq_cst));
    if (state == Sleep::kAsleepWaiting || (state != Sleep::kAwake && even_if_idle)) end_sleep();
  }
  void ring_if_begun() const {
    if (fd_ >= 0 && static_cast<Sleep>(asleep_->load(std::memory_order_seq_cst)) == Sleep::kAsleepBegun) end_sleep();
  }
  // For news that was stored with release order only.
  void ring_after_release(bool even_if_idle) const {
    if (fd_ < 0) return;
#ifdef __SANITIZE_THREAD__  // which does not know fences; a read-modify-write orders as well
    asleep_->fetch_add(0, std::memory_order_seq_cst);
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
    ring(even_if_idle);
  }

 private:
  void end_sleep() const;
  std::atomic<uint32_t>* asleep_ = nullptr;
  int fd_ = -1;
  Traffic* traffic_ = nullptr;
};

// Tells a peer that one of its rings has moved: sets a bit in its news, where it uses them, and rings its doorbell.
class Knocker {
 public:
  Knocker() = default;
  // news null: the peer looks at all of its rings.
  Knocker(const Doorbell* doorbell, std::atomic<uint64_t>* news, uint64_t bit)
      : doorbell_(doorbell), news_(news), bit_(bit) {}
  // After a sequentially consistent store of what has moved.
  void knock(bool even_if_idle) const;

 private:
  const Doorbell* doorbell_ = nullptr;
  std::atomic<uint64_t>* news_ = nullptr;
  uint64_t bit_ = 0;
};

// One direction of a pair.
class RingWriter {
 public:
  RingWriter(std::byte* pair, Line line);
  // Copies what fits; the receiver sees it piece by piece while the rest is still being copied.
  size_t write(std::span<const iovec> parts, const Knocker& peer);

 private:
  size_t room();
  void copy_in(const std::byte* from, size_t bytes);
  RingHeader* header_;
  std::byte* data_;
  size_t capacity_;
  int index_;
  uint64_t head_ = 0, tail_seen_ = 0;
};

class RingReader {
 public:
  RingReader(std::byte* pair, Line line);
  IoResult read(std::span<const iovec> parts, const Knocker& peer);
  bool has_bytes() const { return header_->head[index_].load(std::memory_order_seq_cst) != tail_; }

 private:
  void copy_out(std::byte* to, size_t bytes);
  RingHeader* header_;
  const std::byte* data_;
  size_t capacity_;
  int index_;
  uint64_t tail_ = 0;
};

class ShmChannel final : public FramedChannel {
 public:
  struct Ends {
    std::shared_ptr<Arena> own, peer;
    int own_local_rank = 0, peer_local_rank = 0;
    const Doorbell* doorbell = nullptr;  // the peer's; outlives the channel
    // RingNews::to_look_at() of the mesh. Null: every look at the node's channels includes this one.
    uint64_t* to_look_at = nullptr;
  };
  // The pair for the peer in the own arena must have been committed.
  ShmChannel(int rank, std::string peer, Traffic* traffic, Ends ends);
  // progress() would move nothing.
  bool is_quiet() const { return only_listens() && !in_[0].has_bytes() && !in_[1].has_bytes(); }

 private:
  IoResult write(Line line, std::span<const iovec> parts) override;
  IoResult read(Line line, std::span<const iovec> parts) override;
  void look_again() override;

  Ends ends_;
  Knocker peer_side_;
  RingWriter out_[2];
  RingReader in_[2];
};

inline std::byte* ring_pair(const Arena& owner, int receiver_local_rank) {
  return owner.base() + kRingsOffset + static_cast<size_t>(receiver_local_rank) * kRingBytes;
}

}  // namespace hc
