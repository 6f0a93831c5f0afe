#include "collective/selection.h"

#include <algorithm>

#include "collective/shared/shared.h"

namespace hc {
namespace {

// Below this the messages' latency counts, not their bytes: recursive doubling over all ranks.
constexpr size_t kTwoLevelBytes = 8u << 10;

Algorithm select_in_shared_memory(Op op, size_t bytes, const Thresholds& t) {
  // Where my part lies in a peer's slot depends on counts that I do not know.
  if (op == Op::kAlltoall) return Algorithm::kSharedBlocked;
  return bytes <= std::min(t.flat_bytes, kFlatSlotBytes) ? Algorithm::kSharedFlat : Algorithm::kSharedBlocked;
}

Algorithm select_over_channels(Op op, size_t bytes, const Thresholds& t) {
  switch (op) {
    case Op::kAllreduce:
      return bytes < t.ring_from_bytes ? Algorithm::kRecursiveDoubling : Algorithm::kRing;
    case Op::kAllgather:
    case Op::kReducescatter:
      return Algorithm::kRing;
    case Op::kBroadcast:
    case Op::kReduce:
      return Algorithm::kBinomialTree;
    case Op::kAlltoall:
      return Algorithm::kPairwise;
    case Op::kGather:
    case Op::kScatter:
    case Op::kBarrier:
    case Op::kJoin:
    case Op::kSend:
    case Op::kReceive:
      break;  // to and from the root, or between two
  }
  return Algorithm::kAuto;
}

}  // namespace

Algorithm select_algorithm(Op op, Reduce reduce, size_t bytes, Layout layout, const Thresholds& t) {
  if (op == Op::kAllreduce && reduce == Reduce::kAdasum) return Algorithm::kAuto;  // has one of its own
  if (layout == Layout::kOneNode) return select_in_shared_memory(op, bytes, t);
  if (layout == Layout::kSeveralNodesOfSeveral && t.two_level && op == Op::kAllreduce && bytes > kTwoLevelBytes)
    return Algorithm::kTwoLevel;
  return select_over_channels(op, bytes, t);
}

const char* name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kAuto:
      return "direct";
    case Algorithm::kSharedFlat:
      return "shm flat";
    case Algorithm::kSharedBlocked:
      return "shm blocks";
    case Algorithm::kSharedInPlace:
      return "shm in place";
    case Algorithm::kRing:
      return "ring";
    case Algorithm::kRecursiveDoubling:
      return "recursive doubling";
    case Algorithm::kTwoLevel:
      return "two level";
    case Algorithm::kBinomialTree:
      return "binomial tree";
    case Algorithm::kPairwise:
      return "pairwise exchange";
  }
  return "?";
}

std::vector<Selection> selection_table(Layout layout, const Thresholds& t) {
  std::vector<size_t> edges{0, std::min(t.flat_bytes, kFlatSlotBytes) + 1, kTwoLevelBytes + 1, t.ring_from_bytes};
  std::sort(edges.begin(), edges.end());
  std::vector<Selection> table;
  for (const Op op : {Op::kAllreduce, Op::kAllgather, Op::kBroadcast, Op::kReducescatter, Op::kAlltoall, Op::kReduce,
                      Op::kGather, Op::kScatter}) {
    bool first = true;
    for (const size_t bytes : edges) {
      const Algorithm chosen = select_algorithm(op, Reduce::kSum, bytes, layout, t);
      if (first || chosen != table.back().algorithm) table.push_back({op, bytes, chosen});
      first = false;
    }
  }
  return table;
}

std::string selection_json(const Thresholds& thresholds) {
  constexpr std::pair<Layout, const char*> layouts[] = {
      {Layout::kOneNode, "one node"},
      {Layout::kSeveralNodes, "several nodes"},
      {Layout::kSeveralNodesOfSeveral, "several nodes of several ranks"}};
  std::string text = "{";
  for (const auto& [layout, name] : layouts) {
    text += text_of(text.size() > 1 ? "," : "", "\"", name, "\":[");
    bool first = true;
    for (const Selection& row : selection_table(layout, thresholds)) {
      text += text_of(first ? "" : ",", "{\"operation\":\"", name_of(row.op), "\",\"from_bytes\":", row.from_bytes,
                      ",\"algorithm\":\"", name_of(row.algorithm), "\"}");
      first = false;
    }
    text += "]";
  }
  return text + "}";
}

}  // namespace hc
