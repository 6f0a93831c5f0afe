// Checks of an operation's arguments that need to know no other rank. The submitting rank runs them before it queues
// anything; the coordinator runs them again, because it trusts no rank. Both give the user the same text. PURE.
#pragma once

#include <span>

#include "base/dtype.h"
#include "base/status.h"

namespace hc {

// InvalidArgument with the reason and the next move; the caller says which operation it is about.
Status check_reduction(Op op, Reduce reduce, DType dtype);
// For alltoall, and for scatter on its root: `splits` says how many of the `rows` each of `size` ranks gets; empty
// means equal parts.
Status check_splits(Op op, std::span<const int64_t> splits, int64_t rows, int size);

}  // namespace hc
