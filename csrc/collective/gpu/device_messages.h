// One end of a message between two GPUs, as a state machine like any collective: by NCCL, launched when this
// message's launch ticket comes up, or through host memory. The host waits for neither GPU.
//
// Thread: the thread that makes progress. Owner: a transfer of GpuMessages.
#pragma once

#include <functional>
#include <memory>

#include "collective/gpu/device_link.h"

namespace hc {

struct MessageEnd {
  bool sends = false;
  std::byte* data = nullptr;  // in device memory
  size_t bytes = 0;
  CuEvent ready = nullptr;  // the data are there; the place may be written to
};

class DeviceMessage : public Collective {
 public:
  // Behind the message on the link's stream, once it is done.
  const GpuEventPtr& done() const { return done_; }
  // A failure is the GPU's or NCCL's, not a channel's.
  bool device_failed() const { return device_failed_; }
  // It has not been launched, and has no ticket yet.
  virtual bool may_be_given_up() const { return false; }
  virtual bool has_asked() const { return false; }  // for its ticket

 protected:
  DeviceMessage(DeviceLink* link, const MessageEnd& end) : link_(*link), end_(end) {}
  Progress fail_on_device(const Status& status) {
    device_failed_ = true;
    return fail(status);
  }
  Status await_ready();
  Status record_done();

  DeviceLink& link_;
  const MessageEnd end_;
  GpuEventPtr done_;
  bool device_failed_ = false;
};

// A message's place in the order of all work on GPUs (engine/gpu/launch_tickets.h).
class MessageTicket {
 public:
  virtual ~MessageTicket() = default;
  virtual void ask() = 0;  // for both ends; the sender does, when its end of the link is up
  virtual bool is_granted() const = 0;
  virtual bool is_next() const = 0;
  virtual void over() = 0;
};

std::unique_ptr<DeviceMessage> make_nccl_message(DeviceLink* link, const MessageEnd& end, int place_of_peer,
                                                 std::unique_ptr<MessageTicket> ticket);
// transfer: moves so many bytes of host memory to the peer, or from there.
using HostTransfer = std::function<std::unique_ptr<Collective>(std::byte* at, size_t bytes)>;
std::unique_ptr<DeviceMessage> make_staged_message(DeviceLink* link, const MessageEnd& end, HostTransfer transfer);

}  // namespace hc
