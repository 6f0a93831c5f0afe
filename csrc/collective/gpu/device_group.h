// A process set's part on GPUs: its stream on this rank's device, its communicator, and whether NCCL moves the data,
// our kernels do through memory that the ranks share, or host memory does. The ranks decide that together, once, with a
// table that travels over the host's collectives; every launch is asynchronous and comes from the thread that makes
// progress, so all ranks launch in the order of the plan.
//
// Thread: the thread that makes progress. Owner: a process set.
#pragma once

#include <deque>
#include <memory>
#include <string>

#include "base/clock.h"
#include "collective/collective.h"
#include "collective/gpu/device_state.h"
#include "device/gpu.h"

namespace hc {

class DeviceGroup {
 public:
  DeviceGroup(const Group& group, DeviceOptions options);
  ~DeviceGroup();  // ends the communicator, the peers willing; else aborts it

  // This rank's device; null on a rank that has joined before it used one. May be given later than the first batch.
  void use(const std::shared_ptr<Gpu>& gpu) { state_.gpu = gpu; }
  Gpu* gpu() const { return state_.gpu.get(); }
  Status make_stream() { return state_.make_stream(); }  // once there is a device; again: nothing to do
  const GpuStreamPtr& stream() const { return state_.stream; }

  // Everything that must have happened before a batch: the agreement on who moves the data, stream and communicator.
  // Stepped by every rank at the same batch. Empty once it is done for good: nothing to do.
  std::unique_ptr<Collective> make_setup(Tag tag);
  const GpuBackend* backend() const { return state_.backend.get(); }  // null: the ranks have not agreed yet
  // Why host memory moves the data, or how NCCL was found.
  const std::string& reason() const { return state_.reason; }
  const std::string& advice() const { return state_.advice; }
  // Empty, or why our kernels are not used: what NCCL does not do alone then goes through host memory.
  const std::string& kernels_reason() const { return state_.kernels_reason; }
  // Not ok: the setting demands NCCL, which cannot be used. The same on every rank.
  const Status& refusal() const { return state_.refusal; }

  // For tensors in device memory; pieces as in a host task, with device addresses.
  Result<std::unique_ptr<Collective>> make_collective(Task task);
  // Whether tasks that the backend can do are only enqueued; these can also be captured into a CUDA graph.
  bool launches_alone() const { return state_.backend && state_.backend->order() == GpuBackend::Order::kLaunches; }
  // Whether this one is only enqueued, without the host's collectives. The same on every rank.
  bool enqueues(const Task& task) const { return launches_alone() && state_.backend->can(task); }

  // Puts a task that NCCL does alone into the graph into which `from` is captured, behind what `from` has been given so
  // far; the event is for whoever reads the result, in the same capture. The host waits until NCCL has enqueued it.
  Result<GpuEventPtr> capture(Task task, CuStream from);
  Status prepare_to_capture();  // makes now what a capture would else have to make

  // Begins to tell NCCL of memory in advance (collective: the same sizes in the same order on every rank) / that it
  // will go; see Communicators. The owner lives until NCCL has forgotten it: at the latest when the communicator ends.
  bool registers() const;
  Status begin_telling(std::byte* at, size_t bytes, std::shared_ptr<void> owner) {
    return state_.nccl.begin_telling(at, bytes, std::move(owner));
  }
  Result<bool> is_told() { return state_.nccl.is_told(); }
  Result<bool> is_pending() const { return state_.nccl.is_pending(); }
  bool is_window(const std::byte* at) const { return state_.nccl.is_window(at); }
  bool may_forget() const { return !state_.nccl.was_captured(); }
  std::shared_ptr<void> begin_forgetting(const std::byte* at) { return state_.nccl.begin_forgetting(at); }

  // A batch has been launched. Events of earlier ones that have ended go back to the stock.
  struct Flight {
    std::string what;
    GpuEventPtr input;  // the last that it waits for on this GPU; null: none, or one that its caller owns
    GpuEventPtr done;   // behind it
    TimePoint since = Clock::now();
  };
  void launched(Flight flight);
  // Something has been launched that was not seen to end.
  bool has_flights() const { return !flights_.empty(); }
  // How long the oldest launched batch has been under way; 0: nothing is.
  double oldest_flight_s(TimePoint now);
  // Of what was launched so long ago: what it is and waits for; empty: nothing is. longest_s: is raised to its age.
  std::string under_way(TimePoint now, double older_than_s, double* longest_s);
  // Not ok: the communicator has failed (a network error, a peer's crash that NCCL noticed).
  Status check();
  // Begins to end what runs on the device, so that streams that wait for it go on. Nothing works afterwards.
  void abort();
  void await_abort(const Deadline& limit);

 private:
  Status run_captured(Task task);
  bool close_peers(const Deadline& limit);
  void leave_peers();
  bool flights_land(double limit_s);

  const Group& group_;
  const DeviceOptions options_;
  DeviceState state_;
  // What the backend cannot do, or all while there is none.
  const std::unique_ptr<GpuBackend> staged_ = make_staged_backend(&state_, group_);
  GpuStreamPtr capture_stream_;  // takes part in captures; the other one goes on
  bool aborted_ = false;
  std::deque<Flight> flights_;
};

}  // namespace hc
