#include "server/partition.h"

#include <algorithm>
#include <chrono>
#include <new>

namespace hc {
namespace {

constexpr size_t kCopyBytes = 4u << 20;  // rows of one frame to a new backup: for so long the partition is held

const char* name_of(Role role) {
  switch (role) {
    case Role::kNone:
      return "none";
    case Role::kBackup:
      return "backup";
    case Role::kPrimary:
      return "primary";
    case Role::kUndecided:
      return "undecided";
  }
  return "?";
}

std::chrono::duration<double> seconds(double s) { return std::chrono::duration<double>(s); }

// A copy without memory is no reason to end the server.
template <class Call>
Status with_memory(const char* what, Call&& call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return error(Code::kInternal, "the server has no memory left for ", what,
                 "; give it more, start more servers, or send fewer rows at once");
  }
}

}  // namespace

Partition::Partition(uint32_t number, MemoryBudget* budget, Events* events, Alarm* watch, double silence_s)
    : number_(number), budget_(budget), events_(events), watch_(watch), silence_s_(silence_s) {}

Status Partition::pause(CallContext& call) {
  if (stopping_) return error(Code::kAborted, "the server stops");  // a worker hears "elsewhere" instead
  const double wait_s = std::min(call.next_keepalive.remaining_s(), call.deadline.remaining_s());
  changed_.wait_for(mutex_, seconds(std::max(0.0, wait_s)));
  if (!call.next_keepalive.passed()) return Status::ok();
  call.next_keepalive = Deadline::in(call.keepalive_s);
  mutex_.unlock();
  try {
    Status wanted = call.still_wanted();
    mutex_.lock();
    return wanted;
  } catch (...) {
    mutex_.lock();  // the caller's scope unlocks it
    throw;
  }
}

Status Partition::wait_until_decided(CallContext& call, bool* elsewhere) {
  while (role_ == Role::kUndecided) {
    if (call.deadline.passed()) {
      return error(
          Code::kTimeout, "partition ", number_,
          ": this server has lost the other copy and cannot reach the register that decides which one goes on");
    }
    HC_TRY(pause(call));
  }
  // One that stops lets its backup go: what it did alone would be lost, and somebody may go on elsewhere already.
  *elsewhere = stopping_ || role_ != Role::kPrimary;
  return Status::ok();
}

// The change is done on this copy. It may be acknowledged when the backup has it, or when it was decided that there is
// none; if it was decided that the backup goes on instead, this copy counts for nothing and the change neither.
Status Partition::wait_for_backup(const std::shared_ptr<BackupLink>& link, uint64_t frame, CallContext& call,
                                  bool* elsewhere) {
  while (!link->wait_for(frame, call.keepalive_s)) {
    if (link->is_lost()) {
      MutexLock lock(mutex_);
      if (backup_ != link) return wait_until_decided(call, elsewhere);
      HC_TRY(pause(call));  // backup_lost() is about to come
      continue;
    }
    if (call.deadline.passed())
      return error(Code::kTimeout, "partition ", number_, ": its backup, server ", link->server(),
                   ", has not confirmed the change in time");
    HC_TRY(call.still_wanted());
  }
  return Status::ok();
}

Status Partition::change(const FrameHeader& header, std::span<const uint8_t> payload, CallContext& call,
                         FrameHeader* answer, bool* elsewhere) {
  std::shared_ptr<BackupLink> link;
  uint64_t frame = 0;
  {
    MutexLock lock(mutex_);
    HC_TRY(wait_until_decided(call, elsewhere));
    if (*elsewhere) return Status::ok();
    HC_TRY(with_memory("this change", [&] {
      mutex_.assume_held();
      return shard_->apply(header, payload, answer);
    }));
    if (backup_) {  // also what was in already: whoever sent it first may have died before the backup had it
      frame = backup_->send(header, payload);
      if (member_) link = backup_;
    }
    changed_.notify_all();
  }
  return link ? wait_for_backup(link, frame, call, elsewhere) : Status::ok();
}

