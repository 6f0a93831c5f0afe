#include "net/bootstrap.h"

#include <dirent.h>
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <deque>

#include "base/wire.h"
#include "net/dialer.h"

namespace hc {
namespace {

constexpr int kPollMs = 50;        // `cancelled` is asked this often
constexpr int kDialPollMs = 10;    // while a dialer has addresses to try
constexpr int kAcceptBatch = 64;   // accepted at once, so that every rank gets its turn
constexpr size_t kNamedRanks = 8;  // in a report
constexpr uint64_t kEndsMagic = 0x53444e4548434c4eull;
constexpr size_t kEndsBytes = 16;
constexpr uint64_t kSpareDescriptors = 16;  // dials, accepted strangers, files of the program

uint64_t open_descriptors() {
  DIR* all = opendir("/proc/self/fd");
  if (!all) return 0;
  uint64_t count = 0;
  while (readdir(all)) ++count;
  closedir(all);
  return count > 3 ? count - 3 : 0;  // "." and ".." and the folder itself
}

// One connection that this rank needs.
struct ExpectedLink {
  ExpectedLink(int its_peer, Purpose its_purpose) : peer(its_peer), purpose(its_purpose) {}
  int peer;
  Purpose purpose;
  bool done = false;
  uint64_t taken_by = 0;  // number of the accepted connection whose claim was welcomed
  Fd fd;
  std::string address;
  std::unique_ptr<Dialer> dialer;  // null: the peer dials
  bool ends_sent = false;
  bool ends_received = false;
  SharedEnds ends;
};

struct Incoming {
  uint64_t number;
  Fd fd;
  TimePoint since;
  std::string from;
  Handshake handshake;
};

class Bootstrap {
 public:
  explicit Bootstrap(const BootstrapInput& input);
  Status run();
  std::vector<PeerLinks> take();

 private:
  bool complete() const;
  Status check_addresses() const;
  Status check_descriptors() const;
  Status check_time(TimePoint now);
  Status dial(TimePoint now);
  Status accept_from(int listener, bool local, TimePoint now);
  Status accept_all(TimePoint now);
  Verdict judge(const Claim& claim, bool local, uint64_t number);
  void step_incoming(TimePoint now);
  bool step_one(Incoming& one, TimePoint now);
  void drop_one(const char* why);
  void turned_away(const std::string& from, const std::string& why);
  void say_turned_away(TimePoint now);
  Status swap_ends(ExpectedLink& link);
  Status watch_established();
  void wait();
  std::string missing() const;
  std::string name_of(int rank) const;
  ExpectedLink* find(int peer, Purpose purpose);

