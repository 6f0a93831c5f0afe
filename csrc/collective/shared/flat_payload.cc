#include "collective/shared/flat_payload.h"

#include <cstring>
#include <vector>

namespace hc {

size_t FlatPayload::bytes() const {
  size_t n = 0;
  for (const Piece& p : task_.pieces) n += input_count(p);
  return n * item();
}

void FlatPayload::contribute(std::byte* to) const {
  if (comes_from_root() && rank_ != task_.root) return;
  for (const Piece& p : task_.pieces) {
    const size_t bytes = input_count(p) * item();
    if (bytes) std::memcpy(to, p.in, bytes);
    to += bytes;
  }
}

// Where there are counts they describe the input, and the piece does not.
size_t FlatPayload::input_count(const Piece& piece) const {
  if (task_.counts.empty()) return piece.count;
  if (task_.op == Op::kAllgather || task_.op == Op::kGather) return task_.counts[static_cast<size_t>(rank_)];
  size_t n = 0;
  for (size_t c : task_.counts) n += c;
  return n;
}

void FlatPayload::collect(std::span<const std::byte* const> buffers) const {
  const bool is_root = rank_ == task_.root;
  switch (task_.op) {
    case Op::kAllreduce:
      return reduce_pieces(buffers);
    case Op::kReduce:
      return is_root ? reduce_pieces(buffers) : void();
    case Op::kBroadcast:
      return copy_from_root(buffers[static_cast<size_t>(task_.root)]);
    case Op::kAllgather:
      return concatenate(buffers);
    case Op::kGather:
      return is_root ? concatenate(buffers) : void();
    case Op::kReducescatter:
      return reduce_at(buffers, bytes_before_mine(), task_.pieces[0].out, task_.counts[static_cast<size_t>(rank_)]);
    case Op::kScatter:
      return take_my_parts(buffers.subspan(static_cast<size_t>(task_.root), 1));
    case Op::kAlltoall:
      return take_my_parts(buffers);
    case Op::kBarrier:
    case Op::kJoin:
    case Op::kSend:
    case Op::kReceive:
      return;
  }
}

void FlatPayload::reduce_at(std::span<const std::byte* const> buffers, size_t offset, std::byte* out,
                            size_t count) const {
  if (!count) return;
  std::byte* const destinations[] = {out};
  if (offset == 0)
    return reduce_by_levels(levels_, task_.dtype, task_.reduce, destinations, buffers, count, task_.scale);
  std::vector<const std::byte*> sources(buffers.begin(), buffers.end());
  for (const std::byte*& source : sources) source += offset;
  reduce_by_levels(levels_, task_.dtype, task_.reduce, destinations, sources, count, task_.scale);
}

void FlatPayload::reduce_pieces(std::span<const std::byte* const> buffers) const {
  size_t offset = 0;
  for (const Piece& p : task_.pieces) {
    reduce_at(buffers, offset, p.out, p.count);
    offset += p.count * item();
  }
}

size_t FlatPayload::bytes_before_mine() const {
  size_t before = 0;
  for (int m = 0; m < rank_; ++m) before += task_.counts[static_cast<size_t>(m)];
  return before * item();
}

void FlatPayload::copy_from_root(const std::byte* buffer) const {
  for (const Piece& p : task_.pieces) {
    if (p.count && !(rank_ == task_.root && p.in == p.out)) std::memcpy(p.out, buffer, p.count * item());
    buffer += p.count * item();
  }
}

void FlatPayload::concatenate(std::span<const std::byte* const> buffers) const {
  std::byte* to = task_.pieces[0].out;
  for (size_t m = 0; m < buffers.size(); ++m) {
    const size_t bytes = task_.counts[m] * item();
    if (bytes) std::memcpy(to, buffers[m], bytes);
    to += bytes;
  }
}

// Of each buffer the part for me, one behind the other.
void FlatPayload::take_my_parts(std::span<const std::byte* const> buffers) const {
  const size_t bytes = task_.counts[static_cast<size_t>(rank_)] * item(), from = bytes_before_mine();
  if (!bytes) return;
  std::byte* to = task_.pieces[0].out;
  for (const std::byte* buffer : buffers) {
    std::memcpy(to, buffer + from, bytes);
    to += bytes;
  }
}

}  // namespace hc
