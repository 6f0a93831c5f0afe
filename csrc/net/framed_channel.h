// A channel over two byte streams to one peer, one for control frames and one for data, so that data that waits for a
// receive never holds up an abort. The queues are here, on top of a FrameReader and an Inbox, and so is the rule that a
// peer's last frames are delivered before its loss; the derived classes (TcpChannel, ShmChannel) move the bytes.
//
// A channel that keeps what it has sent (keep_sent) can go on over another stream: what the peer has not acknowledged
// is written again from the byte that it names. Control frames are copied; so is data, as far as it is small or a
// transfer's last bytes. Larger transfers are done only when the peer has acknowledged the rest of them, so that their
// memory need not be copied.
//
// Thread: the thread that makes progress. Owner: the mesh.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "net/channel.h"
#include "net/frame_reader.h"
#include "net/frame_signer.h"
#include "net/inbox.h"
#include "net/socket.h"
#include "net/traffic.h"

namespace hc {

enum class Line : uint8_t { kControl, kData };

class FramedChannel : public Channel {
 public:
  // peer: "rank 3 (node-b, 10.0.0.2:41233)", for errors. traffic outlives the channel. keys: what lies between the
  // ranks may change bytes, so that each frame is signed with them and each segment has its sum.
  FramedChannel(int rank, std::string peer, Traffic* traffic, const std::optional<FrameKeys>& keys);

  Status send(std::span<const uint8_t> frame) final;
  bool receive(std::vector<uint8_t>* frame) final;
  void post_send(Transfer* transfer) final;
  void post_receive(Transfer* transfer) final;
  void forget(Transfer* transfer) final;
  Status progress(bool* moved) final;
  bool flushed() final;

  // The peer has said goodbye: its closing is no error, unless something is still posted.
  void expect_close();
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
  const std::string& peer() const { return peer_; }
  // One stream has ended in order and the other has not yet: look again soon.
  bool closing() const { return (data_ended_ || control_over_) && failed_.is_ok(); }
  // Nothing waits to be written and both streams are open, so only arriving bytes can move anything.
  bool only_listens() const {
    return control_out_.empty() && sends_.empty() && !control_over_ && !data_ended_ && failed_.is_ok();
  }
  // The stream of this line is lost and another one is being made; or that of either.
  bool is_down(Line line) const { return down_[static_cast<int>(line)]; }
  bool is_down() const { return down_[0] || down_[1]; }
  // This rank is about to sleep. When to call progress() again although nothing has come in, as what waits for an
  // acknowledgement may have it by then; 0: not for that.
  int look_again_us();

 protected:
  // Move what fits now. kEnded: nothing will follow.
  virtual IoResult write(Line line, std::span<const iovec> parts) = 0;
  virtual IoResult read(Line line, std::span<const iovec> parts) = 0;
  // Called after each series of moves.
  virtual void settle() {}
  // Bytes that arrived earlier may be taken now: progress() must be called although the peer does nothing.
  virtual void look_again() {}
  // The stream has ended or failed. True: another one will be made, and the line is down until then.
  virtual bool will_remake(Line, const IoResult&) { return false; }
  // Some of what write() has taken is still here.
  virtual bool has_copied() const { return false; }
  virtual bool is_far() const { return false; }
  // How many of the bytes written to this stream the peer's side has not acknowledged yet.
  virtual uint64_t unacknowledged(Line) { return 0; }

  // Keeps from now on what is sent until it is acknowledged. tail_bytes: so much of the end of a large transfer may be
  // copied, as its acknowledgement may come late. soon_up_s: a line that is down longer may stay so.
  void keep_sent(size_t tail_bytes, double soon_up_s);
  // Stops the traffic of a line whose stream is lost.
  void take_down(Line line);
  // Goes on with the stream that it had.
  void take_up(Line line);
  // Another stream is there and the peer's side has taken in `received` bytes of this line so far. Not ok: that is not
  // what was kept.
  Status go_on(Line line, uint64_t received);
  // Bytes that progress() has taken in from this line.
  uint64_t taken(Line line) const { return taken_[static_cast<int>(line)]; }
  uint64_t written(Line line) const { return position_[static_cast<int>(line)]; }
  // Asks which bytes are acknowledged. Returns how many are not.
  uint64_t refresh(Line line);
  void note_life() { ++bytes_received_; }

  bool wants_read(Line line) const;
  bool wants_write(Line line) const;
  Traffic* traffic() const { return traffic_; }
  int rank() const { return rank_; }

 private:
  bool read_control();
  bool read_data();
  bool flush_control();
  bool flush_data();
  bool check_ended();
  void fail(Code code, const std::string& reason);
  void break_line(const std::string& reason);
  bool broke(Line line, const IoResult& result);
  Status verdict() const;
  size_t gather(std::span<iovec> parts);
  void note_written(size_t bytes);
  bool release_written(size_t tail_bytes);
  void drop_acknowledged();
  void note_lingering();
  void keep_control(std::span<const uint8_t> bytes);

  // A transfer that is to be written, or was and is not acknowledged yet.
  struct Outgoing {
    Transfer* transfer;    // null once it is done; then `copy` has its payload from copied_from on
    SegmentHeader header;  // once it is to be written
    uint64_t end = 0;      // position in the stream behind it, once it is written
    size_t copied_from = 0;
    std::unique_ptr<std::byte[]> copy;
    size_t kept = 0;  // memory that it takes since it is done

    size_t bytes() const { return sizeof(SegmentHeader) + header.bytes; }
    std::byte* payload(size_t from) const {
      return transfer ? transfer->data + from : copy.get() + (from - copied_from);
    }
  };
  size_t unwritten() const { return sends_.size() - written_; }
  void copy_rest(Outgoing* one);
  void let_go_of_written();

  const int rank_;
  const std::string peer_;
  const bool has_sums_;
  Traffic* const traffic_;
  bool goodbye_ = false;
  bool stranded_ = false;  // a send can never be done
  uint64_t bytes_received_ = 0;
  Status failed_;
  std::string reason_;
  TimePoint hold_until_{};

  FrameSigner frames_out_;
  FrameReader frames_in_;
  bool control_over_ = false;
  TimePoint control_ended_at_{};  // or the last data after that

  std::vector<uint8_t> control_out_;  // what did not fit, from control_sent_ on
  size_t control_sent_ = 0;

  Inbox inbox_;
  // First those that are done and kept, then those that are written and wait for acknowledgement, then the others.
  std::deque<Outgoing> sends_;
  size_t released_ = 0, written_ = 0;  // so many are done; so many are written
  size_t send_moved_ = 0;              // of the first that is not written: header and payload
  bool data_ended_ = false;
  TimePoint data_ended_at_{};

  bool keeps_ = false, lingers_ = false;
  bool lost_ = false;                       // lose() was called
  size_t tail_bytes_ = 0, kept_bytes_ = 0;  // of all in sends_
  double soon_up_s_ = 0;
  bool down_[2] = {false, false};
  TimePoint down_at_[2];
  // Positions in the streams, by line, since the channel began.
  uint64_t position_[2] = {0, 0}, acknowledged_[2] = {0, 0}, taken_[2] = {0, 0}, asked_at_[2] = {0, 0};
  std::vector<uint8_t> kept_control_;  // what was written, from kept_from_ on up to position_
  size_t kept_from_ = 0;
};

}  // namespace hc
