// Simulates the agreement of a training step at any number of ranks, in one process: the real coordinator, request
// aggregators, plan caches and encoded frames run on a virtual clock. The caller says what messages cost; what the
// objects cost is measured while they run. Equal objects are shared: all ranks with nobody below them use one cache and
// one request list.
#pragma once

#include <cstdint>
#include <string>

#include "base/settings_table.h"
#include "base/status.h"

namespace hc {

struct MessageCost {  // microseconds
  double send = 0, latency = 0, receive = 0;
};

struct SimulationOptions {
  int ranks = 8;
  int ranks_per_node = 1;
  int fanout = defaults::control_fanout;  // of the tree of leaders; 0: a star
  int tensors = 161;                      // announced by name by every rank in each step
  int steps = 5;                          // that are counted, behind one in which the names are learnt
  bool processing = true;  // the virtual clock runs while the objects compute: in a tree above 512 ranks for as long as
                           // they take at 512, where they are in the caches as on a machine of their own
  MessageCost local, network;
};

struct SimulationResult {
  double latency_us = 0;  // from the announcement on all ranks to the plan on the last; median of steps
  double root_messages = 0, root_bytes = 0;  // sent and received by the coordinator's rank, per step
  double node_messages = 0, node_bytes = 0;  // of the busiest node to and from other nodes, per step
  double root_cpu_us = 0;     // of its coordinator and request aggregator, bytes included; median of steps
  double busiest_cpu_us = 0;  // of the busiest rank
  double rank_cpu_us = 0;     // mean of all ranks
  int depth = 0;
  std::string to_json() const;
};

Result<SimulationResult> simulate(const SimulationOptions& options);

}  // namespace hc
