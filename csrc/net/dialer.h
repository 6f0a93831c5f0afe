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
  Dialer(const Credentials* credentials, const Claim& claim, Target target);

  // Starts attempts that are due and advances the others. An error is final: no rank will answer there.
  Status step(TimePoint now);
  void add_to(std::vector<pollfd>* set) const;
  // The connection, once it is authenticated.
  bool done() const { return static_cast<bool>(connected_); }
  Fd take() { return std::move(connected_); }
  const std::string& address() const { return address_; }
  // "10.0.0.2:4123: Connection refused, 192.168.0.2:4123: no answer yet"
  std::string tried() const;

 private:
  struct Attempt {
    Fd fd;
    size_t place;  // of the address
    TimePoint since;
    bool connecting;
    std::optional<Handshake> handshake;
  };
  size_t places() const { return target_.unix_name.empty() ? target_.addresses.size() : 1; }
  std::string name_of_place(size_t place) const;
  bool busy(size_t place) const;
  void start_next(TimePoint now);
  void start(size_t place, TimePoint now);
  bool step_attempt(Attempt& attempt, TimePoint now);
  void note(size_t place, const Status& why, bool refused);
  void choose_prover();

  const Credentials* credentials_;
  const Claim claim_;
  const Target target_;
  std::vector<Attempt> attempts_;
  std::vector<std::string> last_error_;  // by place
  std::vector<int> refusals_;            // by place, in a row
  size_t next_place_ = 0;
  int rounds_ = 0;
  TimePoint next_start_{};
  Fd connected_;
  std::string address_;
};

}  // namespace hc
