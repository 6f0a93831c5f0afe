// A set of group ranks, one bit each. A value; a process set of up to 64 ranks takes one word. A full set is a single
// flag, so that the coordinator of a tree pays the same at any size.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hc {

class RankSet {
 public:
  explicit RankSet(int size = 0) : words_((static_cast<size_t>(size) + 63) / 64), size_(size) {}
  int capacity() const { return size_; }
  bool has(int rank) const { return everybody_ || (words_[word(rank)] & bit(rank)) != 0; }
  bool add(int rank) {  // false: was there already
    if (everybody_) return false;
    touched_ = true;
    uint64_t& w = words_[word(rank)];
    bool added = (w & bit(rank)) == 0;
    w |= bit(rank);
    return added;
  }
  void remove(int rank) {
    if (everybody_) spread();
    words_[word(rank)] &= ~bit(rank);
  }
  void add_everybody() { everybody_ = true; }
  void clear() {
    if (touched_)
      for (uint64_t& w : words_) w = 0;
    everybody_ = touched_ = false;
  }
  void add_all(const RankSet& other) {
    everybody_ = everybody_ || other.everybody_;
    touched_ = touched_ || other.touched_;
    for (size_t i = 0; i < words_.size(); i++) words_[i] |= other.words_[i];
  }
  int count() const {
    if (everybody_) return size_;
    int n = 0;
    for (uint64_t w : words_) n += std::popcount(w);
    return n;
  }
  // How many ranks are in this set or in `other`.
  int count_with(const RankSet& other) const {
    if (everybody_ || other.everybody_) return size_;
    int n = 0;
    for (size_t i = 0; i < words_.size(); i++) n += std::popcount(words_[i] | other.words_[i]);
    return n;
  }
  // The lowest rank; -1: none.
  int first() const {
    if (everybody_ && size_ > 0) return 0;
    for (size_t i = 0; i < words_.size(); i++)
      if (words_[i] != 0) return static_cast<int>(i * 64) + std::countr_zero(words_[i]);
    return -1;
  }
  // The lowest rank that is here and not in `other`; -1: none.
  int first_not_in(const RankSet& other) const {
    if (other.everybody_) return -1;
    if (everybody_) {
      RankSet copy = *this;
      copy.spread();
      return copy.first_not_in(other);
    }
    for (size_t i = 0; i < words_.size(); i++)
      if (uint64_t w = words_[i] & ~other.words_[i]; w != 0) return static_cast<int>(i * 64) + std::countr_zero(w);
    return -1;
  }

 private:
  static size_t word(int rank) { return static_cast<size_t>(rank) / 64; }
  static uint64_t bit(int rank) { return uint64_t{1} << (rank % 64); }
  void spread() {  // the flag becomes bits
    for (int r = 0; r < size_; r++) words_[word(r)] |= bit(r);
    everybody_ = false;
    touched_ = true;
  }
  std::vector<uint64_t> words_;
  int size_ = 0;
  bool everybody_ = false;
  bool touched_ = false;  // some bit may be set
};

}  // namespace hc
