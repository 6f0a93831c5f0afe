// A declared bucket over several nodes without agreement by messages. A rank that enters a round of a bucket tells each
// member of other nodes so, by a token on the bucket's own stream of the data connection; members of its node see its
// flag in shared memory. Memory changes only when all are there. A rank that leaves the plan tells everybody which
// rounds it has entered (member_left): whoever waits in another one for it steps back, memory unchanged, and nobody can
// have gone on, since going on needs that rank's token. Thread: the thread that makes progress.
#include <algorithm>
#include <optional>

#include "collective/channels/striped_allreduce.h"
#include "collective/collective.h"
#include "collective/shared/shared.h"

namespace hc {
namespace {

constexpr size_t kStepBytes = 1u << 20;  // how much one step() reduces before it looks at others again

class PersistentBetweenNodes final : public PersistentCollective {
 public:
  PersistentBetweenNodes(Task task, const Group& group, size_t bucket, bool two_level)
      : task_(std::move(task)), group_(group), left_(static_cast<size_t>(group.size)) {
    algorithm_ = "persistent";
    bytes_ = task_.bytes();
    task_.tag.batch = static_cast<uint32_t>(2 * bucket + 1);
    Tag tokens = task_.tag;
    tokens.batch -= 1;
    if (two_level) local_.emplace(*group.shared_segment, bucket, stripe_of(group), task_);
    for (int position = 0; position < group.size; ++position) {
      if (position == group.rank || (local_ && local_->has(position))) continue;
      auto& peer = peers_.emplace_back(std::make_unique<Peer>());
      peer->position = position;
      peer->channel = group.channel[static_cast<size_t>(position)];
      peer->out = {tokens, reinterpret_cast<std::byte*>(&round_), sizeof round_};
      peer->in = {tokens, reinterpret_cast<std::byte*>(&peer->round), sizeof peer->round};
    }
  }
  ~PersistentBetweenNodes() override {
    for (const auto& peer : peers_) {
      if (!peer->out.done && begun_) peer->channel->forget(&peer->out);
      if (peer->expected && !peer->in.done) peer->channel->forget(&peer->in);
    }
  }
  PersistentBetweenNodes(const PersistentBetweenNodes&) = delete;
  PersistentBetweenNodes& operator=(const PersistentBetweenNodes&) = delete;

  void begin(uint64_t round) override {
    round_ = round;
    begun_ = true;
    stage_ = Stage::kArriving;
    withdrawn_ = false;
    arrival_ = {};
    for (const auto& peer : peers_) {
      peer->expected = true;
      peer->channel->post_receive(&peer->in);
      peer->channel->post_send(&peer->out);
    }
    if (local_) local_->enter(task_.pieces[0].in, round_);
  }

  Progress step(bool* moved) override {
    if (stage_ == Stage::kArriving) {
      if (const int late = first_late(); late >= 0) {
        arrival_.last = late;
        withdrawn_ = must_withdraw();
        return withdrawn_ ? Progress::kDone : Progress::kPending;
      }
      if (arrival_.last >= 0) arrival_.at = Clock::now();
      for (const auto& peer : peers_)
        if (peer->round != round_)
          return fail(Status(Code::kInternal,
                             text_of("a declared bucket: rank ", world_rank(peer->position), " is in round ",
                                     peer->round, ", this rank in ", round_),
                             world_rank(peer->position)));
      if (Status begun = local_ ? local_->begin(group_) : begin_between(); !begun.is_ok())
        return fail(std::move(begun));
      stage_ = Stage::kReducing;
      *moved = true;
    }
    if (stage_ == Stage::kReducing) {
      const Progress progress = local_ ? local_->step(moved, &status_) : step_between(moved);
      if (progress != Progress::kDone) return progress;
      stage_ = Stage::kEnding;
      *moved = true;
    }
    const bool is_over = std::ranges::all_of(peers_, [](const auto& peer) { return peer->out.done; });
    return is_over ? Progress::kDone : Progress::kPending;
  }

