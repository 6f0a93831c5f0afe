#include "engine/intake/arguments.h"

#include "agreement/argument_check.h"
#include "agreement/mismatch.h"
#include "agreement/varint.h"
#include "base/quoted.h"

namespace hc {

namespace {

constexpr size_t kMaxRequestBytes = 4u << 20;  // of a control frame's 16 MiB
constexpr size_t kManyTensors = 4096;          // fewer, of whatever shapes, fit

// In front of every text: allreduce 'layer1.weight', unnamed allreduce.
std::string label_of(const Submission& s) {
  if (is_message(s.op)) return text_of(name_of(s.op), s.op == Op::kSend ? " to rank " : " from rank ", s.root);
  return s.name.empty() ? text_of("unnamed ", name_of(s.op)) : text_of(name_of(s.op), " ", in_quotes(s.name));
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
  return error(Code::kInvalidArgument, name_of(s.op), " ", in_quotes(s.name.substr(0, 60)), "...: a name of ",
               s.name.size(), " bytes; allowed are ", kMaxTextBytes);
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
  if (Status fits = check_reduction(s.op, s.reduce, t.dtype); !fits.is_ok()) return wrong(s, fits.text());
  return Status::ok();
}

// Alltoall on every rank, scatter on its root.
Status check_rows(const Submission& s, int size) {
  const auto& t = s.tensors[0];
  if (t.shape.empty()) return wrong(s, "the tensor must have at least one dimension");
  if (Status fits = check_splits(s.op, s.splits, t.shape[0], size); !fits.is_ok()) return wrong(s, fits.text());
  if (!s.awaited.empty() && s.awaited.size() != static_cast<size_t>(size))
    return wrong(s, "rows are awaited from ", s.awaited.size(), " ranks of ", size);
  return Status::ok();
}

Status check_message(const Submission& s, const Members& set) {
  const bool any = s.op == Op::kReceive && s.root == -1;
  if (!any && set.position_of(s.root) < 0) return wrong(s, "rank ", s.root, set.no_member_text());
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
  if (has_root(s.op) && set.position_of(s.root) < 0) return wrong(s, "root rank ", s.root, set.no_member_text());
  const bool is_root = has_root(s.op) && s.root == me;
  if (s.tensors.empty() && (s.op == Op::kSend || (s.op == Op::kScatter && is_root)))
    return wrong(s, "no tensor was given");
  for (const auto& t : s.tensors) HC_TRY(check_tensor(s, t, is_root));
  if (s.tensors.size() > kManyTensors) HC_TRY(check_frame(s));
  if (s.op == Op::kAlltoall || (s.op == Op::kScatter && is_root)) return check_rows(s, set.size());
  return Status::ok();
}

}  // namespace hc
