// Compares what the ranks announced for one operation. When they agree, the result says on what: the fusion key, the
// bytes, and the table of rows for operations whose ranks contribute different numbers of rows (allgather, alltoall
// ...). When they do not, it holds the text that every rank raises. PURE.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "agreement/negotiation.h"
#include "agreement/rank_set.h"

namespace hc {

// Allreduces with equal keys may share a buffer.
struct FuseKey {
  Reduce reduce = Reduce::kSum;
  DType dtype = DType::kF32;
  uint8_t device = 0;
  bool in_arena = false;
  double prescale = 1.0;
  double postscale = 1.0;
  bool operator==(const FuseKey&) const = default;
};

struct Agreement {
  Code error = Code::kOk;
  std::string text;
  bool in_arena = false;
  bool on_device = false;
  bool fusable = false;
  FuseKey fuse;
  uint64_t fuse_hash = 0;     // of `fuse`; not 0 when fusable
  size_t bytes = 0;           // of the lowest rank's tensors together
  std::vector<int64_t> rows;  // as PlanBatch::rows
};

std::string title_of(Op op);  // as Horovod's messages begin: Allreduce

// What the operation is called in a text: allreduce 'layer3.weight', allreduce 'noname.17' (unnamed).
struct Subject {
  Op op = Op::kAllreduce;
  bool unnamed = false;
  uint64_t sequence = 0;
  std::string_view name;
};
std::string label_of(const Subject& subject);  // for errors
std::string key_of(const Subject& subject);    // for lists: allreduce.layer3.weight, allreduce.noname.17

// Translates group ranks into the world ranks that users know; an empty table means that they are equal.
struct WorldRanks {
  std::span<const int> table;
  int operator()(int rank) const {
    return static_cast<size_t>(rank) < table.size() ? table[static_cast<size_t>(rank)] : rank;
  }
};

// `by_rank`: the announced signatures, null for a rank that has joined instead (at least one is not null).
Agreement agree(const Subject& subject, std::span<const Signature* const> by_rank, const WorldRanks& world_rank);

// For one name with two operations: `first` on rank a, `second` on rank b, and no rank left that could complete either.
std::string mismatched_operations(std::string_view name, std::pair<Op, int> first, std::pair<Op, int> second,
                                  const WorldRanks& world_rank);

// True when the names differ only in the numbers that they contain ("grad_7", "grad_8").
bool differ_by_counter(std::string_view a, std::string_view b);

}  // namespace hc
