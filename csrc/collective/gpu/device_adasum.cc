// Adasum of tensors on GPUs, by NCCL and our kernels, all of it enqueued: nothing waits on the host. As on the host
// (adasum.cc) every rank gets one slice of all vectors, by one exchange, and combines them along the tree; only the
// sums of a level go round; then the slices are gathered. Of nodes (Task::adasum_by_node) with equal numbers of ranks,
// the members of each first reduce and scatter their average, so that a rank exchanges its share only with the ranks of
// its place on the other nodes: Horovod's form for GPUs. Thread: the thread that makes progress.
#include <bit>

#include "collective/channels/schedule.h"
#include "collective/gpu/device_state.h"
#include "collective/nodes.h"

namespace hc {

namespace {

constexpr size_t kPartElements = 16u << 10;  // of one block of threads
constexpr unsigned kLanesBetween = 16;       // lines are folded to so many lanes, then to one

// Where everything lies, in elements. The row has all tensors one behind the other. Each of the ranks that exchange
// combines one slice of it, or of this rank's share when a node's ranks share the row; the slice is cut into parts
// where tensors and units of work end.
class AdasumLayout {
 public:
  struct Part {
    size_t tensor, first, count;  // first: in the slice
  };
  // levels null: all ranks exchange with all. `me` of the `ranks` that exchange.
  AdasumLayout(const Task& task, DType row_type, const DeviceLevels* levels, int ranks, int me)
      : row_item_(size_of(row_type)), is_packed_(levels || task.pieces.size() > 1), me_(me) {
    size_t at = 0;
    for (const Piece& piece : task.pieces) {
      places_.push_back(at);
      at += is_packed_ ? GpuKernels::packed_bytes(piece.count, row_type) / row_item_ : piece.count;
    }
    const size_t unit = kPlaceBytes / row_item_;  // slices begin where 16 bytes do
    if (levels) {
      const auto inner = static_cast<size_t>(levels->place().inner_size);
      share_ = ((at + inner - 1) / inner + unit - 1) / unit * unit;
      share_begin_ = share_ * static_cast<size_t>(levels->place().inner_rank);
      whole_ = share_ * inner;
    } else {
      share_ = whole_ = at;
    }
    for (int r = 0; r <= ranks; ++r)
      begins_.push_back(std::min(share_, chunk_begin((share_ + unit - 1) / unit, ranks, r) * unit));
    stride_ = (slice() + unit - 1) / unit * unit;
    cut_into_parts(task);
  }

  bool is_packed() const { return is_packed_; }  // else the row is the only tensor
  size_t place(size_t tensor) const { return places_[tensor]; }
  size_t tensors() const { return places_.size(); }
  size_t whole() const { return whole_; }
  size_t share() const { return share_; }
  size_t share_begin() const { return share_begin_; }
  int ranks() const { return static_cast<int>(begins_.size()) - 1; }
  size_t slice() const { return begins_[static_cast<size_t>(me_) + 1] - begins_[static_cast<size_t>(me_)]; }
  size_t stride() const { return stride_; }  // from one rank's version of my slice to the next
  const std::vector<Part>& parts() const { return parts_; }
  const std::vector<AdasumSum>& lines() const { return lines_; }  // [tensor] its parts

  // In bytes of the row, of rank r's slice in the share.
  size_t slice_bytes(int r) const {
    return (begins_[static_cast<size_t>(r) + 1] - begins_[static_cast<size_t>(r)]) * row_item_;
  }
  size_t slice_at(int r) const { return begins_[static_cast<size_t>(r)] * row_item_; }
  size_t my_slice_at() const { return slice_at(me_); }

 private:
  void cut_into_parts(const Task& task) {
    const size_t begin = share_begin_ + begins_[static_cast<size_t>(me_)], end = begin + slice();
    for (size_t t = 0; t < task.pieces.size(); ++t) {
      const size_t first = std::max(places_[t], begin), last = std::min(places_[t] + task.pieces[t].count, end);
      AdasumSum lines{static_cast<unsigned>(parts_.size()), 0};
      for (size_t from = first; from < last; from += kPartElements, ++lines.count)
        parts_.push_back({t, from - begin, std::min(kPartElements, last - from)});
      lines_.push_back(lines);
    }
  }

