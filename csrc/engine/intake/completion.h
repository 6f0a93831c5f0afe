// Ends an operation: sets its status, notifies observers, then its waiters.
//
// Thread: the thread that makes progress. Owner: the engine.
#pragma once

#include "engine/context.h"
#include "engine/intake/flight_records.h"
#include "engine/intake/intake.h"
#include "engine/record/timeline.h"
#include "engine/threads/notifier.h"
#include "engine/threads/progress_lock.h"
#include "engine/tune/tuner.h"

namespace hc {

class Completion {
 public:
  Completion(RankMetrics& rank_metrics, Intake& intake, Timeline& timeline, Tuner& tuner, FlightRecords& records,
             Notifier& notifier, ProgressLock& progress_lock)
      : rank_metrics_(rank_metrics),
        intake_(intake),
        timeline_(timeline),
        tuner_(tuner),
        records_(records),
        notifier_(notifier),
        progress_lock_(progress_lock) {}
  // `op` may be recycled when this returns.
  void finish(Operation* op, Status status);

 private:
  RankMetrics& rank_metrics_;
  Intake& intake_;
  Timeline& timeline_;
  Tuner& tuner_;
  FlightRecords& records_;
  Notifier& notifier_;
  ProgressLock& progress_lock_;
};

}  // namespace hc
