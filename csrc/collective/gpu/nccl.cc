// Collectives by NCCL. All of a task is enqueued at once, in one group, on the process set's stream; the communicator
// does not block, so "enqueued" may take a few looks. Small tensors of a fused allreduce travel through one packed
// buffer, large ones from where they lie; what is packed depends on sizes only, so every rank launches the same. What
// NCCL reduces with another meaning than ours is converted by our kernels on its way into that buffer and out of it.
#include <cstring>
#include <optional>

#include "base/half.h"
#include "collective/gpu/device_state.h"

namespace hc {

namespace {

// Below this the launch of a collective costs more than two copies within the device. Not measured on a GPU.
constexpr size_t kPackBelowBytes = 256u << 10;
constexpr size_t kPackAlign = 16;
// Below this two levels cost more launches than they save bytes. Not measured on GPUs of several machines.
constexpr size_t kLevelBytes = 64u << 10;

// NCCL's type with the same arithmetic; for movement alone everything is bytes.
int nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kU8:
      return kNcclU8;
    case DType::kI8:
      return kNcclI8;
    case DType::kI32:
      return kNcclI32;
    case DType::kI64:
      return kNcclI64;
    case DType::kF16:
      return kNcclF16;
    case DType::kBF16:
      return kNcclBF16;
    case DType::kF32:
      return kNcclF32;
    case DType::kF64:
      return kNcclF64;
    case DType::kU16:
    case DType::kI16:
      break;
  }
  return -1;
}

// -1: NCCL has none. Of two bools, "or" is the greater one, "and" the smaller.
int nccl_op(DType dtype, Reduce reduce) {
  const bool is_bool = dtype == DType::kBool;
  switch (reduce) {
    case Reduce::kAverage:
    case Reduce::kSum:
      return is_bool ? kNcclMax : kNcclSum;
    case Reduce::kMin:
      return kNcclMin;
    case Reduce::kMax:
      return kNcclMax;
    case Reduce::kProduct:
      return is_bool ? kNcclMin : kNcclProduct;
    case Reduce::kAnd:
      return is_bool ? kNcclMin : -1;
    case Reduce::kOr:
      return is_bool ? kNcclMax : -1;
    case Reduce::kXor:
    case Reduce::kAdasum:
      break;
  }
  return -1;
}

size_t aligned(size_t bytes) { return (bytes + kPackAlign - 1) / kPackAlign * kPackAlign; }

bool nccl_does_alone(const Task& task) {
  if (nccl_type(task.dtype) < 0) return false;
  if (task.dtype == DType::kBool) return true;
  if (!is_float(task.dtype)) return task.scale.is_unit();  // our integer average truncates toward zero in int64
  return task.reduce == Reduce::kSum || task.scale.is_unit();
}

// The type in which a reduction travels that NCCL does not do alone: prescaled on the way in, postscaled and divided on
// the way out, as on the host. 16-bit integers wrap in 32 bits as they do in 16; halves compute in float32.
DType wire_type(const Task& task) {
  if (task.dtype == DType::kF16 || task.dtype == DType::kBF16) return DType::kF32;
  if (is_float(task.dtype)) return task.dtype;
  return size_of(task.dtype) == 2 ? DType::kI32 : task.dtype;
}

}  // namespace

bool nccl_does(const Task& task, bool with_kernels) {
  if (!reduces(task.op)) return true;
  if (task.reduce == Reduce::kAdasum) return with_kernels && is_float(task.dtype);  // device_adasum.cc
  if (nccl_op(task.dtype, task.reduce) < 0) return false;
  return with_kernels || nccl_does_alone(task);
}

class NcclCollective : public Collective {
 public:
  NcclCollective(Task task, DeviceState* device, const Group& group)
      : task_(std::move(task)),
        device_(*device),
        nccl_(device->nccl.api()),
        gpu_(*device->gpu),
        size_(group.size),
        rank_(group.rank) {
    algorithm_ = "nccl";
  }
  ~NcclCollective() override { drop_operator(); }

