// What the kernels of device/kernels/kernels.cu are given: plain structures of built-in types, at most 4 KiB each, read
// by g++, nvcc and NVRTC alike; so this file includes nothing but the list of reductions. Addresses are device
// addresses.
#pragma once

#include "base/reductions.h"

namespace hc {

constexpr int kMaxPieces = 160;             // tensors in one launch of pack or unpack
constexpr int kMaxPeers = 64;               // sources, and destinations, of one reduction
constexpr unsigned kThreadsPerBlock = 256;  // of every kernel
constexpr unsigned kPlaceBytes = 16;        // the unit of KernelPiece::place

// One tensor and its place in the packed buffer.
struct KernelPiece {
  unsigned long long at;
  unsigned count;  // elements; bytes for the kernels that copy bytes
  unsigned place;  // where it begins in the packed buffer, in units of kPlaceBytes
};

struct PackArguments {
  unsigned long long packed;  // aligned to kPlaceBytes
  double factor;              // each element times this, integers in their own type (arithmetic/reduce.h)
  long long divisor;          // then, integers of unpack only: divided, toward zero
  KernelPiece piece[kMaxPieces];
};

// out[d][i] = post * (pre*in[0][i] op pre*in[1][i] op ...) / divisor for every d, in the order of `in`. An output may
// be exactly one of the inputs.
struct ReduceArguments {
  unsigned long long in[kMaxPeers];
  unsigned long long out[kMaxPeers];
  unsigned long long count;  // elements
  double pre, post;
  long long divisor;  // integers only
  int sources, destinations;
  Reduce reduce;  // reduced_as(), not Adasum
  bool scaled;    // pre or post is not 1
};

// Adasum. A line is what one row's threads have summed: for each of a.a, a.b and b.b, one fake of every lane.
constexpr int kMaxAdasumRows = 160, kMaxAdasumSums = 500;
constexpr unsigned kAdasumLanes = kThreadsPerBlock;  // of a line that the products write

// Parts of two vectors. `place`: which line the products write; which sums (3 doubles) scale them when they combine.
struct AdasumRow {
  unsigned long long a, b;
  unsigned count, place;
};
struct AdasumArguments {
  unsigned long long sums;  // lines, or sums
  AdasumRow row[kMaxAdasumRows];
};
// to's line r is the sum of from's lines [first, first + count), lane by lane, and lanes whose numbers are congruent.
struct AdasumSum {
  unsigned first, count;
};
struct AdasumFoldArguments {
  unsigned long long from, to;
  unsigned lanes_in, lanes_out;
  AdasumSum sum[kMaxAdasumSums];
};

static_assert(sizeof(PackArguments) <= 4096 && sizeof(ReduceArguments) <= 4096, "what every GPU takes");
static_assert(sizeof(AdasumArguments) <= 4096 && sizeof(AdasumFoldArguments) <= 4096, "what every GPU takes");

}  // namespace hc
