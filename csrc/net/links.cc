#include "net/links.h"

#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/wire.h"
#include "net/bootstrap.h"

namespace hc {
namespace {

constexpr uint64_t kCountMagic = 0x544e554f434b4e4cull;  // "LNKCOUNT"
constexpr int kAcceptBatch = 16;
constexpr int kFewRanks = 8;                 // which open several connections at the start; else
constexpr uint64_t kSomeBytes = 256u << 10;  // once so much has moved
constexpr double kClosedRoundTrips = 8;
constexpr double kOfferS = 2.0, kOfferRoundTrips = 10;  // until all of several connections are there
constexpr int kMaxPauseLog2S = 6;                       // between two attempts
// A connection takes one round trip, its handshake two more.
Dialer::Pace pace_of(double round_trip_s) {
  return {.stagger_s = 0.01,
          .round_s = 0.1 + round_trip_s,
          .max_round_s = 0.1 + round_trip_s,
          .connect_s = 1.0 + 2 * round_trip_s,
          .retry_s = 0.2 + 2 * round_trip_s,
          .handshake_s = 1.5 + 6 * round_trip_s};
}

// One connection carries no more in a round trip than the kernel's largest buffer (4 MB, often). Where it has no
// measured rate, a lost packet halves what it carries in many round trips to come. docs/decisions has the figures.
int connections_for(const TcpChannel& channel, bool has_rate) {
  if (!channel.is_long()) return 1;
  if (!has_rate) return 16;
  return channel.round_trip_s() >= 0.05 ? 2 : 1;
}

Purpose purpose_of(Line line) { return line == Line::kControl ? Purpose::kControl : Purpose::kData; }

// A quarter of the descriptors that this process may have.
int most_connections(int ranks) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1;
  return static_cast<int>(std::clamp<rlim_t>(limit.rlim_cur / 4 / static_cast<rlim_t>(ranks), 1, 64));
}

std::string host_of(const std::string& address) { return address.substr(0, address.rfind(':')); }

Status watch_fd(int epoll, int fd, uint64_t token) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = token;
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0)
    return error(Code::kInternal, "epoll_ctl: ", std::strerror(errno));
  return Status::ok();
}

}  // namespace

Result<std::unique_ptr<Links>> Links::open(Setup setup, std::vector<Fd> listeners) {
  std::unique_ptr<Links> links(new Links(std::move(setup)));
  links->peers_.resize(static_cast<size_t>(links->setup_.size));
  links->listeners_ = std::move(listeners);
  links->timer_ = Fd(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (!links->timer_) return error(Code::kInternal, "timerfd_create: ", std::strerror(errno));
  const Setup& s = links->setup_;
  HC_TRY(watch_fd(s.epoll, links->timer_.get(), s.token));
  for (const Fd& fd : links->listeners_) HC_TRY(watch_fd(s.epoll, fd.get(), s.token));
  if (links->interfaces_.fd() >= 0) HC_TRY(watch_fd(s.epoll, links->interfaces_.fd(), s.token));
  return links;
}

void Links::add(int rank, TcpChannel* channel, const std::string& reached_at, std::vector<Address> addresses) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  peer.channel = channel;
  auto good = std::find_if(addresses.begin(), addresses.end(),
                           [&](const Address& a) { return host_of(a.text()) == host_of(reached_at); });
  peer.first_is_good = good != addresses.end();
  if (peer.first_is_good) std::rotate(addresses.begin(), good, good + 1);
  peer.addresses = std::move(addresses);
  channel->remake_with(this);
  const bool has_rate = channel->is_long() && send_at_measured_rate(channel->descriptor(Line::kData));
  const int wanted = setup_.connections > 0 ? setup_.connections : connections_for(*channel, has_rate);
  peer.connections = std::min(wanted, most_connections(setup_.size));
  if (peer.connections > 1 && rank > setup_.rank) expected_ += static_cast<size_t>(most_connections(setup_.size));
  if (peer.connections > 1) watch();
}

void Links::set_timer(double s) {
  timer_set_ = true;
  itimerspec at{};
  at.it_value.tv_nsec = static_cast<long>(s * 1e9);
  ::timerfd_settime(timer_.get(), 0, &at, nullptr);
}

bool Links::is_over(const Peer& peer) const {
  return !peer.channel || !peer.channel->failure().is_ok() || peer.channel->close_expected();
}

