// Collectives between the GPUs of one machine, or on one GPU, through memory that every rank has mapped (PeerMemory).
// The data goes in rounds, as much as fits: each rank copies or packs its part into its own piece of that memory, then
// every rank reads what it needs from all of them; an allreduce reduces slice by slice in place, each slice by one
// rank, N inputs read once and N outputs written once in rank order, and is then unpacked. Between these steps the
// ranks wait for each other on the host: a counter in shared memory is raised when the own event has passed. So no
// stream ever waits for another process, and whoever dies stops nobody's GPU.
#include <algorithm>
#include <numeric>

#include "collective/gpu/device_state.h"
#include "collective/shared/shared.h"
#include "device/peer_memory.h"

namespace hc {

namespace {

constexpr size_t kAlign = kPlaceBytes;
size_t aligned_for_peers(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
size_t aligned_down(size_t bytes) { return bytes / kAlign * kAlign; }

// A part of a tensor in one round.
struct Portion {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  size_t count = 0;  // elements
  size_t place = 0;  // bytes, in everybody's memory
};
using Round = std::vector<Portion>;

}  // namespace

class PeersCollective : public Collective {
 public:
  PeersCollective(Task task, DeviceState* device, const Group& group)
      : task_(std::move(task)),
        device_(*device),
        memory_(*device->peers),
        shared_(*group.shared_segment),
        gpu_(*device->gpu),
        size_(static_cast<size_t>(group.size)),
        rank_(static_cast<size_t>(group.rank)),
        item_(size_of(task_.dtype)),
        capacity_(aligned_down(device->peer_bytes)) {
    algorithm_ = "peers";
  }

  Progress start() override {
    plan();
    Status begun = rounds_ ? fill() : Status::ok();
    return begun.is_ok() ? Progress::kPending : fail(begun);
  }

  // Each state ends with something that is looked at: an event of this rank, or the counters of all.
  Progress step(bool* moved) override {
    while (round_ < rounds_) {
      if (!status_.is_ok()) return Progress::kFailed;
      auto over = state_over();
      if (!over.is_ok()) return fail(over.status());
      if (!over.value()) return Progress::kPending;
      *moved = true;
      if (Status next = advance(); !next.is_ok()) return fail(next);
    }
    return Progress::kDone;
  }

 private:
  enum class State { kFilling, kFilled, kWorking, kWorked };

  Result<bool> state_over() {
    switch (state_) {
      case State::kFilling:
      case State::kWorking:
        return gpu_.passed(*event_);
      case State::kFilled:
        return all_have(&SegmentFlags::peers_filled);
      case State::kWorked:
        return all_have(&SegmentFlags::peers_taken);
    }
    return false;
  }
  bool all_have(std::atomic<uint64_t> SegmentFlags::* counter) const {
    for (int m = 0; m < shared_.size(); ++m)
      if ((shared_.flags(m).*counter).load(std::memory_order_acquire) < shared_.peers_total + 1) return false;
    return true;
  }

  Status advance() {
    switch (state_) {
      case State::kFilling:
        shared_.publish(shared_.mine().peers_filled, shared_.peers_total + 1);
        state_ = State::kFilled;
        return Status::ok();
      case State::kFilled:
        HC_TRY(work());
        return record(State::kWorking);
      case State::kWorking:
        shared_.publish(shared_.mine().peers_taken, shared_.peers_total + 1);
        state_ = State::kWorked;
        return Status::ok();
      case State::kWorked:
        if (task_.op == Op::kAllreduce) HC_TRY(unpack());
        ++shared_.peers_total;
        return ++round_ < rounds_ ? fill() : Status::ok();
    }
    return Status::ok();
  }

  Status record(State next) {
    auto recorded = gpu_.record(stream());
    HC_TRY(recorded.status());
    event_ = recorded.take();
    state_ = next;
    return Status::ok();
  }

  // ---- what each round holds; every rank computes the same number of rounds

  void plan() {
    const auto parts_of = [](size_t bytes, size_t part) { return (bytes + part - 1) / part; };
    if (reduces(task_.op)) {
      plan_portions();
      rounds_ = portions_.size();
    } else if (task_.op == Op::kAlltoall) {
      part_bytes_ = aligned_down(capacity_ / size_);
      rounds_ = parts_of(task_.longest_part * item_, part_bytes_);
    } else {
      part_bytes_ = capacity_;
      const size_t longest = task_.op == Op::kBroadcast ? task_.pieces[0].count
                                                        : *std::max_element(task_.counts.begin(), task_.counts.end());
      rounds_ = parts_of(longest * item_, part_bytes_);
    }
  }

