// A channel over two TCP connections (or other stream sockets): one for control, one for data. It keeps its own
// registration with the mesh's epoll up to date, so that a sleeper is woken exactly by what this channel waits for.
//
// On a long way several connections take over from the one for data (links.h opens them). A side that has all of them
// ends its direction of the first connection and writes on over the others; a side that finds the first connection
// ended, and has all of the others, reads on there, and does the same. No byte is sent twice and nobody waits.
//
// With a Remaker a connection that is lost is no failure: its line is down until resume() brings another one. What the
// old one had received is taken over by drain(); both sides stop writing before either drains (links.h).
//
// Thread: the thread that makes progress. Owner: the mesh.
#pragma once

#include <memory>
#include <vector>

#include "net/framed_channel.h"
#include "net/parallel_stream.h"

namespace hc {

// Makes lost connections again.
class Remaker {
 public:
  virtual void lost(int rank, Line line, const IoResult& how) = 0;
  // Something was written, whose acknowledgement may never come.
  virtual void watch() = 0;
  // The connections that the peer has opened to take over from the one for data; none unless all of them are there.
  virtual std::vector<Fd> take_offered(int rank) = 0;

 protected:
  ~Remaker() = default;
};

class TcpChannel final : public FramedChannel {
 public:
  static constexpr double kLongS = 0.005;  // a round trip from which on a way is long

  struct Sockets {
    Fd control, data;
    int epoll = -1;      // -1: not registered anywhere
    uint64_t token = 0;  // epoll_event::data of both
    // None: both ends are in one kernel's network, which changes nothing.
    std::optional<FrameKeys> keys = FrameKeys{};
  };
  TcpChannel(int rank, std::string peer, Traffic* traffic, Sockets sockets);
  ~TcpChannel() override { close(); }

  // Says end of stream, so that what was sent still arrives, and closes both.
  void close();
  // In a forked child: the connections stay the parent's.
  void abandon();

  // Before anything is sent. `remaker` outlives the channel.
  void remake_with(Remaker* remaker);
  // Nothing is written to this line's connection any more.
  void stop(Line line);
  // On the same connection, before anybody has heard that it was stopped.
  void start(Line line) { take_up(line); }
  // Takes over what the stopped connection has received, and closes it. Returns how many bytes of the line that makes.
  uint64_t drain(Line line);
  // Goes on over another connection, whose other side has `received` bytes of this line.
  Status resume(Line line, Fd connection, uint64_t received);
  // The data line is up and has one connection: these take over.
  void spread(std::vector<Fd> connections);
  // Bytes wait here that no connection will announce.
  bool has_drained() const { return !drained_[0].empty() || !drained_[1].empty(); }
  // Whether something is written and not acknowledged, on a line that is up; and whether the kernel sends it again and
  // again without hearing anything.
  bool waits_for_acknowledgement(Line line) { return !is_down(line) && refresh(line) > 0; }
  bool is_stuck(Line line) const;
  Address own_address(Line line) const;
  bool is_spread() const { return parallel_ != nullptr; }
  uint64_t data_moved() const { return written(Line::kData) + taken(Line::kData); }
  int descriptor(Line line) const;  // of its first connection
  // When the channel was made; 0 before remake_with().
  double round_trip_s() const { return round_trip_s_; }
  bool is_long() const { return round_trip_s_ >= kLongS; }
  size_t sends_in_flight() const override { return is_long() ? kInFlightOnLongWays : kInFlight; }

 private:
  IoResult write(Line line, std::span<const iovec> parts) override;
  IoResult read(Line line, std::span<const iovec> parts) override;
  void settle() override;
  bool will_remake(Line line, const IoResult& how) override;
  uint64_t unacknowledged(Line line) override;
  bool has_copied() const override { return parallel_ && failure().is_ok() && parallel_->has_copied(); }
  bool is_far() const override { return is_long(); }
  void close_one(Fd* fd);
  bool reads_first() const { return fd_[1] && !first_ended_; }

  Fd fd_[2];
  // What has taken over from fd_[1], which is open until the peer has acknowledged all of it.
  std::unique_ptr<ParallelStream> parallel_;
  bool first_ended_ = false;  // all was read from fd_[1]
  int epoll_;
  uint64_t token_;
  uint32_t registered_[2] = {0, 0};  // epoll events; 0: not in the set
  Remaker* remaker_ = nullptr;
  double round_trip_s_ = 0;
  std::vector<std::byte> drained_[2];  // from drained_at_ on
  size_t drained_at_[2] = {0, 0};
};

}  // namespace hc
