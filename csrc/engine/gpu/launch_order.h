// Who may start work on GPUs next. Batches of different process sets, and messages, must start in the same order on
// every rank, else two communicators wait for each other. Rank 0 of the world gives that order: plans of the global set
// come from it anyway; for other sets their coordinator asks, for a message its sender does, and rank 0 tells who takes
// part. Where all ranks share memory the order is written there (launch_tickets.h), and persistent buckets of sets with
// rank 0 have their place in it: when all ranks have arrived at one, rank 0 gives it a ticket. Else tickets travel in
// frames straight from rank 0, which wake also who sleeps because it has nothing to do itself.
// docs/decisions/gpu-launch-order.md has the argument.
//
// Thread: the thread that makes progress. Owner: GpuContext.
#pragma once

#include <vector>

#include "engine/control/control_link.h"
#include "engine/gpu/launch_tickets.h"
#include "engine/intake/intake.h"

namespace hc {

class LaunchOrder {
 public:
  LaunchOrder(Context& context, ControlLink& link, const Intake& intake)
      : context_(context), link_(link), intake_(intake) {}
  LaunchTickets& tickets() { return tickets_; }
  const LaunchTickets& tickets() const { return tickets_; }
  // On rank 0, where tickets travel in shared memory: how many it has given to anything but persistent buckets.
  uint64_t others() const { return others_; }

  // Whether rank 0 may give tickets to persistent buckets before it has filled them: there is one set of them.
  bool may_go_ahead() const { return !stopped_ && bucket_sets_ == 1; }
  // Sets of buckets on GPUs that this rank has declared, and no longer needs.
  void note_buckets(int change) {
    tickets_.withdraw_ahead();
    bucket_sets_ += change;
  }
  // This rank shuts down.
  void stop_ahead() {
    stopped_ = true;
    tickets_.withdraw_ahead();
  }

  // The world's coordinator, before the plan goes out.
  void note_before(const Members& set, Plan* plan);
  // With each plan of the global set on every rank, and with plans of other sets on their coordinator.
  Status order(const Members& set, const Plan& plan);
  // The sender of a message that both ends are ready for.
  Status ask_for_message(int receiver, uint32_t id);
  static LaunchTicket ticket_of_message(int sender, uint32_t id) {
    return {kMessageStream, static_cast<int32_t>(id), static_cast<uint16_t>(sender)};
  }

  // Frames about the order. has_part(ticket): whether this rank takes part in it.
  template <class HasPart>
  Status take_frame(FrameKind kind, int from, Reader* in, HasPart&& has_part) {
    if (kind != FrameKind::kLaunchTicket) return take_request(kind, from, in);
    Given given;
    HC_TRY(read_ticket(from, in, &given));
    tickets_.take_given(given.ticket, given.count, given.after, has_part(given.ticket));
    return Status::ok();
  }

 private:
  struct Given {
    LaunchTicket ticket;
    uint32_t count = 0, after = 0;
  };
  Status take_request(FrameKind kind, int from, Reader* in);
  Status read_ticket(int from, Reader* in, Given* given) const;
  Status grant(uint16_t set, uint32_t count);
  Status grant_message(int sender, int receiver, uint32_t id);
  Status send(int rank, const LaunchTicket& ticket, uint32_t count);

  Context& context_;
  ControlLink& link_;
  const Intake& intake_;
  LaunchTickets tickets_;
  uint64_t others_ = 0;
  int bucket_sets_ = 0;
  bool stopped_ = false;
};

}  // namespace hc
