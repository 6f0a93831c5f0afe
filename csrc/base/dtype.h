// Element types, operations, reductions (reductions.h) and algorithms: one list each, the same numbers in C, C++ and
// Python.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/reductions.h"

namespace hc {

enum class DType : uint8_t { kBool, kU8, kI8, kU16, kI16, kI32, kI64, kF16, kBF16, kF32, kF64 };
inline constexpr int kDTypeCount = 11;

constexpr size_t size_of(DType t) {
  constexpr size_t sizes[kDTypeCount] = {1, 1, 1, 2, 2, 4, 8, 2, 2, 4, 8};
  return sizes[static_cast<int>(t)];
}
constexpr const char* name_of(DType t) {
  constexpr const char* names[kDTypeCount] = {"bool",  "uint8",   "int8",     "uint16",  "int16",  "int32",
                                              "int64", "float16", "bfloat16", "float32", "float64"};
  return names[static_cast<int>(t)];
}
constexpr bool is_float(DType t) { return t >= DType::kF16; }

constexpr Kind kind_of(DType t) {
  return t == DType::kBool ? Kind::kBool : is_float(t) ? Kind::kFloat : Kind::kInteger;
}
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
};

}  // namespace hc
