// What a process set has on GPUs: the set-up fills it in, collectives read it.
//
// Thread: the thread that makes progress. Owner: a DeviceGroup.
#pragma once

#include <memory>
#include <string>

#include "base/settings_table.h"
#include "collective/collective.h"
#include "collective/gpu/communicators.h"
#include "collective/gpu/gpu_backend.h"
#include "device/gpu.h"
#include "device/gpu_kernels.h"
#include "device/peer_memory.h"

namespace hc {

enum class GpuOperations { kAuto, kNccl, kHost, kPeers };  // the setting HOROCLONE_GPU_OPERATIONS

struct DeviceOptions {
  GpuOperations operations = GpuOperations::kAuto;
  std::string nccl_library, nccl_folders;
  KernelOptions kernels;
  size_t peer_bytes = defaults::gpu_peer_bytes;  // of each rank's GPU memory, that peers map
  double init_timeout_s = defaults::init_timeout_s;
  bool adasum_by_node = false;
  bool two_level = false;  // asked for: large allreduces by NCCL within each node, between nodes, within each node
};

struct DeviceState {
  std::shared_ptr<Gpu> gpu;  // null on a rank that has joined before it used one
  GpuStreamPtr stream;
  Communicators nccl;
  GpuKernels* kernels = nullptr;  // this rank's; the Gpu's own
  Status kernels_missing;
  bool kernels_everywhere = false;  // every rank has them
  std::string kernels_reason;       // why not, where somebody has none; the same on every rank
  std::unique_ptr<PeerMemory> peers;
  size_t peer_bytes = 0;                // of it that every rank has
  std::unique_ptr<GpuBackend> backend;  // null: the ranks have not agreed yet
  std::string reason;                   // why host memory moves the data, or how NCCL was found
  std::string advice;                   // what the user had better change; the same on every rank
  Status refusal;                       // not ok: the setting demands what cannot be used. The same on every rank

  Status make_stream();
};

// Whether NCCL does this with our meaning, with the help of our kernels where every rank has them. The same on every
// rank.
bool nccl_does(const Task& task, bool with_kernels);

// Everything that must have happened before the first batch: the ranks agree on who moves the data, then make what that
// needs. backend_selection.cc.
std::unique_ptr<Collective> make_backend_selection(DeviceState* state, const DeviceOptions& options, const Group& group,
                                                   Tag tag);
// Adasum by NCCL and our kernels, a part of its backend. device_adasum.cc.
std::unique_ptr<Collective> make_device_adasum(Task task, DeviceState* device, const Group& group);

}  // namespace hc