  const size_t row_item_;
  const bool is_packed_;
  const int me_;
  std::vector<size_t> places_;  // [tensor] where it begins in the row
  size_t whole_ = 0, share_ = 0, share_begin_ = 0;
  std::vector<size_t> begins_;  // [ranks + 1] the slices of the share
  size_t stride_ = 0;
  std::vector<Part> parts_;
  std::vector<AdasumSum> lines_;
};

// Combines this rank's slice of all vectors along the tree, level by level: the products of each pair, whose sums the
// caller adds up over all ranks, and then one vector in the place of two.
class AdasumTree {
 public:
  AdasumTree(const DeviceState& device, DType work, const AdasumLayout& layout)
      : device_(device), work_(work), layout_(layout) {}

  // The vectors of all ranks lie here, layout.stride() elements apart.
  void begin(CuPointer vectors) {
    vectors_ = vectors;
    live_.clear();
    for (int v = 0; v < layout_.ranks(); ++v) live_.push_back(v);
  }

  // The vectors of each group become one, their average, in the place of the first.
  Status average(const std::vector<std::vector<int>>& groups) {
    live_.clear();
    for (const std::vector<int>& members : groups) {
      std::vector<CuPointer> from;
      for (const int r : members) from.push_back(vector(r));
      const CuPointer to[] = {from[0]};
      const double one_of = 1.0 / static_cast<double>(members.size());
      if (members.size() > 1)
        HC_TRY(kernels().reduce({work_, Reduce::kSum, 1, one_of, 1, from, to, layout_.slice()}, device_.stream->get()));
      live_.push_back(members[0]);
    }
    return Status::ok();
  }

  bool is_over() const { return live_.size() == 1; }
  CuPointer result() const { return vector(live_[0]); }

  // Of one level: this rank's part of all sums, of which numbers() lie in sums().
  Status multiply() {
    const size_t sums = pairs() * layout_.tensors(), lines = std::max<size_t>(1, pairs() * layout_.parts().size());
    for (auto [memory, bytes] : {std::pair{&lines_memory_, lines * kAdasumLanes * kSumBytes},
                                 {&between_, sums * (kAdasumLanes + kLanesBetween) * kSumBytes},
                                 {&sums_, sums * kSumBytes}}) {
      if (*memory && (*memory)->bytes() >= bytes) continue;  // the first level is the largest, but for the folding one
      auto made = device_.gpu->device_memory(bytes, device_.stream);
      HC_TRY(made.status());
      *memory = made.take();
    }
    HC_TRY(kernels().adasum_products(work_, lines_memory_->at(), rows(false), device_.stream->get()));
    return fold(sums);
  }
  const GpuMemory& sums() const { return *sums_; }
  size_t numbers() const { return 3 * pairs() * layout_.tensors(); }

  // Ends the level: the sums are those of all ranks.
  Status combine() {
    HC_TRY(kernels().adasum_combine(work_, sums_->at(), rows(true), device_.stream->get()));
    for (size_t pair = 0, n = pairs(); pair < n; ++pair) live_.erase(live_.begin() + static_cast<long>(pair) + 1);
    return Status::ok();
  }

 private:
  static constexpr size_t kSumBytes = 3 * sizeof(double);

  GpuKernels& kernels() const { return *device_.kernels; }
  CuPointer vector(int v) const { return vectors_ + static_cast<size_t>(v) * layout_.stride() * size_of(work_); }

  // Pairs of one level, as places in live_. Ranks beyond a power of two are reduced into others first.
  size_t pairs() const {
    const size_t core = std::bit_floor(live_.size());
    return live_.size() == core ? core / 2 : live_.size() - core;
  }

