// The settings that may change while the job runs: what rank 0 chose at init, what is in force, and on rank 0 the
// search for better ones. Every rank uses what rank 0 decides, from the same plan on.
//
// Thread: the thread that makes progress, except for json(). Owner: the engine.
#pragma once

#include <memory>
#include <string>

#include "agreement/tuning.h"
#include "base/mutex.h"
#include "engine/context.h"
#include "engine/operation/operation.h"
#include "engine/threads/notifier.h"
#include "engine/tune/autotuner.h"

namespace hc {

class Tuner {
 public:
  Tuner(Context& context, Notifier& notifier) : context_(context), notifier_(notifier) {}

  // Rank 0's settings at init; constant after connect.
  const Tuning& agreed() const { return agreed_; }
  void agree(const Tuning& tuning) {
    agreed_ = tuning;
    flat_bytes_at_init_ = tuning.flat_bytes;
  }
  // What the probe at init has found.
  void agree_on_flat_bytes(size_t bytes) { agreed_.flat_bytes = bytes; }
  // Agreed at init, and changed by no probe.
  size_t flat_bytes_at_init() const { return flat_bytes_at_init_; }
  // The newest settings that this rank knows of; its coordinators pass them on.
  const Tuning& newest() const { return newest_; }
  void adopt(const Tuning& tuning);
  // Changes with every adopt().
  uint64_t revision() const { return revision_; }
  // A plan has brought settings.
  void note_plan() { has_plan_ = true; }
  bool has_plan() const { return has_plan_; }

  // Starts the search on rank 0, if it is enabled and there is something to tune.
  void start(const TuneLayout& layout);
  bool is_searching() const { return search_ != nullptr; }
  // Only while searching: `op` has completed without an error.
  void completed(const Operation& op);

  // Any thread: what is in force.
  std::string json() const;

 private:
  void open_log();
  void write_log(std::string text);

  Context& context_;
  Notifier& notifier_;
  Tuning agreed_, newest_;
  std::unique_ptr<Autotuner> search_;  // on rank 0 while it searches
  size_t flat_bytes_at_init_ = Tuning().flat_bytes;
  uint64_t revision_ = 0;
  bool has_plan_ = false;
  bool log_is_open_ = false;
  mutable Mutex mu_;
  Tuning shown_ HC_GUARDED_BY(mu_);  // newest_, for json()
};

}  // namespace hc
