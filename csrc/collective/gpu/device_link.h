// What a rank has for messages between its GPU and those of others: for each peer a stream and, where NCCL can be used
// by both ends, a communicator of the two, made when the first message needs it. Collectives have streams and
// communicators of their own, so that a message that waits for its peer holds none of them up.
//
// Thread: the thread that makes progress. Owner: GpuMessages.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "base/wire.h"
#include "collective/gpu/device_group.h"

namespace hc {

// What one end tells the other of its GPU before both choose the backend of a message.
struct LinkCard {
  GpuOperations operations = GpuOperations::kAuto;
  int32_t nccl_version = 0;  // 0: there is none
  NcclPlace place;
  void put_into(Writer* frame) const;
  static LinkCard read_from(Reader* frame);
};

struct LinkBackend {
  bool by_nccl = false;
  std::string reason;  // why host memory moves the data
  Status refusal;      // not ok: an end demands NCCL, which cannot be used
};
// PURE: both ends would come to the same answer.
LinkBackend choose_link_backend(const LinkCard& sender, const LinkCard& receiver, bool same_node);

class DeviceLink {
 public:
  DeviceLink(std::shared_ptr<Gpu> gpu, std::shared_ptr<const NcclApi> nccl, double init_timeout_s)
      : gpu_(std::move(gpu)), nccl_(std::move(nccl)), init_timeout_s_(init_timeout_s) {}
  ~DeviceLink();  // ends the communicator, the peer willing; else aborts it

  const std::shared_ptr<Gpu>& gpu() const { return gpu_; }
  Result<GpuStreamPtr> stream();

  Result<NcclId> make_id() const;
  bool has_begun() const { return begun_; }
  Status begin(const NcclId& id, int place);  // 0 or 1, in the communicator of the two; does not block
  Result<bool> is_up();                       // of a link that has not begun: false
  Status launch(bool sends, std::byte* data, size_t bytes, int place_of_peer);
  Result<bool> is_enqueued();

  void launched(GpuEventPtr done) { flights_.push_back({std::move(done), Clock::now()}); }
  bool has_flights() const { return !flights_.empty(); }  // that were not seen to end
  double oldest_flight_s(TimePoint now);                  // 0: nothing is under way
  Status check();
  void abort();
  void await_abort(const Deadline& limit);

 private:
  struct Flight {
    GpuEventPtr done;
    TimePoint since;
  };
  const std::shared_ptr<Gpu> gpu_;
  const std::shared_ptr<const NcclApi> nccl_;  // null: there is none
  const double init_timeout_s_;
  GpuStreamPtr stream_;
  std::unique_ptr<NcclComm> comm_;
  bool begun_ = false, up_ = false;
  Deadline deadline_ = Deadline::in(0);
  std::deque<Flight> flights_;
};

class DeviceLinks {
 public:
  // The same GPU in every call.
  void use(const std::shared_ptr<Gpu>& gpu, const DeviceOptions& options);
  bool in_use() const { return gpu_ != nullptr; }
  LinkCard card() const;
  DeviceLink& to(int peer);  // made when it is asked for the first time

  bool has_flights() const;
  double oldest_flight_s(TimePoint now);
  std::string under_way(TimePoint now, double older_than_s, double* longest_s);  // as of a DeviceGroup
  void each_late(TimePoint now, double older_than_s, const std::function<void(int peer)>& tell);
  Status check();
  void abort();  // streams that wait for a peer go on; nothing works afterwards
  void await_abort(const Deadline& limit);
  void leave();  // in peace

 private:
  std::shared_ptr<Gpu> gpu_;
  std::shared_ptr<const NcclApi> nccl_;
  DeviceOptions options_;
  std::map<int, std::unique_ptr<DeviceLink>> links_;
};

}  // namespace hc