  // Every part of every pair: each with a line of its own, or with its tensor's sums.
  std::vector<AdasumRow> rows(bool combine) const {
    std::vector<AdasumRow> made;
    const size_t item = size_of(work_), tensors = layout_.tensors();
    for (size_t pair = 0; pair < pairs(); ++pair)
      for (const AdasumLayout::Part& part : layout_.parts()) {
        const size_t place = combine ? pair * tensors + part.tensor : made.size();
        made.push_back({vector(live_[2 * pair]) + part.first * item, vector(live_[2 * pair + 1]) + part.first * item,
                        static_cast<unsigned>(part.count), static_cast<unsigned>(place)});
      }
    return made;
  }

  Status fold(size_t sums) {
    std::vector<AdasumSum> of_parts, each;
    for (size_t pair = 0; pair < pairs(); ++pair)
      for (const AdasumSum& tensor : layout_.lines())
        of_parts.push_back({static_cast<unsigned>(pair * layout_.parts().size()) + tensor.first, tensor.count});
    for (size_t i = 0; i < sums; ++i) each.push_back({static_cast<unsigned>(i), 1});
    const CuPointer one_line = between_->at(), few = one_line + sums * kAdasumLanes * kSumBytes;
    HC_TRY(kernels().adasum_fold({lines_memory_->at(), one_line, kAdasumLanes, kAdasumLanes}, of_parts,
                                 device_.stream->get()));
    HC_TRY(kernels().adasum_fold({one_line, few, kAdasumLanes, kLanesBetween}, each, device_.stream->get()));
    return kernels().adasum_fold({few, sums_->at(), kLanesBetween, 1}, each, device_.stream->get());
  }

  const DeviceState& device_;
  const DType work_;  // in which vectors are combined
  const AdasumLayout& layout_;
  CuPointer vectors_{};
  std::vector<int> live_;  // the vectors that are left, in rank order
  GpuMemoryPtr lines_memory_, between_, sums_;
};

class DeviceAdasum : public Collective {
 public:
  DeviceAdasum(Task task, DeviceState* device, const Group& group)
      : task_(std::move(task)),
        device_(*device),
        gpu_(*device->gpu),
        group_(group),
        work_(task_.dtype == DType::kF64 ? DType::kF64 : DType::kF32),
        levels_(task_.adasum_by_node ? device->nccl.levels() : nullptr),
        row_type_(levels_ ? work_ : task_.dtype),
        comm_(levels_ ? levels_->outer() : device->nccl.world()),
        layout_(task_, row_type_, levels_, levels_ ? levels_->place().outer_size : group.size,
                levels_ ? levels_->place().outer_rank : group.rank),
        tree_(*device, work_, layout_) {
    algorithm_ = levels_ ? "nccl adasum of nodes" : "nccl adasum";
  }

  Progress start() override {
    const Gpu::Current current(gpu_);
    Status begun = begin();
    return begun.is_ok() ? Progress::kPending : fail(begun);
  }

  Progress step(bool* moved) override {
    auto pending = busy_->is_pending();
    if (pending.is_ok() && pending.value()) return Progress::kPending;
    const Gpu::Current current(gpu_);
    Status ok = pending.status();
    if (ok.is_ok()) ok = advance();
    if (!ok.is_ok()) return fail(ok);
    *moved = true;
    return stage_ == Stage::kOver ? Progress::kDone : Progress::kPending;
  }

 private:
  enum class Stage { kAveraged, kExchanged, kSummed, kGathered, kGatheredWithin, kOver };  // what was enqueued last

  CuStream stream() const { return device_.stream->get(); }
  GpuKernels& kernels() const { return *device_.kernels; }
  size_t row_item() const { return size_of(row_type_); }

  Status advance() {
    switch (stage_) {
      case Stage::kAveraged:
        return exchange();
      case Stage::kExchanged:
        HC_TRY(load());
        return begin_level();
      case Stage::kSummed:
        HC_TRY(tree_.combine());
        return begin_level();
      case Stage::kGathered:
        return levels_ ? gather_within() : finish();
      case Stage::kGatheredWithin:
        return finish();
      case Stage::kOver:
        break;
    }
    return Status::ok();
  }