void Links::lost(int rank, Line line, const IoResult& how) {
  Side& side = peers_[static_cast<size_t>(rank)].sides[static_cast<int>(line)];
  side.closed = how.what == Io::kEnded;
  take_down(rank, line, side.closed ? "closed its connection without a goodbye" : std::strerror(how.error_number));
}

void Links::take_down(int rank, Line line, const std::string& why) {
  Side& side = peers_[static_cast<size_t>(rank)].sides[static_cast<int>(line)];
  if (!side.down) {
    side.down = true;
    side.down_at = Clock::now();
    side.reason = why;
  }
  // The peer may have changed over to those of a whole one.
  std::optional<Offer>& offer = peers_[static_cast<size_t>(rank)].offer;
  if (line == Line::kData && offer && !offer->is_whole()) offer.reset();
  set_timer(kTalkS / 10);
}

void Links::forget(int rank) {
  for (Side& side : peers_[static_cast<size_t>(rank)].sides) side = Side{};
}

void Links::expect_close(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.offer && !peer.offer->is_whole()) peer.offer.reset();
  forget(rank);
}

void Links::give_up(int rank, const std::string& reason) {
  forget(rank);
  Peer& peer = peers_[static_cast<size_t>(rank)];
  peer.channel->lose(reason);  // may take what is whole
  peer.offer.reset();
}

// One line for a break that concerns both lines, and for many breaks in a short time.
void Links::report(int rank, const Side& was, int fd) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  const TimePoint now = Clock::now();
  ++peer.unsaid;
  peer.unsaid_s = std::max(peer.unsaid_s, seconds_between(was.down_at, now));
  peer.unsaid_why = was.reason;
  const bool both_up = !peer.sides[0].down && !peer.sides[1].down;
  if (!setup_.say || !both_up || (peer.said_at != TimePoint{} && seconds_between(peer.said_at, now) < kSayS)) return;
  sockaddr_storage to{};
  socklen_t bytes = sizeof(to);
  static_cast<void>(::getpeername(fd, reinterpret_cast<sockaddr*>(&to), &bytes));
  setup_.say(text_of("lost ", peer.unsaid == 1 ? "a connection" : text_of(peer.unsaid, " connections"), " to ",
                     peer.channel->peer(), ": ", peer.unsaid_why, "; made again over ",
                     Address(reinterpret_cast<const sockaddr*>(&to), bytes).text(), " within ",
                     std::round(peer.unsaid_s * 100) / 100,
                     " s. Every operation goes on where it was; look at the network if this repeats"));
  peer.said_at = now;
  peer.unsaid = 0;
  peer.unsaid_s = 0;
}

// Asked only about claims that were proven.
Verdict Links::judge(const Claim& claim, Stranger* one) {
  if (claim.to != setup_.rank) return Verdict::kNotThisRank;
  if (claim.from < 0 || claim.from >= setup_.size || claim.purpose == Purpose::kLocal) return Verdict::kUnexpectedRank;
  Peer& peer = peers_[static_cast<size_t>(claim.from)];
  if (is_over(peer)) return Verdict::kUnexpectedRank;
  const Line line = claim.purpose == Purpose::kControl ? Line::kControl : Line::kData;
  Side& side = peer.sides[static_cast<int>(line)];
  const TimePoint now = Clock::now();
  if (claim.purpose == Purpose::kParallel) {
    const bool is_valid =
        claim.from > setup_.rank && claim.number < claim.count && claim.count <= most_connections(setup_.size);
    if (!is_valid || side.down || peer.channel->is_spread()) return Verdict::kUnexpectedRank;
    // What comes late of an older attempt, or of one that was given up here, must not replace anything.
    if (peer.offered == 0 || static_cast<int8_t>(claim.attempt - peer.offered) > 0) {
      peer.offered = claim.attempt;
      peer.offer.emplace().connections.resize(claim.count);
    } else if (claim.attempt != peer.offered || !peer.offer || peer.offer->connections.size() != claim.count ||
               peer.offer->connections[claim.number]) {
      return Verdict::kUnexpectedRank;
    }
    one->from = claim.from;
    one->line = line;
    one->number = claim.number;
    return Verdict::kWelcome;
  }
  const double own_s = kPatienceS + 2 * peer.channel->round_trip_s();
  if (setup_.rank > claim.from &&
      ((side.dialer && side.dialer->proved_within(own_s, now)) || seconds_between(side.dialed_at, now) < own_s))
    return Verdict::kBusy;
  side.dialer.reset();
  side.swap.reset();
  side.suspected = false;
  peer.channel->stop(line);
  take_down(claim.from, line, "its end of the connection was lost");
  one->from = claim.from;
  one->line = line;
  return Verdict::kWelcome;
}

