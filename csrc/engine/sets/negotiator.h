// One rank's side of the agreement of a process set: sends its requests to group rank 0, directly or along a tree of
// ranks that combine them, and passes plans down the same tree. On group rank 0 it owns the coordinator.
//
// Thread: the thread that makes progress. Owner: a process set.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "agreement/control_tree.h"
#include "agreement/coordinator.h"
#include "agreement/plan_cache.h"
#include "agreement/request_aggregator.h"
#include "engine/control/control_link.h"
#include "engine/operation/members.h"
#include "engine/operation/operation.h"
#include "engine/record/timeline.h"
#include "engine/tune/tuner.h"

namespace hc {

class Negotiator {
 public:
  // node: [group rank] the machine of each. one_node: all members share memory.
  Negotiator(Context& context, ControlLink& link, Timeline& timeline, const Members& members,
             StragglerStatistics* stragglers, const std::vector<int>& node, bool one_node);

  PlanCache& cache() { return cache_; }
  bool is_coordinator() const { return coordinator_ != nullptr; }
  const Coordinator* coordinator() const { return coordinator_.get(); }  // null: another rank is
  // The rank (world rank) to which this rank sends its requests and from which it receives plans; not on group rank 0.
  int parent() const;
  // Whether plans come to this rank directly from this member.
  bool follows(int position) const { return position == (tree_ ? tree_->parent(members_.group_rank) : 0); }
  // Plans no longer arrive, because this world rank has left: tells the ranks below, behind the plans that were sent to
  // them.
  Status tell_parent_left(int rank, const std::string& text);

  // Puts `op` into the next requests; sets Operation::cache_id.
  void announce(Operation* op);
  void announce_join() { requests_.joined = true; }
  void announce_bypass() { requests_.on_bypass = true; }  // a session of it is open on this rank
  bool has_requests() const { return !requests_.cached.empty() || !requests_.fresh.empty() || requests_.joined; }
  // Whether sending should wait because small operations still come in quick succession: something new was there at
  // nearly every call. It counts calls, so it ends without a clock.
  bool should_coalesce();
  // reachable: false drops the requests, as no rank is left to take them.
  Status send_requests(bool reachable);

  // Takes the requests of another rank: one that sends directly to this rank, or is below it in the tree.
  Status take(int from, const RequestList& requests);
  bool has_news_from_below() const { return aggregator_ && aggregator_->has_news(); }
  Status pass_up(bool reachable);

  // Group rank 0: something has changed since may_decide() was last found false.
  bool has_news() const { return news_; }
  bool may_decide();
  // Whether ready operations wait for others to join their batch. The delay begins with the first operation that is
  // ready.
  bool should_batch(double delay_ms, TimePoint* next_batch_due);
  Plan decide(size_t room);
  void set_sizes(const Tuning& tuning);
  // Whether a member that has an open session asked for one.
  bool take_bypass_news() { return std::exchange(bypass_news_, false); }

  // Sends a plan to the ranks below this one; `frame` is its encoding.
  Status pass_down(const Plan& plan, std::span<const uint8_t> frame);

  // A member has left for good. False: no request of this rank arrives any more.
  bool leave(int position, const std::string& text);

  // Group rank 0: what these members wait for from one another fails.
  void end_deadlock(const std::vector<int>& stuck, const std::string& text);

  // Makes the request aggregators send what they hold, when somebody must know who is missing. how: 0 hold again, 1
  // send it now, 2 hold nothing from now on.
  Status take_flush_frame(int from, uint8_t how);
  // Half-way to a stall report all aggregators send what they hold, so that the report knows who is missing and since
  // when.
  bool may_flush_held(TimePoint now) const { return aggregator_ && coordinator_ && now >= next_flush_; }
  Status flush_held(TimePoint now, double patience_s);
  // Ranks wait for one another: what this rank holds of others, and what they announce until the next plan, goes up.
  void hold_nothing_until_plan();

 private:
  Status give_to_coordinator(const RequestList& requests);
  Status send(std::span<RequestList> requests);
  Status tell_to_flush(uint8_t how);

  Context& context_;
  ControlLink& link_;
  Timeline& timeline_;
  const Members& members_;
  const bool one_node_;
  std::shared_ptr<const ControlTree> tree_;        // null: every member talks to group rank 0
  std::unique_ptr<RequestAggregator> aggregator_;  // where others are below this rank
  std::unique_ptr<AgreementWatch> watch_;          // the coordinator's
  std::unique_ptr<Coordinator> coordinator_;       // on group rank 0
  bool news_ = false;                              // for the coordinator
  bool bypass_news_ = false;
  bool delays_batch_ = false;  // something is ready and held back until batch_due_, so that more joins it
  TimePoint batch_due_{};
  bool holds_nothing_ = false;  // group rank 0 has told the request aggregators to, for a timeline
  bool until_plan_ = false;     // nothing is held before it
  TimePoint next_flush_{};
  PlanCache cache_;
  RequestList requests_;      // what goes next
  size_t request_bytes_ = 0;  // of the tensors in them
  size_t requests_seen_ = 0;  // announcements in them at the last look
  int looks_without_news_ = 0;
};

}  // namespace hc
