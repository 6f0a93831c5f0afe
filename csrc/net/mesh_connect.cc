#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "net/connected_mesh.h"

namespace hc {
namespace {

constexpr size_t kNamedWithValue = 8;  // with each value of a setting
constexpr double kGreetingS = 30;

// Empty: all say the same. Else each value with its ranks: "1 on ranks 0, 2; 0 on rank 1".
std::string values_of(const std::vector<Endpoint>& endpoints, size_t setting) {
  std::vector<std::pair<std::string, std::vector<size_t>>> values;  // in the order of their first ranks
  for (size_t r = 0; r < endpoints.size(); ++r) {
    const std::string& value = endpoints[r].settings[setting].second;
    auto at = std::find_if(values.begin(), values.end(), [&](const auto& v) { return v.first == value; });
    if (at == values.end()) at = values.insert(at, {value, {}});
    at->second.push_back(r);
  }
  if (values.size() == 1) return "";
  std::string text;
  for (const auto& [value, ranks] : values) {
    text += text_of(text.empty() ? "" : "; ", value, ranks.size() == 1 ? " on rank " : " on ranks ");
    for (size_t i = 0; i < std::min(ranks.size(), kNamedWithValue); ++i) text += text_of(i ? ", " : "", ranks[i]);
    if (ranks.size() > kNamedWithValue) text += text_of(" and ", ranks.size() - kNamedWithValue, " more");
  }
  return text;
}

// Every rank has all endpoints, so that all come to the same end by themselves.
Status check_settings(const std::vector<Endpoint>& endpoints) {
  for (size_t r = 1; r < endpoints.size(); ++r) {
    if (endpoints[r].settings.size() != endpoints[0].settings.size())
      return error(Code::kMismatch, "rank ", r,
                   " reports other settings than rank 0; install the same horoclone on all");
  }
  for (size_t i = 0; i < endpoints[0].settings.size(); ++i) {
    if (const std::string values = values_of(endpoints, i); !values.empty())
      return error(Code::kMismatch, endpoints[0].settings[i].first, " differs between ranks: ", values,
                   ". Set it alike on all ranks");
  }
  return Status::ok();
}

}  // namespace

Status ConnectedMesh::check_members(const MeshMembers& members) const {
  if (connected_) return error(Code::kInternal, "connect() was called twice");
  const int size = static_cast<int>(members.endpoints.size());
  if (members.rank < 0 || members.rank >= size) {
    return error(Code::kInvalidArgument, "rank ", members.rank, " of ", size, " endpoints");
  }
  if (members.secret.size() < 16) {
    return error(Code::kInvalidArgument, "a job secret of ", members.secret.size(),
                 " bytes; it needs at least 16 random ones. "
                 "Set HOROCLONE_SECRET or HOROCLONE_SECRET_FILE, the same on every rank");
  }
  if (members.endpoints[members.rank] != own_endpoint_.encode()) {
    return error(Code::kInvalidArgument, "endpoint ", members.rank,
                 " is not this rank's own; was the list made for another job?");
  }
  return Status::ok();
}

Status ConnectedMesh::read_endpoints(const MeshMembers& members, std::vector<Endpoint>* endpoints) const {
  for (size_t r = 0; r < members.endpoints.size(); ++r) {
    auto one = Endpoint::decode(members.endpoints[r]);
    if (!one.is_ok()) {
      return Status(one.status().code(), text_of("the endpoint of rank ", r, ": ", one.status().text()),
                    static_cast<int>(r));
    }
    endpoints->push_back(one.take());
  }
  return check_settings(*endpoints);
}

// Nodes are numbered by their lowest rank, local ranks ascend with the rank.
void ConnectedMesh::number_nodes(const std::vector<Endpoint>& endpoints) {
  std::vector<int> first, members;  // by node: its lowest rank, its number of ranks
  node_.assign(size_, 0);
  local_.assign(size_, 0);
  locality_.clear();
  for (int r = 0; r < size_; ++r) {
    auto at =
        std::find_if(first.begin(), first.end(), [&](int f) { return endpoints[f].identity == endpoints[r].identity; });
    node_[r] = static_cast<int>(at - first.begin());
    if (at == first.end()) first.push_back(r), members.push_back(0);
    local_[r] = members[node_[r]]++;
    locality_.push_back(endpoints[r].locality);
  }
  local_size_ = members[node_[rank_]];
  cross_rank_ = cross_size_ = 0;
  for (size_t n = 0; n < members.size(); ++n) {
    if (members[n] <= local_[rank_]) continue;
    if (static_cast<int>(n) < node_[rank_]) ++cross_rank_;
    ++cross_size_;
  }
  homogeneous_ = std::all_of(members.begin(), members.end(), [&](int m) { return m == members[0]; });
}

// A rank whose limit on address space leaves no room for the arenas of its node goes without, over TCP. Everybody finds
// the same from the endpoints.
void ConnectedMesh::find_who_shares(const std::vector<Endpoint>& endpoints) {
  std::vector<uint64_t> arenas(size_, 0);  // by node
  for (int r = 0; r < size_; ++r) arenas[node_[r]] += endpoints[r].arena_bytes;
  shares_.assign(size_, false);
  for (int r = 0; r < size_; ++r) {
    const Endpoint& e = endpoints[r];
    shares_[r] = e.arena_bytes > 0 && arenas[node_[r]] - e.arena_bytes <= e.room_bytes;
  }
  every_rank_shares_ = std::find(shares_.begin(), shares_.end(), false) == shares_.end();
  if (!arena_ || shares_[rank_]) return;
  const uint64_t others = arenas[node_[rank_]] - arena_->bytes();
  no_arena_because_ =
      text_of("`ulimit -v` leaves ", own_endpoint_.room_bytes >> 20, " MiB of address space for the ", others >> 20,
              " MiB that the other ranks of this machine share. Raise it, or lower HOROCLONE_ARENA_BYTES on all ranks");
  doorbell_.move_word(nullptr);
  arena_.reset();
}

Status ConnectedMesh::prepare_rings() {
  if (!arena_) return Status::ok();
  arena_->block()->rank = rank_;
  if (local_size_ > kMaxLocalRanks) {
    return error(Code::kUnsupported, local_size_, " ranks on one node; shared memory serves ", kMaxLocalRanks,
                 ". Set HOROCLONE_SHARED_MEMORY=0");
  }
  if (local_size_ == 1) return Status::ok();
  return arena_->commit(kRingsOffset, local_size_ * kRingBytes);
}

Status ConnectedMesh::connect(const MeshMembers& members) {
  HC_TRY(check_members(members));
  rank_ = members.rank;
  size_ = static_cast<int>(members.endpoints.size());
  std::vector<Endpoint> endpoints;
  HC_TRY(read_endpoints(members, &endpoints));
  number_nodes(endpoints);
  find_who_shares(endpoints);
  HC_TRY(check_fabric(endpoints, members));
  HC_TRY(prepare_rings(), "shared memory for ", local_size_, " local ranks");
  if (!no_arena_because_.empty() && members.say)
    members.say("no shared memory, TCP is used instead: " + no_arena_because_);

  BootstrapInput input;
  input.members = &members;
  input.endpoints = &endpoints;
  input.listeners = &listeners_;
  input.tuning = {options_.keepalive_s, options_.socket_buffer_bytes};
  input.doorbell_fd = doorbell_.fd();
  if (arena_) input.arena_fd = arena_->fd(), input.arena_bytes = arena_->bytes();
  for (int r = 0; r < size_; ++r) {
    input.shares.push_back(node_[r] == node_[rank_] && shares_[rank_] && shares_[r]);
  }
  auto links = bootstrap(input);
  if (!links.is_ok()) return links.status();
  std::vector<std::string> reached_at;
  for (const PeerLinks& one : links.value()) reached_at.push_back(one.address);
  if (members.mpi) {
    auto api = MpiApi::load(*members.mpi);
    if (!api.is_ok()) return api.status();
    mpi_ = api.take();
  }
  HC_TRY(make_channels(endpoints, links.take(), members));
  if (!tcp_peers_.empty()) HC_TRY(keep_links(members, endpoints, reached_at));
  if (has_fabric()) HC_TRY(greet_through_fabric(members));
  listeners_ = {};  // without TCP nobody else is expected: from here on there is no port to attack
  connected_ = true;
  return Status::ok();
}

Status ConnectedMesh::make_channels(const std::vector<Endpoint>& endpoints, std::vector<PeerLinks> links,
                                    const MeshMembers& members) {
  peers_.resize(size_);
  if (local_size_ > options_.few_local_ranks && arena_) shared_peers_.heed(arena_->block()->news, local_size_);
  for (int r = 0; r < size_; ++r) {
    Peer& peer = peers_[r];
    const Endpoint& e = endpoints[r];
    peer.name = text_of("rank ", r, " (", e.host_name, ", pid ", e.pid, ")");
    const HostIdentity& host = e.identity;
    peer.process_name = text_of(host.boot_id, " ", host.network_namespace, " ", host.uid, " ", host.label, " ",
                                e.host_name, " ", e.pid);
    if (r == rank_) continue;
    if (links[r].local) {
      HC_TRY(make_shared_channel(r, std::move(links[r])), peer.name);
      continue;
    }
    const std::string name = text_of("rank ", r, " (", e.host_name, ", ", links[r].address, ")");
    std::optional<FrameKeys> keys;
    if (!own_endpoint_.identity.same_network(host))
      keys = frame_keys(members.secret, members.endpoints[rank_], members.endpoints[r]);
    auto tcp = std::make_unique<TcpChannel>(r, name, &traffic_,
                                            TcpChannel::Sockets{std::move(links[r].control), std::move(links[r].data),
                                                                epoll_.get(), static_cast<uint64_t>(r) + 1, keys});
    peer.tcp = tcp.get();
    peer.channel = std::move(tcp);
    tcp_peers_.push_back(r);
    std::shared_ptr<MessageLibrary> library = mpi_;
    if (fabric_) {
      library = fabric_;
      HC_TRY(
          fabric_->add(r, e.fabric_address, frame_keys(members.secret, members.endpoints[rank_], members.endpoints[r])),
          peer.name);
    }
    if (!library) continue;
    peer.messages = std::make_unique<MessageChannel>(r, peer.channel.get(), library, &traffic_, members.generation);
    if (fabric_) HC_TRY(peer.messages->use(true), peer.name);
  }
  all_shared_ = tcp_peers_.empty();
  return Status::ok();
}

// Every rank has all endpoints, so that all come to the same end by themselves.
Status ConnectedMesh::check_fabric(const std::vector<Endpoint>& endpoints, const MeshMembers& members) const {
  const bool all_share = every_rank_shares_ && local_size_ == size_;
  if (options_.fabric.empty() || all_share) return Status::ok();
  const std::string setting = text_of("HOROCLONE_FABRIC=", options_.fabric);
  if (members.mpi)
    return error(Code::kInvalidArgument, setting, " and HOROCLONE_CPU_OPERATIONS=mpi name two ways between the nodes; ",
                 "unset one of them");
  for (int r = 0; r < size_; ++r) {
    const Endpoint& e = endpoints[r];
    const std::string who = text_of(setting, ": rank ", r, " (", e.host_name, ", pid ", e.pid, ")");
    if (!e.fabric_problem.empty())
      return Status(Code::kUnsupported,
                    text_of(who, " cannot use libfabric: ", e.fabric_problem, ". Install ", Fabric::kLibrary,
                            " there (Debian: libfabric1), name a provider that fi_info lists on every host, or unset "
                            "HOROCLONE_FABRIC, and data goes over TCP"),
                    r);
    if (e.fabric_protocol != endpoints[0].fabric_protocol)
      return Status(Code::kMismatch,
                    text_of(who, " speaks ", e.fabric_protocol, ", and rank 0 ", endpoints[0].fabric_protocol,
                            ". Install the same libfabric on all hosts, or name one of the two in full"),
                    r);
  }
  return Status::ok();
}

// One byte to and from each peer: finds what the provider cannot reach, before an operation waits for it.
Status ConnectedMesh::greet_through_fabric(const MeshMembers& members) {
  const double limit_s = std::min(members.timeout_s, kGreetingS);
  struct Greeting {
    std::byte bytes[2]{};
    Transfer out, in;
  };
  std::vector<Greeting> greetings(tcp_peers_.size());
  for (size_t i = 0; i < greetings.size(); ++i) {
    Greeting& one = greetings[i];
    one.out.tag = one.in.tag = {static_cast<uint16_t>(members.generation), 0, ~uint32_t{0}, 0};
    one.out.data = &one.bytes[0];
    one.in.data = &one.bytes[1];
    one.out.bytes = one.in.bytes = 1;
    peers_[tcp_peers_[i]].messages->post_receive(&one.in);
    peers_[tcp_peers_[i]].messages->post_send(&one.out);
  }
  Status outcome;
  for (const Deadline deadline = Deadline::in(limit_s); outcome.is_ok();) {
    bool moved = false;
    int missing = -1;
    for (size_t i = 0; i < greetings.size() && outcome.is_ok(); ++i) {
      if (greetings[i].in.done && peers_[tcp_peers_[i]].messages->flushed()) continue;
      const int r = tcp_peers_[i];
      if (missing < 0) missing = r;
      outcome = peers_[r].messages->progress(&moved).with(peers_[r].name);
    }
    if (missing < 0) break;
    if (!outcome.is_ok() || moved) continue;
    if (members.cancelled && members.cancelled()) outcome = error(Code::kAborted, "cancelled");
    if (deadline.passed())
      outcome = Status(Code::kTimeout,
                       text_of("HOROCLONE_FABRIC=", options_.fabric, ": nothing came from ", peers_[missing].name,
                               " through libfabric (", fabric_->protocol(), ") within ", limit_s,
                               " s. Check that the provider reaches it with fi_pingpong; FI_TCP_IFACE, FI_VERBS_IFACE "
                               "and HOROCLONE_NETWORK_INTERFACES choose its network; or unset HOROCLONE_FABRIC"),
                       missing);
    pollfd ready{epoll_.get(), POLLIN, 0};
    static_cast<void>(::poll(&ready, 1, 1));
  }
  if (outcome.is_ok()) return outcome;
  for (size_t i = 0; i < greetings.size(); ++i) {
    peers_[tcp_peers_[i]].messages->forget(&greetings[i].in);
    peers_[tcp_peers_[i]].messages->forget(&greetings[i].out);
  }
  return outcome;
}

Status ConnectedMesh::keep_links(const MeshMembers& members, const std::vector<Endpoint>& endpoints,
                                 const std::vector<std::string>& reached_at) {
  Links::Setup setup{rank_,
                     size_,
                     members.generation,
                     {members.secret, members.job},
                     {options_.keepalive_s, options_.socket_buffer_bytes},
                     options_.keepalive_s,
                     options_.tcp_streams,
                     epoll_.get(),
                     kLinksToken,
                     members.say};
  auto links = Links::open(std::move(setup), std::move(listeners_.tcp));
  if (!links.is_ok()) return links.status();
  links_ = links.take();
  for (int r : tcp_peers_) links_->add(r, peers_[r].tcp, reached_at[r], dialable(own_endpoint_.identity, endpoints[r]));
  return Status::ok();
}

Status ConnectedMesh::make_shared_channel(int rank, PeerLinks links) {
  Peer& peer = peers_[rank];
  auto arena = Arena::attach(links.ends.arena.release(), links.ends.arena_bytes);
  if (!arena.is_ok()) return arena.status();
  peer.arena = arena.take();
  const RankBlock* block = peer.arena->block();
  if (block->magic != kArenaMagic || block->protocol != kProtocolVersion || block->rank != rank) {
    return error(Code::kInternal, "its shared memory says rank ", block->rank, ", protocol version ", block->protocol);
  }
  peer.doorbell_fd = std::move(links.ends.doorbell);
  peer.doorbell = Doorbell(&peer.arena->block()->asleep, peer.doorbell_fd.get(), &traffic_);
  ShmChannel::Ends ends{arena_, peer.arena, local_[rank_], local_[rank], &peer.doorbell, shared_peers_.to_look_at()};
  auto shm = std::make_unique<ShmChannel>(rank, peer.name, &traffic_, std::move(ends));
  peer.shm = shm.get();
  peer.channel = std::move(shm);
  peer.liveness = std::move(links.local);
  HC_TRY(watch(peer.liveness.get(), static_cast<uint64_t>(rank) + 1));
  // A child that the peer forked may keep its socket open; the process itself is watched, too.
  auto who = peer_credentials(peer.liveness.get());
  if (who.is_ok() && who.value().pid != ::getpid())
    peer.process = open_peer_pidfd(peer.liveness.get(), who.value().pid);
  if (peer.process) {
    peer.pid = who.value().pid;
    HC_TRY(watch(peer.process.get(), static_cast<uint64_t>(rank) + 1));
  }
  shared_peers_.add(rank, local_[rank]);
  return Status::ok();
}

}  // namespace hc