void Links::accept(TimePoint now) {
  for (const Fd& listener : listeners_) {
    for (int i = 0; i < kAcceptBatch; ++i) {
      int number = 0;
      Fd fd = accept_one(listener.get(), nullptr, &number);
      if (!fd) {
        if (number != 0 && !strangers_.empty()) strangers_.pop_front();  // no descriptor is left
        break;
      }
      if (strangers_.size() >= kMaxStrangers + expected_) {
        auto victim = std::find_if(strangers_.begin(), strangers_.end(),
                                   [](const Stranger& s) { return !s.handshake.said_hello(); });
        strangers_.erase(victim == strangers_.end() ? strangers_.begin() : victim);
      }
      strangers_.push_back(
          {std::move(fd), now, Handshake::accept(&setup_.credentials, setup_.generation, {}), -1, {}, {}});
      Stranger* one = &strangers_.back();
      one->handshake.judged_by([this, one](const Claim& claim) { return judge(claim, one); });
    }
  }
}

// True when it is over, or a rank's.
bool Links::step_stranger(Stranger* one, TimePoint now) {
  const Handshake::State state = one->handshake.step(one->fd.get());
  if (state == Handshake::State::kPending) return seconds_between(one->since, now) > kHelloDeadlineS;
  if (state == Handshake::State::kFailed || one->from < 0) return true;
  Peer& peer = peers_[static_cast<size_t>(one->from)];
  if (is_over(peer)) return true;
  Side& side = peer.sides[static_cast<int>(one->line)];
  if (one->number) {
    if (peer.offer && *one->number < peer.offer->connections.size())
      peer.offer->connections[*one->number] = std::move(one->fd);
    return true;
  }
  side.dialer.reset();
  side.swap.emplace();
  side.swap->fd = std::move(one->fd);
  side.swap->since = now;
  return true;
}

void Links::dial(int rank, Line line, TimePoint now) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  Side& side = peer.sides[static_cast<int>(line)];
  if (!side.dialer) {
    const Claim claim{setup_.rank, rank, setup_.generation, purpose_of(line), 0, 0, 1};
    side.dialer =
        std::make_unique<Dialer>(&setup_.credentials, claim, Dialer::Target{"", peer.addresses, setup_.tuning},
                                 pace_of(peer.channel->round_trip_s()));
  }
  if (Status status = side.dialer->step(now); !status.is_ok())
    return give_up(rank, text_of(side.reason, "; it takes no other connection: ", status.text()));
  if (side.dialer->done()) {
    Swap& swap = side.swap.emplace();
    swap.fd = side.dialer->take();
    swap.since = side.dialed_at = now;
    swap.is_dialed = true;
    side.dialer.reset();
    side.suspected = false;
    return;
  }
  bool gone = !peer.addresses.empty();
  for (size_t place = 0; place < peer.addresses.size(); ++place) {
    gone = gone && side.dialer->is_refused(place);
    if (place == 0 && peer.first_is_good && gone) break;
  }
  // Somebody else may answer for it meanwhile, where packets take another way.
  if (gone && !is_unplugged(peer, line)) give_up(rank, std::string(side.reason));
}

