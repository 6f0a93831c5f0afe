// A partition on this server: its shard, which copy this server has of it, and the other copy. What changes the shard
// is done here, sent to the backup in the same order, and acknowledged when both have it. Who is primary is decided
// outside (a register that changes by compare-and-set); until it is decided nobody is answered.
//
// Thread: sessions, the watching thread and the server's program; everything is guarded by one mutex. Owner: the
// server.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/mutex.h"
#include "server/backup_link.h"
#include "server/events.h"
#include "server/shard.h"

namespace hc {

// In the order of horoclone_server.h.
enum class Role : int32_t { kNone, kBackup, kPrimary, kUndecided };
inline constexpr int32_t kRoleCount = 4;

// Of a call that may wait here: it can be told to stop, and tells the other side that it still waits every keepalive_s,
// however often it is woken meanwhile.
struct CallContext {
  Deadline deadline;
  double keepalive_s;
  std::function<Status()> still_wanted;  // an error ends the wait
  Deadline next_keepalive = Deadline::in(keepalive_s);
};

class Partition {
 public:
  Partition(uint32_t number, MemoryBudget* budget, Events* events, Alarm* watch, double silence_s);

  // --- of the primary: `elsewhere` is set when it is not this server ---
  Status change(const FrameHeader& header, std::span<const uint8_t> payload, CallContext& call, FrameHeader* answer,
                bool* elsewhere);
  Status pull(const FrameHeader& header, std::span<const uint8_t> payload, CallContext& call, Buffer* rows,
              bool* elsewhere);
  // A worker's last connection has ended without a goodbye, or with one.
  void worker_left(uint64_t worker);
  // Gives a new backup a copy of the shard; when it returns every further change waits for that backup.
  Status attach(std::unique_ptr<Connection> connection, int32_t server, double timeout_s);
  void detach();

  // --- of the backup. `stream` is the number of the primary's connection: a newer one takes over ---
  Status begin_following(uint64_t stream);
  Status follow(uint64_t stream, const FrameHeader& header, std::span<const uint8_t> payload);
  void stream_ended(uint64_t stream);

  void set_role(Role role);
  Role role() const;
  std::vector<uint64_t> workers() const;
  // Signs of life to the backup.
  void ping();
  void stop();
  std::string describe() const;
  // Up to n rows of a table, with state, from row `from` on, for a file. 0: none left, no such table, or not the
  // primary.
  size_t copy_rows(uint64_t table, size_t from, size_t n, int64_t* ids, float* rows, uint64_t* steps) const;

 private:
  Status wait_until_decided(CallContext& call, bool* elsewhere) HC_REQUIRES(mutex_);
  // Gives the lock back while it waits.
  Status pause(CallContext& call) HC_REQUIRES(mutex_);
  Status wait_for_backup(const std::shared_ptr<BackupLink>& link, uint64_t frame, CallContext& call, bool* elsewhere);
  Status copy_to(BackupLink& link, const Deadline& deadline);
  void backup_lost();

  const uint32_t number_;
  MemoryBudget* const budget_;
  Events* const events_;
  Alarm* const watch_;  // wakes the thread that calls ping()
  const double silence_s_;
  mutable Mutex mutex_;
  CondVar changed_;  // role, shard
  Role role_ HC_GUARDED_BY(mutex_) = Role::kNone;
  std::unique_ptr<Shard> shard_ HC_GUARDED_BY(mutex_) HC_PT_GUARDED_BY(mutex_);
  std::shared_ptr<BackupLink> backup_ HC_GUARDED_BY(mutex_);
  // Changes wait for backup_; before that it is being given its copy.
  bool member_ HC_GUARDED_BY(mutex_) = false;
  uint64_t stream_ HC_GUARDED_BY(mutex_) = 0;  // backup: the connection that is followed
  bool stopping_ HC_GUARDED_BY(mutex_) = false;
};

}  // namespace hc
