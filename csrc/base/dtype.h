// Element types, operations, reductions (reductions.h) and algorithms: one list each, the same numbers in C, C++ and
// Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "base/reductions.h"

namespace hc {

enum class DType : uint8_t { kBool, kU8, kI8, kU16, kI16, kI32, kI64, kF16, kBF16, kF32, kF64 };
inline constexpr int kDTypeCount = 11;  // of those with arithmetic

// What is moved and never reduced. Their numbers follow those of the enumerators; they have none themselves, because no
// switch is about them. The order is that of horoclone.h and horoclone/ops.py.
struct MovedDType {
  const char* name;
  size_t size;
};
inline constexpr MovedDType kMovedDTypes[] = {{"uint32", 4},
                                              {"uint64", 8},
                                              {"complex32", 4},
                                              {"complex64", 8},
                                              {"complex128", 16},
                                              {"float8_e4m3fn", 1},
                                              {"float8_e4m3fnuz", 1},
                                              {"float8_e5m2", 1},
                                              {"float8_e5m2fnuz", 1},
                                              {"float8_e8m0fnu", 1},
                                              {"float8_e4m3", 1},
                                              {"float8_e3m4", 1},
                                              {"float8_e4m3b11fnuz", 1},
                                              {"float6_e2m3fn", 1},
                                              {"float6_e3m2fn", 1},
                                              {"float4_e2m1fn", 1},
                                              {"float4_e2m1fn_x2", 1},
                                              {"int4", 1},
                                              {"uint4", 1},
                                              {"int2", 1},
                                              {"uint2", 1}};
inline constexpr int kMovableCount = kDTypeCount + static_cast<int>(std::size(kMovedDTypes));
constexpr bool is_only_moved(DType t) { return static_cast<int>(t) >= kDTypeCount; }
constexpr const MovedDType& moved(DType t) { return kMovedDTypes[static_cast<int>(t) - kDTypeCount]; }

constexpr size_t size_of(DType t) {
  if (is_only_moved(t)) return moved(t).size;
  constexpr size_t sizes[kDTypeCount] = {1, 1, 1, 2, 2, 4, 8, 2, 2, 4, 8};
  return sizes[static_cast<int>(t)];
}
constexpr const char* name_of(DType t) {
  if (is_only_moved(t)) return moved(t).name;
  constexpr const char* names[kDTypeCount] = {"bool",  "uint8",   "int8",     "uint16",  "int16",  "int32",
                                              "int64", "float16", "bfloat16", "float32", "float64"};
  return names[static_cast<int>(t)];
}
constexpr bool is_float(DType t) { return t >= DType::kF16 && t <= DType::kF64; }

constexpr Kind kind_of(DType t) {
  if (is_only_moved(t)) return Kind::kMoved;
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