  Progress start() override {
    const Gpu::Current current(gpu_);
    Status enqueued = enqueue();
    return enqueued.is_ok() ? Progress::kPending : fail(enqueued);
  }

  Progress step(bool* moved) override {
    const Gpu::Current current(gpu_);
    auto pending = nccl_.is_pending(busy_);
    if (pending.is_ok() && pending.value()) return Progress::kPending;
    Status ok = pending.status();
    if (ok.is_ok() && !shares_.empty() && level_ != Level::kDone) {
      *moved = true;
      ok = next_level();
      return ok.is_ok() ? Progress::kPending : fail(ok);
    }
    if (ok.is_ok()) ok = unpack();
    if (!ok.is_ok()) return fail(ok);
    drop_operator();
    *moved = true;
    return Progress::kDone;
  }

 private:
  NcclHandle comm() const { return device_.nccl.world(); }
  CuStream stream() const { return device_.stream; }

  Status enqueue() {
    if (reduces(task_.op) && !nccl_does_alone(task_)) HC_TRY(convert());
    HC_TRY(choose_operator());
    // What NCCL scales by an operator made for one communicator takes the flat path.
    by_levels_ = device_.nccl.reduces_by_levels() && !made_operator_ && task_.op == Op::kAllreduce;
    busy_ = comm();
    if (task_.op == Op::kAllreduce && !given_) HC_TRY(pack());
    HC_TRY(nccl_.check(nccl_.ncclGroupStart(), "ncclGroupStart", comm()));
    Status called = call();
    // The group is ended in any case: the calls of this thread would stay open.
    Status ended = nccl_.check(nccl_.ncclGroupEnd(), "ncclGroupEnd", comm());
    return called.is_ok() ? ended : called;
  }

  Status call() {
    switch (task_.op) {
      case Op::kAllreduce:
        return allreduce();
      case Op::kAllgather:
        return allgather();
      case Op::kBroadcast:
        return broadcast();
      case Op::kReducescatter:
        return reducescatter();
      case Op::kAlltoall:
        return alltoall();
      case Op::kReduce:
        return reduce();
      case Op::kGather:
        return gather();
      case Op::kScatter:
        return scatter();
      case Op::kBarrier:
      case Op::kJoin:
      case Op::kSend:
      case Op::kReceive:
        break;
    }
    return error(Code::kInternal, "NCCL does no ", name_of(task_.op));
  }

  // Average and scales happen inside NCCL, before the sum and in the tensor's own type.
  Status choose_operator() {
    if (!reduces(task_.op)) return Status::ok();
    type_ = nccl_type(task_.dtype);
    operator_ = nccl_op(task_.dtype, task_.reduce);
    const double factor = task_.scale.pre * task_.scale.post;
    if (!is_float(task_.dtype) || factor == 1.0) return Status::ok();
    if (factor == 1.0 / size_) {
      operator_ = kNcclAverage;
      return Status::ok();
    }
    const auto as_float = static_cast<float>(factor);
    const Float16 as_half = to_float16(as_float);
    const BFloat16 as_bfloat = to_bfloat16(as_float);
    const void* scalar = &factor;
    if (type_ == kNcclF32) scalar = &as_float;
    if (type_ == kNcclF16) scalar = &as_half;
    if (type_ == kNcclBF16) scalar = &as_bfloat;
    HC_TRY(nccl_.check(nccl_.ncclRedOpCreatePreMulSum(&operator_, scalar, type_, kNcclScalarOnHost, comm()),
                       "ncclRedOpCreatePreMulSum", comm()));
    made_operator_ = true;
    return Status::ok();
  }

  void drop_operator() {
    if (made_operator_ && comm()) (void)nccl_.ncclRedOpDestroy(operator_, comm());
    made_operator_ = false;
  }

  bool is_packed(const Piece& piece) const {
    return packs_ && piece.count && piece.count * size_of(task_.dtype) < kPackBelowBytes;
  }

