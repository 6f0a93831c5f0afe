#include "engine/set_changes.h"

#include <algorithm>

#include "agreement/deadlock.h"

namespace hc {

Status SetChanges::add(std::vector<int> ranks, int* id) {
  HC_TRY(context_.check_connected());
  std::sort(ranks.begin(), ranks.end());
  if (ranks.empty() || std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end() || ranks.front() < 0 ||
      ranks.back() >= context_.mesh->size())
    return error(Code::kInvalidArgument, "a process set needs different ranks between 0 and ",
                 context_.mesh->size() - 1);
  HC_TRY(make(ranks, id));
  std::string name = text_of("horoclone.process_set.add.", *id);
  for (int r : ranks) name += text_of(".", r);
  Status known = calls_.barrier(0, name);  // nobody may use the set before everybody knows it
  // Its number is free again, as on the ranks that have not made it.
  if (!known.is_ok() && !context_.has_failed()) drop(*id, known);
  return known;
}

void SetChanges::drop(int id, const Status& reason) {
  std::unique_ptr<ProcessSet> removed;  // ends after the lock is left
  const ProgressThreads::Hold held(progress_);
  backend_.drop_set(static_cast<uint16_t>(id));
  messages_.set_removed(static_cast<uint16_t>(id), reason);
  removed = sets_.remove(id);
  if (removed) removed->end_pending(reason);
}

Status SetChanges::make(std::vector<int> ranks, int* id) {
  const ProgressThreads::Hold held(progress_);
  int free_id = 1;
  while (sets_.find(free_id)) ++free_id;
  if (free_id >= kMaxSharedSegments)
    return error(Code::kUnsupported, "more than ", kMaxSharedSegments - 1, " process sets; remove some first");
  *id = free_id;
  return sets_.add(static_cast<uint16_t>(free_id), std::move(ranks));
}

Status SetChanges::remove(int id) {
  HC_TRY(context_.check_connected());
  if (id == 0) return error(Code::kInvalidArgument, "the global process set cannot be removed");
  if (!intake_.find(id))
    return error(Code::kInvalidArgument, "Process set ", id, " does not exist, or has not been registered.");
  // Then every rank has finished with the set.
  HC_TRY(calls_.barrier(0, text_of("horoclone.process_set.remove.", id)));
  drop(id, error(Code::kAborted, "its process set was removed"));
  return Status::ok();
}

Status SetChanges::declare(int process_set, BucketSet buckets, int* id) {
  HC_TRY(context_.check_connected());
  if (buckets.reduce == Reduce::kAdasum)
    return error(Code::kUnsupported,
                 "a bucket cannot be reduced with Adasum, whose coefficients belong to each tensor; use a grouped "
                 "allreduce");
  const bool owned = !buckets.place.is_host && backend_.find_memory(&buckets);
  const auto declared = std::make_shared<const BucketSet>(std::move(buckets));
  ProcessSet::Capabilities can;
  {
    const ProgressThreads::Hold held(progress_);
    ProcessSet* set = sets_.find(process_set);
    if (!set || !set->members().has_me())
      return error(Code::kInvalidArgument, "rank ", context_.rank(), " is not a member of process set ", process_set);
    *id = intake_.declare(*set->intake(), declared);
    HC_TRY(set->declare(*id, declared, owned, &can));
  }
  const std::string name = text_of("horoclone.declare.", *id);
  // Whether every rank declares the same, and has its buckets where a persistent plan can take them, known to it by the
  // same numbers: one integer each, the least and the greatest agree.
  const int64_t mine[4] = {static_cast<int64_t>(declared->fingerprint() >> 2), can.persistent ? 1 : 0,
                           can.registers ? 1 : 0, can.numbers};
  int64_t least[4], most[4];
  if (Status agreed = agree(process_set, name, mine, least, most); !agreed.is_ok())
    return give_up_declaring(process_set, *id, std::move(agreed));
  if (least[0] != most[0])
    return give_up_declaring(
        process_set, *id,
        error(Code::kMismatch, process_set == 0 ? "all ranks" : ranks_text(intake_.find(process_set)->members.ranks),
              " declared different buckets; do all ranks build the same model "
              "and pass the same arguments to DistributedOptimizer?"));
  // A backend forgets buckets only here, where every rank is: those that all of them have dropped.
  int64_t forgotten = 0;
  if (can.knows_some) HC_TRY(reduce(process_set, name + ".dropped", Reduce::kAnd, {&can.dropped, 1}, &forgotten));
  can.persistent = least[1] == 1 && least[3] == most[3];
  // Who has joined says nothing above, and would not say that it has filled a bucket.
  if (can.persistent && can.between_nodes) {
    const int64_t one = 1;
    int64_t here = 0;
    HC_TRY(reduce(process_set, name + ".here", Reduce::kSum, {&one, 1}, &here));
    can.persistent = here == static_cast<int64_t>(intake_.find(process_set)->members.ranks.size());
  }
  can.registers = least[2] == 1;
  can.dropped = forgotten;
  return confirm(process_set, *id, can);
}

// The progress lock is let go between two steps, in which others may be late: a rank may die meanwhile.
Status SetChanges::confirm(int process_set, int id, const ProcessSet::Capabilities& all) {
  std::shared_ptr<SetBackend::Confirmation> confirmation;
  bool is_over = false;
  Status outcome;
  {
    const ProgressThreads::Hold held(progress_);
    if (ProcessSet* set = sets_.find(process_set)) confirmation = set->confirm(id, all);
    if (!confirmation) return outcome;
  }
  const std::function<bool()> over = [&] {
    if (is_over) return true;
    outcome = context_.has_failed() ? intake_.failure() : context_.check_connected();
    if (outcome.is_ok() && sets_.find(process_set)) {
      auto stepped = confirmation->step();
      outcome = stepped.status();
      if (stepped.is_ok() && !stepped.value()) return false;
    }
    confirmation.reset();
    return is_over = true;
  };
  while (!progress_.until_under_lock(over, Deadline::in(1)));
  return outcome;
}

// As on the ranks that have not declared: the next ones to be declared get the same numbers everywhere.
Status SetChanges::give_up_declaring(int process_set, int id, Status reason) {
  const ProgressThreads::Hold held(progress_);
  ProcessSet* set = sets_.find(process_set);
  if (set && !context_.has_failed()) set->take_back_declared(id);
  return reason;
}

Status SetChanges::agree(int process_set, const std::string& name, std::span<const int64_t> mine, int64_t* least,
                         int64_t* most) {
  HC_TRY(reduce(process_set, name + ".min", Reduce::kMin, mine, least));
  return reduce(process_set, name + ".max", Reduce::kMax, mine, most);
}

Status SetChanges::reduce(int process_set, const std::string& name, Reduce how, std::span<const int64_t> mine,
                          int64_t* out) {
  const int64_t shape[] = {static_cast<int64_t>(mine.size())};
  const Submission::Tensor tensor{mine.data(), out, shape, DType::kI64};
  Submission s;
  s.reduce = how;
  s.process_set = process_set;
  s.name = name;
  s.tensors = {&tensor, 1};
  s.will_wait = true;
  return calls_.run(s);
}

Status SetChanges::undeclare(int process_set, int id) {
  const ProgressThreads::Hold held(progress_);
  if (ProcessSet* set = sets_.find(process_set)) set->undeclare(id);
  return Status::ok();
}

}  // namespace hc
