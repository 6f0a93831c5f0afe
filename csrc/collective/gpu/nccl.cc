// Collectives by NCCL. All of a task is enqueued at once, in one group, on the process set's stream; the communicator
// does not block, so "enqueued" may take a few looks. Small tensors of a fused allreduce travel through one packed
// buffer, large ones from where they lie; what is packed depends on sizes only, so every rank launches the same. What
// NCCL reduces with another meaning than ours is converted by our kernels on its way into that buffer and out of it.
#include <cstring>
#include <optional>

#include "base/half.h"
#include "collective/gpu/device_state.h"
#include "collective/gpu/nccl_meaning.h"

namespace hc {

namespace {

// Below this the launch of a collective costs more than two copies within the device. Not measured on a GPU.
constexpr size_t kPackBelowBytes = 256u << 10;
constexpr size_t kPackAlign = 16;
// Below this two levels cost more launches than they save bytes. Not measured on GPUs of several machines.
constexpr size_t kLevelBytes = 64u << 10;

size_t aligned(size_t bytes) { return (bytes + kPackAlign - 1) / kPackAlign * kPackAlign; }

}  // namespace

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
    auto pending = busy_->is_pending();
    if (pending.is_ok() && pending.value()) return Progress::kPending;
    Status ok = pending.status();
    const Gpu::Current current(gpu_);
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
  struct Share {
    const std::byte* in;
    std::byte* out;
    size_t count;  // of each rank of the node
  };
  NcclComm& comm() const { return *device_.nccl.world(); }
  CuStream stream() const { return device_.stream->get(); }

  // Of the next group. What it works with is copied: it may run later.
  template <class Call>
  void add(const char* name, Call call) {
    calls_.push_back([name, call = std::move(call)](const NcclApi& nccl, NcclHandle comm) {
      return nccl.check(call(nccl, comm), name, comm);
    });
  }
  Status launch_on(NcclComm& comm) {
    busy_ = &comm;
    return comm.launch(std::exchange(calls_, {}));
  }

  Status enqueue() {
    if (reduces(task_.op) && !nccl_does_alone(task_)) HC_TRY(convert());
    HC_TRY(choose_operator());
    // What NCCL scales by an operator made for one communicator takes the flat path.
    by_levels_ = device_.nccl.reduces_by_levels() && !made_operator_ && task_.op == Op::kAllreduce;
    if (task_.op == Op::kAllreduce && !given_) HC_TRY(pack());
    HC_TRY(add_calls());
    return launch_on(comm());
  }

  Status add_calls() {
    switch (task_.op) {
      case Op::kAllreduce:
        return allreduce();
      case Op::kAllgather:
        allgather();
        return Status::ok();
      case Op::kBroadcast:
        broadcast();
        return Status::ok();
      case Op::kReducescatter:
        reducescatter();
        return Status::ok();
      case Op::kAlltoall:
        alltoall();
        return Status::ok();
      case Op::kReduce:
        reduce();
        return Status::ok();
      case Op::kGather:
        gather();
        return Status::ok();
      case Op::kScatter:
        scatter();
        return Status::ok();
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
    const double factor = this->factor();
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
    const NcclHandle at = comm().handle();
    HC_TRY(nccl_.check(nccl_.ncclRedOpCreatePreMulSum(&operator_, scalar, type_, kNcclScalarOnHost, at),
                       "ncclRedOpCreatePreMulSum", at));
    made_operator_ = true;
    return Status::ok();
  }

  double factor() const { return task_.scale.pre * task_.scale.post; }

  void drop_operator() {
    const NcclHandle at = made_operator_ && device_.nccl.world() ? comm().handle() : nullptr;
    if (at) (void)nccl_.ncclRedOpDestroy(operator_, at);
    made_operator_ = false;
  }

  bool is_packed(const Piece& piece) const {
    return packs_ && piece.count && (packs_all() || piece.count * size_of(task_.dtype) < kPackBelowBytes);
  }
  // All ranks' tensors lie in windows, or nobody's: NCCL takes other kernels for these, and asks no other rank.
  bool packs_all() const { return task_.with_joined && device_.nccl.has_windows(); }

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
    packs_ = small > 1 || packs_all();
    if (!packs_) return Status::ok();
    auto memory = gpu_.device_memory(bytes, device_.stream);
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
    auto memory = gpu_.device_memory(bytes, device_.stream);
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
    if (packed_ && !given_) reduce_all(packed_->data(), packed_->data(), packed_count_, operator_);
    for (const Piece& piece : task_.pieces) {
      if (!piece.count || is_packed(piece)) continue;
      const bool scaled = is_scaled_here(piece);
      if (scaled) HC_TRY(scale(piece));
      reduce_all(piece.in, piece.out, piece.count, scaled ? kNcclSum : operator_);
    }
    return Status::ok();
  }
  // NCCL's kernels for windows reduce these types, and in an allreduce they sum and do nothing else (up to 2.32 at
  // least): averages and scales it would do with those for any memory.
  bool is_scaled_here(const Piece& piece) const {
    const bool has_kernel = type_ == kNcclF32 || type_ == kNcclF16 || type_ == kNcclBF16;
    return has_kernel && factor() != 1.0 && device_.kernels_everywhere && !by_levels_ && piece.in == piece.out &&
           device_.nccl.is_window(piece.out);
  }
  // As NCCL does it: before the sum, in the tensor's own type.
  Status scale(const Piece& piece) {
    const CuPointer at[] = {cu_pointer(piece.out)};
    return device_.kernels->reduce({task_.dtype, Reduce::kSum, factor(), 1, 1, at, at, piece.count}, stream());
  }
  void reduce_all(const std::byte* in, std::byte* out, size_t count, int op) {
    const size_t item = size_of(task_.dtype);
    if (by_levels_ && count * item >= kLevelBytes) {
      const Share share{in, out, count / static_cast<size_t>(device_.nccl.levels()->place().inner_size)};
      const size_t shared = share.count * static_cast<size_t>(device_.nccl.levels()->place().inner_size);
      shares_.push_back(share);
      algorithm_ = "nccl two level";
      if (shared == count) return;
      in += shared * item;
      out += shared * item;
      count -= shared;
    }
    add("ncclAllReduce", [=, type = type_, to = stream()](const NcclApi& nccl, NcclHandle comm) {
      return nccl.ncclAllReduce(in, out, count, type, op, comm, to);
    });
  }

