// The tree along which the request lists of a process set travel to its coordinator, and plans travel back. Every rank
// of a node talks to the lowest rank there, the node's leader; the leaders form a tree of bounded fan-out whose root is
// group rank 0. PURE and constant, so it may be shared.
#pragma once

#include <memory>
#include <span>
#include <vector>

namespace hc {

class ControlTree {
 public:
  // node[r]: the node of group rank r. Null: every rank would talk to rank 0 directly (one node, few ranks, fan-out 0).
  static std::shared_ptr<const ControlTree> make(std::span<const int> node, int fanout);
  // The same, but also for a star of one level.
  ControlTree(std::span<const int> node, int fanout);

  int size() const { return static_cast<int>(parent_.size()); }
  int parent(int rank) const { return parent_[static_cast<size_t>(rank)]; }  // -1 of the root
  std::span<const int> children(int rank) const;
  // The rank itself, followed by all ranks below it.
  std::span<const int> subtree(int rank) const;
  bool is_below(int rank, int ancestor) const;  // or the same
  // The child of `from` that has `rank` in its subtree; -1: it is not below.
  int child_towards(int from, int rank) const;
  bool has_relays() const;  // somebody besides the root has children
  int depth() const;        // steps from the farthest rank to the root

 private:
  std::vector<int> parent_;
  std::vector<int> child_;        // children of rank 0, of rank 1, ...
  std::vector<int> first_child_;  // [size + 1] into child_
  std::vector<int> order_;        // a rank in front of what is below it
  std::vector<int> place_;        // in order_
  std::vector<int> below_;        // ranks in the subtree
};

}  // namespace hc
