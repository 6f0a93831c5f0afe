// One stream of bytes over several TCP connections, for a long way: each connection has a window of its own, so that
// the stream starts that many times as fast, and a lost packet slows down one of them only.
//
// The stream is cut into pieces of at most kPieceBytes. A piece goes over any connection that has room, behind a head
// that says where in the stream it belongs; what a socket does not take of a piece is copied and written later. The
// receiver gives the pieces in the order of the stream. It reads those that are early too, up to kMaxEarlyBytes, since
// a kernel widens a connection's window only as long as somebody reads from it.
//
// Thread: the one that makes progress. Owner: the channel.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "net/socket.h"
#include "net/traffic.h"

namespace hc {

class ParallelStream {
 public:
  static constexpr size_t kPieceBytes = 64u << 10;
  static constexpr size_t kMaxEarlyBytes = 64u << 20;
  static constexpr int kMaxConnections = 64;

  // starts_at: of what this side writes, in the stream that a first connection has carried so far.
  ParallelStream(std::vector<Fd> connections, Traffic* traffic, uint64_t starts_at = 0);
  // Before anything is read: where this side stands in what the other writes. If that one began elsewhere, read()
  // fails.
  void read_from(uint64_t starts_at) {
    if (position_in_ == 0) starts_in_ = starts_at;
  }

  // What moves now, in the order of the stream. A head that cannot be right is a failure with EBADMSG.
  IoResult write(std::span<const iovec> parts);
  IoResult read(std::span<const iovec> parts);
  // Writes what was copied.
  void flush();
  bool has_copied() const;
  // Of what write() has taken, from the first byte on that the other side's kernel may not have.
  uint64_t unacknowledged();
  uint64_t written() const { return position_out_; }
  // Appends what has come in as far as it follows what read() gave, and closes everything.
  void drain(std::vector<std::byte>* bytes);
  // Registers with an epoll set what may move something; flushes: what was copied is to be written.
  void settle(int epoll, uint64_t token, bool wants_read, bool wants_write, bool flushes = true);
  // After a read that moved nothing: some have ended, and others have not.
  bool has_lost_some() const { return ended_ > 0 && ended_ < all_.size(); }
  // How long the kernel has heard nothing on any connection that waits for an acknowledgement.
  double unheard_s() const;
  std::vector<Fd>& connections() { return fds_; }

 private:
  struct Head {
    uint64_t position = 0;
    uint32_t bytes = 0;
    uint32_t guard = 0;
    uint32_t guard_of(uint64_t starts_at) const;
  };
  static_assert(sizeof(Head) == 16);
  struct Sent {
    uint64_t position;  // of a piece in the stream
    uint64_t end;       // and behind it, among the bytes of its connection
    size_t bytes;
  };
  struct Connection {
    std::vector<std::byte> copied;  // from copied_at on
    size_t copied_at = 0;
    uint64_t written = 0;  // bytes, heads among them, and what is copied
    std::deque<Sent> sent;
    Head head;  // of the piece that comes in
    size_t head_bytes = 0, taken = 0, given = 0;
    std::vector<std::byte> early;  // what was taken of it and is not given yet, from early_at on
    size_t early_at = 0;
    bool has_ended = false;
    uint32_t registered = 0;
    bool has_head() const { return head_bytes == sizeof(Head); }
    uint64_t next() const { return head.position + given; }
  };
  IoResult write_piece(size_t index, std::span<iovec> parts, size_t bytes);
  IoResult read_ahead(size_t index);
  size_t give(std::vector<std::byte>* from, size_t* at, std::span<const iovec> parts);
  IoResult read_next(std::span<const iovec> parts);
  bool has_next() const;
  void finish_piece(Connection* one);
  bool flush(size_t index);

  std::vector<Fd> fds_;
  std::vector<Connection> all_;  // as fds_
  Traffic* const traffic_;
  Fd always_readable_;  // registered while read() could give what is here
  uint32_t always_registered_ = 0;
  std::map<uint64_t, std::vector<std::byte>> early_;  // pieces, by position; of the first from early_at_ on
  size_t early_at_ = 0, early_bytes_ = 0;             // of all in early_, and of those that come in
  size_t write_at_ = 0;                               // the connection that is tried first
  const uint64_t starts_out_;
  uint64_t starts_in_ = 0;
  uint64_t position_out_ = 0, position_in_ = 0;  // since the stream has these connections
  size_t ended_ = 0;                             // connections, at the last read
  int failed_ = 0;                               // errno of what failed first
};

}  // namespace hc