  Status pack() {
    const size_t item = size_of(task_.dtype);
    size_t bytes = 0;
    int small = 0;
    packs_ = true;
    for (const Piece& piece : task_.pieces)
      if (is_packed(piece)) {
        bytes += aligned(piece.count * item);
        ++small;
      }
    packs_ = small > 1;
    if (!packs_) return Status::ok();
    auto memory = gpu_.device_memory(bytes, stream());
    HC_TRY(memory.status());
    packed_ = memory.take();
    packed_count_ = bytes / item;
    if (device_.kernels) return device_.kernels->pack(as_it_is(), packed_->at(), small_pieces(true), stream());
    return for_packed([&](CuPointer at, const Piece& piece, size_t count) {
      return gpu_.copy(at, cu_pointer(piece.in), count, stream());
    });
  }

  Packing as_it_is() const { return {task_.dtype, task_.dtype, 1, 1}; }
  std::vector<PackedPiece> small_pieces(bool inputs) const {
    std::vector<PackedPiece> pieces;
    size_t at = 0;
    for (const Piece& piece : task_.pieces) {
      if (!is_packed(piece)) continue;
      pieces.push_back({cu_pointer(inputs ? piece.in : piece.out), piece.count, at});
      at += aligned(piece.count * size_of(task_.dtype));
    }
    return pieces;
  }

  // Packs all tensors in the type in which they travel; the task's pieces then lie in the packed buffer.
  Status convert() {
    Task given = task_;
    const DType wire = wire_type(task_);
    size_t all = 0;
    for (const size_t count : task_.counts) all += count;  // reducescatter: the input, piece.count is the output
    size_t bytes = 0;
    std::vector<PackedPiece> inputs;
    for (const Piece& piece : task_.pieces) {
      const size_t count = task_.op == Op::kReducescatter ? all : piece.count;
      inputs.push_back({cu_pointer(piece.in), count, bytes});
      bytes += GpuKernels::packed_bytes(count, wire);
    }
    const size_t output = task_.op == Op::kReducescatter ? bytes : 0;  // others reduce in place
    if (output) bytes += GpuKernels::packed_bytes(task_.pieces[0].count, wire);
    auto memory = gpu_.device_memory(bytes, stream());
    HC_TRY(memory.status());
    packed_ = memory.take();
    HC_TRY(device_.kernels->pack({task_.dtype, wire, task_.scale.pre, 1}, packed_->at(), inputs, stream()));
    std::byte* const base = packed_->data();
    task_.dtype = wire;
    task_.scale = {};
    const size_t count = task_.op == Op::kAllreduce ? bytes / size_of(wire) : task_.pieces[0].count;
    task_.pieces = {{base, given.pieces[0].out ? base + output : nullptr, count}};
    converted_at_ = output;
    given_ = std::move(given);
    return Status::ok();
  }

  Status convert_back() {
    std::vector<PackedPiece> outputs;
    size_t at = converted_at_;
    for (const Piece& piece : given_->pieces) {
      if (piece.out) outputs.push_back({cu_pointer(piece.out), piece.count, at});
      at += GpuKernels::packed_bytes(piece.count, task_.dtype);
    }
    const Scale& scale = given_->scale;
    return device_.kernels->unpack({given_->dtype, task_.dtype, scale.post, scale.divisor}, packed_->at(), outputs,
                                   stream());
  }

  Status unpack() {
    if (!packed_) return Status::ok();
    if (given_)
      HC_TRY(convert_back());
    else if (device_.kernels)
      HC_TRY(device_.kernels->unpack(as_it_is(), packed_->at(), small_pieces(false), stream()));
    else
      HC_TRY(for_packed([&](CuPointer at, const Piece& piece, size_t count) {
        return gpu_.copy(cu_pointer(piece.out), at, count, stream());
      }));
    auto used = gpu_.record(stream());
    HC_TRY(used.status());
    packed_->used_until(used.take());
    packed_.reset();
    return Status::ok();
  }

  template <class Copy>
  Status for_packed(Copy&& copy) {
    CuPointer at = packed_->at();
    for (const Piece& piece : task_.pieces) {
      if (!is_packed(piece)) continue;
      const size_t bytes = piece.count * size_of(task_.dtype);
      HC_TRY(copy(at, piece, bytes));
      at += aligned(bytes);
    }
    return Status::ok();
  }

