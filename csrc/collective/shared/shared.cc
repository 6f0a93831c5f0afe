// Collectives in shared memory. Three shapes: flat (everybody publishes a small payload, one flag each), blocked
// (private tensors travel through buffers in blocks, pipelined) and in place (every buffer lies in an arena: rank r
// reads slice r of all and writes it to all). Sums run in rank order, so every rank gets the same bits, from run to
// run. On a machine with several NUMA nodes they run in the order of levels.h. Thread: the thread that makes progress.
#include "collective/shared/shared.h"
#include "collective/selection.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>

#include "collective/shared/blocked.h"
#include "collective/shared/flat_payload.h"
#include "collective/shared/levelled.h"

namespace hc {

SharedSegment::SharedSegment(std::vector<std::shared_ptr<Arena>> arenas, std::vector<int> positions, int my_index,
                             int number, Levels levels)
    : arenas_(std::move(arenas)),
      positions_(std::move(positions)),
      my_index_(my_index),
      offset_(kSharedSegmentsOffset + static_cast<size_t>(number) * kSharedSegmentBytes),
      levels_(std::move(levels)) {
  for (const auto& arena : arenas_) bases_.push_back(arena->base() + offset_);
}

Status SharedSegment::prepare() {
  Arena& own = *arenas_[my_index_];
  HC_TRY(own.commit(offset_, kBucketFlagsOffset), "shared memory for a process set");
  std::memset(bases_[my_index_], 0, kPage);
  for (uint64_t place : {0, 1}) {
    bypass_cell(my_index_, place).round.store(0, std::memory_order_relaxed);
    bypass_cell(my_index_, place).last.store(0, std::memory_order_relaxed);
  }
  return Status::ok();
}

std::shared_ptr<const std::vector<LevelStage>> SharedSegment::level_stages(Op op, int root, size_t count, size_t item) {
  constexpr size_t kept = 1000, line = 64;
  const size_t unit = std::max<size_t>(1, line / item), all = op == Op::kAllgather ? count : schedule_size(count);
  const size_t kind = op == Op::kBroadcast ? 2 + static_cast<size_t>(root) : op == Op::kAllgather ? 1 : 0;
  if (level_stages_.size() >= kept) level_stages_.clear();
  auto& found = level_stages_[{kind, all, unit}];
  if (found) return found;
  std::vector<LevelShare> given;
  if (op == Op::kBroadcast) given.push_back({0, all, root});
  const size_t slot = all / static_cast<size_t>(size());
  for (int m = 0; m < size() && op == Op::kAllgather; ++m)
    given.push_back({static_cast<size_t>(m) * slot, static_cast<size_t>(m + 1) * slot, m});
  const LevelSchedule schedule = op == Op::kAllreduce ? LevelSchedule::allreduce(levels_, size(), all, unit)
                                                      : LevelSchedule::distribution(levels_, size(), given, unit);
  return found = std::make_shared<const std::vector<LevelStage>>(schedule.stages_of(my_index_));
}

Status SharedSegment::prepare_buckets(size_t first, size_t count) {
  const size_t from = kBucketFlagsOffset + first * sizeof(InPlaceFlags), bytes = count * sizeof(InPlaceFlags);
  HC_TRY(arenas_[my_index_]->commit(offset_ + from, bytes), "shared memory for the flags of ", count, " buckets");
  std::memset(bases_[my_index_] + from, 0, bytes);
  return Status::ok();
}

namespace {

constexpr size_t kInPlaceStepBytes = 1u << 20;  // how much one step() reduces before it looks at others again

// What flat operations of every kind share: my payload goes into the buffer of this round, then I wait for the members
// whose payload I need. Two buffers are enough: nobody enters round k before all have entered k - 1, hence left k - 2.
class FlatCollective : public Collective {
 public:
  FlatCollective(Task task, const Group& group)
      : payload_(std::move(task), group.rank, group.shared_segment->levels()),
        shared_(*group.shared_segment),
        rank_(group.rank) {
    round_ = shared_.flat_total++;
    algorithm_ = "shm flat";
  }