Status Partition::pull(const FrameHeader& header, std::span<const uint8_t> payload, CallContext& call, Buffer* rows,
                       bool* elsewhere) {
  MutexLock lock(mutex_);
  for (;;) {
    HC_TRY(wait_until_decided(call, elsewhere));
    if (*elsewhere) return Status::ok();
    std::string missing;
    if (shard_->may_pull(header, &missing)) break;
    if (call.deadline.passed()) {
      const Table* table = shard_->table(header.table);
      return error(Code::kTimeout, "table '", table->spec().name, "' with staleness ", table->spec().staleness,
                   ": a pull at step ", header.clock, " has waited ", static_cast<double>(header.limit_ms) / 1000,
                   " s for ", missing, ". Start as many workers as the table was made for (", table->spec().workers,
                   "), or let staleness be None");
    }
    HC_TRY(pause(call));
  }
  return with_memory("the answer", [&] {
    mutex_.assume_held();
    return shard_->pull(header, payload, rows);
  });
}

void Partition::worker_left(uint64_t worker) {
  MutexLock lock(mutex_);
  if (role_ != Role::kPrimary || !shard_) return;
  FrameHeader header;
  header.verb = Verb::kLeave;
  header.partition = number_;
  header.worker = worker;
  (void)shard_->apply(header, {}, nullptr);  // cannot fail
  if (backup_) backup_->send(header, {});
  changed_.notify_all();
}

// Chunk by chunk, so that nobody waits long. What changes meanwhile is sent as well, and a later chunk overwrites it
// with the same.
Status Partition::copy_to(BackupLink& link, const Deadline& deadline) {
  std::vector<uint64_t> tables;
  {
    MutexLock lock(mutex_);
    tables = shard_->tables();
  }
  Buffer payload;
  for (uint64_t table : tables) {
    for (size_t from = 0;;) {
      {
        MutexLock lock(mutex_);
        FrameHeader header;
        if (role_ != Role::kPrimary || link.is_lost()) break;
        if (!shard_->rows(table, &from, kCopyBytes, &header, &payload)) break;
        header.partition = number_;
        link.send(header, payload.bytes());
      }
      if (deadline.passed()) return error(Code::kTimeout, "a copy for server ", link.server(), " took too long");
    }
  }
  return Status::ok();
}

Status Partition::attach(std::unique_ptr<Connection> connection, int32_t server, double timeout_s) {
  const Deadline deadline = Deadline::in(timeout_s);
  std::shared_ptr<BackupLink> link;
  {
    MutexLock lock(mutex_);
    if (role_ != Role::kPrimary) return error(Code::kInvalidArgument, "this server is not its primary");
    if (backup_) return error(Code::kInvalidArgument, "it has a backup: server ", backup_->server());
    link = std::make_shared<BackupLink>(std::move(connection), server, silence_s_, [this] { backup_lost(); });
    HC_TRY(link->start());
    FrameHeader header;
    header.verb = Verb::kMetadata;
    header.partition = number_;
    link->send(header, shard_->metadata());
    backup_ = link;
    member_ = false;
  }
  Status status = copy_to(*link, deadline);
  uint64_t last = 0;
  {  // From here on every change waits for the backup; those of before are waited for now.
    MutexLock lock(mutex_);
    member_ = status.is_ok() && backup_ == link && role_ == Role::kPrimary;
    last = link->sent();
  }
  while (status.is_ok() && !link->wait_for(last, kSignsOfLife)) {
    if (link->is_lost()) status = error(Code::kPeerLost, link->why());
    if (deadline.passed()) status = error(Code::kTimeout, "a copy for server ", server, " took too long");
  }
  MutexLock lock(mutex_);
  if (status.is_ok() && backup_ == link && member_) return Status::ok();
  if (backup_ == link) {
    backup_ = nullptr;
    member_ = false;
  }
  lock.unlock();
  link->close();
  return status.is_ok() ? error(Code::kPeerLost, "the new backup, server ", server, ", was lost: ", link->why())
                        : status;
}

