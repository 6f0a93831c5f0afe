#include "agreement/argument_check.h"

namespace hc {

Status check_reduction(Op op, Reduce reduce, DType dtype) {
  const auto wrong = [](const auto&... parts) { return error(Code::kInvalidArgument, parts...); };
  if (!reduces(op)) return Status::ok();
  if (op == Op::kReducescatter && reduced_as(reduce) != Reduce::kSum)
    return wrong(
        "Reducescatter currently only supports AVERAGE and SUM. Pass op=Sum or op=Average, or take this rank's "
        "rows of an allreduce");
  if (op == Op::kReduce && !is_element_wise(reduce)) return wrong("Adasum is for allreduce; use it, or another op");
  if (takes(reduce, dtype)) return Status::ok();
  if (kind_of(dtype) == Kind::kMoved)
    return wrong(
        "Tensor type ", name_of(dtype), " is not supported by ", name_of(op),
        ", only by what moves data: broadcast, allgather, alltoall, gather, scatter, send. Convert it first, to ",
        "float32 or int64 for example; of complex numbers pass the real and imaginary parts");
  if (!is_element_wise(reduce))
    return wrong(name_of(reduce), " needs floating-point tensors, not ", name_of(dtype),
                 "; use op=Sum or op=Average, or convert first");
  if (kind_of(dtype) == Kind::kFloat)
    return wrong(name_of(reduce), " works on the bits of integers and bools, not on ", name_of(dtype),
                 "; use Min, Max, Sum or Product, or pass the bits as an integer type of the same width");
  return wrong(name_of(reduce), " of ", name_of(dtype),
               " has no meaning; use Sum (or) or Product (and), or convert first");
}

Status check_splits(Op op, std::span<const int64_t> splits, int64_t rows, int size) {
  const auto wrong = [](const auto&... parts) { return error(Code::kInvalidArgument, parts...); };
  if (splits.empty()) {
    if (op == Op::kAlltoall && rows % size)
      return wrong("first dimension ", rows, " is not divisible by the number of ranks ", size, "; pass splits");
    return Status::ok();
  }
  if (splits.size() != static_cast<size_t>(size))
    return wrong("splits has ", splits.size(), " entries for ", size, " ranks");
  int64_t sum = 0;
  for (int64_t n : splits) {
    if (n < 0) return wrong("negative entry in splits");
    if (__builtin_add_overflow(sum, n, &sum)) return wrong("splits add up to more than 2^63");
  }
  if (sum > rows) return wrong("the sum of splits, ", sum, ", exceeds the first dimension ", rows);
  return Status::ok();
}

}  // namespace hc