  Progress start() override { return Progress::kPending; }

  Progress step(bool* moved) override {
    if (!published_) {
      if (!all_reached(shared_, &SegmentFlags::flat, round_)) return Progress::kPending;
      payload_.contribute(shared_.flat_buffer(rank_, round_));
      if (payload_.comes_from_root() && rank_ == payload_.root())
        shared_.publish(shared_.mine().flat, round_ + 1);
      else
        shared_.publish_to_all(&SegmentFlags::flat, round_ + 1);
      published_ = true;
      *moved = true;
    }
    if (!others_ready()) return Progress::kPending;
    std::vector<const std::byte*> buffers(static_cast<size_t>(shared_.size()));
    for (int m = 0; m < shared_.size(); ++m) buffers[static_cast<size_t>(m)] = shared_.flat_buffer(m, round_);
    payload_.collect(buffers);
    *moved = true;
    return Progress::kDone;
  }

 private:
  bool others_ready() const {
    if (payload_.comes_from_root()) return shared_.flags(payload_.root()).flat.load(std::memory_order_acquire) > round_;
    if ((payload_.op() == Op::kReduce || payload_.op() == Op::kGather) && rank_ != payload_.root()) return true;
    return all_reached(shared_, &SegmentFlags::flat, round_ + 1);
  }

  const FlatPayload payload_;
  SharedSegment& shared_;
  const int rank_;
  uint64_t round_;
  bool published_ = false;
};

// The barrier in front of one operation: nothing happens before all members have arrived.
class ArrivalBarrier {
 public:
  ArrivalBarrier(const Group& group, std::vector<InPlaceFlags*> flags)
      : shared_(*group.shared_segment), flags_(std::move(flags)) {}
  void enter(int rank, uint64_t round) {
    round_ = round;
    InPlaceFlags& mine = *flags_[static_cast<size_t>(rank)];
    const bool last = shared_.publish_to_all(mine.arrived, round_ + 1, [&](int m) {
      return flags_[static_cast<size_t>(m)]->arrived.load(std::memory_order_seq_cst) > round_;
    });
    if (last) mine.last.store(round_ + 1, std::memory_order_release);
  }
  // All are here: who came last. `seen`: whom this member missed when it last looked; then it may have slept.
  int last_one(int seen) const {
    for (size_t m = 0; m < flags_.size(); ++m)
      if (flags_[m]->last.load(std::memory_order_acquire) == round_ + 1) return static_cast<int>(m);
    return seen;
  }
  bool is_here(size_t m) const { return flags_[m]->arrived.load(std::memory_order_acquire) > round_; }
  int first_late() const {
    for (size_t m = 0; m < flags_.size(); ++m)
      if (!is_here(m)) return static_cast<int>(m);
    return -1;
  }
  std::vector<int> late() const {
    std::vector<int> late;
    for (size_t m = 0; m < flags_.size(); ++m)
      if (!is_here(m)) late.push_back(static_cast<int>(m));
    return late;
  }
  // A member that has invalidated its plans has nothing under way, so if it has not arrived it never will, and nobody
  // can have begun to change memory: all may step back. (`invalidated` is read before `arrived`: arrival comes first on
  // the member.)
  bool must_withdraw() const {
    for (size_t m = 0; m < flags_.size(); ++m)
      if (shared_.flags(static_cast<int>(m)).invalidated.load(std::memory_order_acquire) && !is_here(m)) return true;
    return false;
  }

