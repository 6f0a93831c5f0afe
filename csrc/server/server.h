// A server of a parameter server: listens, serves each connection on a thread of its own, watches the links to backups.
// Its program (Python) tells it which partitions it holds and answers what it asks; everything else needs nobody.
//
// Thread: the public calls from any. Owner: the program.
#pragma once

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/thread.h"
#include "net/listeners.h"
#include "server/partition.h"

namespace hc {

struct ServerOptions {
  Credentials credentials;
  int32_t index = 0;
  uint32_t partitions = 1;
  uint64_t generation = 0;  // of this life, random
  size_t memory_bytes = 0;  // for rows
  double silence_s = 10;    // after which a link is given up
  std::string interfaces;   // as HOROCLONE_NETWORK_INTERFACES
};

class Server {
 public:
  static Result<std::unique_ptr<Server>> start(ServerOptions options);
  ~Server() { stop(); }

  std::string endpoint() const { return endpoint_.encode(); }
  Events& events() { return events_; }
  Result<Partition*> partition(uint32_t number);
  // As soon as this server is primary: workers that it has no connection to have `silence_s` to come.
  Status set_role(uint32_t partition, Role role);
  // Connects to another server and makes it the backup.
  Status attach(uint32_t partition, const Connection::Target& backup, double timeout_s);
  std::string describe() const;
  void stop();

 private:
  struct Session {
    NamedThread thread;
    // Written under mutex_: null before it is authenticated; until then, to end it, the connection once more.
    std::shared_ptr<Connection> connection;
    Fd unauthenticated;  // null: it is authenticated
    std::atomic<bool> over{false};
    uint64_t worker = 0;
    bool goodbye = false;
  };

  explicit Server(ServerOptions options);
  Status listen();
  void accept();
  void take(Fd fd, const std::string& from);
  void drop_oldest_unauthenticated() HC_REQUIRES(mutex_);
  void serve(Session& session, uint64_t number, Fd fd, const std::string& from);
  Status talk(Session& session, uint64_t number);
  Status answer(Session& session, const FrameHeader& header, std::span<const uint8_t> payload, Buffer* rows);
  Status follow(Session& session, uint64_t number, const FrameHeader& first);
  void reap();
  void pause_accepting();
  void watch();
  void hello(Session& session, uint64_t worker);
  void look_for_lost_workers();

  const ServerOptions options_;
  MemoryBudget budget_;
  Events events_;
  Alarm alarm_;
  std::vector<std::unique_ptr<Partition>> partitions_;
  Listeners listeners_;
  Endpoint endpoint_;
  Fd wake_;  // ends accept()
  std::atomic<bool> stopping_{false};
  std::atomic<int> unauthenticated_{0};  // connections that are not authenticated yet
  NamedThread acceptor_, watcher_;
  mutable Mutex mutex_;
  std::list<Session> sessions_ HC_GUARDED_BY(mutex_);
  uint64_t last_session_ HC_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, int> connections_ HC_GUARDED_BY(mutex_);  // by worker
  // Workers that should have a connection and do not: since when.
  std::map<uint64_t, TimePoint> away_ HC_GUARDED_BY(mutex_);
  Mutex stop_once_;
};

}  // namespace hc
