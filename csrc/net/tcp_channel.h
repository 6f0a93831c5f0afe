// A channel over two TCP connections (or other stream sockets): one for control, one for data. It keeps its own
// registration with the mesh's epoll up to date, so that a sleeper is woken exactly by what this channel waits for.
//
// Thread: the thread that makes progress. Owner: the mesh.
#pragma once

#include "net/framed_channel.h"

namespace hc {

class TcpChannel final : public FramedChannel {
 public:
  struct Sockets {
    Fd control, data;
    int epoll = -1;      // -1: not registered anywhere
    uint64_t token = 0;  // epoll_event::data of both
  };
  TcpChannel(int rank, std::string peer, Traffic* traffic, Sockets sockets);
  ~TcpChannel() override { close(); }

  // Says end of stream, so that what was sent still arrives, and closes both.
  void close();
  // In a forked child: the connections stay the parent's.
  void abandon();

 private:
  IoResult write(Line line, std::span<const iovec> parts) override;
  IoResult read(Line line, std::span<const iovec> parts) override;
  void settle() override;

  Fd fd_[2];
  int epoll_;
  uint64_t token_;
  uint32_t registered_[2] = {0, 0};  // epoll events; 0: not in the set
};

}  // namespace hc