  Status allreduce() {
    if (packed_ && !given_) HC_TRY(reduce_all(packed_->data(), packed_->data(), packed_count_));
    for (const Piece& piece : task_.pieces)
      if (piece.count && !is_packed(piece)) HC_TRY(reduce_all(piece.in, piece.out, piece.count));
    return Status::ok();
  }
  Status reduce_all(const std::byte* in, std::byte* out, size_t count) {
    const size_t item = size_of(task_.dtype);
    if (by_levels_ && count * item >= kLevelBytes) {
      const Share share{in, out, count / static_cast<size_t>(device_.nccl.levels()->place().inner_size)};
      const size_t shared = share.count * static_cast<size_t>(device_.nccl.levels()->place().inner_size);
      shares_.push_back(share);
      algorithm_ = "nccl two level";
      if (shared == count) return Status::ok();
      in += shared * item;
      out += shared * item;
      count -= shared;
    }
    return nccl_.check(nccl_.ncclAllReduce(in, out, count, type_, operator_, comm(), stream()), "ncclAllReduce",
                       comm());
  }

  // Each step of all shares is a group of its own: within one, NCCL promises no order. Horovod's hierarchical
  // allreduce.
  Status next_level() {
    level_ = level_ == Level::kNone ? Level::kScatter : level_ == Level::kScatter ? Level::kAcross : Level::kDone;
    const DeviceLevels& levels = *device_.nccl.levels();
    busy_ = level_ == Level::kAcross ? levels.outer() : levels.inner();
    const size_t item = size_of(task_.dtype);
    HC_TRY(nccl_.check(nccl_.ncclGroupStart(), "ncclGroupStart", busy_));
    Status called;
    for (const Share& share : shares_) {
      std::byte* const mine = share.out + share.count * item * static_cast<size_t>(levels.place().inner_rank);
      if (!called.is_ok()) break;
      if (level_ == Level::kScatter)
        called = nccl_.check(nccl_.ncclReduceScatter(share.in, mine, share.count, type_, operator_, busy_, stream()),
                             "ncclReduceScatter", busy_);
      else if (level_ == Level::kAcross)
        called = nccl_.check(nccl_.ncclAllReduce(mine, mine, share.count, type_, operator_, busy_, stream()),
                             "ncclAllReduce", busy_);
      else
        called = nccl_.check(nccl_.ncclAllGather(mine, share.out, share.count * item, kNcclU8, busy_, stream()),
                             "ncclAllGather", busy_);
    }
    Status ended = nccl_.check(nccl_.ncclGroupEnd(), "ncclGroupEnd", busy_);
    return called.is_ok() ? ended : called;
  }

  bool equal_counts() const {
    for (const size_t count : task_.counts)
      if (count != task_.counts[0]) return false;
    return true;
  }

  Status allgather() {
    const Piece& piece = task_.pieces[0];
    const size_t item = size_of(task_.dtype);
    if (equal_counts())
      return nccl_.check(nccl_.ncclAllGather(piece.in, piece.out, task_.counts[0] * item, kNcclU8, comm(), stream()),
                         "ncclAllGather", comm());
    size_t at = 0;
    for (int r = 0; r < size_; ++r) {
      const size_t bytes = task_.counts[r] * item;
      if (bytes) HC_TRY(broadcast_from(r, piece.in, piece.out + at, bytes));
      at += bytes;
    }
    return Status::ok();
  }

  Status broadcast() {
    const Piece& piece = task_.pieces[0];
    return broadcast_from(task_.root, piece.in, piece.out, piece.count * size_of(task_.dtype));
  }
  Status broadcast_from(int root, const std::byte* in, std::byte* out, size_t bytes) {
    const void* source = rank_ == root ? in : out;
    return nccl_.check(nccl_.ncclBroadcast(source, out, bytes, kNcclU8, root, comm(), stream()), "ncclBroadcast",
                       comm());
  }