  // The tensors one behind the other, cut where a round is full.
  void plan_portions() {
    size_t used = capacity_;
    for (const Piece& piece : task_.pieces) {
      const size_t count = task_.op == Op::kReducescatter ? sum_of(task_.counts) : piece.count;
      for (size_t done = 0; done < count;) {
        if (used == capacity_) {
          portions_.emplace_back();
          used = 0;
        }
        const size_t some = std::min(count - done, (capacity_ - used) / item_), bytes = done * item_;
        portions_.back().push_back({piece.in + bytes, piece.out ? piece.out + bytes : nullptr, some, used});
        done += some;
        used += aligned_for_peers(some * item_);
      }
    }
  }

  static size_t sum_of(const std::vector<size_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), size_t{0});
  }
  size_t begin_of(const std::vector<size_t>& counts, size_t rank) const {
    return std::accumulate(counts.begin(), counts.begin() + static_cast<ptrdiff_t>(rank), size_t{0});
  }
  size_t used_bytes() const {
    const Portion& last = portions_[round_].back();
    return last.place + aligned_for_peers(last.count * item_);
  }

  // ---- step 1: my part into my memory

  Status fill() {
    if (reduces(task_.op))
      HC_TRY(device_.kernels->pack({task_.dtype, task_.dtype, 1, 1}, own(), pieces(true), stream()));
    else
      HC_TRY(fill_bytes());
    return record(State::kFilling);
  }

  Status fill_bytes() {
    const Piece& piece = task_.pieces[0];
    switch (task_.op) {
      case Op::kBroadcast:
        return rank_ == static_cast<size_t>(task_.root) ? copy(own(), cu_pointer(piece.in), part(piece.count * item_))
                                                        : Status::ok();
      case Op::kAlltoall:
        for (size_t r = 0; r < size_; ++r)
          HC_TRY(copy(own() + r * part_bytes_, cu_pointer(piece.in) + begin_of(task_.counts, r) * item_,
                      part(task_.counts[r] * item_)));
        return Status::ok();
      case Op::kAllgather:
      case Op::kGather:
        return copy(own(), cu_pointer(piece.in), part(task_.counts[rank_] * item_));
      case Op::kAllreduce:
      case Op::kReducescatter:
      case Op::kReduce:
      case Op::kScatter:
      case Op::kBarrier:
      case Op::kJoin:
      case Op::kSend:
      case Op::kReceive:
        break;
    }
    return error(Code::kInternal, "peers move no bytes for ", name_of(task_.op));
  }

  // ---- step 2: what I need from everybody's memory

  Status work() {
    switch (task_.op) {
      case Op::kAllreduce:
        return reduce_slice();
      case Op::kReducescatter:
        return reduce_rows();
      case Op::kReduce:
        return rank_ == static_cast<size_t>(task_.root)
                   ? reduce_into(portions_[round_][0].out, 0, portions_[round_][0].count)
                   : Status::ok();
      case Op::kAllgather:
      case Op::kBroadcast:
      case Op::kAlltoall:
      case Op::kGather:
        return take_bytes();
      case Op::kScatter:
      case Op::kBarrier:
      case Op::kJoin:
      case Op::kSend:
      case Op::kReceive:
        break;
    }
    return error(Code::kInternal, "peers do no ", name_of(task_.op));
  }

  // Of what all have packed, in place everywhere.
  Status reduce_slice() {
    const size_t units = used_bytes() / kAlign, first = units * rank_ / size_, last = units * (rank_ + 1) / size_;
    std::vector<CuPointer> at;
    for (size_t r = 0; r < size_; ++r) at.push_back(memory_.at(static_cast<int>(r)) + first * kAlign);
    return reduce(at, at, (last - first) * kAlign / item_);
  }

