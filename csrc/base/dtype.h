// Element types (include/horoclone_dtypes.h), operations, reductions (reductions.h) and algorithms: one list each, the
// same numbers in C, C++ and Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "base/reductions.h"
#include "horoclone_dtypes.h"

namespace hc {

// Elements for which C++ has no type (half.h converts them).
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// Those that are reduced. The numbers of what is only moved follow theirs, without enumerators, because no switch is
// about them.
#define HC_ENUMERATOR(name, enumerator, ...) enumerator,
enum class DType : uint8_t { HC_REDUCED_DTYPES(HC_ENUMERATOR) };
#undef HC_ENUMERATOR

struct DTypeTraits {
  const char* name;
  size_t size;
  Kind kind;
};
#define HC_REDUCED(name, enumerator, text, bytes, kind, ...) {text, bytes, Kind::kind},
#define HC_MOVED(name, text, bytes) {text, bytes, Kind::kMoved},
inline constexpr DTypeTraits kDTypes[] = {HC_REDUCED_DTYPES(HC_REDUCED) HC_MOVED_DTYPES(HC_MOVED)};
#undef HC_REDUCED
#undef HC_MOVED
#define HC_ONE(...) +1
inline constexpr int kReducedDTypeCount = 0 HC_REDUCED_DTYPES(HC_ONE);
#undef HC_ONE
inline constexpr int kDTypeCount = static_cast<int>(std::size(kDTypes));

constexpr size_t size_of(DType t) { return kDTypes[static_cast<int>(t)].size; }
constexpr const char* name_of(DType t) { return kDTypes[static_cast<int>(t)].name; }
constexpr Kind kind_of(DType t) { return kDTypes[static_cast<int>(t)].kind; }
constexpr bool is_float(DType t) { return kind_of(t) == Kind::kFloat; }
constexpr bool takes(Reduce r, DType t) { return takes(r, kind_of(t)); }

enum class Op : uint8_t {
  kAllreduce,
  kAllgather,
  kBroadcast,
  kAlltoall,
  kReducescatter,
  kJoin,
  kBarrier,
  kReduce,
  kGather,
  kScatter,
  kSend,
  kReceive
};
inline constexpr int kOpCount = 12;
constexpr const char* name_of(Op op) {
  constexpr const char* names[kOpCount] = {"allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "join",
                                           "barrier",   "reduce",    "gather",    "scatter",  "send",          "recv"};
  return names[static_cast<int>(op)];
}
// Operations with a root, on which all ranks must agree.
constexpr bool has_root(Op op) {
  return op == Op::kBroadcast || op == Op::kReduce || op == Op::kGather || op == Op::kScatter;
}
constexpr bool reduces(Op op) { return op == Op::kAllreduce || op == Op::kReducescatter || op == Op::kReduce; }
// Operations between two ranks, which the coordinator does not see.
constexpr bool is_message(Op op) { return op == Op::kSend || op == Op::kReceive; }

// How a group performs an operation. collective/selection.h chooses one.
enum class Algorithm : uint8_t {
  kAuto = 0,
  kSharedFlat = 1,         // small: payload beside the flag, one barrier
  kSharedBlocked = 2,      // private tensors: blocks through arena buffers
  kSharedInPlace = 3,      // every rank's buffer lies in an arena
  kRing = 4,               // over channels, bandwidth-optimal
  kRecursiveDoubling = 5,  // over channels, few elements
  kTwoLevel = 6,           // shared memory within a node, channels across
  kBinomialTree = 7,
  kPairwise = 8,
  kCirculant = 9,  // over channels, the ring's bytes in fewer rounds
};

}  // namespace hc
