#include "engine/intake/arguments.h"
#include "agreement/mismatch.h"
#include "agreement/varint.h"

namespace hc {

namespace {

constexpr size_t kMaxRequestBytes = 4u << 20;  // of a control frame's 16 MiB
constexpr size_t kManyTensors = 4096;          // fewer, of whatever shapes, fit

// In front of every text: allreduce 'layer1.weight', unnamed allreduce.
std::string label_of(const Submission& s) {
  if (is_message(s.op)) return text_of(name_of(s.op), s.op == Op::kSend ? " to rank " : " from rank ", s.root);
  return s.name.empty() ? text_of("unnamed ", name_of(s.op)) : text_of(name_of(s.op), " '", s.name, "'");
}

template <class... Parts>
Status wrong(const Submission& s, const Parts&... parts) {
  return error(Code::kInvalidArgument, label_of(s), ": ", parts...);
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? "," : "") + std::to_string(shape[i]);
  return text + "]";
}

// What the other ranks' readers would refuse would break the job there; so it is refused here, on this rank alone.
Status check_name(const Submission& s) {
  if (s.name.size() <= kMaxTextBytes) return Status::ok();
  return error(Code::kInvalidArgument, name_of(s.op), " '", s.name.substr(0, 60), "...': a name of ", s.name.size(),
               " bytes; allowed are ", kMaxTextBytes);
}

Status check_frame(const Submission& s) {
  size_t bytes = 0;
  for (const auto& t : s.tensors) {
    bytes += 2;
    for (int64_t d : t.shape) bytes += varint_bytes(static_cast<uint64_t>(d));
  }
  if (bytes <= kMaxRequestBytes) return Status::ok();
  return wrong(s, "the shapes of its ", s.tensors.size(), " tensors take ", bytes, " bytes in a message; allowed are ",
               kMaxRequestBytes, ". Make several groups of them");
}

Status check_tensor(const Submission& s, const Submission::Tensor& t, bool is_root) {
  for (int64_t d : t.shape)
    if (d < 0) return wrong(s, "negative dimension in ", shape_text(t.shape));
  if (t.shape.size() > kMaxDimensions)
    return wrong(s, "a tensor of ", t.shape.size(), " dimensions; allowed are ", kMaxDimensions);
  // As the readers do it: zeros are left out, so that an empty tensor cannot hide a size that overflows.
  int64_t count = 1, bytes = static_cast<int64_t>(size_of(t.dtype));
  for (int64_t d : t.shape) {
    if (d != 0 && (__builtin_mul_overflow(bytes, d, &bytes) || bytes > kMaxTensorBytes))
      return wrong(s, "shape ", shape_text(t.shape), " has too many elements");
    count *= d != 0;
  }
  const bool fills =
      s.op == Op::kAllreduce || s.op == Op::kBroadcast || s.op == Op::kReceive || (s.op == Op::kReduce && is_root);
  if (count && !t.in && s.op != Op::kReceive) return wrong(s, "tensor without memory");
  if (count && !t.out && fills) return wrong(s, "no memory for the result");
  if (!reduces(s.op)) return Status::ok();
  if (s.reduce == Reduce::kAverage && t.dtype == DType::kBool)
    return wrong(s, "Average of bool has no meaning; use Sum (or) or Product (and), or convert first");
  if (is_float(t.dtype) && !takes(s.reduce, t.dtype))
    return wrong(s, name_of(s.reduce), " works on the bits of integers and bools, not on ", name_of(t.dtype),
                 "; use Min, Max, Sum or Product, or pass the bits as an integer type of the same width");
  if (s.op == Op::kAllreduce && s.reduce == Reduce::kAdasum && !is_float(t.dtype))
    return wrong(s, "Adasum needs floating-point tensors, not ", name_of(t.dtype),
                 "; use op=Sum or op=Average, or convert first");
  return Status::ok();
}

// Alltoall on every rank, scatter on its root.
Status check_rows(const Submission& s, int size) {
  const auto& t = s.tensors[0];
  if (t.shape.empty()) return wrong(s, "the tensor must have at least one dimension");
  const int64_t rows = t.shape[0];
  if (s.splits.empty()) {
    if (s.op == Op::kAlltoall && rows % size)
      return wrong(s, "first dimension ", rows, " is not divisible by the number of ranks ", size, "; pass splits");
    return Status::ok();
  }
  if (static_cast<int>(s.splits.size()) != size)
    return wrong(s, "splits has ", s.splits.size(), " entries for ", size, " ranks");
  int64_t sum = 0;
  for (int64_t n : s.splits) {
    if (n < 0) return wrong(s, "negative entry in splits");
    if (__builtin_add_overflow(sum, n, &sum)) return wrong(s, "splits add up to more than 2^63");
  }
  if (sum > rows) return wrong(s, "the sum of splits, ", sum, ", exceeds the first dimension ", rows);
  return Status::ok();
}

Status check_message(const Submission& s, const Members& set) {
  const bool any = s.op == Op::kReceive && s.root == -1;
  if (!any && set.position_of(s.root) < 0) return wrong(s, "it is not a member of process set ", set.id);
  if (s.tag < 0) return wrong(s, "tag ", s.tag, " is negative");
  return Status::ok();
}

}  // namespace

Status check_arguments(const Submission& s, const Members& set, int me) {
  HC_TRY(check_name(s));
  if (set.group_rank < 0)
    return error(Code::kInvalidArgument, title_of(s.op), ": Rank ", me,
                 " is not a member of the provided process set.");
  if (is_message(s.op)) HC_TRY(check_message(s, set));
  if (has_root(s.op) && set.position_of(s.root) < 0)
    return wrong(s, "root rank ", s.root, " is not a member of process set ", set.id);
  const bool is_root = has_root(s.op) && s.root == me;
  if (s.tensors.empty() && (s.op == Op::kSend || (s.op == Op::kScatter && is_root)))
    return wrong(s, "no tensor was given");
  for (const auto& t : s.tensors) HC_TRY(check_tensor(s, t, is_root));
  if (s.tensors.size() > kManyTensors) HC_TRY(check_frame(s));
  if (s.op == Op::kReducescatter && s.reduce != Reduce::kSum && s.reduce != Reduce::kAverage)
    return wrong(s,
                 "Reducescatter currently only supports AVERAGE and SUM. Pass op=Sum or op=Average, or take this "
                 "rank's rows of an allreduce");
  if (s.op == Op::kReduce && s.reduce == Reduce::kAdasum)
    return wrong(s, "Adasum is for allreduce; use it, or another op");
  if (s.op == Op::kAlltoall || (s.op == Op::kScatter && is_root)) return check_rows(s, set.size());
  return Status::ok();
}

}  // namespace hc
