// What a reduction of ours is in NCCL's terms, and where NCCL means something else by it. PURE: the same on every rank.
#pragma once

#include "collective/collective.h"

namespace hc {

// NCCL's type with the same arithmetic, -1: none; for movement alone everything is bytes.
int nccl_type(DType dtype);
// -1: NCCL has none. Of two bools, "or" is the greater one, "and" the smaller.
int nccl_op(DType dtype, Reduce reduce);
// A reduction that NCCL does with our meaning, as it is.
bool nccl_does_alone(const Task& task);
// The type in which a reduction travels that NCCL does not do alone: prescaled on the way in, postscaled and divided on
// the way out, as on the host. 16-bit integers wrap in 32 bits as they do in 16; halves compute in float32.
DType wire_type(const Task& task);

}  // namespace hc
