// One communicator of NCCL, and how calls reach it without holding up the thread that makes progress. From 2.27 on the
// communicator does not block: NCCL works on a thread of its own. Older ones keep a group that is under way in the
// calling thread's memory, where the next caller of NCCL on that thread (torch, say) runs into it; with them the
// communicator blocks, and a thread of this class makes the calls.
//
// Thread: the thread that makes progress. Owner: Communicators, DeviceLevels, DeviceLink.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "device/gpu.h"
#include "device/nccl_api.h"

namespace hc {

// A call on the communicator. Holds all that it works with: it may run later, on another thread.
using NcclCall = std::function<Status(const NcclApi&, NcclHandle)>;

class NcclComm {
 public:
  NcclComm(std::shared_ptr<const NcclApi> nccl, std::shared_ptr<Gpu> gpu);
  ~NcclComm();  // aborts what was not finished, and waits some seconds for that
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  // Begins to make it; is_pending() says when it is up. name: shown by NCCL's own tools.
  Status begin(int size, const NcclId& id, int rank, const std::string& name);
  // All of them in one group, or one alone; nothing else may be pending.
  Status launch(std::vector<NcclCall> calls);
  Status call(NcclCall call);
  // Whether what was begun, launched or called is still on its way; the error that NCCL met meanwhile.
  Result<bool> is_pending();
  Status until_over(double limit_s);
  // The error that NCCL has met, if any; also while something is pending.
  Status check();
  // For calls that NCCL does at once. Null: it is not up.
  NcclHandle handle() const;

  // The end in peace, which takes at most so long; false: it has to be aborted.
  bool finish(double limit_s);
  // The end otherwise: begins it, on a thread of its own. NCCL tells the device to stop and waits until it has, which
  // may take another communicator's abort, or the end of all graphs that hold its work. kept: lives as long.
  void abort(std::shared_ptr<void> kept = nullptr);
  void await_abort(const Deadline& limit);  // at the limit it is forgotten
  void forget();                            // the destructor does not wait for what abort() has begun

 private:
  class Caller;  // the thread that calls, for communicators that block
  class Ending;  // whether what abort() has begun is over
  Status run(const std::vector<NcclCall>& calls, bool grouped);

  const std::shared_ptr<const NcclApi> nccl_;
  const std::shared_ptr<Gpu> gpu_;
  NcclHandle comm_ = nullptr;       // that does not block
  std::shared_ptr<Caller> caller_;  // null: it does not block
  std::shared_ptr<Ending> ending_;
};

}  // namespace hc
