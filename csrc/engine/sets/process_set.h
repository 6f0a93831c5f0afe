// One process set on one rank: its members, its agreement (cache, and on group rank 0 the coordinator), the operations
// that wait for a plan and the batches that wait for their turn. Sets share nothing, so none delays another.
//
// Thread: the thread that drives the engine, except where a line says "submit lock".
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "agreement/combiner.h"
#include "agreement/control_tree.h"
#include "agreement/coordinator.h"
#include "agreement/lateness.h"
#include "agreement/plan_cache.h"
#include "collective/collective.h"
#include "collective/shared/express.h"
#include "collective/shared/shared.h"
#include "engine/intake/operation.h"
#include "engine/sets/batch_runner.h"

namespace hc {

// Buckets that a binding declared (an optimizer's gradients): same names, sizes and order on every rank, memory fixed.
// Where all members share memory their plan is frozen: a bucket starts as soon as it is submitted, without any message.
struct BucketSet {
  struct Bucket {
    std::string name;
    std::byte* data;
    std::vector<int64_t> shape;
    DType dtype;
    uint64_t turn = 0;  // driving thread
  };
  Reduce reduce = Reduce::kSum;
  double prescale = 1, postscale = 1;
  std::vector<Bucket> buckets;
  bool on_device = false;  // in the memory of GPU `device_index`
  int device_index = 0;
  std::vector<std::shared_ptr<Memory>> memory;  // [bucket] where all lie in memory of Engine::allocate_on_device
  size_t first_flag = 0;
  bool frozen = false;  // driving thread
};

class ProcessSet {
 public:
  ProcessSet(uint16_t id, uint32_t generation, std::vector<int> ranks, int group_rank)
      : id(id), generation(generation), ranks(std::move(ranks)), group_rank(group_rank), lateness(size()) {
    ballot.generation = generation;
    ballot.process_set = id;
    ballot.rank = group_rank;
  }

  const uint16_t id;
  const uint32_t generation;
  const std::vector<int> ranks;  // world ranks, ascending; position = group rank
  const int group_rank;          // mine, -1 when I am no member
  int size() const { return static_cast<int>(ranks.size()); }
  int coordinator_rank() const { return ranks[0]; }  // world rank
  // Group rank of a world rank, -1 when it is no member.
  int position_of(int world_rank) const;

  // Submit lock ---------------------------------------------------------------------------------------------------
  // Gives the next number of an unnamed operation / the record of a name.
  uint64_t next_sequence(Op op) { return sequences_[static_cast<int>(op)]++; }
  uint64_t upcoming_sequence(Op op) const { return sequences_[static_cast<int>(op)]; }
  // Unnamed operation `sequence` ran without this rank, which had joined: number behind it, as the other ranks do.
  void skip_sequence(Op op, uint64_t sequence) {
    uint64_t& next = sequences_[static_cast<int>(op)];
    next = std::max(next, sequence + 1);
  }
  NameRecord& record_of(Op op, std::string_view name);
  // Of a name that there is already, or (empty) of the unnamed ones; null: there is none.
  NameRecord* known_record(Op op, std::string_view name);
  Operation* find_named(Op op, std::string_view name);
  uint64_t calls = 0;  // submitted to this set

  Lateness lateness;  // driving thread writes; on group rank 0 about every operation, elsewhere about frozen buckets
  std::atomic<bool> join_pending{false};  // set under the submit lock, cleared by the driving thread

  // Driving thread ------------------------------------------------------------------------------------------------
  void adopt(Operation* op);     // taken from submit: it is pending from now on
  void announce(Operation* op);  // puts a pending operation into the next ballot
  // An allreduce of one tensor that is not agreed on first.
  Task task_of(const Operation& op) const;
  // Starts a bucket of a frozen plan; false: announce it.
  bool start_frozen(Operation* op);
  // What `op` has to do if every rank has submitted the same; fails where nobody could.
  Result<Task> express_task_of(Operation* op) const;
  // Starts a small operation on the express way, without a message; false: announce it.
  bool start_express(Operation* op);
  // Remembers what another call like this operation needs.
  void keep_repeat(const Operation& op, const ExpressKey& key, const Task& task);
  // A plan says so.
  void open_express(uint64_t first_turn);
  // Group rank 0: what a member announces.
  Status take_ballot(const Ballot& ballot);
  // Group rank 0: whether the plans so far look like a loop of blocking calls, which an express session serves.
  bool suits_express(const Plan& plan);
  // Steps what runs frozen; calls done(op, collective) for what has ended, and announces what stepped back.
  template <class Done>
  void run_frozen(bool* moved, Done&& done);
  // This rank enters no frozen plan any more and no express turn (it joins or leaves); nothing of it runs there.
  void thaw();
  // The operation that a plan entry means on this rank; null when this rank did not submit it (it has joined).
  // `find_named` must be called with the submit lock held: the caller passes a function that does.
  template <class FindNamed>
  Operation* match(Op op, const PlanEntry& entry, FindNamed&& find_named);
  void forget(Operation* op);  // it is about to be done
  // An unnamed operation with this number was never announced: the next that is need not count from before it.
  void pass_over(Op op, uint64_t sequence);

  // To whom my ballots go and from whom plans come (world rank); not on group rank 0.
  int above() const { return tree ? ranks[tree->parent(group_rank)] : coordinator_rank(); }
  // Without this member none of my ballots arrives.
  bool needs(int position) const { return tree ? tree->is_below(group_rank, position) : position == 0; }
  std::shared_ptr<const ControlTree> tree;  // null: every member talks to group rank 0
  std::unique_ptr<Combiner> combiner;       // where others are below this rank
  bool shows_all = false;                   // group rank 0: the combiners were told to, for a timeline
  TimePoint next_reveal{};                  // group rank 0