  std::vector<int> late_members() const override {
    std::vector<int> late;
    for (int position = 0; position < group_.size; ++position)
      if (is_late(position)) late.push_back(position);
    return late;
  }

  void member_left(int position, uint64_t rounds) override {
    left_[static_cast<size_t>(position)] = rounds;
    for (const auto& peer : peers_) {
      if (peer->position != position || !peer->expected || peer->in.done || rounds > round_) continue;
      peer->channel->forget(&peer->in);  // nothing of it will come, and the connection may close
      peer->expected = false;
    }
  }
  bool is_at_rest() const override {
    return std::ranges::all_of(
        peers_, [&](const auto& peer) { return (peer->out.done || !begun_) && (peer->in.done || !peer->expected); });
  }

 private:
  enum class Stage { kArriving, kReducing, kEnding };
  struct Peer {
    int position = 0;
    Channel* channel = nullptr;
    uint64_t round = 0;  // as it has told
    bool expected = false;
    Transfer out, in;
  };

  // The members of this node: their buffers are reduced where they lie, each member carries a stripe to other nodes.
  class Local {
   public:
    Local(SharedSegment& shared, size_t bucket, Stripe stripe, const Task& task)
        : shared_(shared), stripe_(std::move(stripe)), task_(task), me_(shared.index()) {
      for (int m = 0; m < shared.size(); ++m) flags_.push_back(&shared.bucket_flags(m, bucket));
    }
    bool has(int position) const {
      return std::ranges::find(shared_.positions(), position) != shared_.positions().end();
    }
    bool is_here(int position) const {
      const auto m = std::ranges::find(shared_.positions(), position) - shared_.positions().begin();
      return flags_[static_cast<size_t>(m)]->arrived.load(std::memory_order_acquire) > round_;
    }
    void enter(const std::byte* data, uint64_t round) {
      round_ = round;
      mine().offset.store(shared_.arena(me_).offset_of(data), std::memory_order_relaxed);
      shared_.publish_to_all(mine().arrived, round_ + 1, [&](int m) {
        return flags_[static_cast<size_t>(m)]->arrived.load(std::memory_order_seq_cst) > round_;
      });
    }
    // All members have entered.
    Status begin(const Group& group) {
      buffers_.clear();
      for (int m = 0; m < shared_.size(); ++m) {
        const uint64_t offset = flags_[static_cast<size_t>(m)]->offset.load(std::memory_order_relaxed);
        if (offset > shared_.arena(m).bytes() || task_.bytes() > shared_.arena(m).bytes() - offset)
          return error(Code::kInternal, "member ", m, " announced a bucket outside its arena");
        buffers_.push_back(shared_.arena_base(m) + offset);
      }
      const Slices slices(task_.count(), stripe_.stripes, item());
      const bool owns = stripe_.index < stripe_.stripes;
      first_ = at_ = owns ? slices.begin(stripe_.index) : 0;
      end_ = owns ? slices.end(stripe_.index) : 0;
      is_published_ = false;
      across_.reset();
      if (first_ == end_) return Status::ok();
      const StripeRange range =
          stripe_range_of(task_, buffers_[static_cast<size_t>(me_)] + first_ * item(), end_ - first_);
      auto made = make_striped_allreduce(range, group, stripe_.positions);
      HC_TRY(made.status());
      across_ = made.take();
      return across_->start() == Progress::kFailed ? across_->status() : Status::ok();
    }
    Progress step(bool* moved, Status* failure) {
      if (at_ < end_) {
        reduce_some();
        *moved = true;
      }
      if (across_) {
        const Progress progress = across_->step(moved);
        if (progress == Progress::kFailed) *failure = across_->status();
        if (progress != Progress::kDone) return progress;
        across_.reset();
        for (std::byte* other : buffers_)
          if (other != buffers_[static_cast<size_t>(me_)])
            std::copy_n(buffers_[static_cast<size_t>(me_)] + first_ * item(), (end_ - first_) * item(),
                        other + first_ * item());
      }
      const auto is_finished = [&](int m) {
        return flags_[static_cast<size_t>(m)]->finished.load(std::memory_order_seq_cst) > round_;
      };
      if (!is_published_) {
        shared_.publish_to_all(mine().finished, round_ + 1, is_finished);
        is_published_ = *moved = true;
      }
      for (int m = 0; m < shared_.size(); ++m)
        if (!is_finished(m)) return Progress::kPending;
      return Progress::kDone;
    }

