#include "server/server.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "net/bootstrap.h"

namespace hc {
namespace {

constexpr int kMaxUnauthenticated = static_cast<int>(kMaxHalfOpen);
constexpr double kDefaultWaitS = 60;  // for who says nothing about it
constexpr int kPauseMs = 100;

CallContext context_of(const FrameHeader& header, Connection* connection, double silence_s,
                       const std::atomic<bool>* stopping) {
  const double limit_s = header.limit_ms > 0 ? static_cast<double>(header.limit_ms) / 1000 : kDefaultWaitS;
  return {Deadline::in(limit_s), silence_s * kSignsOfLife, [=]() -> Status {
            if (stopping->load()) return error(Code::kAborted, "the server stops");
            FrameHeader sign;
            sign.verb = Verb::kWaiting;
            return connection->send(sign, {}, {}, silence_s);
          }};
}

}  // namespace

Server::Server(ServerOptions options) : options_(std::move(options)), budget_(options_.memory_bytes) {
  for (uint32_t i = 0; i < options_.partitions; ++i)
    partitions_.push_back(std::make_unique<Partition>(i, &budget_, &events_, &alarm_, options_.silence_s));
}

Result<std::unique_ptr<Server>> Server::start(ServerOptions options) {
  if (options.credentials.secret.size() < 16)
    return error(Code::kInvalidArgument, "the secret has ", options.credentials.secret.size(), " bytes; 16 are needed");
  if (options.partitions < 1 || options.partitions > 65536)
    return error(Code::kInvalidArgument, options.partitions, " partitions; 1 to 65536 are possible");
  std::unique_ptr<Server> server(new Server(std::move(options)));
  HC_TRY(server->listen());
  HC_TRY(server->acceptor_.start("hc-ps-accept", [s = server.get()] { s->accept(); }));
  HC_TRY(server->watcher_.start("hc-ps-watch", [s = server.get()] { s->watch(); }));
  return server;
}

Status Server::listen() {
  wake_ = Fd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake_) return error(Code::kInternal, "eventfd: ", std::strerror(errno));
  endpoint_.identity = HostIdentity::of_this_process("");
  endpoint_.host_name = this_host_name();
  endpoint_.pid = ::getpid();
  return open_listeners(options_.interfaces, {}, &listeners_, &endpoint_);
}

Result<Partition*> Server::partition(uint32_t number) {
  if (number >= partitions_.size())
    return error(Code::kInvalidArgument, "partition ", number, " of ", partitions_.size());
  return partitions_[number].get();
}

// --- connections ---

void Server::accept() {
  std::vector<pollfd> set{{wake_.get(), POLLIN, 0}, {listeners_.unix_socket.get(), POLLIN, 0}};
  for (const Fd& one : listeners_.tcp) set.push_back({one.get(), POLLIN, 0});
  while (!stopping_) {
    if (::poll(set.data(), set.size(), -1) < 0) {
      if (errno != EINTR) pause_accepting();
      continue;
    }
    for (size_t i = 1; i < set.size(); ++i) {
      if (set[i].revents == 0) continue;
      Address from;
      int number = 0;
      Fd fd = accept_one(set[i].fd, &from, &number);
      if (fd && !stopping_) take(std::move(fd), from.text());
      if (number != 0) pause_accepting();
    }
    reap();
  }
}

// No descriptor or no memory is left: not again at once.
void Server::pause_accepting() {
  pollfd one{wake_.get(), POLLIN, 0};
  ::poll(&one, 1, kPauseMs);
}

