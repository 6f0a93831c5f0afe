#include "collective/selection.h"

#include <algorithm>
#include <numeric>

#include "collective/shared/shared.h"

namespace hc {
namespace {

// Below this the messages' latency counts, not their bytes: recursive doubling over all ranks.
constexpr size_t kTwoLevelBytes = 8 * kKiB;

// A rank's share from which on rounds cost less than that their messages wait for each other
// (docs/decisions/rounds.md).
constexpr size_t kRingShareBytes = 16 * kKiB;

// Smaller tensors that lie in the arena go with the private ones, of which many are copied into one batch: in place
// each is a batch of its own, in which all ranks wait for each other twice. A caller that waits at once has nothing to
// fuse it with, and in place is the faster there from kInPlaceAloneBytes on (docs/decisions/shared-memory.md).
constexpr size_t kInPlaceBytes = 64 * kKiB, kInPlaceAloneBytes = 16 * kKiB;

// Below this the second wait for each other costs more than half of the bytes (docs/decisions/bypass.md).
constexpr size_t kHalvesFromBytes = 16 * kKiB;

Algorithm select_in_shared_memory(Op op, size_t bytes, const Thresholds& t) {
  // Where my part lies in a peer's buffer depends on counts that I do not know.
  if (op == Op::kAlltoall) return Algorithm::kSharedBlocked;
  return bytes <= std::min(t.flat_bytes, kFlatBufferBytes) ? Algorithm::kSharedFlat : Algorithm::kSharedBlocked;
}

// Where a rank's share is short, the rounds cost more than the bytes. Up to three ranks a ring has as few.
Algorithm in_few_rounds(size_t bytes, int ranks) {
  return ranks > 3 && bytes < kRingShareBytes * static_cast<size_t>(ranks) ? Algorithm::kCirculant : Algorithm::kRing;
}

Algorithm select_over_channels(Op op, size_t bytes, const Thresholds& t) {
  switch (op) {
    case Op::kAllreduce:
      if (bytes < t.ring_from_bytes) return Algorithm::kRecursiveDoubling;
      return in_few_rounds(bytes, t.ranks);
    case Op::kAllgather:
      return in_few_rounds(bytes, t.ranks);
    case Op::kReducescatter:
      return t.ranks > 4 ? in_few_rounds(bytes, t.ranks) : Algorithm::kRing;  // two rounds for three gain nothing
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

// The largest number of bytes that any member puts into its buffer; the same on every member.
size_t most_in_a_buffer(const Task& task) {
  const size_t item = size_of(task.dtype);
  switch (task.op) {
    case Op::kBarrier:
      return 0;
    case Op::kAllgather:
    case Op::kGather:
      return *std::max_element(task.counts.begin(), task.counts.end()) * item;
    case Op::kScatter:
    case Op::kReducescatter:
      return std::accumulate(task.counts.begin(), task.counts.end(), size_t{0}) * item;
    case Op::kAllreduce:
    case Op::kReduce:
    case Op::kBroadcast:
    case Op::kAlltoall:
    case Op::kJoin:
    case Op::kSend:
    case Op::kReceive:
      break;
  }
  return task.bytes();
}

// What an operation between nodes is chosen by: the whole of what is reduced or gathered, the same on every member.
size_t bytes_of_all(const Task& task) {
  if (task.op != Op::kAllgather && task.op != Op::kReducescatter) return task.bytes();
  return std::accumulate(task.counts.begin(), task.counts.end(), size_t{0}) * size_of(task.dtype);
}

}  // namespace

Algorithm choose_in_shared_memory(const Task& task) {
  if (task.algorithm == Algorithm::kSharedInPlace && task.op == Op::kAllreduce && task.pieces.size() == 1)
    return Algorithm::kSharedInPlace;
  const size_t payload = most_in_a_buffer(task);
  // With nothing to move the ranks only wait for each other, whatever the task demands.
  if (task.algorithm == Algorithm::kSharedBlocked && payload > 0) return Algorithm::kSharedBlocked;
  return select_in_shared_memory(task.op, payload, {.flat_bytes = task.flat_bytes});
}

bool goes_by_levels(Op op, const Levels& levels) {
  return !levels.flat() && (op == Op::kAllreduce || op == Op::kBroadcast || op == Op::kAllgather);
}

Algorithm choose_between_nodes(const Task& task, int ranks) {
  for (const Algorithm demanded : {Algorithm::kRing, Algorithm::kRecursiveDoubling, Algorithm::kCirculant})
    if (task.algorithm == demanded) return demanded;
  const bool two_level = task.algorithm == Algorithm::kTwoLevel;
  const Layout layout = two_level ? Layout::kSeveralNodesOfSeveral : Layout::kSeveralNodes;
  return select_algorithm(task.op, task.reduce, bytes_of_all(task), layout,
                          {task.flat_bytes, task.ring_from_bytes, two_level, ranks});
}

Algorithm choose_over_channels(const Task& task, int ranks) {
  if (task.algorithm != Algorithm::kAuto) return task.algorithm;
  return select_over_channels(task.op, bytes_of_all(task), {.ring_from_bytes = task.ring_from_bytes, .ranks = ranks});
}

// Several blocks are under way at a time, which hides their rounds.
Algorithm select_for_block(size_t block_bytes, size_t ring_from_bytes) {
  return block_bytes < ring_from_bytes ? Algorithm::kRecursiveDoubling : Algorithm::kRing;
}

bool reduces_in_place(bool in_arena, Reduce reduce) { return in_arena && is_element_wise(reduce); }

Layout layout_of(std::span<const int> node) {
  std::vector<int> sorted(node.begin(), node.end());
  std::sort(sorted.begin(), sorted.end());
  if (sorted.empty() || sorted.front() == sorted.back()) return Layout::kOneNode;
  const bool repeats = std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end();
  return repeats ? Layout::kSeveralNodesOfSeveral : Layout::kSeveralNodes;
}

bool in_place_pays(size_t bytes, size_t tensors, bool caller_waits) {
  return bytes >= tensors * (caller_waits ? kInPlaceAloneBytes : kInPlaceBytes);
}

Algorithm algorithm_in_plan(Op op, bool may_be_two_level) {
  return op == Op::kAllreduce && may_be_two_level ? Algorithm::kTwoLevel : Algorithm::kAuto;
}

// Two ranks read as much of each other's memory in a round as in blocks, and wait for each other once or twice, not
// three times.
bool may_bypass(Op op, Reduce reduce, size_t bytes, int ranks, size_t flat_bytes) {
  size_t limit = std::min(kBypassBytes, ranks == 2 ? 4 * flat_bytes : flat_bytes);
  switch (op) {
    case Op::kBarrier:
      return true;
    case Op::kAllreduce:
      if (!is_element_wise(reduce)) return false;
      if (ranks == 2) limit = std::min(2 * kHalfBytes, 64 * flat_bytes);
      break;
    case Op::kBroadcast:
    case Op::kAllgather:
    case Op::kReducescatter:
    case Op::kAlltoall:
      break;
    case Op::kReduce:
    case Op::kGather:
    case Op::kScatter:
    case Op::kJoin:
    case Op::kSend:
    case Op::kReceive:
      return false;
  }
  return bytes > 0 && bytes <= limit;
}

bool goes_in_halves(const Task& task, int ranks) {
  return task.op == Op::kAllreduce && ranks == 2 && task.bytes() >= kHalvesFromBytes;
}

// A ring of length 0 leaves no batch that recursive doubling would reduce.
size_t most_fused_in_arenas(bool one_node, size_t ring_from_bytes) {
  return one_node || ring_from_bytes == 0 ? 0 : ring_from_bytes - 1;
}

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
    case Algorithm::kCirculant:
      return "circulant";
  }
  return "?";
}

std::vector<Selection> selection_table(Layout layout, const Thresholds& t) {
  std::vector<size_t> edges{0, std::min(t.flat_bytes, kFlatBufferBytes) + 1, kTwoLevelBytes + 1, t.ring_from_bytes,
                            kRingShareBytes * static_cast<size_t>(t.ranks)};
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
  constexpr std::pair<Layout, const char*> layouts[] = {{Layout::kOneNode, "one node"},
                                                        {Layout::kSeveralNodes, "8 nodes"},
                                                        {Layout::kSeveralNodesOfSeveral, "8 nodes of several ranks"}};
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
