// Several tensors seen as one sequence of elements: copies a range into a buffer (as into the fusion buffer), copies it
// back, or visits it piece by piece. And the slices into which members divide it.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "collective/collective.h"

namespace hc {

// Boundaries of member m's slice of `count` elements: near equal, whole cache lines where there are enough elements.
struct Slices {
  Slices(size_t count, int n, size_t item) : count_(count), each_((count + n - 1) / n) {
    const size_t line = std::max<size_t>(1, 64 / item);
    if (each_ > line) each_ = (each_ + line - 1) / line * line;
  }
  size_t begin(int m) const { return std::min(count_, each_ * m); }
  size_t end(int m) const { return std::min(count_, each_ * (m + 1)); }
  size_t count_, each_;
};

class PieceView {
 public:
  PieceView(const std::vector<Piece>& pieces, size_t item_bytes) : pieces_(pieces), item_(item_bytes) {
    size_t at = 0;
    for (const Piece& p : pieces_) {
      starts_.push_back(at);
      at += p.count;
    }
  }

  // Calls visit(part) for every part of [begin, begin + count), in order; part is never empty.
  template <class Visit>
  void each(size_t begin, size_t count, Visit&& visit) const {
    if (!count) return;
    size_t i = std::upper_bound(starts_.begin(), starts_.end(), begin) - starts_.begin() - 1;
    for (; count; ++i) {
      const Piece& p = pieces_[i];
      const size_t skip = begin - starts_[i];
      const size_t take = std::min(count, p.count - skip);
      if (!take) continue;
      visit(Piece{p.in + skip * item_, p.out ? p.out + skip * item_ : nullptr, take});
      begin += take;
      count -= take;
    }
  }
  void gather(size_t begin, size_t count, std::byte* to) const {
    each(begin, count, [&](const Piece& part) {
      std::memcpy(to, part.in, part.count * item_);
      to += part.count * item_;
    });
  }
  void scatter(size_t begin, size_t count, const std::byte* from) const {
    each(begin, count, [&](const Piece& part) {
      std::memcpy(part.out, from, part.count * item_);
      from += part.count * item_;
    });
  }

 private:
  const std::vector<Piece>& pieces_;
  size_t item_;
  std::vector<size_t> starts_;
};

}  // namespace hc
