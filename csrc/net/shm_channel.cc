#include "net/shm_channel.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace hc {
namespace {

constexpr size_t kPublishBytes = 32u << 10;  // a long write is shown in pieces, so that both sides copy at once

constexpr size_t offset_of_line(Line line) {
  return line == Line::kControl ? kRingHeaderBytes : kRingHeaderBytes + kControlRingBytes;
}
constexpr size_t capacity_of(Line line) { return line == Line::kControl ? kControlRingBytes : kDataRingBytes; }

size_t total_of(std::span<const iovec> parts) {
  size_t total = 0;
  for (const iovec& p : parts) total += p.iov_len;
  return total;
}

}  // namespace

void Doorbell::end_sleep() const {
  if (asleep_->exchange(static_cast<uint32_t>(Sleep::kAwake), std::memory_order_seq_cst) == 0)
    return;  // somebody else rang
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t written = ::write(fd_, &one, sizeof(one));  // full means that it will wake anyway
  traffic_->wakes.add(1);
  traffic_->syscalls.add(1);
}

// The peer clears the bit and then looks, so a bit that is still there stands for this, too.
void Knocker::knock(bool even_if_idle) const {
  if (news_ && !(news_->load(std::memory_order_seq_cst) & bit_)) news_->fetch_or(bit_, std::memory_order_seq_cst);
  doorbell_->ring(even_if_idle);
}

RingWriter::RingWriter(std::byte* pair, Line line)
    : header_(reinterpret_cast<RingHeader*>(pair)),
      data_(pair + offset_of_line(line)),
      capacity_(capacity_of(line)),
      index_(static_cast<int>(line)) {
  head_ = header_->head[index_].load(std::memory_order_relaxed);
  tail_seen_ = header_->tail[index_].load(std::memory_order_acquire);
}

size_t RingWriter::room() {
  tail_seen_ = header_->tail[index_].load(std::memory_order_seq_cst);
  return capacity_ - static_cast<size_t>(head_ - tail_seen_);
}

void RingWriter::copy_in(const std::byte* from, size_t bytes) {
  const size_t at = head_ % capacity_, first = std::min(bytes, capacity_ - at);
  std::memcpy(data_ + at, from, first);
  if (first < bytes) std::memcpy(data_, from + first, bytes - first);
  head_ += bytes;
}

size_t RingWriter::write(std::span<const iovec> parts, const Knocker& peer) {
  const size_t total = total_of(parts);
  size_t written = 0;
  size_t free = capacity_ - static_cast<size_t>(head_ - tail_seen_);
  size_t part = 0, part_done = 0, hidden = 0;
  auto publish = [&] {
    header_->head[index_].store(head_, std::memory_order_seq_cst);
    hidden = 0;
    peer.knock(false);
  };
  while (written < total) {
    if (free == 0 && (free = room()) == 0) {
      if (hidden) publish();
      header_->starved[index_].store(1, std::memory_order_seq_cst);
      if ((free = room()) == 0) break;  // the receiver will ring once it has taken something
    }
    size_t piece = std::min({parts[part].iov_len - part_done, free, kPublishBytes});
    if (piece > 0) copy_in(static_cast<const std::byte*>(parts[part].iov_base) + part_done, piece);
    part_done += piece, written += piece, free -= piece, hidden += piece;
    if (part_done == parts[part].iov_len) ++part, part_done = 0;
    if (hidden >= kPublishBytes) publish();
  }
  if (hidden) publish();
  return written;
}

RingReader::RingReader(std::byte* pair, Line line)
    : header_(reinterpret_cast<RingHeader*>(pair)),
      data_(pair + offset_of_line(line)),
      capacity_(capacity_of(line)),
      index_(static_cast<int>(line)) {
  tail_ = header_->tail[index_].load(std::memory_order_relaxed);
}

void RingReader::copy_out(std::byte* to, size_t bytes) {
  const size_t at = tail_ % capacity_, first = std::min(bytes, capacity_ - at);
  std::memcpy(to, data_ + at, first);
  if (first < bytes) std::memcpy(to + first, data_, bytes - first);
  tail_ += bytes;
}

IoResult RingReader::read(std::span<const iovec> parts, const Knocker& peer) {
  const uint64_t head = header_->head[index_].load(std::memory_order_seq_cst);
  size_t there = static_cast<size_t>(head - tail_);
  if (there == 0) return {Io::kWouldBlock, 0, 0};
  if (there > capacity_) return {Io::kFailed, 0, EBADMSG};
  size_t moved = 0;
  for (const iovec& p : parts) {
    size_t piece = std::min(p.iov_len, there);
    copy_out(static_cast<std::byte*>(p.iov_base), piece);
    moved += piece, there -= piece;
    if (there == 0) break;
  }
  header_->tail[index_].store(tail_, std::memory_order_seq_cst);
  // A sender that waits for room must wake even if it believes that it has nothing else to do.
  std::atomic<uint32_t>& starved = header_->starved[index_];
  if (starved.load(std::memory_order_seq_cst) != 0 && starved.exchange(0, std::memory_order_seq_cst) != 0) {
    peer.knock(true);
  }
  return {Io::kMoved, moved, 0};
}

ShmChannel::ShmChannel(int rank, std::string peer, Traffic* traffic, Ends ends)
    : FramedChannel(rank, std::move(peer), traffic, std::nullopt),
      ends_(std::move(ends)),
      peer_side_(ends_.doorbell, ends_.to_look_at ? &ends_.peer->block()->news[ends_.own_local_rank / 64] : nullptr,
                 uint64_t{1} << ends_.own_local_rank % 64),
      out_{RingWriter(ring_pair(*ends_.own, ends_.peer_local_rank), Line::kControl),
           RingWriter(ring_pair(*ends_.own, ends_.peer_local_rank), Line::kData)},
      in_{RingReader(ring_pair(*ends_.peer, ends_.own_local_rank), Line::kControl),
          RingReader(ring_pair(*ends_.peer, ends_.own_local_rank), Line::kData)} {}

IoResult ShmChannel::write(Line line, std::span<const iovec> parts) {
  const size_t moved = out_[static_cast<int>(line)].write(parts, peer_side_);
  return {moved ? Io::kMoved : Io::kWouldBlock, moved, 0};
}

IoResult ShmChannel::read(Line line, std::span<const iovec> parts) {
  return in_[static_cast<int>(line)].read(parts, peer_side_);
}

void ShmChannel::look_again() {
  if (ends_.to_look_at) ends_.to_look_at[ends_.peer_local_rank / 64] |= uint64_t{1} << ends_.peer_local_rank % 64;
}

}  // namespace hc
