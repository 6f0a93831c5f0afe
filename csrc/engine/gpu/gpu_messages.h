// Messages between GPUs. They are announced and matched as all others are; then both ends launch NCCL's send or receive
// when rank 0 gives this message its ticket among all work on GPUs, or the payload goes through host memory.
// docs/decisions/nccl.md has the argument why nobody waits for ever.
//
// Thread: the thread that makes progress. Owner: the GPU context.
#pragma once

#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "collective/gpu/device_messages.h"
#include "engine/context.h"
#include "engine/control/control_link.h"
#include "engine/gpu/launch_order.h"
#include "engine/operation/backend.h"

namespace hc {

class GpuContext;

class GpuMessages final : public MessageBackend {
 public:
  GpuMessages(Context& context, ControlLink& link, GpuContext& gpu, LaunchOrder& order)
      : context_(context), link_(link), gpu_(gpu), order_(order) {}

  void announce(const Operation* op, Writer* frame) override;
  std::unique_ptr<BackendMessage> read(Reader* in) const override;
  Status check_place(const Operation* op, int from, bool is_host) const override;
  Status prepare(Operation* op, size_t bytes) override;
  Way choose(const Operation* op, int from, const BackendMessage& message) override;
  std::unique_ptr<BackendTransfer> make(Operation* op, std::pair<int, uint32_t> peer_and_id, bool is_direct,
                                        HostTransfer transfer) override;
  Status take_link(int from, Reader* in) override;
  Result<std::unique_ptr<BackendMessage>> to_self(Operation* op, bool copies) override;
  Status copy_to_self(Operation* op, const BackendMessage& message, const Operation* source) override;

  // Whether this rank is the sender or the receiver of that message.
  bool expects_ticket(int sender, uint32_t id) const;
  DeviceLinks& links() { return links_; }
  const DeviceLinks& links() const { return links_; }

 private:
  class Transfer;
  bool same_node(int rank) const { return context_.mesh->node_of(rank) == context_.mesh->node_of(context_.rank()); }
  Status want_link(int peer);

  Context& context_;
  ControlLink& link_;
  GpuContext& gpu_;
  LaunchOrder& order_;
  DeviceLinks links_;
  std::vector<const Transfer*> transfers_;
  std::set<int> told_backend_;  // senders of whom it was said that host memory moves what they send
};

}  // namespace hc
