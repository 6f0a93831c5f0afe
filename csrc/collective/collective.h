// A collective performs one operation over a group. It is a small state machine: start() once, then step() until it
// says done or failed. It never blocks, sleeps or locks; the thread that makes progress steps every live one, so a slow
// peer in one process set holds up nothing else. It knows bytes and reductions, never a tensor's name.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "arithmetic/reduce.h"
#include "base/clock.h"
#include "base/dtype.h"
#include "base/settings_table.h"
#include "base/status.h"
#include "net/channel.h"

namespace hc {

class SharedSegment;  // collective/shared/shared.h: the group's part of the node's shared memory

// Who takes part. Positions (0 .. size-1) are ranks within the group, not world ranks.
struct Group {
  int rank = 0;
  int size = 1;
  std::vector<int> world_rank;              // [size]
  std::vector<int> node;                    // [size] node number of each
  std::vector<Channel*> channel;            // [size] null at own position
  SharedSegment* shared_segment = nullptr;  // not null when the local members share memory (one node: the whole group)
};

// One tensor's share of a task, in elements of Task::dtype. `in` may equal `out`. What only the root has (the output of
// reduce and gather, the input of scatter) is null elsewhere.
struct Piece {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  size_t count = 0;
};

// What a collective has to do. Several pieces make a fused allreduce; all other operations have one piece.
struct Task {
  Op op = Op::kAllreduce;
  Reduce reduce = Reduce::kSum;
  DType dtype = DType::kF32;
  int root = 0;  // group rank (broadcast, reduce, gather, scatter)
  Scale scale;
  std::vector<Piece> pieces;
  // allgather, gather: elements contributed by each group rank (out = their concatenation);
  // reducescatter, scatter: elements of each group rank's slice (in = their concatenation, out = mine);
  // alltoall: elements sent to each group rank (in = their concatenation).
  std::vector<size_t> counts;
  std::vector<size_t> received_counts;  // alltoall: elements from each group rank (out = their concatenation)
  size_t longest_part = 0;              // alltoall: most elements any rank sends to any other; the same on every rank
  Algorithm algorithm = Algorithm::kAuto;
  size_t segment_bytes = defaults::segment_bytes;  // one transfer; tests make it tiny
  // Shared memory, kAuto: up to this many take the flat path, at most kFlatBufferBytes.
  size_t flat_bytes = defaults::flat_bytes;
  // Channels, kAuto: an allreduce of fewer is done by recursive doubling.
  size_t ring_from_bytes = defaults::ring_threshold_bytes;
  bool adasum_by_node = false;  // Adasum: of the averages of each node's ranks
  bool with_joined = false;     // some rank has joined, and its pieces lie in other memory
  Tag tag;                      // generation, process set, batch
  // Allreduce between nodes: only part `part` of `parts` of the work is done. All parts together, in order and whatever
  // runs in between, give the same bits as the whole.
  uint32_t part = 0, parts = 1;

  size_t count() const {
    size_t n = 0;
    for (const Piece& p : pieces) n += p.count;
    return n;
  }
  size_t bytes() const { return count() * size_of(dtype); }
};

enum class Progress { kPending, kDone, kFailed };

class Collective {
 public:
  virtual ~Collective() = default;  // withdraws its posted transfers
  virtual Progress start() = 0;
  // Does what can be done now. `moved` is set when anything happened (the engine then does not go to sleep).
  virtual Progress step(bool* moved) = 0;
  const Status& status() const { return status_; }
  // What it is called in a timeline: "ring", "shm flat".
  const char* algorithm() const { return algorithm_; }

 protected:
  Progress fail(Status status) {
    status_ = std::move(status);
    return Progress::kFailed;
  }
  Status status_;
  const char* algorithm_ = "host";
};

// Chooses by Task::algorithm (kAuto: by operation, size and layout) and makes the state machine. host.cc.
Result<std::unique_ptr<Collective>> make_collective(Task task, const Group& group);

// Algorithms over channels: ring, recursive doubling, circulant graph, binomial tree, pairwise. channel_collectives.cc.
Result<std::unique_ptr<Collective>> make_channel_collective(Task task, const Group& group);
// Algorithms in shared memory; every member shares the group's shared segment. shared.cc.
Result<std::unique_ptr<Collective>> make_shared_collective(Task task, const Group& group);

// Private tensors through buffers of the shared segment. shared_blocked.cc.
Result<std::unique_ptr<Collective>> make_blocked_collective(Task task, const Group& group);
// The same with as few bytes as possible between the groups of SharedSegment::levels(). levelled.cc.
Result<std::unique_ptr<Collective>> make_levelled_collective(Task task, const Group& group);
// Allreduce over several nodes of which some have several ranks: shared memory within, channels between. two_level.cc.
Result<std::unique_ptr<Collective>> make_two_level_allreduce(Task task, const Group& group);
// Allreduce with Reduce::kAdasum: each piece is a tensor with coefficients of its own. adasum.cc.
Result<std::unique_ptr<Collective>> make_adasum_allreduce(Task task, const Group& group);

// A collective that is not negotiated: the ranks' arrival is the agreement. If a member has left while it waits for
// arrivals, it withdraws: it is done, withdrawn() is true and memory is unchanged.
class ArrivalCollective : public Collective {
 public:
  bool withdrawn() const { return withdrawn_; }
  virtual std::vector<int> late_members() const = 0;  // group ranks that have not arrived
  struct Arrival {
    int last = -1;   // group rank of the member that came last; -1: this one did
    TimePoint at{};  // when all were there, if somebody was missing
  };
  const Arrival& arrival() const { return arrival_; }

 protected:
  bool withdrawn_ = false;
  Arrival arrival_;
};

// A bucket whose plan is persistent. It is made once and used again and again: begin(), then step() as for any
// collective.
class PersistentCollective : public ArrivalCollective {
 public:
  // round: counts its uses, from 0.
  virtual void begin(uint64_t round) = 0;
  Progress start() override {
    begin(0);
    return Progress::kPending;
  }
  size_t bytes() const { return bytes_; }  // of the bucket; 0: of an arrival alone
  // Between nodes: the member (group rank) has begun so many rounds, and will begin no other.
  virtual void member_left(int, uint64_t) {}
  // Nothing of it is on its way to or from another member.
  virtual bool is_at_rest() const { return true; }

 protected:
  size_t bytes_ = 0;
};
// In place, all members share memory; `bucket` indexes the shared segment's bucket flags. shared.cc.
std::unique_ptr<PersistentCollective> make_persistent_allreduce(Task task, const Group& group, size_t bucket);
// Over several nodes; Task::tag names the process set's streams of declared buckets. two_level: the members of each
// node share memory, in which all buffers lie. channels/persistent_allreduce.cc.
std::unique_ptr<PersistentCollective> make_persistent_between_nodes(Task task, const Group& group, size_t bucket,
                                                                    bool two_level);
// The arrival alone, for a bucket that something else then reduces: done when all members have come. shared.cc.
std::unique_ptr<PersistentCollective> make_persistent_arrival(const Group& group, size_t bucket);

}  // namespace hc