void Server::take(Fd fd, const std::string& from) {
  if (unauthenticated_ >= 2 * kMaxUnauthenticated) return;  // closes it: those that were sent away have not noticed yet
  Fd end(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
  if (!end) return;
  MutexLock lock(mutex_);
  if (unauthenticated_ >= kMaxUnauthenticated) drop_oldest_unauthenticated();
  ++unauthenticated_;
  Session& session = sessions_.emplace_back();
  session.unauthenticated = std::move(end);
  const uint64_t number = ++last_session_;
  auto owned = std::make_shared<Fd>(std::move(fd));
  Status started = session.thread.start("hc-ps-serve", [this, &session, number, owned, from] {
    serve(session, number, std::move(*owned), from);
    session.over = true;
  });
  if (!started.is_ok()) {
    --unauthenticated_;
    sessions_.pop_back();
  }
}

// Its thread sees the end of the connection.
void Server::drop_oldest_unauthenticated() {
  for (Session& session : sessions_) {
    if (!session.unauthenticated) continue;
    (void)::shutdown(session.unauthenticated.get(), SHUT_RDWR);
    session.unauthenticated = Fd();
    return;
  }
}

void Server::reap() {
  MutexLock lock(mutex_);
  sessions_.remove_if([](const Session& session) { return session.over.load(); });
}

void Server::serve(Session& session, uint64_t number, Fd fd, const std::string& from) {
  auto connection = Connection::welcome(std::move(fd), from, options_.credentials, options_.index, options_.generation,
                                        kHelloDeadlineS);
  {
    MutexLock lock(mutex_);
    --unauthenticated_;
    session.unauthenticated = Fd();
    if (!connection.is_ok()) return;  // not authenticated: nothing is owed to it
    session.connection = connection.take();
    if (stopping_) return;
  }
  (void)talk(session, number);  // how it ended is the other side's business
  session.connection->shut();
  if (session.worker == 0) return;
  {
    MutexLock lock(mutex_);
    if (--connections_[session.worker] > 0) return;
    connections_.erase(session.worker);
  }
  if (stopping_) return;
  for (auto& partition : partitions_) partition->worker_left(session.worker);
}

void Server::hello(Session& session, uint64_t worker) {
  MutexLock lock(mutex_);
  if (session.worker != 0 || worker == 0) return;
  session.worker = worker;
  ++connections_[worker];
}

Status Server::talk(Session& session, uint64_t number) {
  Connection& connection = *session.connection;
  Buffer payload, rows;
  FrameHeader header;
  for (;;) {
    HC_TRY(connection.receive(&header, &payload, -1));
    switch (header.verb) {
      case Verb::kHello:
        hello(session, header.worker);
        HC_TRY(connection.send({}, {}, {}, options_.silence_s));
        break;
      case Verb::kGoodbye:
        return Status::ok();
      case Verb::kReplica:
        return follow(session, number, header);
      case Verb::kAsk:
      case Verb::kPull:
      case Verb::kTable:
      case Verb::kRegister:
      case Verb::kPush:
      case Verb::kAssign:
      case Verb::kRows:
        HC_TRY(answer(session, header, payload.bytes(), &rows));
        break;
      case Verb::kReply:
      case Verb::kWaiting:
      case Verb::kElsewhere:
      case Verb::kLeave:
      case Verb::kMetadata:
      case Verb::kPing:
      case Verb::kVerbs:
        return error(Code::kInternal, connection.peer(), " sent frame ", static_cast<int>(header.verb));
    }
  }
}

Status Server::answer(Session& session, const FrameHeader& header, std::span<const uint8_t> payload, Buffer* rows) {
  Connection& connection = *session.connection;
  CallContext call = context_of(header, &connection, options_.silence_s, &stopping_);
  FrameHeader reply;
  reply.partition = header.partition;
  bool elsewhere = false;
  std::string text;
  rows->sized(0);
  Status status;
  auto place = partition(header.partition);
  if (header.verb == Verb::kAsk) {
    status = events_.ask(std::string(payload.begin(), payload.end()), call.keepalive_s, call.still_wanted, &text);
  } else if (!place.is_ok()) {
    status = place.status();
  } else if (header.verb == Verb::kPull) {
    status = place.value()->pull(header, payload, call, rows, &elsewhere);
  } else {
    status = place.value()->change(header, payload, call, &reply, &elsewhere);
  }
  // A worker has nothing to do with this server's end: whoever has the partition next will answer.
  if (!status.is_ok() && stopping_.load() && header.verb != Verb::kAsk) {
    status = Status::ok();
    elsewhere = true;
  }
  std::span<const uint8_t> body = rows->bytes();
  if (!status.is_ok()) {
    text = status.text();
    reply.code = static_cast<uint16_t>(status.code());
  }
  if (status.is_ok() && elsewhere) {
    reply.verb = Verb::kElsewhere;
    text = text_of("server ", options_.index, " is not the primary of partition ", header.partition);
  }
  if (!text.empty()) body = {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
  return connection.send(reply, body, {}, options_.silence_s);
}

Status Server::follow(Session& session, uint64_t number, const FrameHeader& first) {
  Connection& connection = *session.connection;
  auto found = partition(first.partition);
  if (!found.is_ok()) return found.status();
  Partition& place = *found.value();
  Status status = place.begin_following(number);
  FrameHeader reply;
  Buffer payload;
  FrameHeader header;
  while (true) {
    reply.code = static_cast<uint16_t>(status.code());
    const std::string& text = status.text();
    Status sent =
        connection.send(reply, {reinterpret_cast<const uint8_t*>(text.data()), text.size()}, {}, options_.silence_s);
    if (status.is_ok()) status = sent;
    if (!status.is_ok()) break;
    status = connection.receive(&header, &payload, options_.silence_s);
    if (!status.is_ok()) break;
    status = place.follow(number, header, payload.bytes());
    ++reply.sequence;
  }
  place.stream_ended(number);
  return status;
}

// --- watching ---

void Server::watch() {
  while (!stopping_) {
    alarm_.wait(options_.silence_s * kSignsOfLife);
    for (auto& partition : partitions_) partition->ping();
    look_for_lost_workers();
  }
}

// A worker whose connection ends is known to have left. One that died together with an earlier primary has never had a
// connection here: it is given the time in which everybody else comes.
void Server::look_for_lost_workers() {
  const TimePoint now = Clock::now();
  std::vector<uint64_t> lost;
  {
    std::vector<uint64_t> expected;
    for (auto& partition : partitions_) {
      for (uint64_t worker : partition->workers()) expected.push_back(worker);
    }
    MutexLock lock(mutex_);
    std::map<uint64_t, TimePoint> still_away;
    for (uint64_t worker : expected) {
      if (connections_.contains(worker)) continue;
      auto since = away_.find(worker);
      still_away[worker] = since == away_.end() ? now : since->second;
      if (seconds_between(still_away[worker], now) > options_.silence_s) lost.push_back(worker);
    }
    away_.swap(still_away);
  }
  for (uint64_t worker : lost) {
    for (auto& partition : partitions_) partition->worker_left(worker);
  }
}

// --- what the program says ---

Status Server::set_role(uint32_t number, Role role) {
  auto found = partition(number);
  if (!found.is_ok()) return found.status();
  found.value()->set_role(role);
  return Status::ok();
}

Status Server::attach(uint32_t number, const Connection::Target& backup, double timeout_s) {
  auto found = partition(number);
  if (!found.is_ok()) return found.status();
  auto connection =
      Connection::dial(options_.credentials, options_.index, backup, std::min(timeout_s, options_.silence_s));
  if (!connection.is_ok()) return connection.status();
  FrameHeader header;
  header.verb = Verb::kReplica;
  header.partition = number;
  HC_TRY(connection.value()->send(header, {}, {}, options_.silence_s));
  Buffer text;
  HC_TRY(connection.value()->receive(&header, &text, options_.silence_s));
  if (header.code != 0)
    return Status(static_cast<Code>(header.code), std::string(text.bytes().begin(), text.bytes().end()));
  return found.value()->attach(connection.take(), backup.index, timeout_s);
}

std::string Server::describe() const {
  std::string text;
  for (const auto& partition : partitions_) text += (text.empty() ? "" : ", ") + partition->describe();
  MutexLock lock(mutex_);
  return text_of("{\"server\": ", options_.index, ", \"workers\": ", connections_.size(),
                 ", \"memory_used\": ", budget_.used(), ", \"memory\": ", budget_.limit(), ", \"partitions\": [", text,
                 "]}");
}

void Server::stop() {
  MutexLock once(stop_once_);
  stopping_ = true;
  events_.stop();
  if (wake_) {
    const uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof(one));
  }
  alarm_.ring();
  acceptor_.join();
  watcher_.join();
  for (auto& partition : partitions_) partition->stop();
  std::list<Session> ending;
  {
    MutexLock lock(mutex_);
    for (Session& session : sessions_) {
      if (session.connection) session.connection->shut();
      if (session.unauthenticated) (void)::shutdown(session.unauthenticated.get(), SHUT_RDWR);
    }
    ending.swap(sessions_);  // nobody adds any more, and their threads refer to them where they are
  }
  for (Session& session : ending) session.thread.join();
}

}  // namespace hc