   private:
    InPlaceFlags& mine() const { return *flags_[static_cast<size_t>(me_)]; }
    size_t item() const { return size_of(task_.dtype); }
    void reduce_some() {
      const size_t count = std::min(end_ - at_, std::max<size_t>(1, kStepBytes / item()));
      if (buffers_.size() > 1 || task_.scale.pre != 1.0) {
        from_.clear();
        for (const std::byte* buffer : buffers_) from_.push_back(buffer + at_ * item());
        std::byte* const to[] = {buffers_[static_cast<size_t>(me_)] + at_ * item()};
        reduce(task_.dtype, task_.reduce, to, from_, count, Scale{task_.scale.pre, 1.0, 1});
      }
      at_ += count;
      across_->release(at_ - first_);
    }

    SharedSegment& shared_;
    const Stripe stripe_;
    const Task& task_;
    const int me_;
    std::vector<InPlaceFlags*> flags_;  // [member]
    uint64_t round_ = 0;
    size_t first_ = 0, at_ = 0, end_ = 0;  // of my stripe, in elements: reduced within the node up to at_
    bool is_published_ = false;
    std::vector<std::byte*> buffers_;  // [member]
    std::vector<const std::byte*> from_;
    std::unique_ptr<StripedAllreduce> across_;
  };

  int world_rank(int position) const { return group_.world_rank[static_cast<size_t>(position)]; }
  bool is_late(int position) const {
    if (position == group_.rank) return false;
    if (local_ && local_->has(position)) return !local_->is_here(position);
    return std::ranges::any_of(peers_, [&](const auto& peer) { return peer->position == position && !peer->in.done; });
  }
  int first_late() const {
    for (const auto& peer : peers_)
      if (!peer->in.done) return peer->position;
    if (!local_) return -1;
    for (const int position : group_.shared_segment->positions())
      if (is_late(position)) return position;
    return -1;
  }
  bool must_withdraw() const {
    for (int position = 0; position < group_.size; ++position)
      if (const auto& rounds = left_[static_cast<size_t>(position)]; rounds && *rounds <= round_) return true;
    return false;
  }
  Status begin_between() {
    auto made = make_channel_collective(task_, group_);
    HC_TRY(made.status());
    between_ = made.take();
    return between_->start() == Progress::kFailed ? between_->status() : Status::ok();
  }
  Progress step_between(bool* moved) {
    const Progress progress = between_->step(moved);
    if (progress == Progress::kFailed) status_ = between_->status();
    if (progress != Progress::kPending) between_.reset();
    return progress;
  }

  Task task_;
  const Group& group_;
  uint64_t round_ = 0;
  bool begun_ = false;
  Stage stage_ = Stage::kArriving;
  std::vector<std::unique_ptr<Peer>> peers_;   // the members that have no flag in this node's shared memory
  std::vector<std::optional<uint64_t>> left_;  // [position] the rounds it had entered when it left the plan
  std::optional<Local> local_;                 // several nodes of several ranks
  std::unique_ptr<Collective> between_;        // else
};

}  // namespace

std::unique_ptr<PersistentCollective> make_persistent_between_nodes(Task task, const Group& group, size_t bucket,
                                                                    bool two_level) {
  return std::make_unique<PersistentBetweenNodes>(std::move(task), group, bucket, two_level);
}

}  // namespace hc