  // Each step of all shares is a group of its own: within one, NCCL promises no order. Horovod's hierarchical
  // allreduce.
  Status next_level() {
    level_ = level_ == Level::kNone ? Level::kScatter : level_ == Level::kScatter ? Level::kAcross : Level::kDone;
    const DeviceLevels& levels = *device_.nccl.levels();
    for (const Share& share : shares_) add_level(share, static_cast<size_t>(levels.place().inner_rank));
    return launch_on(level_ == Level::kAcross ? *levels.outer() : *levels.inner());
  }
  void add_level(const Share& share, size_t place) {
    const size_t item = size_of(task_.dtype);
    std::byte* const mine = share.out + share.count * item * place;
    if (level_ == Level::kScatter)
      add("ncclReduceScatter", [=, type = type_, op = operator_, to = stream()](const NcclApi& nccl, NcclHandle comm) {
        return nccl.ncclReduceScatter(share.in, mine, share.count, type, op, comm, to);
      });
    else if (level_ == Level::kAcross)
      add("ncclAllReduce", [=, type = type_, op = operator_, to = stream()](const NcclApi& nccl, NcclHandle comm) {
        return nccl.ncclAllReduce(mine, mine, share.count, type, op, comm, to);
      });
    else
      add("ncclAllGather", [=, to = stream()](const NcclApi& nccl, NcclHandle comm) {
        return nccl.ncclAllGather(mine, share.out, share.count * item, kNcclU8, comm, to);
      });
  }

  bool equal_counts() const {
    for (const size_t count : task_.counts)
      if (count != task_.counts[0]) return false;
    return true;
  }

  void allgather() {
    const Piece& piece = task_.pieces[0];
    const size_t item = size_of(task_.dtype);
    if (equal_counts())
      return add("ncclAllGather", [in = piece.in, out = piece.out, bytes = task_.counts[0] * item, to = stream()](
                                      const NcclApi& nccl, NcclHandle comm) {
        return nccl.ncclAllGather(in, out, bytes, kNcclU8, comm, to);
      });
    size_t at = 0;
    for (int r = 0; r < size_; ++r) {
      const size_t bytes = task_.counts[r] * item;
      if (bytes) broadcast_from(r, piece.in, piece.out + at, bytes);
      at += bytes;
    }
  }

  void broadcast() {
    const Piece& piece = task_.pieces[0];
    broadcast_from(task_.root, piece.in, piece.out, piece.count * size_of(task_.dtype));
  }
  void broadcast_from(int root, const std::byte* in, std::byte* out, size_t bytes) {
    const void* source = rank_ == root ? in : out;
    add("ncclBroadcast", [=, to = stream()](const NcclApi& nccl, NcclHandle comm) {
      return nccl.ncclBroadcast(source, out, bytes, kNcclU8, root, comm, to);
    });
  }

