// Adds and removes process sets and declared buckets, on every rank alike: each change is made on this rank, then
// agreed on. Thread: any. Owner: the engine.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "engine/calls.h"
#include "engine/point_to_point/messages.h"

namespace hc {

class SetChanges {
 public:
  SetChanges(Context& context, Intake& intake, Backend& backend, SetTable& sets, Messages& messages,
             ProgressThreads& progress, Calls& calls)
      : context_(context),
        intake_(intake),
        backend_(backend),
        sets_(sets),
        messages_(messages),
        progress_(progress),
        calls_(calls) {}

  // Collective over the world, in the same order on every rank.
  Status add(std::vector<int> ranks, int* id);
  Status remove(int id);
  // Collective over the process set. The buckets' memory must live until undeclare.
  Status declare(int process_set, BucketSet buckets, int* id);
  Status undeclare(int process_set, int id);

 private:
  Status make(std::vector<int> ranks, int* id);
  void drop(int id, const Status& reason);
  Status confirm(int process_set, int id, const ProcessSet::Capabilities& all);
  Status give_up_declaring(int process_set, int id, Status reason);
  Status agree(int process_set, const std::string& name, std::span<const int64_t> mine, int64_t* least, int64_t* most);
  Status reduce(int process_set, const std::string& name, Reduce how, std::span<const int64_t> mine, int64_t* out);

  Context& context_;
  Intake& intake_;
  Backend& backend_;
  SetTable& sets_;
  Messages& messages_;
  ProgressThreads& progress_;
  Calls& calls_;
};

}  // namespace hc
