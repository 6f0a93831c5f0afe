// A set of group ranks, one bit each. A value; a process set of up to 64 ranks is one word.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hc {

class RankSet {
 public:
  explicit RankSet(int size = 0) : words_((static_cast<size_t>(size) + 63) / 64) {}
  bool has(int rank) const { return (words_[word(rank)] & bit(rank)) != 0; }
  bool add(int rank) {  // false: was there already
    uint64_t& w = words_[word(rank)];
    bool added = (w & bit(rank)) == 0;
    w |= bit(rank);
    return added;
  }
  void clear() {
    for (uint64_t& w : words_) w = 0;
  }
  void add_all(const RankSet& other) {
    for (size_t i = 0; i < words_.size(); i++) words_[i] |= other.words_[i];
  }
  int count() const {
    int n = 0;
    for (uint64_t w : words_) n += std::popcount(w);
    return n;
  }
  // How many ranks are in this set or in `other`.
  int count_with(const RankSet& other) const {
    int n = 0;
    for (size_t i = 0; i < words_.size(); i++) n += std::popcount(words_[i] | other.words_[i]);
    return n;
  }
  // The lowest rank; -1: none.
  int first() const {
    for (size_t i = 0; i < words_.size(); i++)
      if (words_[i] != 0) return static_cast<int>(i * 64) + std::countr_zero(words_[i]);
    return -1;
  }
  // The lowest rank that is here and not in `other`; -1: none.
  int first_not_in(const RankSet& other) const {
    for (size_t i = 0; i < words_.size(); i++)
      if (uint64_t w = words_[i] & ~other.words_[i]; w != 0) return static_cast<int>(i * 64) + std::countr_zero(w);
    return -1;
  }

 private:
  static size_t word(int rank) { return static_cast<size_t>(rank) / 64; }
  static uint64_t bit(int rank) { return uint64_t{1} << (rank % 64); }
  std::vector<uint64_t> words_;
};

}  // namespace hc
