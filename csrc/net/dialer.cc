#include "net/dialer.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace hc {
namespace {

constexpr int kMaxRefusals = 3;  // so many in a row at every address that answered: it will not change

TimePoint later(TimePoint now, double s) {
  return now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
}

}  // namespace

Dialer::Dialer(const Credentials* credentials, const Claim& claim, Target target, Pace pace)
    : credentials_(credentials),
      claim_(claim),
      target_(std::move(target)),
      pace_(pace),
      last_error_(places()),
      refusals_(places(), 0),
      refused_(places(), false) {}

std::string Dialer::name_of_place(size_t place) const {
  return target_.unix_name.empty() ? target_.addresses[place].text() : "its unix socket";
}

bool Dialer::busy(size_t place) const {
  return std::any_of(attempts_.begin(), attempts_.end(), [&](const Attempt& a) { return a.place == place; });
}

bool Dialer::is_talking() const {
  return std::any_of(attempts_.begin(), attempts_.end(), [](const Attempt& a) { return !a.connecting; });
}

bool Dialer::proved_within(double s, TimePoint now) const {
  return std::any_of(attempts_.begin(), attempts_.end(), [&](const Attempt& a) {
    return a.handshake && a.handshake->proof_sent() && seconds_between(a.proved, now) < s;
  });
}

std::string Dialer::tried() const {
  std::string all;
  for (size_t i = 0; i < places(); ++i) {
    if (!all.empty()) all += ", ";
    all += name_of_place(i) + ": " +
           (busy(i)                  ? "no answer yet"
            : last_error_[i].empty() ? "not tried yet"
                                     : last_error_[i]);
  }
  return all.empty() ? "it has no address" : all;
}

void Dialer::note(size_t place, const Status& why, bool refused) {
  last_error_[place] = why.text();
  refusals_[place] = refused ? refusals_[place] + 1 : 0;
}

void Dialer::start(size_t place, TimePoint now) {
  const bool local = !target_.unix_name.empty();
  auto fd = local ? connect_unix(target_.unix_name) : start_connect(target_.addresses[place], target_.tuning);
  if (!fd.is_ok()) {
    refused_[place] = fd.status().code() == Code::kPeerLost;
    note(place, fd.status(), local && refused_[place]);
    return;
  }
  attempts_.push_back({fd.take(), place, now, !local, {}, {}});
}

void Dialer::start_next(TimePoint now) {
  if (now < next_start_ || places() == 0) return;
  const bool waits = std::any_of(attempts_.begin(), attempts_.end(), [&](const Attempt& a) {
    return a.place == next_place_ && (!a.connecting || seconds_between(a.since, now) < pace_.retry_s);
  });
  if (!waits) start(next_place_, now);
  double pause = pace_.stagger_s;
  if (++next_place_ == places()) {
    next_place_ = 0;
    pause = std::min(pace_.max_round_s, pace_.round_s * ++rounds_);
  }
  next_start_ = later(now, pause);
}

// False: this attempt is over, and if it succeeded connected_ is set.
bool Dialer::step_attempt(Attempt& attempt, TimePoint now) {
  if (attempt.connecting) {
    pollfd one{attempt.fd.get(), POLLOUT, 0};
    if (::poll(&one, 1, 0) <= 0) {
      if (seconds_between(attempt.since, now) < pace_.connect_s) return true;
      note(attempt.place, error(Code::kTimeout, "no answer to the connection request"), false);
      return false;
    }
    const int number = take_socket_error(attempt.fd.get());
    refused_[attempt.place] = number == ECONNREFUSED;
    if (number != 0) {
      note(attempt.place, error(Code::kPeerLost, std::strerror(number)), false);
      return false;
    }
    attempt.connecting = false;
  }
  if (!attempt.handshake) attempt.handshake = Handshake::connect(credentials_, claim_);
  switch (attempt.handshake->step(attempt.fd.get())) {
    case Handshake::State::kPending:
      if (seconds_between(attempt.since, now) < pace_.handshake_s) return true;
      note(attempt.place, error(Code::kTimeout, "no answer to the handshake"), false);
      return false;
    case Handshake::State::kFailed:
      if (attempt.handshake->turned_away()) --proofs_;
      note(attempt.place, attempt.handshake->status(), attempt.handshake->refused());
      return false;
    case Handshake::State::kDone:
      break;
  }
  address_ = name_of_place(attempt.place);
  connected_ = std::move(attempt.fd);
  return false;
}

void Dialer::choose_prover(TimePoint now) {
  for (const Attempt& a : attempts_) {
    if (a.handshake && a.handshake->proof_sent()) return;
  }
  for (Attempt& a : attempts_) {
    if (!a.handshake || !a.handshake->ready_to_prove()) continue;
    a.handshake->allow_proof();
    a.proved = now;
    ++proofs_;
    a.handshake->step(a.fd.get());
    return;
  }
}

Status Dialer::step(TimePoint now) {
  if (done()) return Status::ok();
  start_next(now);
  std::erase_if(attempts_, [&](Attempt& a) { return !done() && !step_attempt(a, now); });
  if (done()) {
    attempts_.clear();
    return Status::ok();
  }
  choose_prover(now);
  // Somebody refuses us again and again and nobody else answers: waiting for the deadline would change nothing.
  bool hopeless = false;
  for (size_t i = 0; i < places(); ++i) {
    if (busy(i)) return Status::ok();
    if (refusals_[i] >= kMaxRefusals) hopeless = true;
  }
  if (!hopeless || rounds_ < kMaxRefusals) return Status::ok();
  return error(Code::kPeerLost, tried());
}

void Dialer::add_to(std::vector<pollfd>* set) const {
  for (const Attempt& a : attempts_) {
    short events = a.connecting || !a.handshake ? POLLOUT : a.handshake->events();
    set->push_back({a.fd.get(), events, 0});
  }
}

}  // namespace hc
