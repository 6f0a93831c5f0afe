// What changes or describes the engine's own state: process sets, declared buckets, memory, counters, texts for humans.
#include <algorithm>
#include <cstring>

#include "engine/engine.h"

namespace hc {

Status Engine::barrier(int process_set, const std::string& name) {
  Submission s;
  s.op = Op::kBarrier;
  s.process_set = process_set;
  s.name = name;
  s.will_wait = true;
  int64_t handle = 0;
  HC_TRY(submit(s, &handle));
  bool done = false;
  Status outcome = wait(handle, -1, &done);
  release(handle);
  return outcome;
}

Status Engine::declare(int process_set, BucketSet buckets, int* id) {
  if (!connected_.load()) return error(Code::kNotInitialized, "Horovod has not been initialized; use hvd.init().");
  if (buckets.reduce == Reduce::kAdasum)
    return error(Code::kUnsupported,
                 "a bucket cannot be reduced with Adasum, whose coefficients belong to each tensor; use a grouped "
                 "allreduce");
  std::string agreed;
  for (const auto& b : buckets.buckets) {
    agreed += text_of(b.name, name_of(b.dtype));
    for (int64_t d : b.shape) agreed += text_of(",", d);
  }
  agreed += text_of(";", static_cast<int>(buckets.reduce), ",", buckets.prescale, ",", buckets.postscale,
                    buckets.on_device ? ",gpu" : "");
  const bool owned = buckets.on_device && find_memory(&buckets);
  ProcessSet* set = nullptr;
  bool fits = false, registers = false;
  {
    const GateHold held(this);
    set = find_set(process_set);
    if (!set || set->group_rank < 0)
      return error(Code::kInvalidArgument, "rank ", mesh_->rank(), " is not a member of process set ", process_set);
    std::lock_guard lock(submit_mu_);
    *id = set->next_bucket_set++;
    const size_t n = buckets.buckets.size();
    const bool has_flags =
        set->lane && set->lane->size() == set->size() && set->next_bucket_flag + n <= kMaxFrozenBuckets;
    if (has_flags) {
      buckets.first_flag = set->next_bucket_flag;
      set->next_bucket_flag += n;
      HC_TRY(set->lane->prepare_buckets(buckets.first_flag, n));
      set->lane->publish(set->lane->mine().thawed, 0);
    }
    registers = owned && set->device && set->device->registers();
    set->bucket_sets[*id] = buckets;
    if (buckets.on_device && set->device) HC_TRY(set->device->prepare_to_capture());
    fits = has_flags && (buckets.on_device ? may_freeze_on_device(*set, buckets) : declared_in_arena(buckets));
  }
  // Whether every rank declares the same, and has its buckets where a frozen plan can take them: one integer each, the
  // least and the greatest agree.
  int64_t mine[3] = {static_cast<int64_t>(std::hash<std::string>{}(agreed) >> 2), fits ? 1 : 0, registers ? 1 : 0};
  int64_t least[3], most[3];
  HC_TRY(agree(process_set, text_of("horoclone.declare.", *id), mine, least, most));
  if (least[0] != most[0])
    return error(Code::kMismatch, "the ranks of process set ", process_set,
                 " declared different buckets; do all ranks build the same model "
                 "and pass the same arguments to DistributedOptimizer?");
  const GateHold held(this);
  BucketSet& stored = set->bucket_sets[*id];
  stored.frozen = least[1] == 1 && set->size() > 1;
  if (least[2] == 1) register_buckets(*set, stored);
  return Status::ok();
}

Status Engine::agree(int process_set, const std::string& name, int64_t (&mine)[3], int64_t (&least)[3],
                     int64_t (&most)[3]) {
  const int64_t shape[] = {3};
  for (const Reduce reduce : {Reduce::kMin, Reduce::kMax}) {
    int64_t* out = reduce == Reduce::kMin ? least : most;
    const Submission::Tensor tensor{mine, out, shape, DType::kI64};
    Submission s;
    s.reduce = reduce;
    s.process_set = process_set;
    const std::string full = name + (reduce == Reduce::kMin ? ".min" : ".max");
    s.name = full;
    s.tensors = {&tensor, 1};
    s.will_wait = true;
    int64_t handle = 0;
    HC_TRY(submit(s, &handle));
    bool done = false;
    Status outcome = wait(handle, -1, &done);
    release(handle);
    HC_TRY(outcome);
  }
  return Status::ok();
}

bool Engine::declared_in_arena(const BucketSet& buckets) const {
  if (!mesh_->shares_memory(mesh_->rank())) return false;
  const Arena& arena = *mesh_->arena(mesh_->rank());
  return std::all_of(buckets.buckets.begin(), buckets.buckets.end(), [&](const BucketSet::Bucket& b) {
    size_t bytes = size_of(b.dtype);
    for (int64_t d : b.shape) bytes *= static_cast<size_t>(d);
    return bytes && arena.contains(b.data, bytes);
  });
}

Status Engine::undeclare(int process_set, int id) {
  const GateHold held(this);
  std::lock_guard lock(submit_mu_);
  if (ProcessSet* set = find_set(process_set)) {
    const bool used = std::any_of(set->pending.begin(), set->pending.end(),
                                  [&](const Operation* op) { return op->bucket_set == id; });
    const auto at = set->bucket_sets.find(id);
    if (at != set->bucket_sets.end() && !used && set->device)
      for (const auto& memory : at->second.memory) set->device->forget_memory(memory->data());
    if (!used) set->bucket_sets.erase(id);  // else the late operations find it; it goes with the process set
  }
  return Status::ok();
}

Status Engine::add_process_set(std::vector<int> ranks, int* id) {
  if (!connected_.load()) return error(Code::kNotInitialized, "Horovod has not been initialized; use hvd.init().");
  std::sort(ranks.begin(), ranks.end());
  if (ranks.empty() || std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end() || ranks.front() < 0 ||
      ranks.back() >= mesh_->size())
    return error(Code::kInvalidArgument, "a process set needs different ranks between 0 and ", mesh_->size() - 1);
  int free_id = 1;
  {
    const GateHold held(this);
    while (find_set(free_id)) ++free_id;
    if (free_id >= kMaxLanes)
      return error(Code::kUnsupported, "more than ", kMaxLanes - 1, " process sets; remove some first");
    auto set = make_set(static_cast<uint16_t>(free_id), ranks);
    if (set->lane) HC_TRY(set->lane->prepare());
    std::lock_guard lock(submit_mu_);
    sets_[free_id] = std::move(set);
  }
  *id = free_id;
  std::string name = text_of("horoclone.process_set.add.", free_id);
  for (int r : ranks) name += text_of(".", r);
  return barrier(0, name);  // nobody may use the set before everybody knows it
}

Status Engine::remove_process_set(int id) {
  if (!connected_.load()) return error(Code::kNotInitialized, "Horovod has not been initialized; use hvd.init().");
  if (id == 0) return error(Code::kInvalidArgument, "the global process set cannot be removed");
  {
    std::lock_guard lock(submit_mu_);
    if (!find_set(id))
      return error(Code::kInvalidArgument, "Process set ", id, " does not exist, or has not been registered.");
  }
  HC_TRY(barrier(0, text_of("horoclone.process_set.remove.", id)));  // every rank has finished with the set
  std::unique_ptr<ProcessSet> removed;                               // ends after the gate is left
  const GateHold held(this);
  {
    std::lock_guard lock(submit_mu_);
    removed = std::move(sets_[id]);
    sets_.erase(id);
  }
  device_turns_.drop(static_cast<uint16_t>(id));
  messages_.set_removed(static_cast<uint16_t>(id), error(Code::kAborted, "its process set was removed"));
  while (!removed->pending.empty()) {
    Operation* op = removed->pending.back();
    complete(*removed, op, error(Code::kAborted, op->describe(), ": its process set was removed"));
  }
  return Status::ok();
}

Engine::Place Engine::place_in(int process_set) {
  std::lock_guard lock(submit_mu_);
  const ProcessSet* set = find_set(process_set);
  return set ? Place{set->size(), set->group_rank} : Place{};
}

Result<std::shared_ptr<Memory>> Engine::allocate(size_t bytes) {
  if (!connected_.load()) return error(Code::kNotInitialized, "Horovod has not been initialized; use hvd.init().");
  if (!mesh_->shares_memory(mesh_->rank())) {
    auto memory = Memory::make_private(bytes);
    if (!memory) return error(Code::kInternal, "no memory for a block of ", bytes, " bytes");
    std::memset(memory->data(), 0, bytes);
    return memory;
  }
  return Memory::make_shared(mesh_->arena(mesh_->rank()), bytes);
}

bool Engine::shares_memory() const {
  if (mesh_->local_size() != mesh_->size()) return false;
  for (int r = 0; r < mesh_->size(); ++r)
    if (!mesh_->shares_memory(r)) return false;
  return true;
}

std::string Engine::describe() {
  if (!connected_.load()) return "not connected";
  const GateHold held(this);
  // Whoever asks again and again holds the gate nearly all the time: the work goes on here, too.
  if (!failed_.load() && !stopping_.load()) (void)step();
  std::string text = text_of(mesh_->describe(mesh_->rank()), " of ", mesh_->size(),
                             failed_.load() ? text_of(", failed: ", failure_.text()) : "");
  const TimePoint now = Clock::now();
  for (const auto& [id, set] : sets_) {
    text += text_of("\nprocess set ", id, ": ", set->size(), " ranks, ", set->pending.size(), " operations pending, ",
                    set->queue.size(), " batches planned",
                    set->runner ? text_of(", batch ", set->runner->batch().id, " under way") : "");
    size_t shown = 0;
    for (const Operation* op : set->pending) {
      if (++shown > 20) break;
      text += text_of("\n  ", op->describe(), " for ", seconds_between(op->submitted, now), " s",
                      op->batch ? text_of(", in batch ", op->batch) : ", not agreed yet");
    }
    if (set->coordinator)
      for (const Stall& stall : set->coordinator->stalled(now, 0.0)) {
        text += text_of("\n  ", stall.name, " misses ranks");
        for (int r : stall.missing) text += " " + std::to_string(set->ranks[r]);
      }
  }
  for (const Operation* op : messages_.operations())
    text += text_of("\n  ", op->describe(), " for ", seconds_between(op->submitted, now), " s");
  rest_after_driving();
  return text;
}

}  // namespace hc