  void reducescatter() {
    const Piece& piece = task_.pieces[0];
    if (equal_counts())
      return add("ncclReduceScatter", [in = piece.in, out = piece.out, count = task_.counts[0], type = type_,
                                       op = operator_, to = stream()](const NcclApi& nccl, NcclHandle comm) {
        return nccl.ncclReduceScatter(in, out, count, type, op, comm, to);
      });
    const std::byte* at = piece.in;
    for (int r = 0; r < size_; ++r) {
      const size_t count = task_.counts[r];
      if (count) reduce_to(r, at, piece.out, count);
      at += count * size_of(task_.dtype);
    }
  }

  void reduce() {
    const Piece& piece = task_.pieces[0];
    reduce_to(task_.root, piece.in, piece.out, piece.count);
  }
  void reduce_to(int root, const std::byte* in, std::byte* out, size_t count) {
    add("ncclReduce", [=, type = type_, op = operator_, to = stream()](const NcclApi& nccl, NcclHandle comm) {
      return nccl.ncclReduce(in, out, count, type, op, root, comm, to);
    });
  }

  void gather() {
    const Piece& piece = task_.pieces[0];
    const size_t item = size_of(task_.dtype), mine = task_.counts[static_cast<size_t>(rank_)] * item;
    if (mine) send(piece.in, mine, task_.root);
    std::byte* to = piece.out;
    for (int r = 0; rank_ == task_.root && r < size_; ++r) {
      const size_t bytes = task_.counts[static_cast<size_t>(r)] * item;
      if (bytes) receive(to, bytes, r);
      to += bytes;
    }
  }

  void scatter() {
    const Piece& piece = task_.pieces[0];
    const size_t item = size_of(task_.dtype), mine = task_.counts[static_cast<size_t>(rank_)] * item;
    if (mine) receive(piece.out, mine, task_.root);
    const std::byte* from = piece.in;
    for (int r = 0; rank_ == task_.root && r < size_; ++r) {
      const size_t bytes = task_.counts[static_cast<size_t>(r)] * item;
      if (bytes) send(from, bytes, r);
      from += bytes;
    }
  }

  void send(const std::byte* from, size_t bytes, int peer) {
    add("ncclSend", [=, to = stream()](const NcclApi& nccl, NcclHandle comm) {
      return nccl.ncclSend(from, bytes, kNcclU8, peer, comm, to);
    });
  }
  void receive(std::byte* at, size_t bytes, int peer) {
    add("ncclRecv", [=, to = stream()](const NcclApi& nccl, NcclHandle comm) {
      return nccl.ncclRecv(at, bytes, kNcclU8, peer, comm, to);
    });
  }

  void alltoall() {
    const Piece& piece = task_.pieces[0];
    const size_t item = size_of(task_.dtype);
    const std::byte* from = piece.in;
    std::byte* at = piece.out;
    for (int r = 0; r < size_; ++r) {
      const size_t out = task_.counts[r] * item, in = task_.received_counts[r] * item;
      if (out) send(from, out, r);
      if (in) receive(at, in, r);
      from += out;
      at += in;
    }
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
  std::vector<NcclCall> calls_;  // of the next group
  NcclComm* busy_ = nullptr;     // what was called last
  bool by_levels_ = false;
  enum class Level { kNone, kScatter, kAcross, kDone } level_ = Level::kNone;  // the last that was enqueued
  std::vector<Share> shares_;                                                  // what goes by levels
  GpuMemoryPtr packed_;
  size_t packed_count_ = 0;
};

namespace {

class NcclBackend final : public GpuBackend {
 public:
  NcclBackend(DeviceState* device, const Group& group) : device_(*device), group_(group) {}
  const char* name() const override { return "nccl"; }
  bool can(const Task& task) const override { return nccl_does(task, device_.kernels_everywhere); }
  std::unique_ptr<Collective> start(Task task) override {
    if (reduces(task.op) && !is_element_wise(task.reduce)) return make_device_adasum(std::move(task), &device_, group_);
    return std::make_unique<NcclCollective>(std::move(task), &device_, group_);
  }
  Order order() const override { return Order::kLaunches; }

 private:
  DeviceState& device_;
  const Group& group_;
};

}  // namespace

std::unique_ptr<GpuBackend> make_nccl_backend(DeviceState* device, const Group& group) {
  return std::make_unique<NcclBackend>(device, group);
}

}  // namespace hc
