// Send and receive between two ranks; no coordinator and no other rank is involved. The sender announces a message
// (what it is, with the payload if that is small). The receiver matches announcements with its receives, in order, by
// process set, source and tag, and asks for the payload, which then goes straight to its destination. So an unexpected
// message takes no memory but its announcement, and both sides learn when a message does not fit. Payloads that do not
// lie in host memory are the backend's. Thread: the thread that makes progress. Owner: the engine.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "agreement/frames.h"
#include "base/clock.h"
#include "base/wire.h"
#include "collective/collective.h"
#include "engine/control/control_link.h"
#include "engine/intake/completion.h"
#include "engine/operation/backend.h"
#include "engine/operation/operation.h"

namespace hc {

inline constexpr size_t kEagerBytes = 8u << 10;          // such payloads travel with the announcement
inline constexpr size_t kEagerWindow = 256u << 10;       // of them unanswered, per receiver
inline constexpr size_t kSelfBufferBytes = 64u << 20;    // what a rank sends to itself is copied, up to so much
inline constexpr size_t kAnnouncementsAhead = 1u << 15;  // unanswered, per receiver; more wait at the sender

class Messages {
 public:
  Messages(Context& context, ControlLink& link, const Intake& intake, Completion& completion, MessageBackend& backend)
      : context_(context), link_(link), intake_(intake), completion_(completion), backend_(backend) {}

  // A kSend or kReceive: Signature::root is the other's world rank (receive: -1 = any), Request::sequence the tag.
  Status submit(Operation* op);
  Status handle(int from, FrameKind kind, Reader* in);
  // Moves payloads. An error comes from a transport and ends the whole engine.
  Status step(bool* moved);

  void peer_left(int rank, const std::string& text);
  // Ends the operations that wait in a process set that is removed; payloads under way go on.
  void set_removed(uint16_t process_set, const Status& reason);
  // Ends what waits for these ranks, of which this one is one, because all of them wait for one another.
  void end_deadlock(const std::set<int>& stuck, const Status& reason);
  void fail_all(const Status& reason);

  // The backend moves some, which rings no doorbell.
  bool looks_soon() const;
  // Both ends of some have agreed on it.
  bool are_moving() const { return !moving_.empty(); }

  size_t outstanding() const { return operations_.size(); }
  const std::vector<Operation*>& operations() const { return operations_; }  // in no order
  // Marks the ranks that an operation has waited for longer than `older_than_s`.
  void mark_awaited(TimePoint now, double older_than_s, std::vector<bool>* waits) const;
  // One line for each operation that has been unmatched for longer than `older_than_s`.
  std::string stalled(TimePoint now, double older_than_s, double* longest_s, std::set<int>* late) const;

 private:
  struct Announced {
    int from = -1;
    uint32_t id = 0;
    TensorMeta meta;
    bool here = false;  // the payload came with it
    std::vector<std::byte> payload;
    std::unique_ptr<BackendMessage> elsewhere;  // null: from host memory
  };
  struct Mailbox {  // of one process set and tag; forgotten when it is empty
    bool is_empty() const { return announced.empty() && receives.empty(); }
    std::list<Announced> announced;
    std::list<Operation*> receives;
  };
  using Address = std::pair<uint16_t, int64_t>;
  struct Moving {
    Operation* op;
    int peer;
    uint32_t id;
    std::unique_ptr<Collective> transfer;
    BackendTransfer* by_backend = nullptr;  // the same; null: host memory
  };
  struct Outbox {  // to one rank
    size_t unanswered = 0, eager_bytes = 0;
    std::list<Operation*> queued;
  };
  struct Sent {
    Operation* op;  // null: given up, the answer is still to come
    int to;
    size_t eager_bytes;
  };

  Status announce(Operation* op);
  Status pump(int to);
  Status send_to_self(Operation* op);
  Status arrived(const Address& address, Announced message);
  Status match(Operation* op, Announced message);
  Status prepare(Operation* op, const Announced& message);
  Status answer(int to, FrameKind kind, uint32_t id, const Status& reason, bool is_direct = false);
  Status answered(int from, FrameKind kind, Reader* in);
  Status read_announcement(int from, Reader* in);
  Status withdrawn(int from, Reader* in);
  Status begin_transfer(Operation* op, int peer, uint32_t id, bool by_backend, bool is_direct);
  std::unique_ptr<Collective> transfer_of(bool sends, std::byte* at, size_t bytes, std::pair<int, uint32_t> which);

  void complete(Operation* op, Status status);
  void drop_waiting(const std::function<bool(const Operation*)>& which, const Status& reason);

  const std::vector<int>& members_of(uint16_t process_set) const { return intake_.find(process_set)->members.ranks; }

  Context& context_;
  ControlLink& link_;
  const Intake& intake_;
  Completion& completion_;
  MessageBackend& backend_;
  uint32_t next_id_ = 0;
  std::map<Address, Mailbox> mailboxes_;
  std::map<int, Outbox> outboxes_;
  std::unordered_map<uint32_t, Sent> sent_;  // announced, not answered
  std::vector<Moving> moving_;
  size_t self_bytes_ = 0;  // copied, not received yet
  std::vector<Operation*> operations_;
};

}  // namespace hc