  // ---- the row: all tensors one behind the other, in which slices are cut

  Status begin() {
    if (!layout_.is_packed()) return exchange();
    auto memory = gpu_.device_memory(std::max<size_t>(1, layout_.whole() * row_item()), device_.stream);
    HC_TRY(memory.status());
    packed_ = memory.take();
    const double factor = levels_ ? task_.scale.pre / levels_->place().inner_size : 1;
    HC_TRY(kernels().pack({task_.dtype, row_type_, factor, 1}, packed_->at(), packed_pieces(true), stream()));
    return levels_ ? average_within() : exchange();
  }

  std::vector<PackedPiece> packed_pieces(bool inputs) const {
    std::vector<PackedPiece> pieces;
    for (size_t t = 0; t < task_.pieces.size(); ++t)
      pieces.push_back({cu_pointer(inputs ? task_.pieces[t].in : task_.pieces[t].out), task_.pieces[t].count,
                        layout_.place(t) * row_item()});
    return pieces;
  }

  const std::byte* source() const { return packed_ ? share() : task_.pieces[0].in; }
  std::byte* target() const { return packed_ ? share() : task_.pieces[0].out; }
  std::byte* share() const { return packed_->data() + layout_.share_begin() * row_item(); }

  // ---- NCCL: each step is a group of its own

  // What a call works with is copied: it may run later.
  template <class Call>
  void add(const char* name, Call call) {
    calls_.push_back([name, call = std::move(call)](const NcclApi& nccl, NcclHandle comm) {
      return nccl.check(call(nccl, comm), name, comm);
    });
  }
  Status launch(NcclComm* comm, Stage next) {
    stage_ = next;
    busy_ = comm;
    return comm->launch(std::exchange(calls_, {}));
  }

  int nccl_work() const { return work_ == DType::kF64 ? kNcclF64 : kNcclF32; }

  Status average_within() {
    add("ncclReduceScatter", [from = packed_->data(), at = share(), count = layout_.share(), type = nccl_work(),
                              to = stream()](const NcclApi& nccl, NcclHandle comm) {
      return nccl.ncclReduceScatter(from, at, count, type, kNcclSum, comm, to);
    });
    return launch(levels_->inner(), Stage::kAveraged);
  }

  Status exchange() {
    auto memory = gpu_.device_memory(vectors_bytes(row_type_), device_.stream);
    HC_TRY(memory.status());
    received_ = memory.take();
    for (int r = 0; r < layout_.ranks(); ++r) {
      if (const size_t bytes = layout_.slice_bytes(r))
        add("ncclSend",
            [=, from = source() + layout_.slice_at(r), to = stream()](const NcclApi& nccl, NcclHandle comm) {
              return nccl.ncclSend(from, bytes, kNcclU8, r, comm, to);
            });
      std::byte* const at = received_->data() + static_cast<size_t>(r) * layout_.stride() * row_item();
      if (layout_.slice())
        add("ncclRecv", [=, bytes = layout_.slice() * row_item(), to = stream()](const NcclApi& nccl, NcclHandle comm) {
          return nccl.ncclRecv(at, bytes, kNcclU8, r, comm, to);
        });
    }
    return launch(comm_, Stage::kExchanged);
  }

  // Equal slices by one allgather, else each from its owner.
  Status gather() {
    const size_t bytes = layout_.slice_bytes(0);
    bool equal = true;
    for (int r = 1; r < layout_.ranks(); ++r) equal = equal && layout_.slice_bytes(r) == bytes;
    if (equal && bytes) {
      add("ncclAllGather",
          [from = target() + layout_.my_slice_at(), at = target(), bytes, to = stream()](
              const NcclApi& nccl, NcclHandle comm) { return nccl.ncclAllGather(from, at, bytes, kNcclU8, comm, to); });
      return launch(comm_, Stage::kGathered);
    }
    for (int r = 0; r < layout_.ranks(); ++r) {
      std::byte* const at = target() + layout_.slice_at(r);
      if (const size_t part = layout_.slice_bytes(r))
        add("ncclBroadcast", [=, to = stream()](const NcclApi& nccl, NcclHandle comm) {
          return nccl.ncclBroadcast(at, at, part, kNcclU8, r, comm, to);
        });
    }
    return launch(comm_, Stage::kGathered);
  }

