// A process set's part on GPUs: its stream on this rank's device, its communicator, and whether NCCL moves the data,
// our kernels do through memory that the ranks share, or host memory does. The ranks decide that together, once, with a
// table that travels over the host's collectives; every launch is asynchronous and comes from the thread that drives,
// so all ranks launch in the order of the plan.
//
// Thread: the thread that drives the engine. Owner: a process set.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "collective/collective.h"
#include "collective/gpu/device_levels.h"
#include "device/gpu.h"
#include "device/nccl_api.h"
#include "device/peer_memory.h"

namespace hc {

enum class GpuOperations { kAuto, kNccl, kHost, kPeers };  // the setting HOROCLONE_GPU_OPERATIONS

struct DeviceOptions {
  GpuOperations operations = GpuOperations::kAuto;
  std::string nccl_library, nccl_folders;
  KernelOptions kernels;
  size_t peer_bytes = 32u << 20;  // of each rank's GPU memory, that peers map
  double init_timeout_s = 300;
  bool adasum_by_node = false;
  bool two_level = false;  // asked for: large allreduces by NCCL within each node, between nodes, within each node
};

class DeviceGroup {
 public:
  DeviceGroup(const Group& group, DeviceOptions options);
  ~DeviceGroup();  // ends the communicator, the peers willing; else aborts it

  // This rank's device; null on a rank that has joined before it used one. May be given later than the first batch.
  void use(const std::shared_ptr<Gpu>& gpu) { gpu_ = gpu; }
  Gpu* gpu() const { return gpu_.get(); }
  const std::shared_ptr<Gpu>& shared_gpu() const { return gpu_; }
  CuStream stream() const { return stream_; }

  // Everything that must have happened before a batch: the agreement on who moves the data, stream and communicator.
  // Stepped by every rank at the same batch. Empty once it is done for good: nothing to do.
  std::unique_ptr<Collective> make_setup(Tag tag);
  enum class Way { kUnknown, kNccl, kPeers, kHost };
  Way way() const { return way_; }
  // Why host memory moves the data, or how NCCL was found.
  const std::string& reason() const { return reason_; }
  // Not ok: the setting demands NCCL, which cannot be used. The same on every rank.
  const Status& refusal() const { return refusal_; }

  // For tensors in device memory; pieces as in a host task, with device addresses.
  Result<std::unique_ptr<Collective>> make_collective(Task task);
  // Whether NCCL does this with our meaning, with the help of our kernels where every rank has them. The same on every
  // rank.
  static bool nccl_does(const Task& task, bool with_kernels);
  // Whether it is only enqueued, without the host's collectives. The same on every rank.
  bool enqueues(const Task& task) const { return way_ == Way::kNccl && nccl_does(task, kernels_everywhere_); }

  // Whether peers do this; they do all reductions with our meaning.
  static bool peers_do(const Task& task);

  // Puts a task that NCCL does alone into the graph into which `from` is captured, behind what `from` has been given so
  // far; the event is for whoever reads the result, in the same capture. The host waits until NCCL has enqueued it.
  Result<GpuEventPtr> capture(Task task, CuStream from);
  Status prepare_to_capture();  // makes now what a capture would else have to make

  // Tells NCCL of memory in advance (collective: the same sizes in the same order on every rank) / that it will go. The
  // owner lives until NCCL has forgotten it: at the latest when the communicator ends.
  bool registers() const;
  Status register_memory(std::byte* at, size_t bytes, std::shared_ptr<void> owner);
  void forget_memory(std::byte* at);

  // A batch has been launched; `done` comes behind it.
  void launched(GpuEventPtr done) { flights_.push_back({std::move(done), Clock::now()}); }
  // How long the oldest launched batch has been under way; 0: nothing is.
  double oldest_flight_s(TimePoint now);
  // Not ok: the communicator has failed (a network error, a peer's crash that NCCL noticed).
  Status check();
  // Ends what runs on the device, so that streams that wait for it go on. Nothing works afterwards.
  void abort();

 private:
  friend class DeviceSetup;
  friend class NcclCollective;
  friend class DeviceAdasum;
  friend class PeersCollective;
  friend class StagedCollective;
  struct Flight {
    GpuEventPtr done;
    TimePoint since;
  };
  Status ensure_stream();
  Status run_captured(Task task);
  Status until_enqueued();
  void load_nccl();
  void load_kernels();  // may take seconds
  void finish_communicators();
  bool finish(NcclHandle comm);
  Status check(NcclHandle comm);
  std::vector<NcclHandle> communicators() const;
  void leave_peers();
  bool flights_land(double limit_s);

  struct Registered {
    void* handle = nullptr;  // NCCL's
    bool is_window = false;
    std::shared_ptr<void> owner;
  };

  const Group& group_;
  const DeviceOptions options_;
  std::shared_ptr<Gpu> gpu_;
  std::shared_ptr<const NcclApi> nccl_;
  Status nccl_missing_;
  bool nccl_sought_ = false;
  GpuKernels* kernels_ = nullptr;  // this rank's; the Gpu's own
  Status kernels_missing_;
  bool kernels_everywhere_ = false;  // every rank has them
  std::unique_ptr<PeerMemory> peers_;
  size_t peer_bytes_ = 0;  // of it that every rank has
  bool aborted_ = false;
  CuStream stream_ = nullptr;
  CuStream capture_stream_ = nullptr;  // takes part in captures; the other one goes on
  NcclHandle comm_ = nullptr;
  std::unique_ptr<DeviceLevels> levels_;  // complete while way_ is kNccl; null: not asked for, or no levels here
  bool reduces_by_levels_ = false;        // they were asked for, on every rank, for allreduces as well as Adasum
  bool flat_only_ = false;                // in a capture
  std::map<std::byte*, Registered> registered_;
  bool captured_ = false;  // graphs that hold work of the communicator may live
  Way way_ = Way::kUnknown;
  std::string reason_;
  Status refusal_;
  std::deque<Flight> flights_;
};

// collective/gpu/nccl.cc, device_adasum.cc, peers.cc, staged.cc
std::unique_ptr<Collective> make_nccl_collective(Task task, DeviceGroup* device, const Group& group);
std::unique_ptr<Collective> make_device_adasum(Task task, DeviceGroup* device, const Group& group);
std::unique_ptr<Collective> make_peers_collective(Task task, DeviceGroup* device, const Group& group);
std::unique_ptr<Collective> make_staged_collective(Task task, DeviceGroup* device, const Group& group);

}  // namespace hc
