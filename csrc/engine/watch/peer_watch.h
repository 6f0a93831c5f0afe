// Watches whether the ranks that this one waits for are alive: pings those that are late, warns about those that do not
// answer, and returns an error when one counts as lost (liveness.h decides). Thread: the thread that makes progress.
// Owner: the engine.
#pragma once

#include <vector>

#include "engine/control/control_link.h"
#include "engine/watch/liveness.h"

namespace hc {

class PeerWatch {
 public:
  PeerWatch(Context& context, ControlLink& link) : context_(context), link_(link) {}
  void start();
  void heard(int rank) { liveness_.heard(rank); }
  // Nothing is outstanding.
  void rest() { liveness_.rest(); }
  // waits[r]: some operation has waited for rank r for longer than liveness_probe_s. Not ok: who is lost.
  Status check(TimePoint now, std::vector<bool> waits);

 private:
  Context& context_;
  ControlLink& link_;
  Liveness liveness_{0, {}};
};

}  // namespace hc