  Status gather_within() {
    add("ncclAllGather",
        [from = share(), at = packed_->data(), bytes = layout_.share() * row_item(), to = stream()](
            const NcclApi& nccl, NcclHandle comm) { return nccl.ncclAllGather(from, at, bytes, kNcclU8, comm, to); });
    return launch(levels_->inner(), Stage::kGatheredWithin);
  }

  // ---- what is done with the vectors, which lie layout_.stride() elements apart

  size_t vectors_bytes(DType dtype) const {
    return std::max<size_t>(kPlaceBytes, static_cast<size_t>(layout_.ranks()) * layout_.stride() * size_of(dtype));
  }

  Status load() {
    const size_t all = static_cast<size_t>(layout_.ranks()) * layout_.stride();
    const double factor = levels_ ? 1 : task_.scale.pre;  // with levels it is in the average
    CuPointer to = received_->at();
    if (row_type_ != work_) {
      auto memory = gpu_.device_memory(vectors_bytes(work_), device_.stream);
      HC_TRY(memory.status());
      widened_ = memory.take();
      to = widened_->at();
    }
    const PackedPiece vectors{received_->at(), all, 0};
    if (all && (widened_ || factor != 1))
      HC_TRY(kernels().pack({row_type_, work_, factor, 1}, to, {&vectors, 1}, stream()));
    tree_.begin(to);
    // Nodes of different numbers of ranks: their members have not reduced among themselves.
    return task_.adasum_by_node && !levels_ ? tree_.average(ranks_by_node(group_.node)) : Status::ok();
  }

  Status begin_level() {
    if (tree_.is_over()) {
      HC_TRY(store());
      return gather();
    }
    HC_TRY(tree_.multiply());
    add("ncclAllReduce",
        [sums = tree_.sums().data(), count = tree_.numbers(), to = stream()](const NcclApi& nccl, NcclHandle comm) {
          return nccl.ncclAllReduce(sums, sums, count, kNcclF64, kNcclSum, comm, to);
        });
    return launch(device_.nccl.world(), Stage::kSummed);
  }

  // My slice of the result, to its place in the row.
  Status store() {
    const CuPointer to = cu_pointer(target()) + layout_.my_slice_at();
    const PackedPiece slice{to, layout_.slice(), 0};
    const double factor = layout_.is_packed() && levels_ ? 1 : task_.scale.post;
    return layout_.slice() ? kernels().unpack({row_type_, work_, factor, 1}, tree_.result(), {&slice, 1}, stream())
                           : Status::ok();
  }

  Status finish() {
    stage_ = Stage::kOver;
    if (packed_) {
      const double factor = levels_ ? task_.scale.post : 1;
      HC_TRY(kernels().unpack({task_.dtype, row_type_, factor, 1}, packed_->at(), packed_pieces(false), stream()));
    }
    return Status::ok();
  }

  const Task task_;
  DeviceState& device_;
  Gpu& gpu_;
  const Group& group_;
  const DType work_;                  // in which vectors are combined
  const DeviceLevels* const levels_;  // null: all ranks exchange with all
  const DType row_type_;              // in which tensors travel
  NcclComm* const comm_;              // of those who exchange
  const AdasumLayout layout_;
  AdasumTree tree_;
  GpuMemoryPtr packed_, received_, widened_;
  std::vector<NcclCall> calls_;  // of the next group
  NcclComm* busy_ = nullptr;     // what was called last
  Stage stage_ = Stage::kExchanged;
};

}  // namespace

std::unique_ptr<Collective> make_device_adasum(Task task, DeviceState* device, const Group& group) {
  return std::make_unique<DeviceAdasum>(std::move(task), device, group);
}

}  // namespace hc