  std::unique_ptr<AgreementWatch> watch;     // the coordinator's
  std::unique_ptr<Coordinator> coordinator;  // on group rank 0
  bool gathering = false;  // something is ready and held back until gathered_at, so that more joins it
  TimePoint gathered_at{};
  PlanCache cache;
  Ballot ballot;  // what the next ballot will say
  bool ballot_waits() const { return !ballot.cached.empty() || !ballot.fresh.empty() || ballot.joined; }
  // Whether the ballot that waits had better wait for more: small operations come in quick succession. For as long as
  // something new is there nearly every time this is asked; it counts looks, so it ends without a clock.
  bool ballot_fills();
  void ballot_sent();
  Operation* join = nullptr;        // my join, while it is pending
  std::vector<Operation*> pending;  // taken from submit and not done, in no order (Operation::pending_at)
  size_t outstanding() const { return pending.size(); }

  std::map<int, BucketSet> bucket_sets;  // changed with the gate and the submit lock held
  int next_bucket_set = 0;
  size_t next_bucket_flag = 0;
  struct FrozenRun {
    Operation* op;
    std::unique_ptr<FrozenCollective> collective;
  };
  std::vector<FrozenRun> frozen_runs;
  Operation* deferred_join = nullptr;  // waits until nothing runs frozen
  // Frozen buckets on a GPU at which all members have arrived; each waits for its turn, then it is launched.
  std::vector<Operation*> armed;
  std::unique_ptr<BatchRunner> armed_runner;  // of the one whose turn it is
  Operation* take_armed(int32_t flag);        // null: this rank has not seen all arrivals yet

  // Its operations are frozen runs without a bucket set.
  Express express;
  bool express_allowed = true;
  size_t express_bytes = 16 * kKiB;  // larger ones are agreed on; the same on all members
  struct ExpressTrial {              // group rank 0
    static constexpr int kFirstWanted = 8;
    int alike = 0, wanted = kFirstWanted;  // plans in a row that suit it; how many open a session
    uint64_t successes_before = 0;         // of the session before
  } express_trial;

  bool may_be_two_level = false;  // several nodes: allreduce in shared memory within each, over channels between
  Tuning tuning;                  // in force for the plans that come; the same on every rank after the same plan
  Group group;
  std::unique_ptr<SharedLane> lane;
  std::string told_about_device;        // DeviceGroup::reason, once it has been logged
  std::unique_ptr<DeviceGroup> device;  // from the first batch on device memory on; uses `group`
  std::deque<PlanBatch> queue;
  std::unique_ptr<BatchRunner> runner;
  std::map<uint32_t, std::unique_ptr<BatchRunner>> cut;  // batches between two of their parts, by id of the first
  Status closed;  // not ok: every operation from now on fails with it (a member has left)

 private:
  struct Window {  // unnamed operations of one kind by sequence number
    uint64_t base = 0;
    std::deque<Operation*> operations;
  };
  std::array<uint64_t, kOpCount> sequences_{};                               // submit lock
  std::array<std::unordered_map<std::string, NameRecord>, kOpCount> names_;  // submit lock (records: atomic)
  std::array<NameRecord, kOpCount> unnamed_;                                 // what they repeat
  std::array<Window, kOpCount> windows_;
  std::vector<Operation*> by_slot_;
  size_t ballot_bytes_ = 0;  // of the tensors that the waiting ballot announces
  size_t ballot_seen_ = 0;   // announcements in it at the last look
  int looks_without_news_ = 0;
};

template <class Done>
void ProcessSet::run_frozen(bool* moved, Done&& done) {
  for (size_t i = 0; i < frozen_runs.size();) {
    const Progress progress = frozen_runs[i].collective->step(moved);
    if (progress == Progress::kPending) {
      ++i;
      continue;
    }
    FrozenRun run = std::move(frozen_runs[i]);
    frozen_runs.erase(frozen_runs.begin() + static_cast<std::ptrdiff_t>(i));
    *moved = true;
    if (run.collective->withdrawn()) {
      if (run.op->bucket_set >= 0) bucket_sets[run.op->bucket_set].frozen = false;
      announce(run.op);
    } else {
      // A turn is over: what was announced while it was under way others may wait for, instead of entering the next.
      if (run.op->bucket_set < 0 && express.is_on() && pending.size() > 1) express.close();
      done(run.op, *run.collective);
    }
  }
  if (deferred_join && frozen_runs.empty()) {
    thaw();
    announce(std::exchange(deferred_join, nullptr));
    *moved = true;
  }
}

template <class FindNamed>
Operation* ProcessSet::match(Op op, const PlanEntry& entry, FindNamed&& find_named) {
  if (op == Op::kJoin) return join;
  if (entry.unnamed) {
    Window& w = windows_[static_cast<int>(op)];
    if (entry.sequence < w.base || entry.sequence - w.base >= w.operations.size()) return nullptr;
    Operation* found = w.operations[entry.sequence - w.base];
    if (found && entry.assigned && entry.slot != kNoSlot) cache.learn(found->request, entry.slot);
    return found;
  }
  Operation* found = nullptr;
  if (entry.name.empty()) {
    if (entry.slot < by_slot_.size()) found = by_slot_[entry.slot];
  } else {
    found = find_named(op, entry.name);
  }
  if (entry.assigned && entry.slot != kNoSlot) {
    if (found)
      cache.learn(found->request, entry.slot);
    else
      cache.learn(entry);
  }
  return found;
}

}  // namespace hc
