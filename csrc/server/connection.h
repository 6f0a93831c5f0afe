// One authenticated connection of a parameter server: frames, each call blocking with a limit on silence.
//
// Thread: one sends and one receives at a time; shut() from any. Owner: a session, a backup link or a client.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "base/mutex.h"
#include "net/endpoint.h"
#include "net/handshake.h"
#include "net/socket.h"
#include "server/frames.h"

namespace hc {

inline constexpr int32_t kClientIndex = 1 << 24;  // handshake: "ranks" of workers begin here, below are servers

class Connection {
 public:
  Connection(Fd fd, std::string peer);

  struct Target {
    Endpoint endpoint;
    int32_t index = 0;        // of the server
    uint64_t generation = 0;  // its life
  };
  // Over the unix socket where both are on one host, else TCP.
  static Result<std::unique_ptr<Connection>> dial(const Credentials& credentials, int32_t from, const Target& target,
                                                  double timeout_s);
  // The accepting side: authenticates what was just accepted.
  static Result<std::unique_ptr<Connection>> welcome(Fd fd, std::string from, const Credentials& credentials,
                                                     int32_t index, uint64_t generation, double timeout_s);

  // PeerLost when the other side is gone, Timeout when nothing moved for silence_s.
  Status send(const FrameHeader& header, std::span<const uint8_t> first = {}, std::span<const uint8_t> second = {},
              double silence_s = 10);
  // silence_s < 0: waits for a frame without limit (until shut()); within a frame kWithinFrameS counts. PeerLost when
  // the frame was changed on its way: who asked asks again, over another connection.
  Status receive(FrameHeader* header, Buffer* payload, double silence_s);
  // Ends what waits, and everything afterwards.
  void shut();
  int fd() const { return fd_.get(); }
  const std::string& peer() const { return peer_; }

 private:
  static constexpr double kWithinFrameS = 30;
  Status fill(void* to, size_t bytes, double silence_s);
  Status wait(short events, double silence_s) const;

  Fd fd_;
  const std::string peer_;
  const bool has_sums_;  // something may lie between the two ends
  Mutex sending_;        // signs of life and replies do not mix
};

}  // namespace hc
