// One rank's part in a tree of request lists (control_tree.h): what all of its subtree has announced goes up as one
// announcement, what ranks announce differently goes up as each of them said it. What only some have announced stays
// here, for nothing can come of it yet, until the rest comes or somebody must know: a rank has joined or left, or a
// stall is looked into. PURE like the coordinator: request lists, plans and times go in, request lists come out.
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

  // A request list of this rank itself or one that a child sent up. An error: a broken request list, as in
  // Coordinator::take.
  Status take(const RequestList& request_list, TimePoint now);
  bool has_news() const;
  // What goes up now, to be taken in this order. On the root: to the coordinator.
  std::vector<RequestList> collect();
  // Before the plan goes down, and before this rank acts on it.
  void pass(const Plan& plan);
  // What is held goes up; whoever announces the same later follows at once.
  void reveal(TimePoint now);
  // A rank of the process set has left: operations may fail that some have not announced. Nothing is held any more.
  void leave(TimePoint now);
  // A timeline wants to see who announces when: nothing is held while `on`.
  void show_all(bool on, TimePoint now);
  size_t held() const;  // operations that only a part of the subtree has announced, and that are not shown

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hc
