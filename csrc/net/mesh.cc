#include "net/mesh.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <set>

#include "base/sha256.h"
#include "net/connected_mesh.h"

namespace hc {

Result<std::unique_ptr<Mesh>> Mesh::listen(const MeshOptions& options) {
  auto mesh = std::make_unique<ConnectedMesh>(options);
  HC_TRY(mesh->open());
  return std::unique_ptr<Mesh>(std::move(mesh));
}

Status ConnectedMesh::open() {
  if (!(options_.keepalive_s >= 1))
    return error(Code::kInvalidArgument, "keepalive_s is ", options_.keepalive_s, ", not >= 1");
  epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_ || !doorbell_.open()) {
    return error(Code::kInternal, "epoll or eventfd: ", std::strerror(errno), "; raise `ulimit -n` if files ran out");
  }
  HC_TRY(watch(doorbell_.fd(), 0));
  own_endpoint_.identity = HostIdentity::of_this_process(options_.node);
  own_endpoint_.host_name = this_host_name();
  own_endpoint_.pid = ::getpid();
  own_endpoint_.locality = options_.locality;
  own_endpoint_.settings = options_.must_agree;
  HC_TRY(open_listeners(options_.interfaces, {options_.keepalive_s, options_.socket_buffer_bytes}, &listeners_,
                        &own_endpoint_));
  if (options_.shared_memory) open_arena();
  if (!options_.fabric.empty()) open_fabric();
  if (arena_) own_endpoint_.arena_bytes = arena_->bytes();
  own_endpoint_.room_bytes = room_for_arenas();
  return Status::ok();
}

// Without an arena the rank still works, over TCP; connect() says so.
void ConnectedMesh::open_arena() {
  auto arena = Arena::create(options_.arena_bytes);
  if (!arena.is_ok()) {
    no_arena_because_ = arena.status().text();
    return;
  }
  arena_ = arena.take();
  RankBlock* block = arena_->block();
  block->pid = ::getpid();
  block->protocol = kProtocolVersion;
  block->magic = kArenaMagic;
  doorbell_.move_word(&block->asleep);
}

// What is wrong is told to all, so that all refuse alike.
void ConnectedMesh::open_fabric() {
  auto fabric = Fabric::open(options_.fabric, own_endpoint_.addresses);
  if (!fabric.is_ok()) {
    own_endpoint_.set_fabric_problem(fabric.status().text());
    return;
  }
  fabric_ = fabric.take();
  own_endpoint_.fabric_protocol = fabric_->protocol();
  own_endpoint_.fabric_address = fabric_->address();
}

Status ConnectedMesh::watch(int fd, uint64_t token) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = token;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    return error(Code::kInternal, "epoll_ctl: ", std::strerror(errno));
  return Status::ok();
}

void ConnectedMesh::unwatch(Fd* fd) {
  if (!*fd) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd->get(), nullptr);
  fd->reset();
}

std::string ConnectedMesh::describe(int rank) const {
  if (rank < 0 || rank >= static_cast<int>(peers_.size())) return text_of("rank ", rank);
  return peers_[rank].name;
}

ProcessState ConnectedMesh::process_state(int rank) const {
  return rank == rank_ ? ProcessState::kRuns : state_of_process(peers_[rank].pid);
}

const std::shared_ptr<Arena>& ConnectedMesh::arena(int rank) const {
  return rank == rank_ || peers_.empty() ? arena_ : peers_[rank].arena;
}

void ConnectedMesh::wake(int rank, bool even_if_idle) {
  if (rank != rank_) peers_[rank].doorbell.ring_after_release(even_if_idle);
}

void ConnectedMesh::wake_those_with_work() {
  for (Peer& peer : peers_) peer.doorbell.ring_if_begun();
}

Status ConnectedMesh::use_mpi(bool on) {
  for (int r : tcp_peers_)
    if (peers_[r].messages) HC_TRY(peers_[r].messages->use(on), peers_[r].name);
  return Status::ok();
}

bool ConnectedMesh::moves_by_messages() const {
  return (mpi_ || fabric_) && std::any_of(tcp_peers_.begin(), tcp_peers_.end(),
                                          [&](int r) { return peers_[r].messages && peers_[r].messages->under_way(); });
}

bool ConnectedMesh::moves_silently() const { return traffic_.lingering.value() != 0 || moves_by_messages(); }

int ConnectedMesh::silent_look_us() {
  int soonest = moves_by_messages() ? kSilentLookUs : 0;
  for (size_t i = 0; traffic_.lingering.value() != 0 && i < tcp_peers_.size(); ++i) {
    const int us = peers_[tcp_peers_[i]].channel->look_again_us();
    if (us > 0) soonest = soonest == 0 ? us : std::min(soonest, us);
  }
  return soonest;
}

void ConnectedMesh::expect_close(int rank) {
  if (rank == rank_) return;
  Peer& peer = peers_[rank];
  if (peer.tcp) links_->expect_close(rank);
  peer.channel->expect_close();
  unwatch(&peer.liveness);
  unwatch(&peer.process);
}

std::string ConnectedMesh::counters_json() const {
  const Traffic& t = traffic_;
  return text_of("{\"frames_sent\": ", t.frames_sent.value(), ", \"frames_received\": ", t.frames_received.value(),
                 ", \"segments_sent\": ", t.segments_sent.value(),
                 ", \"segments_received\": ", t.segments_received.value(), ", \"bytes_sent\": ", t.bytes_sent.value(),
                 ", \"bytes_received\": ", t.bytes_received.value(), ", \"syscalls\": ", t.syscalls.value(),
                 ", \"wakes\": ", t.wakes.value(), ", \"connections_remade\": ", t.remade.value(), "}");
}

void ConnectedMesh::close() {
  doorbell_.disconnect();
  listeners_ = {};
  links_.reset();  // first: who sees a connection end finds that nobody listens any more
  for (Peer& peer : peers_) {
    if (peer.messages) peer.messages->close();
    if (peer.tcp) peer.tcp->close();
    peer.doorbell = {};
    peer.doorbell_fd.reset();
    peer.liveness.reset();
    peer.process.reset();
  }
  if (fabric_) fabric_->close();
  epoll_.reset();
  doorbell_.close();
}

// Every descriptor here is the child's own number for the parent's object: closing it leaves the parent's alone,
// whereas shutdown or epoll_ctl would not.
void ConnectedMesh::after_fork_child() {
  doorbell_.forget();
  if (fabric_) fabric_->abandon();
  for (Peer& peer : peers_) {
    if (peer.messages) peer.messages->abandon();
    if (peer.tcp) peer.tcp->abandon();
    if (peer.arena) peer.arena->remap_private();
  }
  if (arena_) arena_->remap_private();
  close();
}

}  // namespace hc
