// Decides, for one process set, what runs next and in which order. PURE: no I/O, clock, lock or global. The same
// request lists in the same order give the same plans, so it is tested over thousands of random schedules and runs
// unchanged in a simulator. It lives on group rank 0 of each process set. A grouped operation is one request with
// several tensors (negotiation.h), so its tensors become ready together.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "agreement/control_tree.h"
#include "agreement/mismatch.h"
#include "agreement/negotiation.h"
#include "agreement/straggler_statistics.h"
#include "base/clock.h"
#include "base/settings_table.h"

namespace hc {

// Observes a coordinator while it is on. The timeline implements it.
class AgreementWatch {
 public:
  virtual ~AgreementWatch() = default;
  virtual bool on() const = 0;
  virtual void announced(const Subject& subject, int group_rank, TimePoint at) = 0;
  virtual void decided(const Subject& subject) = 0;  // it goes into a plan
};

struct CoordinatorOptions {
  int size = 1;                                  // ranks in the process set
  size_t fusion_bytes = defaults::fusion_bytes;  // 0 = no fusion
  // As fusion_bytes, for tensors in arenas, whose bits fusion must not change. Batches up to this size are reduced
  // between nodes by recursive doubling, where the order of an element's sum does not depend on its neighbours. 0
  // within one node, where each tensor is reduced in place.
  size_t arena_fusion_bytes = 0;
  bool fuse_groups = true;  // a group may share a batch with operations that are not of it
  // Once an operation has a priority, larger allreduces in host memory run in parts of about this many bytes. 0: never.
  size_t part_bytes = 0;
  size_t cache_capacity = defaults::cache_capacity;  // cache ids; 0 = no cache
  uint64_t generation = 0;
  uint16_t process_set = 0;
  std::vector<int> world_rank;              // [size] for texts
  std::shared_ptr<const ControlTree> tree;  // along which request lists come; null: from each rank
  AgreementWatch* watch = nullptr;
  StragglerStatistics* stragglers = nullptr;  // who was the last to be ready, where all announce
};

// An operation that some ranks announced and others did not.
struct Stall {
  std::string name;  // "allreduce.layer1.weight", "allreduce.noname.17"
  double waited_s = 0;
  std::vector<int> missing;  // group ranks
  std::vector<int> present;
  std::string hint;  // a likely cause, or empty: "rank 1 waits in allreduce.grad_8 instead: ..."
};

class Coordinator {
 public:
  explicit Coordinator(CoordinatorOptions options);
  ~Coordinator();

  // Takes one rank's request list, or one for a whole subtree of the tree. An error means a broken request list
  // (unknown cache id, announced twice): a bug or an intruder.
  Status take(const RequestList& request_list, TimePoint now);
  // The plan for what is ready, at most `room` batches (a row of small ones in the arena counts as one); empty when
  // nothing is.
  Plan decide(size_t room);
  bool anything_ready() const;

  // Announced by some, not by all, for longer than `older_than_s`.
  std::vector<Stall> stalled(TimePoint now, double older_than_s) const;
  // A rank has left for good (shutdown): operations that wait for it fail with `text`, now and later.
  void leave(int rank, const std::string& text);
  // These ranks wait for one another: what some of them have announced and others not fails with `text`.
  void end_deadlock(const std::vector<int>& stuck, const std::string& text);
  size_t pending() const;
  // These take effect from the next plan on.
  void set_fusion_bytes(size_t bytes);
  void set_arena_fusion_bytes(size_t bytes);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hc