// Both sides have stopped writing to the old connection. False: this one is lost as well.
bool Links::swap_counts(int rank, Line line, TimePoint now, bool* moved) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  Side& side = peer.sides[static_cast<int>(line)];
  Swap& swap = *side.swap;
  if (!swap.sent) {
    Writer message;
    message.put(kCountMagic);
    message.put(peer.channel->drain(line));
    if (line == Line::kData) peer.offer.reset();
    const iovec part{const_cast<uint8_t*>(message.bytes().data()), kCountBytes};
    // The first bytes after the handshake: they fit into the socket's buffer.
    if (send_parts(swap.fd.get(), {&part, 1}).bytes != kCountBytes) return false;
    swap.sent = true;
  }
  if (swap.in_bytes < kCountBytes) {
    const iovec part{swap.in.data() + swap.in_bytes, kCountBytes - swap.in_bytes};
    const IoResult result = receive_parts(swap.fd.get(), {&part, 1});
    if (result.what == Io::kWouldBlock) return true;
    if (result.what != Io::kMoved) return false;
    swap.in_bytes += result.bytes;
    if (swap.in_bytes < kCountBytes) return true;
  }
  Reader in(swap.in);
  if (in.get<uint64_t>() != kCountMagic) return false;
  const uint64_t received = in.get<uint64_t>();
  Fd fd = std::move(swap.fd);
  if (line == Line::kData && peer.channel->is_long()) send_at_measured_rate(fd.get());
  const int number = fd.get();
  const Side was = std::exchange(side, Side{});
  side.dialed_at = was.dialed_at;
  peer.made_at[static_cast<int>(line)] = now;
  *moved = true;
  if (Status status = peer.channel->resume(line, std::move(fd), received); !status.is_ok()) {
    give_up(rank, status.text());
    return true;
  }
  report(rank, was, number);
  static_cast<void>(peer.channel->progress(moved));
  return true;
}

void Links::step_side(int rank, Line line, TimePoint now, bool* moved) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  Side& side = peer.sides[static_cast<int>(line)];
  if (side.swap &&
      (!swap_counts(rank, line, now, moved) ||
       (side.swap && seconds_between(side.swap->since, now) > kSwapS + kSwapRoundTrips * peer.channel->round_trip_s())))
    side.swap.reset();
  if (!side.down) return;
  const double down_s = seconds_between(side.down_at, now);
  if (side.closed && down_s > kClosedS + kClosedRoundTrips * peer.channel->round_trip_s())
    return give_up(rank, std::string(side.reason));
  if (down_s > setup_.limit_s)
    return give_up(rank, text_of(side.reason, ", and no other connection came about within ", setup_.limit_s, " s"));
  if (!side.swap && !std::any_of(strangers_.begin(), strangers_.end(),
                                 [&](const Stranger& s) { return s.from == rank && s.line == line; }))
    dial(rank, line, now);
}

// From both lines the peer has heard nothing yet.
bool Links::can_go_back(int rank) const {
  const Peer& peer = peers_[static_cast<size_t>(rank)];
  bool suspects = false;
  for (const Side& side : peer.sides) {
    if (side.down && (!side.suspected || side.swap || (side.dialer && side.dialer->has_proved()))) return false;
    suspects |= side.suspected;
  }
  for (const Line line : {Line::kControl, Line::kData})
    if (peer.channel->is_stuck(line) || is_unplugged(peer, line)) return false;
  return suspects;
}

// And there is another way; else it may come back before anybody notices.
bool Links::is_unplugged(const Peer& peer, Line line) const {
  return interfaces_.some_are_down() &&
         interfaces_.went_down(peer.channel->own_address(line), peer.made_at[static_cast<int>(line)]) &&
         std::any_of(peer.addresses.begin(), peer.addresses.end(),
                     [&](const Address& other) { return interfaces_.lead_to(other); });
}

bool Links::Offer::is_whole() const {
  return std::all_of(connections.begin(), connections.end(), [](const Fd& fd) { return static_cast<bool>(fd); });
}

// The higher rank opens them, as it has reached the lower one before: at the start if there are few ranks.
bool Links::wants_several(int rank, TimePoint now) const {
  const Peer& peer = peers_[static_cast<size_t>(rank)];
  return peer.connections > 1 && setup_.rank > rank && now >= peer.offer_at && !peer.channel->is_spread() &&
         !peer.channel->is_down() && (setup_.size <= kFewRanks || peer.channel->data_moved() >= kSomeBytes);
}