 private:
  SharedSegment& shared_;
  uint64_t round_ = 0;
  const std::vector<InPlaceFlags*> flags_;  // [member]
};

class PersistentArrival final : public PersistentCollective {
 public:
  PersistentArrival(const Group& group, std::vector<InPlaceFlags*> flags)
      : rank_(group.rank), barrier_(group, std::move(flags)) {
    algorithm_ = "gpu persistent";
  }
  void begin(uint64_t round) override {
    withdrawn_ = false;
    arrival_ = {};
    barrier_.enter(rank_, round);
  }
  Progress step(bool* moved) override {
    if (const int late = barrier_.first_late(); late >= 0) {
      arrival_.last = late;
      withdrawn_ = barrier_.must_withdraw();
      if (!withdrawn_) return Progress::kPending;
    } else if (arrival_.last >= 0) {
      arrival_ = {barrier_.last_one(arrival_.last), Clock::now()};
    }
    *moved = true;
    return Progress::kDone;
  }
  std::vector<int> late_members() const override { return barrier_.late(); }

 private:
  const int rank_;
  ArrivalBarrier barrier_;
};

// Every buffer lies in an arena: read each input once, write each output once. Memory changes only after all have
// arrived. Negotiated operations share the shared segment's flags; a persistent bucket has flags of its own.
class InPlaceAllreduce final : public PersistentCollective {
 public:
  // round: of a negotiated operation; a persistent bucket gets it from begin().
  InPlaceAllreduce(Task task, const Group& group, std::vector<InPlaceFlags*> flags, std::optional<uint64_t> round)
      : task_(std::move(task)),
        shared_(*group.shared_segment),
        n_(group.size),
        rank_(group.rank),
        flags_(flags),
        barrier_(group, std::move(flags)),
        persistent_(!round),
        round_(round.value_or(0)),
        slices_(task_.pieces[0].count, group.size, size_of(task_.dtype)) {
    algorithm_ = persistent_ ? "shm persistent" : "shm in place";
    if (!shared_.levels().flat())
      levelled_ = shared_.level_stages(Op::kAllreduce, 0, task_.count(), size_of(task_.dtype));
    bytes_ = task_.bytes();
  }
  Progress start() override {
    begin(round_);
    return Progress::kPending;
  }
  void begin(uint64_t round) override {
    round_ = round;
    stage_ = Stage::kArriving;
    withdrawn_ = false;
    arrival_ = {};
    buffers_.clear();
    at_ = slices_.begin(rank_);
    levels_done_ = 0;
    flags_[rank_]->offset.store(shared_.arena(rank_).offset_of(task_.pieces[0].in), std::memory_order_relaxed);
    barrier_.enter(rank_, round_);
  }

  Progress step(bool* moved) override {
    if (stage_ == Stage::kArriving) {
      if (const int late = barrier_.first_late(); late >= 0) {
        arrival_.last = late;
        withdrawn_ = persistent_ && barrier_.must_withdraw();
        return withdrawn_ ? Progress::kDone : Progress::kPending;
      }
      if (arrival_.last >= 0) arrival_ = {barrier_.last_one(arrival_.last), Clock::now()};
      if (Status found = find_buffers(); !found.is_ok()) return fail(std::move(found));
      stage_ = Stage::kReducing;
    }
    *moved = true;
    if (stage_ == Stage::kReducing) {
      if (levelled_ ? !levelled_some(moved) : !reduce_some()) return Progress::kPending;
      shared_.publish_to_all(flags_[rank_]->finished, round_ + 1,
                             [&](int m) { return flags_[m]->finished.load(std::memory_order_seq_cst) > round_; });
      stage_ = Stage::kFinishing;
    }
    if (all_finished()) return Progress::kDone;
    *moved = false;
    return Progress::kPending;
  }
  std::vector<int> late_members() const override { return barrier_.late(); }

 private:
  enum class Stage { kArriving, kReducing, kFinishing };

