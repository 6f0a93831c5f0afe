// Decides which of the node's rings a rank looks at. With few ranks it looks at all of them. With many, each look may
// miss the caches and the page tables, so it looks only where a peer has set a bit in its arena's first page (Knocker),
// and goes on looking there until nothing moves.
//
// Thread: the thread that makes progress. Owner: the mesh.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <vector>

namespace hc {

class RingNews {
 public:
  // From now on look only at rings with news: peers set a bit for each local rank. `news` outlives this object.
  void heed(std::atomic<uint64_t>* news, int local_size) {
    news_ = news;
    to_look_at_.assign(static_cast<size_t>(local_size) / 64 + 1, 0);
  }
  // Adds the ring from this rank.
  void add(int rank, int local_rank) {
    ranks_.push_back(rank);
    if (rank_of_local_.size() <= static_cast<size_t>(local_rank))
      rank_of_local_.resize(static_cast<size_t>(local_rank) + 1, -1);
    rank_of_local_[static_cast<size_t>(local_rank)] = rank;
  }
  // Bits, one for each local rank, in which a channel notes that it must be looked at; null: every channel is always
  // looked at.
  uint64_t* to_look_at() { return to_look_at_.empty() ? nullptr : to_look_at_.data(); }

  // Calls `progress(rank)`, which says whether anything moved, for all rings or those with news. Returns whether
  // anything moved anywhere.
  template <class Progress>
  bool look(Progress&& progress) {
    if (!to_look_at_.empty()) return look_where_news_is(progress);
    bool moved = false;
    for (int rank : ranks_) moved |= progress(rank);
    return moved;
  }

 private:
  template <class Progress>
  bool look_where_news_is(Progress& progress) {
    bool moved = false;
    for (size_t word = 0; word < to_look_at_.size(); ++word) {
      std::atomic<uint64_t>& news = news_[word];
      if (news.load(std::memory_order_seq_cst) != 0) to_look_at_[word] |= news.exchange(0, std::memory_order_seq_cst);
      for (uint64_t left = to_look_at_[word]; left != 0; left &= left - 1) {
        const int local = static_cast<int>(word) * 64 + std::countr_zero(left);
        if (progress(rank_of_local_[local]))
          moved = true;
        else
          to_look_at_[word] &= ~(uint64_t{1} << local % 64);  // whatever can move next is news, or look_again()
      }
    }
    return moved;
  }

  std::vector<int> ranks_, rank_of_local_;
  std::atomic<uint64_t>* news_ = nullptr;
  std::vector<uint64_t> to_look_at_;  // [local rank / 64]: those whose channels may have something to move
};

}  // namespace hc
