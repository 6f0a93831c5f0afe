#include "server/client.h"

#include <poll.h>

#include <algorithm>

namespace hc {
namespace {

constexpr int kPollMs = 200;

}  // namespace

Status Client::connect(const Connection::Target& target, double timeout_s) {
  auto made = Connection::dial(options_.credentials, kClientIndex + options_.rank, target, timeout_s);
  if (!made.is_ok()) return made.status();
  std::shared_ptr<Connection> connection = made.take();
  FrameHeader header;
  header.verb = Verb::kHello;
  header.worker = options_.worker;
  HC_TRY(connection->send(header, {}, {}, options_.silence_s));
  Buffer none;
  HC_TRY(connection->receive(&header, &none, options_.silence_s));
  MutexLock lock(mutex_);
  links_[target.index] = std::move(connection);
  return Status::ok();
}

std::shared_ptr<Connection> Client::link(int32_t server) const {
  MutexLock lock(mutex_);
  auto at = links_.find(server);
  return at == links_.end() ? nullptr : at->second;
}

bool Client::is_connected(int32_t server) const { return link(server) != nullptr; }

void Client::drop(int32_t server, const std::shared_ptr<Connection>& connection) {
  connection->shut();
  MutexLock lock(mutex_);
  auto at = links_.find(server);
  if (at != links_.end() && at->second == connection) links_.erase(at);
}

Status Client::ask(int32_t server, const std::string& question, double timeout_s, std::string* answer) {
  const std::shared_ptr<Connection> connection = link(server);
  if (!connection) return error(Code::kPeerLost, "there is no connection to server ", server);
  FrameHeader header;
  header.verb = Verb::kAsk;
  header.limit_ms = static_cast<uint64_t>(timeout_s * 1000);
  Status status = connection->send(header, {reinterpret_cast<const uint8_t*>(question.data()), question.size()}, {},
                                   options_.silence_s);
  const Deadline deadline = Deadline::in(timeout_s);
  Buffer payload;
  do {
    if (status.is_ok() && deadline.passed())
      status = error(Code::kTimeout, connection->peer(), " has not answered within ", timeout_s, " s");
    if (status.is_ok()) status = connection->receive(&header, &payload, options_.silence_s);
  } while (status.is_ok() && header.verb == Verb::kWaiting);
  if (!status.is_ok()) {
    drop(server, connection);
    return status;
  }
  *answer = std::string(payload.bytes().begin(), payload.bytes().end());
  return header.code == 0 ? Status::ok() : Status(static_cast<Code>(header.code), *answer);
}

std::vector<Client::Work> Client::plan(const Call& call, std::vector<Failure>* failures) const {
  std::vector<Work> all;
  for (uint32_t p = 0; p < call.partitions(); ++p) {
    if (call.is_done(p)) continue;
    const int32_t server = place_[p];
    auto at = std::find_if(all.begin(), all.end(), [&](const Work& w) { return w.server == server; });
    if (at == all.end()) {
      std::shared_ptr<Connection> connection = link(server);
      if (!connection) {
        failures->push_back({p, server, true, error(Code::kPeerLost, "there is no connection to server ", server)});
        continue;
      }
      at = all.insert(at, Work{server, std::move(connection), {}, 0, {}, false});
    }
    at->partitions.push_back(p);
  }
  return all;
}

void Client::give_up(Work& work, const Status& why, std::vector<Failure>* failures) {
  drop(work.server, work.connection);
  if (work.busy) work.partitions.push_back(work.current);
  for (uint32_t p : work.partitions) failures->push_back({p, work.server, true, why});
  work.partitions.clear();
  work.busy = false;
}

void Client::next(Work& work, Call& call, double limit_s, std::vector<Failure>* failures) {
  work.busy = !work.partitions.empty();
  if (!work.busy) return;
  work.current = work.partitions.back();
  work.partitions.pop_back();
  FrameHeader header = call.header(work.current);
  header.worker = options_.worker;
  header.limit_ms = static_cast<uint64_t>(std::max(0.001, limit_s) * 1000);
  const std::span<const uint8_t> ids = call.ids(work.current), values = call.values(work.current, &scratch_);
  if (ids.size() + values.size() > kMaxPayload) {
    failures->push_back({work.current, work.server, false,
                         error(Code::kInvalidArgument, ids.size() + values.size(),
                               " bytes for one partition; a call may have 1 GiB for each. Send the rows in parts")});
    return next(work, call, limit_s, failures);
  }
  Status sent = work.connection->send(header, ids, values, options_.silence_s);
  work.heard = Clock::now();
  if (!sent.is_ok()) give_up(work, sent, failures);
}

void Client::hear(Work& work, Call& call, double limit_s, std::vector<Failure>* failures) {
  FrameHeader header;
  Status status = work.connection->receive(&header, &payload_, options_.silence_s);
  if (!status.is_ok()) return give_up(work, status, failures);
  work.heard = Clock::now();
  if (header.verb == Verb::kWaiting) return;
  const std::string text(header.code != 0 || header.verb == Verb::kElsewhere
                             ? std::string(payload_.bytes().begin(), payload_.bytes().end())
                             : std::string());
  if (header.verb == Verb::kElsewhere) {
    failures->push_back({work.current, work.server, true, error(Code::kPeerLost, text)});
  } else if (header.code != 0) {
    failures->push_back({work.current, work.server, false, Status(static_cast<Code>(header.code), text)});
  } else if (Status taken = call.take(work.current, header, payload_.bytes()); !taken.is_ok()) {
    failures->push_back({work.current, work.server, false, taken});
  }
  next(work, call, limit_s, failures);
}

void Client::serve(std::vector<Work>& all, Call& call, double limit_s, const std::function<bool()>& cancelled,
                   std::vector<Failure>* failures) {
  for (Work& work : all) next(work, call, limit_s, failures);
  for (;;) {
    std::vector<pollfd> set;
    std::vector<Work*> whose;
    for (Work& work : all) {
      if (work.busy) set.push_back({work.connection->fd(), POLLIN, 0}), whose.push_back(&work);
    }
    if (set.empty()) return;
    const int ready = ::poll(set.data(), set.size(), kPollMs);
    const TimePoint now = Clock::now();
    for (size_t i = 0; i < set.size(); ++i) {
      Work& work = *whose[i];
      if (ready <= 0 && cancelled()) {
        give_up(work, error(Code::kAborted, "the call was interrupted"), failures);
      } else if (set[i].revents != 0) {
        hear(work, call, limit_s, failures);
      } else if (seconds_between(work.heard, now) > options_.silence_s) {
        give_up(work,
                error(Code::kTimeout, work.connection->peer(), " has said nothing for ", options_.silence_s, " s"),
                failures);
      }
    }
  }
}

std::vector<Failure> Client::run(Call& call, double limit_s, const std::function<bool()>& cancelled) {
  if (call.changes_rows() && call.sequence() == 0) call.number(++sequence_);
  std::vector<Failure> failures;
  std::vector<Work> all = plan(call, &failures);
  try {
    serve(all, call, limit_s, cancelled, &failures);
  } catch (...) {  // no memory: a reply that nobody has taken must not be taken for the next one
    for (Work& work : all) drop(work.server, work.connection);
    throw;
  }
  return failures;
}

void Client::close() {
  MutexLock lock(mutex_);
  for (auto& [server, connection] : links_) {
    FrameHeader header;
    header.verb = Verb::kGoodbye;
    (void)connection->send(header, {}, {}, 1);
    connection->shut();
  }
  links_.clear();
}

}  // namespace hc