  bool all_finished() const {
    for (const InPlaceFlags* f : flags_)
      if (f->finished.load(std::memory_order_acquire) <= round_) return false;
    return true;
  }
  // The members' offsets were published for this round; nobody can enter the next before I finish this one.
  Status find_buffers() {
    for (int m = 0; m < n_; ++m) {
      const uint64_t offset = flags_[m]->offset.load(std::memory_order_relaxed);
      if (offset > shared_.arena(m).bytes() || bytes_ > shared_.arena(m).bytes() - offset)
        return error(Code::kInternal, "member ", m, " announced a buffer outside its arena");
      buffers_.push_back(shared_.arena_base(m) + offset);
    }
    return Status::ok();
  }
  bool reduce_some() {
    const size_t item = size_of(task_.dtype);
    const size_t count = std::min(slices_.end(rank_) - at_, std::max<size_t>(1, kInPlaceStepBytes / item));
    if (count) {
      there_.resize(n_);
      from_.resize(n_);
      for (int m = 0; m < n_; ++m) from_[m] = there_[m] = buffers_[m] + at_ * item;
      reduce(task_.dtype, task_.reduce, there_, from_, count, task_.scale);
      at_ += count;
    }
    return at_ == slices_.end(rank_);
  }
  // The next stage that can be done. The buffers themselves are what the schedule reads and writes.
  bool levelled_some(bool* moved) {
    const uint64_t before = round_ * kMaxLevelStages + levels_done_;
    const LevelStage& stage = (*levelled_)[levels_done_];
    for (int m : stage.sources)  // all have arrived, which the first stage waits for
      if (levels_done_ > 0 && flags_[m]->stages.load(std::memory_order_acquire) < before) return *moved = false;
    for (const LevelStep& step : stage.steps) run_level_step(task_, stage, step, task_.count(), buffers_, rank_);
    shared_.publish(flags_[rank_]->stages, before + 1);
    return ++levels_done_ == levelled_->size();
  }

  Task task_;
  SharedSegment& shared_;
  const int n_, rank_;
  const std::vector<InPlaceFlags*> flags_;  // [member]
  ArrivalBarrier barrier_;
  const bool persistent_;
  uint64_t round_;
  const Slices slices_;
  Stage stage_ = Stage::kArriving;
  size_t at_ = 0;
  std::vector<std::byte*> buffers_, there_;
  std::vector<const std::byte*> from_;
  std::shared_ptr<const std::vector<LevelStage>> levelled_;  // null where there are no levels
  size_t levels_done_ = 0;
};

std::vector<InPlaceFlags*> flags_of(const Group& group, size_t bucket) {
  std::vector<InPlaceFlags*> flags;
  for (int m = 0; m < group.size; ++m) flags.push_back(&group.shared_segment->bucket_flags(m, bucket));
  return flags;
}

}  // namespace

std::unique_ptr<PersistentCollective> make_persistent_allreduce(Task task, const Group& group, size_t bucket) {
  return std::make_unique<InPlaceAllreduce>(std::move(task), group, flags_of(group, bucket), std::nullopt);
}

std::unique_ptr<PersistentCollective> make_persistent_arrival(const Group& group, size_t bucket) {
  return std::make_unique<PersistentArrival>(group, flags_of(group, bucket));
}

Result<std::unique_ptr<Collective>> make_shared_collective(Task task, const Group& group) {
  if (!group.shared_segment || group.shared_segment->size() != group.size)
    return error(Code::kInternal, "a shared-memory ", name_of(task.op), " needs shared memory of the whole group");
  const Algorithm chosen = choose_in_shared_memory(task);
  if (chosen == Algorithm::kSharedInPlace) {
    std::vector<InPlaceFlags*> flags;
    for (int m = 0; m < group.size; ++m) flags.push_back(&group.shared_segment->in_place_flags(m));
    const uint64_t round = group.shared_segment->in_place_total++;
    return std::unique_ptr<Collective>(
        std::make_unique<InPlaceAllreduce>(std::move(task), group, std::move(flags), round));
  }
  if (chosen == Algorithm::kSharedFlat)
    return std::unique_ptr<Collective>(std::make_unique<FlatCollective>(std::move(task), group));
  if (goes_by_levels(task.op, group.shared_segment->levels())) return make_levelled_collective(std::move(task), group);
  return make_blocked_collective(std::move(task), group);
}

}  // namespace hc