  const BootstrapInput& in_;
  const MeshMembers& members_;
  const int rank_, size_;
  const Credentials credentials_;
  const TimePoint began_ = Clock::now();
  const Deadline deadline_;
  TimePoint next_report_;
  std::vector<ExpectedLink> expected_;  // fixed after construction: pointers into it stay good
  std::deque<Incoming> incoming_;
  uint64_t last_number_ = 0;
  uint64_t turned_away_ = 0, turned_away_said_ = 0;
  std::string last_turned_away_;
  TimePoint turned_away_said_at_{};
};

Bootstrap::Bootstrap(const BootstrapInput& input)
    : in_(input),
      members_(*input.members),
      rank_(members_.rank),
      size_(static_cast<int>(members_.endpoints.size())),
      credentials_{members_.secret, members_.job},
      deadline_(Deadline::in(members_.timeout_s)),
      next_report_(began_ + std::chrono::duration_cast<Clock::duration>(
                                std::chrono::duration<double>(members_.report_after_s))) {
  const Endpoint& own = (*in_.endpoints)[rank_];
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const Endpoint& other = (*in_.endpoints)[peer];
    Dialer::Target target{"", {}, in_.tuning};
    if (in_.shares[peer]) {
      target.unix_name = other.unix_name;
    } else {
      target.addresses = dialable(own.identity, other);
    }
    const auto purposes =
        in_.shares[peer] ? std::vector{Purpose::kLocal} : std::vector{Purpose::kControl, Purpose::kData};
    for (Purpose purpose : purposes) {
      ExpectedLink link(peer, purpose);
      const Claim claim{rank_, peer, members_.generation, purpose};
      if (peer < rank_) link.dialer = std::make_unique<Dialer>(&credentials_, claim, target, Dialer::Pace{});
      expected_.push_back(std::move(link));
    }
  }
}

std::string Bootstrap::name_of(int rank) const {
  const Endpoint& e = (*in_.endpoints)[rank];
  return text_of("rank ", rank, " (", e.host_name, ", pid ", e.pid, ")");
}

ExpectedLink* Bootstrap::find(int peer, Purpose purpose) {
  auto at = std::find_if(expected_.begin(), expected_.end(),
                         [&](const ExpectedLink& s) { return s.peer == peer && s.purpose == purpose; });
  return at == expected_.end() ? nullptr : &*at;
}

bool Bootstrap::complete() const {
  return std::all_of(expected_.begin(), expected_.end(), [](const ExpectedLink& s) {
    return s.done && (s.purpose != Purpose::kLocal || (s.ends_sent && s.ends_received));
  });
}

Status Bootstrap::check_addresses() const {
  for (const ExpectedLink& link : expected_) {
    if (link.purpose == Purpose::kLocal) continue;
    for (int rank : {rank_, link.peer})
      if ((*in_.endpoints)[rank].addresses.empty())
        return error(Code::kInvalidArgument, name_of(rank), " has no network interface that is up, and ",
                     name_of(rank == rank_ ? link.peer : rank_),
                     " shares no memory with it. On one machine `ip link set lo up` is enough");
  }
  return Status::ok();
}

Status Bootstrap::check_descriptors() const {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return Status::ok();
  uint64_t need = kSpareDescriptors;
  for (const ExpectedLink& s : expected_)
    need += s.purpose == Purpose::kLocal ? 4 : 1;  // socket, arena, doorbell, pidfd
  const uint64_t open = open_descriptors();
  if (open + need <= limit.rlim_cur) return Status::ok();
  return error(Code::kInternal, "too few file descriptors: the limit is ", limit.rlim_cur, ", ", open, " are open and ",
               size_, " ranks need ", need, " more. Raise it: ulimit -n ", open + need + 64);
}

std::string Bootstrap::missing() const {
  std::string text;
  std::vector<int> ranks;
  for (const ExpectedLink& s : expected_) {
    const bool ready = s.done && (s.purpose != Purpose::kLocal || s.ends_received);
    if (ready || (!ranks.empty() && ranks.back() == s.peer)) continue;
    ranks.push_back(s.peer);
    if (ranks.size() > kNamedRanks) continue;
    text += (text.empty() ? "" : "; ") + name_of(s.peer);
    if (s.done) {
      text += " has not sent its shared memory";
    } else {
      text += s.dialer ? ", tried " + s.dialer->tried() : std::string(" has not connected to this rank");
    }
  }
  if (ranks.size() > kNamedRanks) text += text_of("; and ", ranks.size() - kNamedRanks, " more");
  if (turned_away_ > 0) {
    text += text_of(". Connections turned away: ", turned_away_, ", the last one ", last_turned_away_);
  }
  return text_of(ranks.size(), " of ", size_, " ranks missing: ", text);
}

Status Bootstrap::check_time(TimePoint now) {
  if (members_.cancelled && members_.cancelled()) return error(Code::kAborted, "connecting was cancelled; ", missing());
  if (deadline_.passed()) {
    auto first = std::find_if(expected_.begin(), expected_.end(), [](const ExpectedLink& s) { return !s.done; });
    return Status(
        Code::kTimeout,
        text_of("after ", members_.timeout_s, " s ", missing(),
                ". Did every rank start? HOROCLONE_START_TIMEOUT sets the time, HOROCLONE_NETWORK_INTERFACES the "
                "network"),
        first == expected_.end() ? -1 : first->peer);
  }
  if (now >= next_report_) {
    const double waited = seconds_between(began_, now);
    if (members_.say) members_.say(text_of("connecting for ", std::lround(waited * 10) / 10.0, " s: ", missing()));
    next_report_ = now + (next_report_ - began_);  // 10, 20, 40 s
  }
  return Status::ok();
}

Status Bootstrap::dial(TimePoint now) {
  for (ExpectedLink& link : expected_) {
    if (link.done || !link.dialer) continue;
    if (Status status = link.dialer->step(now); !status.is_ok()) {
      return Status(Code::kPeerLost, "cannot connect to " + name_of(link.peer) + ", tried " + status.text(), link.peer);
    }
    if (!link.dialer->done()) continue;
    link.fd = link.dialer->take();
    link.address = link.dialer->address();
    link.done = true;
  }
  return Status::ok();
}

// Counted always, said once a second: a flood must not fill the log.
void Bootstrap::turned_away(const std::string& from, const std::string& why) {
  ++turned_away_;
  last_turned_away_ = "from " + from + ": " + why;
}

void Bootstrap::say_turned_away(TimePoint now) {
  if (turned_away_ == turned_away_said_ || seconds_between(turned_away_said_at_, now) < 1.0) return;
  if (members_.say) {
    members_.say(
        text_of("turned away ", turned_away_ - turned_away_said_, " connections, the last one ", last_turned_away_));
  }
  turned_away_said_ = turned_away_;
  turned_away_said_at_ = now;
}

// Asked only about claims that were proven.
Verdict Bootstrap::judge(const Claim& claim, bool local, uint64_t number) {
  if (claim.to != rank_) return Verdict::kNotThisRank;
  if (claim.attempt > 0) return Verdict::kBusy;  // that rank is connected already, and this one will be
  ExpectedLink* link = find(claim.from, claim.purpose);
  if (!link || link->dialer || local != (claim.purpose == Purpose::kLocal)) return Verdict::kUnexpectedRank;
  if (link->done || link->taken_by != 0) return Verdict::kDuplicate;
  link->taken_by = number;
  return Verdict::kWelcome;
}

// Makes room: the oldest that has not even said hello, else the oldest. A real rank says hello at once.
void Bootstrap::drop_one(const char* why) {
  auto victim =
      std::find_if(incoming_.begin(), incoming_.end(), [](const Incoming& i) { return !i.handshake.said_hello(); });
  if (victim == incoming_.end()) victim = incoming_.begin();
  for (ExpectedLink& link : expected_) {
    if (link.taken_by == victim->number) link.taken_by = 0;
  }
  turned_away(victim->from, why);
  incoming_.erase(victim);
}

Status Bootstrap::accept_from(int listener, bool local, TimePoint now) {
  for (int i = 0; i < kAcceptBatch; ++i) {
    Address from;
    int number = 0;
    Fd fd = accept_one(listener, &from, &number);
    if (number == EMFILE || number == ENFILE) {
      if (incoming_.empty()) HC_TRY(error(Code::kInternal, "accept: ", std::strerror(number)), "raise `ulimit -n`");
      drop_one("no file descriptor was left");
      continue;
    }
    if (!fd) return Status::ok();
    if (local) {
      auto who = peer_credentials(fd.get());
      if (!who.is_ok() || who.value().uid != geteuid()) {
        turned_away("its unix socket", "another user's process");
        continue;
      }
    }
    if (incoming_.size() >= kMaxHalfOpen + kMaxHalfOpenPerRank * expected_.size())
      drop_one("too many connections that said nothing");
    const uint64_t id = ++last_number_;
    Handshake handshake = Handshake::accept(&credentials_, members_.generation,
                                            [this, local, id](const Claim& c) { return judge(c, local, id); });
    incoming_.push_back({id, std::move(fd), now, local ? "its unix socket" : from.text(), std::move(handshake)});
    if (step_one(incoming_.back(), now)) incoming_.pop_back();
  }
  return Status::ok();
}

Status Bootstrap::accept_all(TimePoint now) {
  if (in_.listeners->unix_socket) HC_TRY(accept_from(in_.listeners->unix_socket.get(), true, now));
  for (const Fd& fd : in_.listeners->tcp) HC_TRY(accept_from(fd.get(), false, now));
  return Status::ok();
}

// True when this connection has become a rank's or is over.
bool Bootstrap::step_one(Incoming& one, TimePoint now) {
  const Handshake::State state = one.handshake.step(one.fd.get());
  auto link =
      std::find_if(expected_.begin(), expected_.end(), [&](const ExpectedLink& s) { return s.taken_by == one.number; });
  if (state == Handshake::State::kDone && link != expected_.end()) {
    link->fd = std::move(one.fd);
    link->address = one.from;
    link->done = true;
    return true;
  }
  const bool late = seconds_between(one.since, now) > kHelloDeadlineS;
  if (state == Handshake::State::kPending && !late) return false;
  if (link != expected_.end()) link->taken_by = 0;
  if (one.handshake.is_busy()) return true;
  turned_away(one.from, state == Handshake::State::kFailed ? one.handshake.status().text()
                                                           : text_of("no handshake within ", kHelloDeadlineS, " s"));
  return true;
}

void Bootstrap::step_incoming(TimePoint now) {
  std::erase_if(incoming_, [&](Incoming& one) { return step_one(one, now); });
}

// Each side of a local pair sends its descriptors as soon as the pair is authenticated, and takes the other's.
Status Bootstrap::swap_ends(ExpectedLink& link) {
  if (!link.ends_sent) {
    Writer message;
    message.put(kEndsMagic);
    message.put(in_.arena_bytes);
    const int fds[2] = {in_.arena_fd, in_.doorbell_fd};
    IoResult sent = send_descriptors(link.fd.get(), message.bytes(), fds);
    if (sent.what == Io::kFailed) {
      return Status(Code::kPeerLost,
                    text_of(name_of(link.peer), ": cannot send the shared memory: ", std::strerror(sent.error_number)),
                    link.peer);
    }
    link.ends_sent = sent.what == Io::kMoved;
  }
  if (link.ends_received) return Status::ok();
  uint8_t message[kEndsBytes];
  Fd fds[2];
  IoResult got = receive_descriptors(link.fd.get(), message, fds);
  if (got.what == Io::kWouldBlock) return Status::ok();
  Reader reader(message);
  if (got.what != Io::kMoved || reader.get<uint64_t>() != kEndsMagic) {
    const char* why = got.what == Io::kFailed  ? std::strerror(got.error_number)
                      : got.what == Io::kEnded ? "it closed the connection"
                                               : "a wrong message";
    return Status(Code::kPeerLost, text_of(name_of(link.peer), ": shared memory did not arrive: ", why), link.peer);
  }
  link.ends.arena_bytes = reader.get<uint64_t>();
  link.ends.arena = std::move(fds[0]);
  link.ends.doorbell = std::move(fds[1]);
  link.ends_received = true;
  return Status::ok();
}

// A rank that gives up closes its connections: the others need not wait for the deadline.
Status Bootstrap::watch_established() {
  std::vector<pollfd> set;
  std::vector<int> peers;
  for (ExpectedLink& link : expected_) {
    if (!link.done) continue;
    if (link.purpose == Purpose::kLocal && (!link.ends_sent || !link.ends_received)) HC_TRY(swap_ends(link));
    set.push_back({link.fd.get(), POLLRDHUP, 0});
    peers.push_back(link.peer);
  }
  if (set.empty() || ::poll(set.data(), set.size(), 0) <= 0) return Status::ok();
  for (size_t i = 0; i < set.size(); ++i) {
    if (!(set[i].revents & (POLLRDHUP | POLLHUP | POLLERR))) continue;
    return Status(Code::kPeerLost,
                  name_of(peers[i]) + " has left while the ranks were still connecting; its own log has the cause",
                  peers[i]);
  }
  return Status::ok();
}

void Bootstrap::wait() {
  std::vector<pollfd> set;
  int timeout_ms = kPollMs;
  if (in_.listeners->unix_socket) set.push_back({in_.listeners->unix_socket.get(), POLLIN, 0});
  for (const Fd& fd : in_.listeners->tcp) set.push_back({fd.get(), POLLIN, 0});
  for (const Incoming& one : incoming_) set.push_back({one.fd.get(), one.handshake.events(), 0});
  for (const ExpectedLink& link : expected_) {
    if (!link.done && link.dialer) {
      link.dialer->add_to(&set);
      timeout_ms = kDialPollMs;
    } else if (link.done && link.purpose == Purpose::kLocal && !link.ends_received) {
      set.push_back({link.fd.get(), POLLIN, 0});
    }
  }
  ::poll(set.data(), set.size(), std::min(timeout_ms, deadline_.remaining_ms()));
}

Status Bootstrap::run() {
  HC_TRY(check_addresses());
  HC_TRY(check_descriptors());
  while (!complete()) {
    const TimePoint now = Clock::now();
    HC_TRY(check_time(now));
    HC_TRY(dial(now));
    HC_TRY(accept_all(now));
    step_incoming(now);
    HC_TRY(watch_established());
    say_turned_away(now);
    if (!complete()) wait();
  }
  return Status::ok();
}

std::vector<PeerLinks> Bootstrap::take() {
  std::vector<PeerLinks> links(size_);
  for (ExpectedLink& link : expected_) {
    PeerLinks& to = links[link.peer];
    if (link.purpose == Purpose::kLocal) to.local = std::move(link.fd), to.ends = std::move(link.ends);
    if (link.purpose == Purpose::kControl) to.control = std::move(link.fd), to.address = link.address;
    if (link.purpose == Purpose::kData) to.data = std::move(link.fd);
  }
  return links;
}

}  // namespace

Result<std::vector<PeerLinks>> bootstrap(const BootstrapInput& input) {
  Bootstrap all(input);
  HC_TRY(all.run());
  return all.take();
}

}  // namespace hc