  Status reducescatter() {
    const Piece& piece = task_.pieces[0];
    if (equal_counts())
      return nccl_.check(
          nccl_.ncclReduceScatter(piece.in, piece.out, task_.counts[0], type_, operator_, comm(), stream()),
          "ncclReduceScatter", comm());
    const std::byte* at = piece.in;
    for (int r = 0; r < size_; ++r) {
      const size_t count = task_.counts[r];
      if (count)
        HC_TRY(nccl_.check(nccl_.ncclReduce(at, piece.out, count, type_, operator_, r, comm(), stream()), "ncclReduce",
                           comm()));
      at += count * size_of(task_.dtype);
    }
    return Status::ok();
  }

  Status reduce() {
    const Piece& piece = task_.pieces[0];
    return nccl_.check(
        nccl_.ncclReduce(piece.in, piece.out, piece.count, type_, operator_, task_.root, comm(), stream()),
        "ncclReduce", comm());
  }

  Status gather() {
    const Piece& piece = task_.pieces[0];
    const size_t item = size_of(task_.dtype), mine = task_.counts[static_cast<size_t>(rank_)] * item;
    if (mine) HC_TRY(send(piece.in, mine, task_.root));
    if (rank_ != task_.root) return Status::ok();
    std::byte* to = piece.out;
    for (int r = 0; r < size_; ++r) {
      const size_t bytes = task_.counts[static_cast<size_t>(r)] * item;
      if (bytes) HC_TRY(receive(to, bytes, r));
      to += bytes;
    }
    return Status::ok();
  }

  Status scatter() {
    const Piece& piece = task_.pieces[0];
    const size_t item = size_of(task_.dtype), mine = task_.counts[static_cast<size_t>(rank_)] * item;
    if (mine) HC_TRY(receive(piece.out, mine, task_.root));
    const std::byte* from = piece.in;
    for (int r = 0; rank_ == task_.root && r < size_; ++r) {
      const size_t bytes = task_.counts[static_cast<size_t>(r)] * item;
      if (bytes) HC_TRY(send(from, bytes, r));
      from += bytes;
    }
    return Status::ok();
  }

  Status send(const std::byte* from, size_t bytes, int to) {
    return nccl_.check(nccl_.ncclSend(from, bytes, kNcclU8, to, comm(), stream()), "ncclSend", comm());
  }
  Status receive(std::byte* to, size_t bytes, int from) {
    return nccl_.check(nccl_.ncclRecv(to, bytes, kNcclU8, from, comm(), stream()), "ncclRecv", comm());
  }

  Status alltoall() {
    const Piece& piece = task_.pieces[0];
    const size_t item = size_of(task_.dtype);
    const std::byte* from = piece.in;
    std::byte* to = piece.out;
    for (int r = 0; r < size_; ++r) {
      const size_t out = task_.counts[r] * item, in = task_.received_counts[r] * item;
      if (out) HC_TRY(send(from, out, r));
      if (in) HC_TRY(receive(to, in, r));
      from += out;
      to += in;
    }
    return Status::ok();
  }

  Task task_;                  // as NCCL is to do it
  std::optional<Task> given_;  // as it was asked for, where it is converted
  size_t converted_at_ = 0;    // where in the packed buffer the results are
  DeviceState& device_;
  const NcclApi& nccl_;
  Gpu& gpu_;
  const int size_, rank_;
  int type_ = kNcclU8, operator_ = kNcclSum;
  bool made_operator_ = false;
  bool packs_ = false;
  NcclHandle busy_ = nullptr;  // the communicator that was called last
  bool by_levels_ = false;
  enum class Level { kNone, kScatter, kAcross, kDone } level_ = Level::kNone;  // the last that was enqueued
  struct Share {
    const std::byte* in;
    std::byte* out;
    size_t count;  // of each rank of the node
  };
  std::vector<Share> shares_;  // what goes by levels
  GpuMemoryPtr packed_;
  size_t packed_count_ = 0;
};

std::unique_ptr<Collective> make_nccl_collective(Task task, DeviceState* device, const Group& group) {
  return std::make_unique<NcclCollective>(std::move(task), device, group);
}

}  // namespace hc
