// What is wrong with arguments by themselves. The rank that submits asks before it queues anything; the coordinator
// asks again, because it believes no rank. Both give the user the same words. PURE.
#pragma once

#include <span>

#include "base/dtype.h"
#include "base/status.h"

namespace hc {

// InvalidArgument with the reason and the next move; the caller says which operation it is about.
Status check_reduction(Op op, Reduce reduce, DType dtype);
// alltoall, and scatter on its root: how many of `rows` each of `size` ranks gets. No splits: equal parts.
Status check_splits(Op op, std::span<const int64_t> splits, int64_t rows, int size);

}  // namespace hc