void Links::step_offer(int rank, TimePoint now) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  const double round_trip_s = peer.channel->round_trip_s();
  if (!peer.offer && wants_several(rank, now)) {
    Offer& offer = peer.offer.emplace();
    const auto attempt = static_cast<uint8_t>(1 + peer.attempts++ % 255);
    offer.since = now;
    peer.offer_at = now + std::chrono::seconds(1 << std::min(++peer.in_vain, kMaxPauseLog2S));
    offer.connections.resize(static_cast<size_t>(peer.connections));
    const auto end = peer.first_is_good ? peer.addresses.begin() + 1 : peer.addresses.end();
    const Dialer::Target target{"", {peer.addresses.begin(), end}, setup_.tuning};
    for (int number = 0; number < peer.connections; ++number) {
      const Claim claim{setup_.rank,
                        rank,
                        setup_.generation,
                        Purpose::kParallel,
                        static_cast<uint8_t>(number),
                        static_cast<uint8_t>(peer.connections),
                        attempt};
      offer.dialers.push_back(std::make_unique<Dialer>(&setup_.credentials, claim, target, pace_of(round_trip_s)));
    }
  }
  if (!peer.offer || peer.offer->dialers.empty()) return;
  Offer& offer = *peer.offer;
  bool is_over = seconds_between(offer.since, now) > kOfferS + kOfferRoundTrips * round_trip_s;
  for (size_t i = 0; i < offer.dialers.size(); ++i) {
    if (offer.connections[i]) continue;
    is_over |= !offer.dialers[i]->step(now).is_ok();
    if (offer.dialers[i]->done()) offer.connections[i] = offer.dialers[i]->take();
  }
  if (offer.is_whole()) {
    peer.channel->spread(take_offered(rank));
    peer.in_vain = 0;
  } else if (is_over) {
    peer.offer.reset();
  }
}

std::vector<Fd> Links::take_offered(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (!peer.offer || !peer.offer->is_whole()) return {};
  std::vector<Fd> connections = std::move(peer.offer->connections);
  peer.offer.reset();
  if (peer.channel->is_long())
    for (const Fd& fd : connections) send_at_measured_rate(fd.get());
  return connections;
}

void Links::look_at(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  TcpChannel& channel = *peer.channel;
  constexpr Line kLines[] = {Line::kControl, Line::kData};
  if (can_go_back(rank)) {
    forget(rank);
    for (const Line line : kLines) channel.start(line);
  }
  // A path that is cut somewhere concerns both lines.
  const bool is_cut = std::any_of(std::begin(kLines), std::end(kLines), [&](Line line) {
    return channel.waits_for_acknowledgement(line) && channel.is_stuck(line);
  });
  for (const Line line : kLines) {
    Side& side = peer.sides[static_cast<int>(line)];
    const bool unplugged = !side.down && is_unplugged(peer, line);
    if (!is_cut && !unplugged) continue;
    side.suspected |= !side.down;
    channel.stop(line);
    take_down(rank, line,
              unplugged ? "the network interface of its connection is down" : "no answer comes over its connection");
  }
}

void Links::step(bool* moved) {
  uint64_t expirations;
  static_cast<void>(!::read(timer_.get(), &expirations, sizeof(expirations)));
  timer_set_ = false;
  interfaces_.take_news();
  const TimePoint now = Clock::now();
  accept(now);
  for (auto one = strangers_.begin(); one != strangers_.end();)
    one = step_stranger(&*one, now) ? strangers_.erase(one) : std::next(one);
  double again_s = 1e9;
  for (const Stranger& one : strangers_) again_s = std::min(again_s, one.handshake.said_hello() ? kTalkS : kDialS);
  for (int rank = 0; rank < setup_.size; ++rank) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    if (is_over(peer)) continue;
    look_at(rank);
    step_offer(rank, now);
    if (peer.offer && !peer.offer->dialers.empty()) {
      const auto& dialers = peer.offer->dialers;
      const bool talks = std::any_of(dialers.begin(), dialers.end(), [](const auto& one) { return one->is_talking(); });
      again_s = std::min(again_s, talks ? kTalkS : kDialS);
    }
    for (const Line line : {Line::kControl, Line::kData}) {
      Side& side = peer.sides[static_cast<int>(line)];
      if (side.down) step_side(rank, line, now, moved);
      if (is_over(peer)) break;
      if (side.down)
        again_s = std::min(again_s, side.swap || (side.dialer && side.dialer->is_talking()) ? kTalkS : kDialS);
      else if (peer.channel->waits_for_acknowledgement(line))
        again_s = std::min(again_s, kLookS);
    }
    if (is_over(peer)) continue;
    if (peer.channel->has_drained()) {
      static_cast<void>(peer.channel->progress(moved));
      again_s = std::min(again_s, kDialS);
    }
  }
  if (again_s < 1) set_timer(again_s);
}

}  // namespace hc
