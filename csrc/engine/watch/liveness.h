// Decides when a peer is asked for a sign of life, when it is warned about, and when it is declared lost. A stopped
// process (SIGSTOP) or a cut link gives no sign through any kernel mechanism; this is how it is noticed. (A process
// that dies is noticed at once by mesh_poll.cc.) PURE: times come in. Does nothing while nothing is outstanding.
//
// Thread: the thread that makes progress.
#pragma once

#include <vector>

#include "base/clock.h"
#include "base/settings_table.h"

namespace hc {

struct LivenessLimits {
  double probe_s = defaults::liveness_probe_s, warn_s = defaults::liveness_warn_s, error_s = defaults::liveness_error_s;
};

class Liveness {
 public:
  Liveness(int size, LivenessLimits limits) : limits_(limits), peers_(size) {}

  struct Action {
    int rank;
    enum Kind { kPing, kWarn, kLost } kind;
    double silent_s;
  };

  void heard(int rank) { peers_[rank].asked = false, peers_[rank].warned = false; }
  // Nothing is outstanding: forget every question.
  void rest() {
    for (Peer& p : peers_) p = {};
  }
  // `waits[r]`: some operation outstanding for longer than probe_s involves rank r.
  std::vector<Action> tick(TimePoint now, const std::vector<bool>& waits) {
    std::vector<Action> actions;
    for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
      Peer& p = peers_[r];
      if (!waits[r]) {
        p = {};
        continue;
      }
      if (!p.asked) {
        if (p.ever_asked && seconds_between(p.last_ping, now) < limits_.probe_s) continue;
        p.asked = p.ever_asked = true;
        p.first_ping = p.last_ping = now;
        actions.push_back({r, Action::kPing, 0});
        continue;
      }
      const double silent = seconds_between(p.first_ping, now);
      if (silent >= limits_.error_s) {
        actions.push_back({r, Action::kLost, silent});
      } else if (silent >= limits_.warn_s && !p.warned) {
        p.warned = true;
        actions.push_back({r, Action::kWarn, silent});
      }
      if (seconds_between(p.last_ping, now) >= limits_.probe_s) {
        p.last_ping = now;
        actions.push_back({r, Action::kPing, silent});
      }
    }
    return actions;
  }

 private:
  struct Peer {
    bool asked = false, ever_asked = false, warned = false;
    TimePoint first_ping{}, last_ping{};  // first one that was not answered yet; latest
  };
  LivenessLimits limits_;
  std::vector<Peer> peers_;
};

}  // namespace hc
