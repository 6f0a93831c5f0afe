// See control_tree.h.
#include "agreement/control_tree.h"

#include <algorithm>
#include <map>

namespace hc {

ControlTree::ControlTree(std::span<const int> node, int fanout)
    : parent_(node.size(), 0), first_child_(node.size() + 1, 0), place_(node.size()), below_(node.size(), 1) {
  const int size = static_cast<int>(node.size());
  std::map<int, int> leader_of;  // node -> group rank
  std::vector<int> leaders;
  for (int r = 0; r < size; r++) {
    const auto [at, first] = leader_of.try_emplace(node[static_cast<size_t>(r)], r);
    if (first) leaders.push_back(r);
    parent_[static_cast<size_t>(r)] = at->second;
  }
  for (size_t i = 0; i < leaders.size(); i++) {
    const size_t above = i == 0 || fanout <= 0 ? 0 : (i - 1) / static_cast<size_t>(fanout);
    parent_[static_cast<size_t>(leaders[i])] = i == 0 ? -1 : leaders[above];
  }
  if (fanout <= 0) std::fill(parent_.begin() + 1, parent_.end(), 0);
  // A parent is always lower than its child: leaders ascend, and a node's leader is its lowest rank.
  for (int r = 1; r < size; r++) first_child_[static_cast<size_t>(parent(r)) + 1]++;
  for (int r = 0; r < size; r++) first_child_[static_cast<size_t>(r) + 1] += first_child_[static_cast<size_t>(r)];
  child_.resize(static_cast<size_t>(std::max(0, size - 1)));
  std::vector<int> next(first_child_.begin(), first_child_.end() - 1);
  for (int r = 1; r < size; r++) child_[static_cast<size_t>(next[static_cast<size_t>(parent(r))]++)] = r;
  for (int r = size - 1; r > 0; r--) below_[static_cast<size_t>(parent(r))] += below_[static_cast<size_t>(r)];
  order_.resize(node.size());
  for (int r = 0; r < size; r++) {
    const auto at = static_cast<size_t>(r);
    order_[static_cast<size_t>(place_[at])] = r;
    int place = place_[at] + 1;
    for (int c : children(r)) {
      place_[static_cast<size_t>(c)] = place;
      place += below_[static_cast<size_t>(c)];
    }
  }
}

std::shared_ptr<const ControlTree> ControlTree::make(std::span<const int> node, int fanout) {
  if (fanout <= 0 || std::all_of(node.begin(), node.end(), [&](int n) { return n == node[0]; })) return nullptr;
  auto tree = std::make_shared<const ControlTree>(node, fanout);
  return tree->has_relays() ? tree : nullptr;
}

std::span<const int> ControlTree::children(int rank) const {
  const auto first = static_cast<size_t>(first_child_[static_cast<size_t>(rank)]);
  return std::span(child_).subspan(first, static_cast<size_t>(first_child_[static_cast<size_t>(rank) + 1]) - first);
}

std::span<const int> ControlTree::subtree(int rank) const {
  const auto at = static_cast<size_t>(rank);
  return std::span(order_).subspan(static_cast<size_t>(place_[at]), static_cast<size_t>(below_[at]));
}

bool ControlTree::is_below(int rank, int ancestor) const {
  const int distance = place_[static_cast<size_t>(rank)] - place_[static_cast<size_t>(ancestor)];
  return distance >= 0 && distance < below_[static_cast<size_t>(ancestor)];
}

int ControlTree::child_towards(int from, int rank) const {
  if (rank == from || !is_below(rank, from)) return -1;
  while (parent(rank) != from) rank = parent(rank);
  return rank;
}

bool ControlTree::has_relays() const {
  return std::any_of(parent_.begin() + 1, parent_.end(), [](int p) { return p != 0; });
}

int ControlTree::depth() const {
  int deepest = 0;
  for (int r = 1; r < size(); r++) {
    int steps = 0;
    for (int at = r; at != 0; at = parent(at)) steps++;
    deepest = std::max(deepest, steps);
  }
  return deepest;
}

}  // namespace hc
