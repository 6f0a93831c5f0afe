// Watches whether the ranks that this one waits for are alive: pings those that are late, warns about those that do not
// answer, asks other ranks whether they hear them, and returns an error when one counts as lost (liveness.h decides).
// Answers such questions of others, too. Thread: the thread that makes progress. Owner: the engine.
#pragma once

#include <set>

#include "base/wire.h"
#include "engine/control/control_link.h"
#include "engine/watch/liveness.h"

namespace hc {

class PeerWatch {
 public:
  PeerWatch(Context& context, ControlLink& link) : context_(context), link_(link) {}
  void start();
  // Nothing is outstanding.
  void rest() { liveness_.rest(); }
  // waits[r]: some operation has waited for rank r for longer than liveness_probe_s. Not ok: who is lost.
  Status check(TimePoint now, std::vector<bool> waits);

  // Frames: a rank has answered a ping; another one asks whether a rank is heard here; and the answer to that.
  Status take_pong(int from);
  Status take_question(int from, Reader* in);
  Status take_witness(Reader* in);

 private:
  Status ask_others(TimePoint now, int silent);
  Status ping(int rank);
  Status tell(int asker, int silent);
  bool is_other(int rank) const;

  Context& context_;
  ControlLink& link_;
  Liveness liveness_{0, {}};
  std::vector<uint64_t> received_;        // [world] bytes, at the last check
  std::vector<std::set<int>> asked_for_;  // [world] who wants to know when it is heard
};

}  // namespace hc
