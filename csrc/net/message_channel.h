// A channel whose data moves as the messages of a library (MPI, libfabric), while control frames go over another
// channel, which also notices when the peer dies. Each segment is announced by a message on one tag, so that
// announcements keep their order; small segments are part of it, larger ones follow on a tag derived from the count of
// segments, straight into the memory of the receive that waits for them. The library keeps what no receive has asked
// for yet.
//
// Thread: the thread that makes progress. Owner: the mesh.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <list>
#include <memory>

#include "net/framed_channel.h"
#include "net/message_library.h"

namespace hc {

class MessageChannel final : public Channel {
 public:
  // `rank`: the peer's, also for the library. `control` outlives this.
  MessageChannel(int rank, FramedChannel* control, std::shared_ptr<MessageLibrary> library, Traffic* traffic,
                 uint64_t generation);
  ~MessageChannel() override { close(); }

  // Whether data goes through the library from now on, or through `control`. All ranks change it between the same
  // operations.
  Status use(bool on);
  // Data is in flight. The library rings no doorbell, so progress() must be called repeatedly.
  bool under_way() const { return !posted_.empty() || !arriving_.empty() || !leaving_.empty(); }
  // Withdraws everything; returns when the library uses none of our memory any more, or after a second.
  void close();
  // In a forked child: the library and what is under way stay the parent's.
  void abandon() { listening_ = on_ = false; }

  Status send(std::span<const uint8_t> frame) override { return control_->send(frame); }
  bool receive(std::vector<uint8_t>* frame) override { return control_->receive(frame); }
  void post_send(Transfer* transfer) override;
  void post_receive(Transfer* transfer) override;
  void forget(Transfer* transfer) override;
  Status progress(bool* moved) override;
  bool flushed() override { return control_->flushed() && leaving_.empty(); }

 private:
  static constexpr size_t kInlineBytes = 2048;  // below every library's eager limit, with the header
  static constexpr size_t kNotices = 8;         // receives for announcements that are posted at any time
  struct Notice {
    SegmentHeader header;
    std::byte data[kInlineBytes];
  };
  static size_t bytes_of(const SegmentHeader& header) {
    return sizeof(SegmentHeader) + (header.bytes <= kInlineBytes ? header.bytes : 0);
  }
  struct Leaving {
    Notice notice;
    MessageRequest notice_request, data_request;
    Transfer* transfer = nullptr;  // null: it rides in the notice and is done, or was withdrawn
  };
  struct Arriving {
    Transfer* transfer;
    SegmentHeader header;
    MessageRequest request;
  };
  struct Kept {  // announced, nobody takes it yet
    SegmentHeader header;
    std::unique_ptr<std::byte[]> data;  // of small ones
    uint32_t number = 0;                // of large ones
  };

  int notice_tag() const { return tag_base_; }
  int data_tag(uint32_t number) const;
  Status post_notice(size_t index);
  bool take_notices();
  Status take(const Notice& notice);
  Status deliver(const SegmentHeader& header, const std::byte* data, uint32_t number, Transfer* transfer);
  bool finish_arriving();
  bool finish_leaving();
  bool is_over(MessageRequest* request);
  bool is_released(MessageRequest* request);
  void fail(const Status& status);

  const int rank_;
  FramedChannel* const control_;
  const std::shared_ptr<MessageLibrary> library_;
  Traffic* const traffic_;
  const int tag_base_;
  bool on_ = false;
  Status failed_;

  std::array<Notice, kNotices> notices_;
  std::array<MessageRequest, kNotices> notice_requests_;
  bool listening_ = false;
  size_t next_notice_ = 0;                          // the oldest one
  uint32_t sent_number_ = 0, received_number_ = 0;  // large segments so far
  std::deque<Transfer*> posted_;
  std::deque<Arriving> arriving_;  // complete in this order
  std::list<Leaving> leaving_;     // in order of posting
  std::list<Leaving> spare_;
  std::list<Kept> kept_;
  size_t kept_bytes_ = 0;
};

}  // namespace hc
