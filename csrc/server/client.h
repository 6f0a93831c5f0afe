// A worker's side of a parameter server: a connection to each server, and calls that go to all servers at once. Where a
// partition is now its program finds out, from the register.
//
// Thread: one call at a time; close() from any. Owner: the program.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "server/call.h"
#include "server/connection.h"

namespace hc {

struct ClientOptions {
  Credentials credentials;
  uint64_t worker = 0;  // of this life, random, not 0
  int32_t rank = 0;
  double silence_s = 10;  // after which a server is given up
  uint32_t partitions = 1;
};

// Why a partition's part of a call is not done.
struct Failure {
  uint32_t partition = 0;
  int32_t server = -1;
  bool retry = false;  // its server is gone, or another one has it now
  Status status;
};

class Client {
 public:
  explicit Client(ClientOptions options) : options_(std::move(options)), place_(options_.partitions, -1) {}
  ~Client() { close(); }

  uint32_t partitions() const { return options_.partitions; }
  // Replaces an earlier connection to that server.
  Status connect(const Connection::Target& target, double timeout_s);
  bool is_connected(int32_t server) const;
  void route(uint32_t partition, int32_t server) { place_.at(partition) = server; }
  // A question to a server's program.
  Status ask(int32_t server, const std::string& question, double timeout_s, std::string* answer);
  // Empty: all is done. limit_s: how long servers wait for other workers. cancelled is asked five times a second while
  // nothing comes.
  std::vector<Failure> run(Call& call, double limit_s, const std::function<bool()>& cancelled);
  // Says goodbye.
  void close();

 private:
  // What is under way on one connection: one frame at a time, so that neither side can block the other.
  struct Work {
    int32_t server;
    std::shared_ptr<Connection> connection;
    std::vector<uint32_t> partitions;  // to do, the last one is next
    uint32_t current = 0;
    TimePoint heard;
    bool busy = false;
  };
  std::shared_ptr<Connection> link(int32_t server) const;
  void drop(int32_t server, const std::shared_ptr<Connection>& connection);
  std::vector<Work> plan(const Call& call, std::vector<Failure>* failures) const;
  void next(Work& work, Call& call, double limit_s, std::vector<Failure>* failures);
  void hear(Work& work, Call& call, double limit_s, std::vector<Failure>* failures);
  void serve(std::vector<Work>& all, Call& call, double limit_s, const std::function<bool()>& cancelled,
             std::vector<Failure>* failures);
  void give_up(Work& work, const Status& why, std::vector<Failure>* failures);

  const ClientOptions options_;
  std::vector<int32_t> place_;  // by partition: its primary
  uint64_t sequence_ = 0;
  Buffer scratch_, payload_;
  mutable Mutex mutex_;
  std::map<int32_t, std::shared_ptr<Connection>> links_ HC_GUARDED_BY(mutex_);  // by server
};

}  // namespace hc