  // The part of my rows that lies in this round.
  Status reduce_rows() {
    const size_t mine = begin_of(task_.counts, rank_), end = mine + task_.counts[rank_];
    const size_t from = static_cast<size_t>(portions_[round_][0].in - task_.pieces[0].in) / item_;
    const size_t first = std::max(mine, from), last = std::min(end, from + portions_[round_][0].count);
    if (first >= last) return Status::ok();
    return reduce_into(task_.pieces[0].out + (first - mine) * item_, (first - from) * item_, last - first);
  }

  Status reduce_into(std::byte* out, size_t place, size_t count) {
    std::vector<CuPointer> in;
    for (size_t r = 0; r < size_; ++r) in.push_back(memory_.at(static_cast<int>(r)) + place);
    return reduce(in, {cu_pointer(out)}, count);
  }

  Status reduce(const std::vector<CuPointer>& in, const std::vector<CuPointer>& out, size_t count) {
    const Scale& s = task_.scale;
    return device_.kernels->reduce({task_.dtype, task_.reduce, s.pre, s.post, s.divisor, in, out, count}, stream());
  }

  Status take_bytes() {
    const Piece& piece = task_.pieces[0];
    if (task_.op == Op::kBroadcast) {
      if (rank_ == static_cast<size_t>(task_.root) && piece.in == piece.out) return Status::ok();
      return copy_out(cu_pointer(piece.out), memory_.at(task_.root), part(piece.count * item_));
    }
    if (task_.op == Op::kGather && rank_ != static_cast<size_t>(task_.root)) return Status::ok();
    const bool exchange = task_.op == Op::kAlltoall;
    const std::vector<size_t>& counts = exchange ? task_.received_counts : task_.counts;
    for (size_t r = 0; r < size_; ++r)
      HC_TRY(copy_out(cu_pointer(piece.out) + begin_of(counts, r) * item_,
                      memory_.at(static_cast<int>(r)) + (exchange ? rank_ * part_bytes_ : 0), part(counts[r] * item_)));
    return Status::ok();
  }

  // ---- step 3, allreduce: the results into the tensors

  Status unpack() { return device_.kernels->unpack({task_.dtype, task_.dtype, 1, 1}, own(), pieces(false), stream()); }

  std::vector<PackedPiece> pieces(bool inputs) const {
    std::vector<PackedPiece> made;
    for (const Portion& p : portions_[round_]) made.push_back({cu_pointer(inputs ? p.in : p.out), p.count, p.place});
    return made;
  }

  // Where this round's part of `bytes` begins, and how much it is.
  struct Part {
    size_t at, bytes;
  };
  Part part(size_t bytes) const {
    const size_t at = std::min(bytes, round_ * part_bytes_);
    return {at, std::min(part_bytes_, bytes - at)};
  }
  Status copy(CuPointer to, CuPointer from, Part p) {
    return p.bytes ? gpu_.copy(to, from + p.at, p.bytes, stream()) : Status::ok();
  }
  Status copy_out(CuPointer to, CuPointer from, Part p) {
    return p.bytes ? gpu_.copy(to + p.at, from, p.bytes, stream()) : Status::ok();
  }

  CuPointer own() const { return memory_.at(static_cast<int>(rank_)); }
  CuStream stream() const { return device_.stream->get(); }

  const Task task_;
  DeviceState& device_;
  const PeerMemory& memory_;
  SharedSegment& shared_;
  Gpu& gpu_;
  const size_t size_, rank_, item_, capacity_;
  std::vector<Round> portions_;  // of reductions
  size_t part_bytes_ = 0;        // of the others: as much of one rank's part goes in a round
  size_t rounds_ = 0, round_ = 0;
  State state_ = State::kFilling;
  GpuEventPtr event_;
};

namespace {

class PeersBackend final : public GpuBackend {
 public:
  PeersBackend(DeviceState* device, const Group& group) : device_(*device), group_(group) {}
  const char* name() const override { return "peers"; }
  // It has kernels for every reduction but Adasum.
  bool can(const Task& task) const override { return task.op != Op::kScatter && is_element_wise(task.reduce); }
  std::unique_ptr<Collective> start(Task task) override {
    return std::make_unique<PeersCollective>(std::move(task), &device_, group_);
  }
  Order order() const override { return Order::kPlan; }

 private:
  DeviceState& device_;
  const Group& group_;
};

}  // namespace

std::unique_ptr<GpuBackend> make_peers_backend(DeviceState* device, const Group& group) {
  return std::make_unique<PeersBackend>(device, group);
}

}  // namespace hc
