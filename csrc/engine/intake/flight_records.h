// Writes this rank's flight record into HOROCLONE_RECORDER_DIR when something goes wrong. Thread: the thread that makes
// progress asks for it; hc-notify writes, so that neither a slow disk nor the formatting holds up the engine.
#pragma once

#include <string>

#include "base/clock.h"
#include "engine/context.h"
#include "engine/intake/intake.h"
#include "engine/threads/notifier.h"

namespace hc {

class FlightRecords {
 public:
  FlightRecords(Context& context, const Intake& intake, Notifier& notifier)
      : context_(context), intake_(intake), notifier_(notifier) {}
  bool are_wanted() const { return !context_.config.recorder_dir.empty(); }
  void save(const std::string& reason);
  // Saves a record after a mismatch, at most once a second, because a program that catches mismatches may cause many.
  void save_mismatch(const Status& status);

 private:
  Context& context_;
  const Intake& intake_;
  Notifier& notifier_;
  TimePoint last_mismatch_{};
};

}  // namespace hc
