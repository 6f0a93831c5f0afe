#include "net/parallel_stream.h"

#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>

#include "base/hash.h"

namespace hc {
namespace {

constexpr size_t kMaxParts = 64;  // of one write or read

}  // namespace

uint32_t ParallelStream::Head::guard_of(uint64_t starts_at) const {
  uint64_t hash = 0x44414548;
  mix(&hash, starts_at);
  mix(&hash, position);
  mix(&hash, bytes);
  return halved(hash);
}

ParallelStream::ParallelStream(std::vector<Fd> connections, Traffic* traffic, uint64_t starts_at)
    : fds_(std::move(connections)),
      all_(fds_.size()),
      traffic_(traffic),
      starts_out_(starts_at),
      always_readable_(::eventfd(1, EFD_NONBLOCK | EFD_CLOEXEC)) {}

bool ParallelStream::has_copied() const {
  return failed_ == 0 &&
         std::any_of(all_.begin(), all_.end(), [](const Connection& one) { return !one.copied.empty(); });
}

// True: nothing is copied there any more.
bool ParallelStream::flush(size_t index) {
  Connection& one = all_[index];
  if (one.copied.empty()) return true;
  const iovec part{one.copied.data() + one.copied_at, one.copied.size() - one.copied_at};
  traffic_->syscalls.add(1);
  const IoResult result = send_parts(fds_[index].get(), {&part, 1});
  if (result.what == Io::kFailed) failed_ = result.error_number;
  one.copied_at += result.bytes;
  if (one.copied_at < one.copied.size()) return false;
  one.copied.clear();
  one.copied_at = 0;
  return true;
}

void ParallelStream::flush() {
  for (size_t i = 0; i < all_.size(); ++i) flush(i);
}

// parts: the first is for the head. kWouldBlock: nothing of the piece is written; else all of it is, or copied.
IoResult ParallelStream::write_piece(size_t index, std::span<iovec> parts, size_t bytes) {
  Connection& one = all_[index];
  Head head{position_out_, static_cast<uint32_t>(bytes), 0};
  head.guard = head.guard_of(starts_out_);
  parts[0] = {&head, sizeof(head)};
  traffic_->syscalls.add(1);
  IoResult result = send_parts(fds_[index].get(), parts);
  if (result.bytes == 0) return result;
  size_t skip = result.bytes;
  for (const iovec& part : parts) {
    const size_t gone = std::min(skip, part.iov_len);
    skip -= gone;
    const auto* from = static_cast<const std::byte*>(part.iov_base);
    one.copied.insert(one.copied.end(), from + gone, from + part.iov_len);
  }
  position_out_ += bytes;
  one.written += sizeof(head) + bytes;
  one.sent.push_back({head.position, one.written, bytes});
  return {Io::kMoved, bytes, 0};
}

IoResult ParallelStream::write(std::span<const iovec> parts) {
  size_t moved = 0, at = 0, offset = 0;  // of the part that is next
  while (at < parts.size() && failed_ == 0) {
    iovec piece[1 + kMaxParts];
    size_t n = 1, bytes = 0, next = at, next_offset = offset;
    while (next < parts.size() && n <= kMaxParts && bytes < kPieceBytes) {
      const size_t take = std::min(parts[next].iov_len - next_offset, kPieceBytes - bytes);
      piece[n++] = {static_cast<std::byte*>(parts[next].iov_base) + next_offset, take};
      bytes += take;
      next_offset += take;
      if (next_offset == parts[next].iov_len) ++next, next_offset = 0;
    }
    IoResult result;
    for (size_t tried = 0; tried < all_.size() && result.what == Io::kWouldBlock; ++tried) {
      const size_t index = write_at_;
      write_at_ = (write_at_ + 1) % all_.size();
      if (flush(index)) result = write_piece(index, {piece, n}, bytes);
    }
    if (result.what == Io::kFailed) failed_ = result.error_number;
    if (result.what != Io::kMoved) break;
    moved += bytes;
    at = next;
    offset = next_offset;
  }
  if (moved > 0) return {Io::kMoved, moved, 0};
  return failed_ ? IoResult{Io::kFailed, 0, failed_} : IoResult{};
}

// Takes what has come in over this connection, as far as it is not next in the stream.
IoResult ParallelStream::read_ahead(size_t index) {
  Connection& one = all_[index];
  for (;;) {
    if (one.has_ended) return one.head_bytes > 0 ? IoResult{Io::kFailed, 0, ECONNRESET} : IoResult{Io::kEnded, 0, 0};
    if (!one.has_head()) {
      const iovec part{reinterpret_cast<std::byte*>(&one.head) + one.head_bytes, sizeof(Head) - one.head_bytes};
      traffic_->syscalls.add(1);
      const IoResult result = receive_parts(fds_[index].get(), {&part, 1});
      one.has_ended = result.what == Io::kEnded;
      if (one.has_ended) continue;
      if (result.what != Io::kMoved) return result;
      one.head_bytes += result.bytes;
      if (!one.has_head()) return {};
      if (one.head.guard != one.head.guard_of(starts_in_) || one.head.position < position_in_ || one.head.bytes == 0 ||
          one.head.bytes > kPieceBytes || early_.contains(one.head.position)) {
        one.has_ended = true;  // nothing behind it can be placed
        one.head_bytes = 1;
        return {Io::kFailed, 0, EBADMSG};
      }
    }
    if (one.next() == position_in_ || early_bytes_ >= kMaxEarlyBytes) return {};
    const size_t before = one.early.size();
    one.early.resize(before + one.head.bytes - one.taken);
    const iovec part{one.early.data() + before, one.head.bytes - one.taken};
    traffic_->syscalls.add(1);
    const IoResult result = receive_parts(fds_[index].get(), {&part, 1});
    one.early.resize(before + result.bytes);
    one.has_ended = result.what == Io::kEnded;
    if (one.has_ended) continue;
    if (result.what != Io::kMoved) return result;
    one.taken += result.bytes;
    early_bytes_ += result.bytes;
    if (one.taken < one.head.bytes) return {};
    early_[one.next()] = std::move(one.early);
    finish_piece(&one);
  }
}

void ParallelStream::finish_piece(Connection* one) {
  one->head_bytes = one->taken = one->given = one->early_at = 0;
  one->early.clear();
}

size_t ParallelStream::give(std::vector<std::byte>* from, size_t* at, std::span<const iovec> parts) {
  size_t moved = 0;
  for (const iovec& part : parts) {
    const size_t bytes = std::min(part.iov_len, from->size() - *at);
    std::memcpy(part.iov_base, from->data() + *at, bytes);
    *at += bytes;
    moved += bytes;
  }
  early_bytes_ -= moved;
  position_in_ += moved;
  return moved;
}

// What is next in the stream, of one piece.
IoResult ParallelStream::read_next(std::span<const iovec> parts) {
  if (!early_.empty() && early_.begin()->first + early_at_ == position_in_) {
    std::vector<std::byte>& piece = early_.begin()->second;
    const size_t moved = give(&piece, &early_at_, parts);
    if (early_at_ == piece.size()) {
      early_.erase(early_.begin());
      early_at_ = 0;
    }
    return {Io::kMoved, moved, 0};
  }
  const auto at = std::find_if(all_.begin(), all_.end(),
                               [&](const Connection& one) { return one.has_head() && one.next() == position_in_; });
  if (at == all_.end()) return {};
  Connection& one = *at;
  if (one.early_at < one.early.size()) {
    const size_t moved = give(&one.early, &one.early_at, parts);
    one.given += moved;
    return {Io::kMoved, moved, 0};
  }
  iovec places[kMaxParts];
  size_t n = 0, wanted = 0;
  for (const iovec& part : parts) {
    const size_t take = std::min<size_t>(part.iov_len, one.head.bytes - one.taken - wanted);
    if (take == 0 || n == kMaxParts) break;
    places[n++] = {part.iov_base, take};
    wanted += take;
  }
  traffic_->syscalls.add(1);
  const IoResult result = receive_parts(fds_[static_cast<size_t>(at - all_.begin())].get(), {places, n});
  if (result.what == Io::kEnded) {
    one.has_ended = true;
    return {Io::kFailed, 0, ECONNRESET};
  }
  one.taken += result.bytes;
  one.given += result.bytes;
  position_in_ += result.bytes;
  if (one.given == one.head.bytes) finish_piece(&one);
  return result;
}

IoResult ParallelStream::read(std::span<const iovec> parts) {
  ended_ = 0;
  for (size_t i = 0; i < all_.size(); ++i) {
    const IoResult result = read_ahead(i);
    ended_ += result.what == Io::kEnded;
    if (result.what == Io::kFailed) failed_ = result.error_number;
  }
  std::vector<iovec> rest(parts.begin(), parts.end());
  size_t at = 0, moved = 0;
  while (at < rest.size()) {
    const IoResult result = read_next(std::span(rest).subspan(at));
    if (result.what == Io::kFailed) failed_ = result.error_number;
    if (result.bytes == 0) break;
    moved += result.bytes;
    for (size_t skip = result.bytes; skip > 0;) {
      const size_t take = std::min(skip, rest[at].iov_len);
      rest[at] = {static_cast<std::byte*>(rest[at].iov_base) + take, rest[at].iov_len - take};
      skip -= take;
      if (rest[at].iov_len == 0) ++at;
    }
  }
  if (moved > 0) return {Io::kMoved, moved, 0};
  if (failed_ != 0) return {Io::kFailed, 0, failed_};  // a socket tells its error once
  return ended_ == all_.size() ? IoResult{Io::kEnded, 0, 0} : IoResult{};
}

// What read() could give although nothing comes in.
bool ParallelStream::has_next() const {
  if (!early_.empty() && early_.begin()->first + early_at_ == position_in_) return true;
  return std::any_of(all_.begin(), all_.end(), [&](const Connection& one) {
    return one.early_at < one.early.size() && one.next() == position_in_;
  });
}

uint64_t ParallelStream::unacknowledged() {
  uint64_t first = position_out_;
  for (size_t i = 0; i < all_.size(); ++i) {
    Connection& one = all_[i];
    if (one.sent.empty()) continue;
    int bytes = 0;
    traffic_->syscalls.add(1);
    if (::ioctl(fds_[i].get(), SIOCOUTQ, &bytes) != 0 || bytes < 0) bytes = 0x7fffffff;
    const uint64_t waiting = static_cast<uint64_t>(bytes) + one.copied.size() - one.copied_at;
    const uint64_t acknowledged = one.written > waiting ? one.written - waiting : 0;
    while (!one.sent.empty() && one.sent.front().end <= acknowledged) one.sent.pop_front();
    if (one.sent.empty()) continue;
    const Sent& oldest = one.sent.front();
    const uint64_t payload_at = oldest.end - oldest.bytes;
    first = std::min(first, oldest.position + (acknowledged > payload_at ? acknowledged - payload_at : 0));
  }
  return position_out_ - first;
}

double ParallelStream::unheard_s() const {
  double least = -1;
  for (size_t i = 0; i < all_.size() && least != 0; ++i)
    if (const double s = hc::unheard_s(fds_[i].get()); !all_[i].sent.empty())
      least = least < 0 ? s : std::min(least, s);
  return std::max(least, 0.0);
}

void ParallelStream::drain(std::vector<std::byte>* bytes) {
  std::vector<std::byte> piece(kPieceBytes);
  const iovec part{piece.data(), piece.size()};
  for (IoResult result{Io::kMoved, 0, 0}; result.what == Io::kMoved;) {
    result = read({&part, 1});
    bytes->insert(bytes->end(), piece.begin(), piece.begin() + static_cast<std::ptrdiff_t>(result.bytes));
  }
  for (Fd& fd : fds_) fd.reset();
}

// Level-triggered: one that is ended leaves the set, and one from which nothing would be read.
void ParallelStream::settle(int epoll, uint64_t token, bool wants_read, bool wants_write, bool flushes) {
  const auto set = [&](const Fd& fd, uint32_t wanted, uint32_t* registered) {
    traffic_->syscalls.add(register_events(epoll, fd, token, wanted, registered));
  };
  set(always_readable_, wants_read && has_next() ? uint32_t{EPOLLIN} : 0, &always_registered_);
  for (size_t i = 0; i < all_.size(); ++i) {
    Connection& one = all_[i];
    const bool reads = wants_read && !one.has_ended &&
                       (early_bytes_ < kMaxEarlyBytes || !one.has_head() || one.next() == position_in_);
    const uint32_t wanted = (reads ? uint32_t{EPOLLIN} : 0) |
                            (wants_write || (flushes && !one.copied.empty() && failed_ == 0) ? uint32_t{EPOLLOUT} : 0);
    set(fds_[i], wanted, &one.registered);
  }
}

}  // namespace hc
