// A channel over two byte streams to one peer, one for control frames and one for data, so that data that waits for a
// receive never holds up an abort. The queues are here, on top of a FrameReader and an Inbox, and so is the rule that a
// peer's last frames are delivered before its loss; the derived classes (TcpChannel, ShmChannel) move the bytes.
//
// Thread: the thread that makes progress. Owner: the mesh.
#pragma once

#include <deque>
#include <string>

#include "base/clock.h"
#include "net/channel.h"
#include "net/frame_reader.h"
#include "net/inbox.h"
#include "net/socket.h"
#include "net/traffic.h"

namespace hc {

enum class Line : uint8_t { kControl, kData };

class FramedChannel : public Channel {
 public:
  // peer: "rank 3 (node-b, 10.0.0.2:41233)", for errors. traffic outlives the channel.
  FramedChannel(int rank, std::string peer, Traffic* traffic);

  Status send(std::span<const uint8_t> frame) final;
  bool receive(std::vector<uint8_t>* frame) final;
  void post_send(Transfer* transfer) final;
  void post_receive(Transfer* transfer) final;
  void forget(Transfer* transfer) final;
  Status progress(bool* moved) final;
  bool flushed() const final { return control_out_.empty() && sends_.empty(); }

  // The peer has said goodbye: its closing is no error, unless something is still posted.
  void expect_close() { goodbye_ = true; }
  bool close_expected() const { return goodbye_; }
  // Another connection has noticed that the peer is gone: delivers what it has left behind, then fails with this
  // reason.
  void lose(const std::string& reason);
  // The first failure, also while progress() still holds it back because received frames wait.
  const Status& failure() const { return failed_; }
  const std::string& reason() const { return reason_; }
  // It has failed, but the peer's last frames may still arrive; until then the failure is not reported.
  bool held_back() const;
  bool has_frames() const { return frames_in_.has_frames(); }
  uint64_t bytes_received() const { return bytes_received_; }  // on both lines
  // One stream has ended in order and the other has not yet: look again soon.
  bool closing() const { return (data_ended_ || control_over_) && failed_.is_ok(); }
  // Nothing waits to be written and both streams are open, so only arriving bytes can move anything.
  bool only_listens() const {
    return control_out_.empty() && sends_.empty() && !control_over_ && !data_ended_ && failed_.is_ok();
  }

 protected:
  // Move what fits now. kEnded: nothing will follow.
  virtual IoResult write(Line line, std::span<const iovec> parts) = 0;
  virtual IoResult read(Line line, std::span<const iovec> parts) = 0;
  // Called after each series of moves.
  virtual void settle() {}
  // Bytes that arrived earlier may be taken now: progress() must be called although the peer does nothing.
  virtual void look_again() {}

  bool wants_read(Line line) const;
  bool wants_write(Line line) const;
  Traffic* traffic() const { return traffic_; }

 private:
  bool read_control();
  bool read_data();
  bool flush_control();
  bool flush_data();
  bool check_ended();
  void fail(Code code, const std::string& reason);
  void break_line(const std::string& reason);
  Status verdict() const;
  size_t gather(std::span<iovec> parts, std::span<SegmentHeader> headers) const;

  const int rank_;
  const std::string peer_;
  Traffic* const traffic_;
  bool goodbye_ = false;
  bool stranded_ = false;  // a send can never be done
  uint64_t bytes_received_ = 0;
  Status failed_;
  std::string reason_;
  TimePoint hold_until_{};

  FrameReader frames_in_;
  bool control_over_ = false;
  TimePoint control_ended_at_{};  // or the last data after that

  std::vector<uint8_t> control_out_;  // what did not fit, from control_sent_ on
  size_t control_sent_ = 0;

  Inbox inbox_;
  std::deque<Transfer*> sends_;
  size_t send_moved_ = 0;  // of the first: header and payload
  bool data_ended_ = false;
  TimePoint data_ended_at_{};
};

}  // namespace hc
