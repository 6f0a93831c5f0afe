// Makes a lost TCP connection between two living ranks again, so that every transfer goes on at the byte where it was.
// A connection is lost when it fails or ends without a goodbye, when its interface is down, or when the kernel sends
// something again and again and hears nothing (the cable is cut; its own timers would take seconds, or minutes) -
// unless it hears from the peer on the old connection before a new one has been authenticated. The rank that notices
// stops writing and dials every address of the peer, whose listeners stay open for the job's life, with the handshake
// of the bootstrap. The rank that accepts also stops writing before it welcomes; only then does each side take over
// what its old connection has received and tell the other how many bytes of the line that makes, and the sender goes on
// from there. So nothing that an old connection may still deliver counts, and bytes that a kernel has acknowledged are
// never asked for again.
//
// If both dial at once the higher rank's connection is the one. A rank is lost when the address at which it was
// reached refuses (its process is gone), when a connection that it closed is not replaced within kClosedS, or when
// nothing comes of it for `limit_s`. (A rank that is waited for is given up earlier by engine/watch.)
//
// HOROCLONE_TCP_STREAMS connections may carry the data of two ranks (parallel_stream.h). The higher rank opens them, at
// the start or once the first one has carried some data, which goes on meanwhile; when all are there the channel
// changes over to them (tcp_channel.h). If they do not come about it stays as it is; if one is lost, the repair goes on
// with one, and they are opened again later.
//
// Thread: the one that makes progress. Owner: the mesh.
#pragma once

#include <array>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "net/dialer.h"
#include "net/endpoint.h"
#include "net/handshake.h"
#include "net/interface_watch.h"
#include "net/listeners.h"
#include "net/tcp_channel.h"

namespace hc {

class Links final : public Remaker {
 public:
  static constexpr double kClosedS = 1.0;
  static constexpr size_t kMaxStrangers = 64;  // connections that are nobody's yet, beside those that peers open

  struct Setup {
    int rank = 0, size = 1;
    uint64_t generation = 0;
    Credentials credentials;
    TcpTuning tuning;
    double limit_s = 0;
    int connections = 0;  // for data, of each pair; 0: by the way of each
    int epoll = -1;
    uint64_t token = 0;                           // epoll_event::data of everything here
    std::function<void(const std::string&)> say;  // what was made again; may be empty
  };
  // `listeners`: the TCP ones of the bootstrap.
  static Result<std::unique_ptr<Links>> open(Setup setup, std::vector<Fd> listeners);
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  // `reached_at`: the address of its connection, as text; the addresses at which it may be reached.
  void add(int rank, TcpChannel* channel, const std::string& reached_at, std::vector<Address> addresses);
  // One of the descriptors is ready.
  void step(bool* moved);
  // The peer has said goodbye. Before the channel hears of it, which then reads on where it can.
  void expect_close(int rank);

  void lost(int rank, Line line, const IoResult& how) override;
  void watch() override {
    if (!timer_set_) set_timer(kLookS);
  }
  std::vector<Fd> take_offered(int rank) override;

 private:
  static constexpr double kLookS = 0.025;       // at what is not acknowledged
  static constexpr double kDialS = 0.01;        // while a connection is being made,
  static constexpr double kTalkS = 0.002;       // and while its handshake is under way
  static constexpr double kPatienceS = 0.3;     // with a connection of one's own before the other's is preferred
  static constexpr double kSwapS = 1.0;         // for the two counts once both are authenticated,
  static constexpr double kSwapRoundTrips = 2;  // and longer on a long way
  static constexpr double kSayS = 5.0;          // between two reports about one peer
  static constexpr size_t kCountBytes = 16;

  // An authenticated connection, over which both sides say how many bytes they have.
  struct Swap {
    Fd fd;
    TimePoint since{};
    bool is_dialed = false;  // by this rank
    bool sent = false;
    std::array<uint8_t, kCountBytes> in{};
    size_t in_bytes = 0;
  };
  // Several connections for data, until all of them are there.
  struct Offer {
    TimePoint since{};
    std::vector<Fd> connections;                   // by number
    std::vector<std::unique_ptr<Dialer>> dialers;  // the same, of the rank that dials
    bool is_whole() const;
  };
  struct Side {
    bool down = false, closed = false;
    bool suspected = false;  // its connection may be good, and nobody has heard that it was stopped
    TimePoint down_at{}, dialed_at{};
    std::string reason;
    std::unique_ptr<Dialer> dialer;
    std::optional<Swap> swap;
  };
  struct Peer {
    TcpChannel* channel = nullptr;
    std::vector<Address> addresses;
    bool first_is_good = false;  // it was reached at the first one
    int connections = 1;         // for data, that this rank opens
    int attempts = 0;            // to do so, since the start; since the last that succeeded:
    int in_vain = 0;
    TimePoint offer_at{};  // the next one
    uint8_t offered = 0;   // the peer's newest attempt
    std::optional<Offer> offer;
    Side sides[2];
    TimePoint made_at[2]{};  // the connections; of those of the start not known
    TimePoint said_at{};
    int unsaid = 0;          // breaks since then, of either line
    double unsaid_s = 0;     // the longest of them
    std::string unsaid_why;  // the last of them
  };
  struct Stranger {
    Fd fd;
    TimePoint since;
    Handshake handshake;
    int from = -1;  // once it is welcome
    Line line = Line::kControl;
    std::optional<uint8_t> number = {};  // of those of an offer
  };

  explicit Links(Setup setup) : setup_(std::move(setup)) {}
  bool is_over(const Peer& peer) const;
  void accept(TimePoint now);
  bool step_stranger(Stranger* one, TimePoint now);
  Verdict judge(const Claim& claim, Stranger* one);
  void step_side(int rank, Line line, TimePoint now, bool* moved);
  bool swap_counts(int rank, Line line, TimePoint now, bool* moved);
  void take_down(int rank, Line line, const std::string& why);
  void dial(int rank, Line line, TimePoint now);
  void give_up(int rank, const std::string& reason);
  void report(int rank, const Side& was, int fd);
  void look_at(int rank);
  bool can_go_back(int rank) const;
  bool wants_several(int rank, TimePoint now) const;
  void step_offer(int rank, TimePoint now);
  void forget(int rank);
  bool is_unplugged(const Peer& peer, Line line) const;
  void set_timer(double s);

  Setup setup_;
  std::vector<Fd> listeners_;
  InterfaceWatch interfaces_;
  Fd timer_;
  bool timer_set_ = false;
  std::vector<Peer> peers_;  // by rank
  std::list<Stranger> strangers_;
  size_t expected_ = 0;  // connections that peers may open at once
};

}  // namespace hc
