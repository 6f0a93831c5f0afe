// NCCL's side of a process set on GPUs: the library, the set's communicator and those of the two levels, the memory
// that NCCL was told of. A rank tells it of memory at the same place as the others: windows from 2.27 on, single
// buffers from 2.19 on.
//
// Thread: the thread that makes progress. Owner: a DeviceGroup.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "collective/gpu/device_levels.h"
#include "collective/gpu/nccl_comm.h"

namespace hc {

class Communicators {
 public:
  // Loads NCCL; once. Without it missing() says why.
  void load(const std::shared_ptr<Gpu>& gpu, const std::string& library, const std::string& folders);
  const std::shared_ptr<const NcclApi>& library() const { return nccl_; }  // null: none
  const NcclApi& api() const { return *nccl_; }
  const Status& missing() const { return missing_; }

  NcclComm* world() const { return world_.get(); }  // of the whole set; null: none
  // Begins to make it, without blocking.
  Status begin(int size, const NcclId& id, int rank, const std::string& name);
  // Null: not asked for, or there are no levels here.
  DeviceLevels* levels() const { return levels_.get(); }
  void make_levels(const LevelPlace& place) { levels_ = std::make_unique<DeviceLevels>(nccl_, gpu_, place); }
  // They were asked for, on every rank, for allreduces as well as Adasum.
  bool reduces_by_levels() const { return reduces_by_levels_ && levels_ && !flat_only_; }
  void reduce_by_levels(bool on) { reduces_by_levels_ = on; }

  // Not ok: one has failed (a network error, a peer's crash that NCCL noticed).
  Status check() const;
  // Of the set's own, also what it was told of memory.
  Result<bool> is_pending() const { return world_ ? world_->is_pending() : false; }
  // Waits until NCCL has enqueued what it was called for, at most `limit_s`.
  Status until_enqueued(double limit_s) const;

  bool registers() const { return nccl_->registration() != NcclApi::Registration::kNone; }
  // Begins to tell NCCL; what was called before is over, and is_told() is asked when this is. On every rank in the same
  // order, and so is what is forgotten: NCCL gives windows places of its own, one behind the other.
  Status begin_telling(std::byte* at, size_t bytes, std::shared_ptr<void> owner);
  // false: it has begun to tell it in another way.
  Result<bool> is_told();
  // Of windows: what begins there, or any. The same on every rank.
  bool is_window(const std::byte* at) const;
  bool has_windows() const { return std::any_of(registered_.begin(), registered_.end(), is_of_window); }
  // Begins it: nothing on the device works on it any more. The caller keeps the memory's owner until this is over.
  // Null: a graph may still use it, and it stays until the communicator ends.
  std::shared_ptr<void> begin_forgetting(const std::byte* at);
  void forget_all_memory(double limit_s);

  // From now on graphs that hold work of the communicator may live.
  void note_capture() { captured_ = true; }
  bool was_captured() const { return captured_; }
  void set_flat_only(bool on) { flat_only_ = on; }  // in a capture

  // The end in peace: every rank has the data, nobody reads from this one any more.
  void finish();
  // The end otherwise, which goes on on other threads; the destructor waits for it, some seconds. See NcclComm.
  void abort();
  void await_abort(const Deadline& limit);

 private:
  struct Registered {
    std::byte* at = nullptr;
    size_t bytes = 0;
    std::shared_ptr<void*> handle;  // NCCL's, which it may write later
    bool is_window = false;
    std::shared_ptr<void> owner;
  };
  static bool is_of_window(const Registered& one) { return one.is_window && *one.handle; }
  Status tell(const Registered& made);
  void forget(const Registered& known);

  std::shared_ptr<Gpu> gpu_;
  std::shared_ptr<const NcclApi> nccl_;
  Status missing_;
  bool sought_ = false;
  std::unique_ptr<NcclComm> world_;
  std::unique_ptr<DeviceLevels> levels_;
  std::unique_ptr<NcclComm> aborted_world_;
  std::unique_ptr<DeviceLevels> aborted_levels_;
  bool reduces_by_levels_ = false;
  bool flat_only_ = false;
  bool captured_ = false;
  std::vector<Registered> registered_;  // in the order in which NCCL was told
};

}  // namespace hc
