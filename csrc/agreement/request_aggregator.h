// Combines the request lists of one rank's subtree (control_tree.h). What the whole subtree has announced alike goes up
// as one announcement; announcements that differ go up as each rank made them. An announcement that is still missing on
// some ranks cannot run yet, so it is held here until they make it, or until the coordinator must know: a rank has
// joined or left, or a stall is investigated. PURE like the coordinator: request lists, plans and times go in, request
// lists come out.
#pragma once

#include <memory>
#include <vector>

#include "agreement/control_tree.h"
#include "agreement/negotiation.h"
#include "base/clock.h"

namespace hc {

struct RequestAggregatorOptions {
  std::shared_ptr<const ControlTree> tree;
  int rank = 0;  // group rank; has children in the tree
  uint64_t generation = 0;
  uint16_t process_set = 0;
};

class RequestAggregator {
 public:
  explicit RequestAggregator(RequestAggregatorOptions options);
  ~RequestAggregator();

  // A request list of this rank itself or one that a child sent up. An error means a malformed request list, as in
  // Coordinator::take.
  Status take(const RequestList& request_list, TimePoint now);
  bool has_news() const;
  // What goes up now, to be taken in this order. On the root: to the coordinator.
  std::vector<RequestList> collect();
  // Call this before the plan is sent down and before this rank executes it.
  void pass(const Plan& plan);
  // Sends up what is held; later announcements of the same operations follow at once.
  void flush_held(TimePoint now);
  // A rank of the process set has left. Operations may now fail before all ranks have announced them, so nothing is
  // held any more.
  void leave(TimePoint now);
  // While `on`, nothing is held: a timeline shows when each rank announces.
  void hold_nothing(bool on, TimePoint now);
  size_t held() const;  // operations that only a part of the subtree has announced, and that are not shown

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hc
