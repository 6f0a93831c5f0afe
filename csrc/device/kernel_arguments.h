// What the kernels of device/kernels/kernels.cu are given: plain structures of built-in types, at most 4 KiB each, read
// by g++, nvcc and NVRTC alike; so this file includes nothing. Addresses are device addresses.
#pragma once

namespace hc {

constexpr int kMostPieces = 160;            // tensors in one launch of pack or unpack
constexpr int kMostPeers = 64;              // sources, and destinations, of one reduction
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
  double factor;              // each element times this
  long long divisor;          // then, integers of unpack only: divided, toward zero
  KernelPiece piece[kMostPieces];
};

enum KernelFold { kFoldSum, kFoldMin, kFoldMax, kFoldProduct };

// out[d][i] = post * (pre*in[0][i] op pre*in[1][i] op ...) / divisor for every d, in the order of `in`. An output may
// be exactly one of the inputs.
struct ReduceArguments {
  unsigned long long in[kMostPeers];
  unsigned long long out[kMostPeers];
  unsigned long long count;  // elements
  double pre, post;
  long long divisor;  // integers only; other than 1 for sums without scales only
  int sources, destinations;
  int fold;    // KernelFold
  int scaled;  // pre or post is not 1
};

static_assert(sizeof(PackArguments) <= 4096 && sizeof(ReduceArguments) <= 4096, "what every GPU takes");

}  // namespace hc