void Partition::detach() {
  MutexLock lock(mutex_);
  const std::shared_ptr<BackupLink> link = std::move(backup_);
  member_ = false;
  lock.unlock();
  if (link) link->close();
}

// On the link's own reading thread, or on one that holds the lock and has just sent: so the work is left to the
// watching thread, see ping().
void Partition::backup_lost() { watch_->ring(); }

void Partition::ping() {
  MutexLock lock(mutex_);
  if (!backup_) return;
  if (!backup_->is_lost()) {
    const std::shared_ptr<BackupLink> link = backup_;
    lock.unlock();
    return link->ping();
  }
  const std::shared_ptr<BackupLink> link = std::move(backup_);
  const std::string why = link->why();
  if (member_ && role_ == Role::kPrimary) {
    role_ = Role::kUndecided;
    events_->add(EventKind::kBackupLost, number_, why);
  }
  member_ = false;
  changed_.notify_all();
  lock.unlock();
  link->close();
}

Status Partition::begin_following(uint64_t stream) {
  MutexLock lock(mutex_);
  if (role_ == Role::kPrimary || role_ == Role::kUndecided)
    return error(Code::kInvalidArgument, "partition ", number_, ": this server holds it itself");
  shard_ = std::make_unique<Shard>(budget_);
  role_ = Role::kBackup;
  stream_ = stream;
  return Status::ok();
}

Status Partition::follow(uint64_t stream, const FrameHeader& header, std::span<const uint8_t> payload) {
  MutexLock lock(mutex_);
  if (role_ != Role::kBackup || stream_ != stream)
    return error(Code::kAborted, "partition ", number_, ": this server follows that primary no more");
  if (header.verb == Verb::kPing) return Status::ok();
  FrameHeader ignored;
  return with_memory("a copy", [&] {
    mutex_.assume_held();
    return shard_->apply(header, payload, &ignored);
  });
}

void Partition::stream_ended(uint64_t stream) {
  MutexLock lock(mutex_);
  if (role_ != Role::kBackup || stream_ != stream) return;
  stream_ = 0;
  events_->add(EventKind::kPrimaryLost, number_, "its stream has ended");
}

void Partition::set_role(Role role) {
  std::shared_ptr<BackupLink> link;
  {
    MutexLock lock(mutex_);
    role_ = role;
    stream_ = 0;  // a primary that is followed no more learns it from its next frame
    if (role == Role::kNone) shard_ = nullptr;
    if (role == Role::kPrimary && !shard_) shard_ = std::make_unique<Shard>(budget_);
    if (role != Role::kPrimary) {
      link = std::move(backup_);
      member_ = false;
    }
    changed_.notify_all();
  }
  if (link) link->close();
}

Role Partition::role() const {
  MutexLock lock(mutex_);
  return role_;
}

std::vector<uint64_t> Partition::workers() const {
  MutexLock lock(mutex_);
  return shard_ && role_ == Role::kPrimary ? shard_->workers() : std::vector<uint64_t>();
}

void Partition::stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  detach();
}

std::string Partition::describe() const {
  MutexLock lock(mutex_);
  return text_of("{\"partition\": ", number_, ", \"role\": \"", name_of(role_),
                 "\", \"backup\": ", backup_ && member_ ? backup_->server() : -1,
                 ", \"tables\": ", shard_ ? shard_->describe() : "[]", "}");
}

size_t Partition::copy_rows(uint64_t table, size_t from, size_t n, int64_t* ids, float* rows, uint64_t* steps) const {
  MutexLock lock(mutex_);
  const Table* found = shard_ && role_ == Role::kPrimary ? shard_->table(table) : nullptr;
  if (!found) return 0;
  *steps = found->steps();
  return found->copy_rows(from, n, ids, rows);
}

}  // namespace hc
