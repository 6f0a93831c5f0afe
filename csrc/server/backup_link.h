// A primary's stream to the backup of one partition: frames go out in order, the backup answers each, and whoever has
// sent one can wait until it is on both copies. Signs of life go both ways, so that a cut link is noticed.
//
// Thread: send() under the partition's lock; the others from any; answers are read by a thread of its own.
// Owner: the partition, shared with those that wait.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "base/thread.h"
#include "server/connection.h"

namespace hc {

class BackupLink {
 public:
  // lost: called once, on the reading thread or on one that sends; must not wait.
  BackupLink(std::unique_ptr<Connection> connection, int32_t server, double silence_s, std::function<void()> lost);
  ~BackupLink();
  Status start();

  // The number of this frame in the stream. A failure shows in is_lost().
  uint64_t send(const FrameHeader& header, std::span<const uint8_t> payload);
  uint64_t sent() const { return sent_.load(); }
  // Waits for at most wait_s. True: the backup has done that frame.
  bool wait_for(uint64_t frame, double wait_s);
  bool is_lost() const { return lost_.load(); }
  std::string why() const;
  int32_t server() const { return server_; }
  // Sends a sign of life where nothing else was sent lately.
  void ping();
  void close();

 private:
  void read();
  void give_up(const std::string& why);

  const std::unique_ptr<Connection> connection_;
  const int32_t server_;
  const double silence_s_;
  const std::function<void()> on_lost_;
  std::atomic<uint64_t> sent_{0};
  std::atomic<bool> lost_{false};
  mutable Mutex mutex_;
  CondVar changed_;
  uint64_t done_ HC_GUARDED_BY(mutex_) = 0;  // frames
  std::string why_ HC_GUARDED_BY(mutex_);
  Mutex numbering_;  // a ping between two frames of the partition
  Mutex closing_;    // one joins the thread
  NamedThread reader_;
};

}  // namespace hc
