// See mismatch.h. The texts keep the words that Horovod's users search for ("Mismatched data types", ...).
#include "agreement/mismatch.h"

#include <algorithm>

#include "agreement/argument_check.h"
#include "agreement/signature_table.h"
#include "base/quoted.h"

namespace hc {
namespace {

enum class Difference { kNone, kTensorCount, kDType, kReduce, kScale, kRoot, kDevice, kShape, kStep };

struct Found {
  Difference what = Difference::kNone;
  size_t tensor = 0;  // kDType, kShape
};

bool first_dimension_is_free(Op op) { return op == Op::kAllgather || op == Op::kAlltoall || op == Op::kGather; }

bool same_shape(Op op, const TensorMeta& a, const TensorMeta& b) {
  if (a.shape.size() != b.shape.size()) return false;
  size_t from = first_dimension_is_free(op) && !a.shape.empty() ? 1 : 0;
  return std::equal(a.shape.begin() + static_cast<ptrdiff_t>(from), a.shape.end(),
                    b.shape.begin() + static_cast<ptrdiff_t>(from));
}

// NaN equals NaN here: ranks that announce the same nonsense agree.
bool same_number(double a, double b) { return a == b || (a != a && b != b); }

Found difference(Op op, const Signature& a, const Signature& b) {
  if (op == Op::kScatter) return {a.root != b.root ? Difference::kRoot : Difference::kNone};  // only the root has rows
  if (a.tensors.size() != b.tensors.size()) return {Difference::kTensorCount};
  for (size_t t = 0; t < a.tensors.size(); t++)
    if (a.tensors[t].dtype != b.tensors[t].dtype) return {Difference::kDType, t};
  if (reduces(op)) {
    if (a.reduce != b.reduce) return {Difference::kReduce};
    if (!same_number(a.prescale, b.prescale) || !same_number(a.postscale, b.postscale)) return {Difference::kScale};
  }
  if (has_root(op) && a.root != b.root) return {Difference::kRoot};
  if (a.device != b.device) return {Difference::kDevice};
  for (size_t t = 0; t < a.tensors.size(); t++)
    if (!same_shape(op, a.tensors[t], b.tensors[t])) return {Difference::kShape, t};
  return {a.left_out != b.left_out ? Difference::kStep : Difference::kNone};
}

std::string announced(const Found& found, const Signature& s, const WorldRanks& world_rank) {
  switch (found.what) {
    case Difference::kTensorCount:
      return text_of(s.tensors.size(), s.tensors.size() == 1 ? " tensor" : " tensors");
    case Difference::kReduce:
      return text_of("reduce operation ", name_of(s.reduce));
    case Difference::kScale:
      return text_of("prescale ", s.prescale, " and postscale ", s.postscale);
    case Difference::kRoot:
      return text_of("root rank ", world_rank(s.root));
    case Difference::kDevice:
      return s.device == 0 ? "a tensor in host memory (CPU)" : "a tensor on a GPU";
    case Difference::kStep:
      return s.left_out == 0 ? std::string("that of the step after the last common one")
                             : text_of("that of ", s.left_out + 1, " steps after the last common one, having left out ",
                                       s.left_out);
    default:
      break;
  }
  std::string which = s.tensors.size() > 1 ? text_of("tensor ", found.tensor, " as ") : "";
  return which + text_of_tensor(s.tensors[found.tensor]);
}

// Horovod's words, then the next move.
// culprit: -1 where as many ranks announced the one as the other.
std::string advice(const Subject& subject, const Found& found, int culprit, bool floats) {
  const char* op = name_of(subject.op);
  const char* one_name = "Every rank must submit one name with one dtype and shape";
  switch (found.what) {
    case Difference::kTensorCount:
      return text_of("Mismatched ", op, " tensor counts. Every rank must put the same tensors into a group",
                     subject.op == Op::kAllreduce ? ", and give weight= where the others do." : ".");
    case Difference::kDType:
      return text_of("Mismatched data types. ", one_name,
                     !floats       ? std::string(".")
                     : culprit < 0 ? std::string("; is mixed precision on for some of the ranks only?")
                                   : text_of("; is mixed precision on for rank ", culprit, " only?"));
    case Difference::kReduce:
      return text_of("Mismatched ", op, " reduce operations. Every rank must pass the same op.");
    case Difference::kScale:
      return "Mismatched prescale and/or postscale factors. Every rank must pass the same factors.";
    case Difference::kRoot:
      return text_of("Mismatched ", op, " root ranks. Every rank must pass the same root_rank.");
    case Difference::kDevice:
      return text_of("Mismatched ", op,
                     " CPU/GPU device selection. Move the tensor to one kind of device on every rank.");
    case Difference::kStep:
      return text_of("Mismatched steps. ", culprit < 0 ? std::string("One of them") : text_of("Rank ", culprit),
                     " takes its steps by what it alone sees: do optax.apply_if_finite, lax.cond or a loss scaler "
                     "stand around the optimizer? Put them inside of it, or decide by an allreduce, alike on every "
                     "rank.");
    default:
      break;
  }
  if (first_dimension_is_free(subject.op))
    return text_of("Mismatched ", op, " tensor shapes. Only the first dimension may differ between ranks.");
  return text_of("Mismatched ", op, " tensor shapes. ", one_name,
                 culprit < 0 ? std::string("; do the ranks run different models or batch sizes?")
                             : text_of("; does rank ", culprit, " run another model or batch size?"));
}

// The fewer are in the wrong: with eight ranks of which only rank 0 differs, rank 0 is named. Of two that differ
// neither is: `and` between them tells the launcher (launch/root_cause.py).
std::string describe(const Subject& subject, std::span<const Signature* const> by_rank, int reference,
                     const WorldRanks& world_rank) {
  const Signature& a = *by_rank[static_cast<size_t>(reference)];
  std::vector<int> like, unlike;
  for (size_t r = 0; r < by_rank.size(); r++) {
    if (by_rank[r] == nullptr) continue;
    bool differs = difference(subject.op, a, *by_rank[r]).what != Difference::kNone;
    (differs ? unlike : like).push_back(static_cast<int>(r));
  }
  const bool even_split = like.size() == unlike.size();
  if (like.size() < unlike.size()) std::swap(like, unlike);
  int odd = unlike.front(), even = like.front();
  const Signature& mine = *by_rank[static_cast<size_t>(odd)];
  const Signature& theirs = *by_rank[static_cast<size_t>(even)];
  Found found = difference(subject.op, mine, theirs);
  bool floats = found.what == Difference::kDType && is_float(mine.tensors[found.tensor].dtype) &&
                is_float(theirs.tensors[found.tensor].dtype);
  std::string more;
  constexpr size_t kListed = 8;
  for (size_t i = 1; i < std::min(unlike.size(), kListed); i++)
    more += text_of(i == 1 ? "" : ", ", world_rank(unlike[i]));
  if (!more.empty()) more = text_of(" (ranks ", more, unlike.size() > kListed ? ", ..." : "", " differ as well)");
  return text_of(label_of(subject), ": rank ", world_rank(odd), " announced ", announced(found, mine, world_rank),
                 even_split ? " and rank " : ", rank ", world_rank(even), " announced ",
                 announced(found, theirs, world_rank), more, ". ",
                 advice(subject, found, even_split ? -1 : world_rank(odd), floats));
}

Agreement refuse(Code code, std::string text) {
  Agreement a;
  a.error = code;
  a.text = std::move(text);
  return a;
}

// What is wrong on every rank alike; Agreement::error is kOk when nothing is.
Agreement check_arguments(const Subject& subject, const Signature& s, int size) {
  const Op op = subject.op;
  const bool gathers = op == Op::kAllgather || op == Op::kReducescatter || op == Op::kAlltoall || op == Op::kGather ||
                       op == Op::kScatter;
  for (const TensorMeta& t : s.tensors) {
    if (gathers && t.shape.empty())
      return refuse(Code::kMismatch,
                    text_of(label_of(subject), ": Process-set rank zero tried to ", name_of(subject.op),
                            " a rank-zero tensor. Give it a first dimension (reshape it to [1])."));
    if (Status fits = check_reduction(op, s.reduce, t.dtype); !fits.is_ok())
      return refuse(fits.code(), text_of(label_of(subject), ": ", fits.text(), "."));
  }
  if (has_root(op) && (s.root < 0 || s.root >= size))
    return refuse(Code::kInvalidArgument,
                  text_of(label_of(subject), ": root ", s.root, " is not one of the process set's ", size, " ranks."));
  if ((op == Op::kAlltoall || op == Op::kScatter) && s.tensors.size() != 1)
    return refuse(Code::kUnsupported,
                  text_of(label_of(subject), ": ", name_of(op), " takes one tensor, not ", s.tensors.size(), "."));
  return {};
}

// A scatter from a GPU needs one on every rank; one from host memory asks for none.
Agreement everybody_on_gpu(const Subject& subject, const Signature& root, std::span<const Signature* const> by_rank,
                           const WorldRanks& world_rank) {
  for (size_t r = 0; root.device && r < by_rank.size(); ++r)
    if (by_rank[r] && !by_rank[r]->device)
      return refuse(Code::kMismatch,
                    text_of(label_of(subject), ": rank ", world_rank(root.root), " scatters a tensor on a GPU, rank ",
                            world_rank(static_cast<int>(r)),
                            " takes part without one. Pass a tensor on the GPU there (an empty one will do), or give "
                            "the root's in host memory."));
  return {};
}

// Rows of every rank's slice: the first ranks take one more where the division leaves a rest.
void slice_rows(int64_t rows, int size, std::vector<int64_t>* out) {
  for (int r = 0; r < size; r++) out->push_back(rows / size + (r < rows % size ? 1 : 0));
}

// One rank's line of the alltoall table, or the root's rows for everybody; no splits = equal parts.
Agreement add_splits(const Subject& subject, const Signature& s, int rank, int size, std::vector<int64_t>* out) {
  const int64_t rows = s.tensors[0].shape[0];
  if (Status fits = check_splits(subject.op, s.splits, rows, size); !fits.is_ok())
    return refuse(fits.code(), text_of(label_of(subject), ": rank ", rank, ": ", fits.text(), "."));
  if (!s.splits.empty())
    out->insert(out->end(), s.splits.begin(), s.splits.end());
  else if (subject.op == Op::kScatter)
    slice_rows(rows, size, out);
  else
    out->insert(out->end(), static_cast<size_t>(size), rows / size);
  return {};
}

Agreement rows_of(const Subject& subject, std::span<const Signature* const> by_rank, const WorldRanks& world_rank) {
  Agreement a;
  int size = static_cast<int>(by_rank.size());
  const Signature& any = *by_rank[0];
  if (subject.op == Op::kAlltoall) {
    for (int r = 0; r < size; r++) {
      Agreement bad = add_splits(subject, *by_rank[static_cast<size_t>(r)], world_rank(r), size, &a.rows);
      if (bad.error != Code::kOk) return bad;
    }
    return a;
  }
  if (subject.op == Op::kScatter) {
    Agreement bad = add_splits(subject, *by_rank[static_cast<size_t>(any.root)], world_rank(any.root), size, &a.rows);
    return bad.error != Code::kOk ? bad : a;
  }
  for (size_t t = 0; t < any.tensors.size(); t++) {
    if (subject.op == Op::kReducescatter) slice_rows(any.tensors[t].shape[0], size, &a.rows);
    if (!first_dimension_is_free(subject.op)) continue;
    for (const Signature* s : by_rank) a.rows.push_back(s->tensors[t].shape[0]);
  }
  return a;
}

// Adasum adds up its dot products slice by slice, and the slices depend on what shares the buffer; apart, the same call
// gives the same bits from run to run.
bool may_fuse(const Subject& subject, const Signature& s) {
  if (subject.op != Op::kAllreduce || s.reduce == Reduce::kAdasum || s.tensors.empty()) return false;
  return std::all_of(s.tensors.begin(), s.tensors.end(),
                     [&](const TensorMeta& t) { return t.dtype == s.tensors[0].dtype; });
}

uint64_t hash_of_key(const FuseKey& key) {
  Signature s;
  s.reduce = key.reduce;
  s.device = key.device;
  s.in_arena = key.in_arena;
  s.prescale = key.prescale;
  s.postscale = key.postscale;
  s.root = static_cast<int32_t>(key.dtype);
  return hash_of(s) | 1;
}

std::string joined_text(const Subject& subject, std::span<const Signature* const> by_rank,
                        const WorldRanks& world_rank) {
  auto gone = std::find(by_rank.begin(), by_rank.end(), nullptr);
  return text_of(label_of(subject), ": ", title_of(subject.op), " is not supported with Join at this time. Rank ",
                 world_rank(static_cast<int>(gone - by_rank.begin())),
                 " has joined and contributes to allreduce and barrier only.");
}

// The identity element of a rank that has joined is not scaled. Where a scaled 0 still changes nothing nobody has to do
// anything about it; elsewhere the others scale their inputs beforehand, in host memory.
bool cannot_scale_before(const Signature& s) {
  return s.device != 0 && s.prescale != 1.0 && !has_zero_identity(s.reduce);
}

std::string prescaled_text(const Subject& subject, const Signature& s) {
  return text_of(label_of(subject), ": ", name_of(s.reduce), " of tensors on GPUs with a prescale factor (", s.prescale,
                 ") is not supported while a rank has joined. Scale the tensor before the call, or the result.");
}

}  // namespace

std::string title_of(Op op) {
  std::string title = name_of(op);
  title[0] = static_cast<char>(title[0] - 'a' + 'A');
  return title;
}

std::string label_of(const Subject& s) {
  if (s.unnamed) return text_of(name_of(s.op), " 'noname.", s.sequence, "' (unnamed, matched by order)");
  return text_of(name_of(s.op), " ", in_quotes(s.name));
}

std::string key_of(const Subject& s) {
  if (s.unnamed) return text_of(name_of(s.op), ".noname.", s.sequence);
  return text_of(name_of(s.op), ".", printable(s.name));
}

Agreement agree(const Subject& subject, std::span<const Signature* const> by_rank, const WorldRanks& world_rank) {
  int reference = -1;
  bool someone_joined = false, in_arena = true;
  const Signature* last_equal = nullptr;  // ranks that announced the same share one object: compare it once
  for (size_t r = 0; r < by_rank.size(); r++) {
    const Signature* s = by_rank[r];
    if (s == nullptr) {
      someone_joined = true;
      continue;
    }
    in_arena = in_arena && s->in_arena;
    if (reference < 0) reference = static_cast<int>(r);
    if (s == last_equal) continue;
    if (difference(subject.op, *by_rank[static_cast<size_t>(reference)], *s).what != Difference::kNone)
      return refuse(Code::kMismatch, describe(subject, by_rank, reference, world_rank));
    last_equal = s;
  }
  if (someone_joined && subject.op != Op::kAllreduce && subject.op != Op::kBarrier)
    return refuse(Code::kUnsupported, joined_text(subject, by_rank, world_rank));
  const Signature& first = *by_rank[static_cast<size_t>(reference)];
  const bool by_root = subject.op == Op::kScatter && first.root >= 0 && first.root < static_cast<int>(by_rank.size());
  const Signature& s = by_root ? *by_rank[static_cast<size_t>(first.root)] : first;
  Agreement a = check_arguments(subject, s, static_cast<int>(by_rank.size()));
  if (a.error == Code::kOk && by_root) a = everybody_on_gpu(subject, s, by_rank, world_rank);
  if (a.error != Code::kOk) return a;
  if (someone_joined && cannot_scale_before(s)) return refuse(Code::kUnsupported, prescaled_text(subject, s));
  if (!someone_joined) a = rows_of(subject, by_rank, world_rank);
  if (a.error != Code::kOk) return a;
  a.in_arena = in_arena && !someone_joined && !s.tensors.empty();
  a.on_device = s.device != 0 && !s.tensors.empty();
  a.fusable = may_fuse(subject, s);
  if (a.fusable) a.fuse = {s.reduce, s.tensors[0].dtype, s.device, a.in_arena, s.prescale, s.postscale};
  if (a.fusable) a.fuse_hash = hash_of_key(a.fuse);
  a.bytes = bytes_of(s);
  return a;
}

std::string mismatched_operations(std::string_view name, std::pair<Op, int> first, std::pair<Op, int> second,
                                  const WorldRanks& world_rank) {
  return text_of(name_of(first.first), " ", in_quotes(name), ": rank ", world_rank(first.second), " announced ",
                 name_of(first.first), " and rank ", world_rank(second.second), " announced ", name_of(second.first),
                 ". Mismatched operations. Every rank must use one name for one operation; do the ranks take different "
                 "branches, or is one name used twice?");
}

bool differ_by_counter(std::string_view a, std::string_view b) {
  auto digit = [](char c) { return c >= '0' && c <= '9'; };
  if (a == b) return false;
  size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (digit(a[i]) && digit(b[j])) {
      while (i < a.size() && digit(a[i])) i++;
      while (j < b.size() && digit(b[j])) j++;
    } else if (a[i++] != b[j++]) {
      return false;
    }
  }
  return i == a.size() && j == b.size();
}

}  // namespace hc
