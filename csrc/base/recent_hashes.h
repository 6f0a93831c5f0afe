// Tells what comes back from what comes once. It knows at least the last `kept` hashes, and its memory does not grow
// with what it is asked. Not for several threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace hc {

class RecentHashes {
 public:
  explicit RecentHashes(size_t kept) : kept_(std::max<size_t>(kept, 1)) {}

  // Whether this hash came before; notes that it has come.
  bool again(uint64_t hash) {
    hash += hash == 0;  // zero is a free cell
    if (has(newer_, hash)) return true;
    const bool before = has(older_, hash);
    if (count_ == kept_) {
      std::swap(newer_, older_);
      std::fill(newer_.begin(), newer_.end(), 0);
      count_ = 0;
    }
    if (2 * (count_ + 1) > newer_.size()) grow();
    cell(newer_, hash) = hash;
    ++count_;
    return before;
  }

 private:
  using Cells = std::vector<uint64_t>;  // open addressing; a power of two, at most half full
  static uint64_t& cell(Cells& cells, uint64_t hash) {
    size_t at = hash & (cells.size() - 1);
    while (cells[at] != 0 && cells[at] != hash) at = (at + 1) & (cells.size() - 1);
    return cells[at];
  }
  static bool has(Cells& cells, uint64_t hash) { return !cells.empty() && cell(cells, hash) == hash; }
  void grow() {
    Cells larger(std::max<size_t>(64, 2 * newer_.size()), 0);
    for (const uint64_t hash : newer_)
      if (hash != 0) cell(larger, hash) = hash;
    newer_ = std::move(larger);
  }

  size_t kept_;
  size_t count_ = 0;  // in newer_
  Cells newer_, older_;
};

}  // namespace hc
