// Decides when a peer is asked for a sign of life, when it is warned about, when others are asked whether they hear it,
// and when it is declared lost. A stopped process (SIGSTOP) or a cut link gives no sign through any kernel mechanism;
// this is how it is noticed. (A process that dies is noticed at once by mesh_poll.cc.) Does nothing while nothing is
// outstanding. PURE: times come in.
//
// A peer's silence begins when it is asked, and counts for the wait before that as well. It is too long after error_s
// and, as in phi accrual, what the answers of this peer so far make likely: their mean and four deviations. Silence
// while this rank itself did not run is none. A witness (somebody who sees the process run, or hears from it) holds the
// verdict up, as the fault is then between the two or will pass.
//
// Thread: the thread that makes progress.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/clock.h"
#include "base/settings_table.h"

namespace hc {

struct LivenessLimits {
  double probe_s = defaults::liveness_probe_s, warn_s = defaults::liveness_warn_s, error_s = defaults::liveness_error_s;
};

class Liveness {
 public:
  static constexpr double kWitnessedS = 15;                       // of silence at which witnesses do not count any more
  static constexpr double kProbesPerS = 400;                      // that one rank sends while all answer
  static constexpr double kTicksInProbe = 4;                      // calls of tick() in probe_s
  static constexpr double kMean = 1.0 / 8, kDeviation = 1.0 / 4;  // weight of the newest answer, as in TCP (RFC 6298)

  Liveness(int size, LivenessLimits limits)
      : limits_(limits), again_s_(std::max(limits.probe_s, size / kProbesPerS)), peers_(static_cast<size_t>(size)) {}

  struct Action {
    int rank;
    enum Kind { kPing, kWarn, kAskOthers, kLost } kind;
    double silent_s;
  };

  // Something has come in from this rank since the last tick.
  void heard(int rank) { at(rank).heard = true; }
  // A witness says that this rank runs.
  void witnessed(int rank, TimePoint now) {
    at(rank).is_witnessed = true;
    at(rank).witnessed = now;
  }
  bool answers(int rank) const { return !peers_[static_cast<size_t>(rank)].asked; }
  // Nothing is outstanding: forget every question.
  void rest() {
    for (Peer& p : peers_) p.forget();
  }
  // `waits[r]`: some operation outstanding for longer than probe_s involves rank r.
  std::vector<Action> tick(TimePoint now, const std::vector<bool>& waits) {
    discount_own_pause(now);
    std::vector<Action> actions;
    for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
      Peer& p = at(r);
      if (p.heard) p.take_answer(ticked_, now);
      if (waits[static_cast<size_t>(r)])
        look_at(r, now, &actions);
      else
        p.forget();
    }
    ticked_ = now;
    return actions;
  }
  // After so much silence this rank would be lost.
  double limit_s(int rank) const {
    const Peer& p = peers_[static_cast<size_t>(rank)];
    return limits_.error_s + std::min(limits_.error_s, p.mean_s + 4 * p.deviation_s);
  }

 private:
  struct Peer {
    bool heard = false, asked = false, warned = false, has_spoken = false, is_witnessed = false;
    TimePoint first_ping{}, last_ping{};  // first one that was not answered yet; latest
    TimePoint spoken{}, witnessed{};
    double mean_s = 0, deviation_s = 0;  // of its answers

    void forget() { heard = asked = warned = has_spoken = is_witnessed = false; }
    // It came at some moment after the tick before this one.
    void take_answer(TimePoint before, TimePoint now) {
      if (asked) {
        const double answer_s = std::max(0.0, seconds_between(first_ping, before)), off_s = answer_s - mean_s;
        mean_s += kMean * off_s;
        deviation_s += kDeviation * (std::abs(off_s) - deviation_s);
      }
      heard = asked = warned = is_witnessed = false;
      has_spoken = true;
      spoken = now;
    }
  };

  Peer& at(int rank) { return peers_[static_cast<size_t>(rank)]; }

  // A rank that was stopped, or that the others keep from the processor, has not listened meanwhile.
  void discount_own_pause(TimePoint now) {
    const auto usual = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limits_.probe_s));
    if (const auto pause = now - ticked_ - usual; pause > Clock::duration::zero())
      for (Peer& p : peers_) p.first_ping += pause;
  }

  void look_at(int rank, TimePoint now, std::vector<Action>* actions) {
    Peer& p = at(rank);
    if (!p.asked) {
      if (p.has_spoken && seconds_between(p.spoken, now) < again_s_) return;
      p.asked = true;
      p.first_ping = p.last_ping = now;
      actions->push_back({rank, Action::kPing, 0});
      return;
    }
    const double silent_s = std::min(limits_.probe_s, limits_.error_s / 2) + seconds_between(p.first_ping, now);
    const double limit = limit_s(rank);
    const bool is_witnessed = p.is_witnessed && seconds_between(p.witnessed, now) < 3 * limits_.probe_s;
    if (silent_s >= (is_witnessed ? std::max(limit, kWitnessedS) : limit)) {
      actions->push_back({rank, Action::kLost, silent_s});
      return;
    }
    if (silent_s >= limits_.warn_s && !p.warned) {
      p.warned = true;
      actions->push_back({rank, Action::kWarn, silent_s});
    }
    if (seconds_between(p.last_ping, now) < limits_.probe_s) return;
    p.last_ping = now;
    actions->push_back({rank, Action::kPing, silent_s});
    if (silent_s >= limit / 2) actions->push_back({rank, Action::kAskOthers, silent_s});
  }

  LivenessLimits limits_;
  double again_s_;  // between an answer and the next question
  TimePoint ticked_{};
  std::vector<Peer> peers_;
};

}  // namespace hc
