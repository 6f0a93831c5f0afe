// Dials one connection to one peer: all its addresses in quick succession, repeatedly, until one authenticates. If
// several answer at once only one goes on, so that the peer never sees this rank twice.
//
// Thread and owner: the bootstrap's.
#pragma once

#include <poll.h>

#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "net/handshake.h"
#include "net/socket.h"

namespace hc {

class Dialer {
 public:
  struct Target {
    std::string unix_name;           // not empty: this one,
    std::vector<Address> addresses;  // else these
    TcpTuning tuning;
  };
  struct Pace {
    double stagger_s = 0.05;   // between two addresses of one round
    double round_s = 0.1;      // before the first address is tried again; grows with the rounds,
    double max_round_s = 1.0;  // up to this
    double connect_s = 3.0;    // an address that swallows packets
    double retry_s = 3.0;      // then it is asked again beside that, as its host may be there by now
    double handshake_s = 1e9;  // for a connection to become a rank's
  };
  Dialer(const Credentials* credentials, const Claim& claim, Target target, Pace pace);

  // Starts attempts that are due and advances the others. An error is final: no rank will answer there.
  Status step(TimePoint now);
  void add_to(std::vector<pollfd>* set) const;
  // The connection, once it is authenticated.
  bool done() const { return static_cast<bool>(connected_); }
  Fd take() { return std::move(connected_); }
  const std::string& address() const { return address_; }
  // Some connection is on its way to become one.
  bool is_talking() const;
  // One of them has sent its proof within the last `s`: the other side may have chosen it.
  bool proved_within(double s, TimePoint now) const;
  // Some proof was sent, of whatever attempt, to which the other side has not said no.
  bool has_proved() const { return proofs_ > 0; }
  // Nobody listens at this address any more.
  bool is_refused(size_t place) const { return refused_[place]; }
  // "10.0.0.2:4123: Connection refused, 192.168.0.2:4123: no answer yet"
  std::string tried() const;

 private:
  struct Attempt {
    Fd fd;
    size_t place;  // of the address
    TimePoint since;
    bool connecting;
    std::optional<Handshake> handshake;
    TimePoint proved{};
  };
  size_t places() const { return target_.unix_name.empty() ? target_.addresses.size() : 1; }
  std::string name_of_place(size_t place) const;
  bool busy(size_t place) const;
  void start_next(TimePoint now);
  void start(size_t place, TimePoint now);
  bool step_attempt(Attempt& attempt, TimePoint now);
  void note(size_t place, const Status& why, bool refused);
  void choose_prover(TimePoint now);

  const Credentials* credentials_;
  const Claim claim_;
  const Target target_;
  const Pace pace_;
  std::vector<Attempt> attempts_;
  std::vector<std::string> last_error_;  // by place
  std::vector<int> refusals_;            // by place, in a row
  std::vector<bool> refused_;            // by place: by its kernel, at the last attempt
  size_t next_place_ = 0;
  int rounds_ = 0;
  TimePoint next_start_{};
  int proofs_ = 0;
  Fd connected_;
  std::string address_;
};

}  // namespace hc
