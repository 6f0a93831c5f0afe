// A piece of memory on this rank's GPU that the other ranks of the machine map into their processes (CUDA IPC), and
// theirs in this one: what peers reduce through. Ranks that are threads of one process use the address itself, since
// CUDA refuses to map a process's own memory. Thread: any, one at a time. Owner: a DeviceGroup.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "device/gpu.h"

namespace hc {

// What a rank tells the others; plain bytes.
struct PeerHandle {
  uint64_t process = 0;  // a random number of the process
  uint64_t address = 0;  // there
  CuIpcHandle ipc{};
};

class PeerMemory {
 public:
  static Result<std::unique_ptr<PeerMemory>> create(std::shared_ptr<Gpu> gpu, size_t bytes);
  // What was mapped must have been forgotten by everybody, or what follows is undefined as CUDA has it.
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  const PeerHandle& handle() const { return handle_; }
  size_t bytes() const { return bytes_; }
  // Maps what the ranks have told, one entry for each, this one's among them. Names the one that cannot be mapped.
  Status open(std::span<const PeerHandle> ranks);
  CuPointer at(int rank) const { return at_[static_cast<size_t>(rank)]; }
  // Forgets what was mapped; nothing may use it any more.
  void close();
  // The process ends without giving it back: something still works with it.
  void abandon() { abandoned_ = true; }

 private:
  PeerMemory(std::shared_ptr<Gpu> gpu, size_t bytes) : gpu_(std::move(gpu)), bytes_(bytes) {}

  const std::shared_ptr<Gpu> gpu_;
  const size_t bytes_;
  CuPointer own_ = 0;
  PeerHandle handle_;
  std::vector<CuPointer> at_, mapped_;
  bool abandoned_ = false;
};

}  // namespace hc
