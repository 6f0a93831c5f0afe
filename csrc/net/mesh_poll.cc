#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "net/connected_mesh.h"

namespace hc {
namespace {

constexpr int kEvents = 64;
constexpr int kLingeringMs = 1;            // how soon to look again at what waits for an acknowledgement
constexpr int kClosingMs = 100;            // how soon to look again at a connection of which one half has ended
constexpr int kProcessesAtOnce = 16;       // of which the kernel is asked; about 20 us each
constexpr char kHasEnded[] = "has ended";  // native_module.py knows it

bool is_readable(int fd) {
  pollfd one{fd, POLLIN, 0};
  return ::poll(&one, 1, 0) > 0 && (one.revents & POLLIN);
}

}  // namespace

bool ConnectedMesh::progress(int rank) {
  FramedChannel& channel = *peers_[rank].channel;
  bool moved = false;
  // A failure stays in the channel until collect_losses.
  if (channel.failure().is_ok()) static_cast<void>(channel.progress(&moved));
  return moved;
}

bool ConnectedMesh::progress_shared() {
  return shared_peers_.look([this](int rank) { return !peers_[rank].shm->is_quiet() && progress(rank); });
}

// What it left behind is taken in before.
void ConnectedMesh::lose_local(int rank, const std::string& reason) {
  Peer& peer = peers_[rank];
  unwatch(&peer.liveness);
  unwatch(&peer.process);
  peer.channel->lose(reason);
}

// Whether a local peer's socket or process has ended.
bool ConnectedMesh::local_end(int rank) {
  Peer& peer = peers_[rank];
  const bool ended = peer.process && is_readable(peer.process.get());
  bool closed = false;
  if (peer.liveness) {
    std::byte waste;
    const iovec part{&waste, 1};
    IoResult result = receive_parts(peer.liveness.get(), {&part, 1});
    closed = result.what == Io::kEnded || result.what == Io::kFailed;
  }
  if (!ended && !closed) return false;
  lose_local(rank, ended ? kHasEnded : "closed its connection without a goodbye");
  return true;
}

bool ConnectedMesh::look_at_processes() {
  bool found = false;
  for (int seen = 0, looked = 0; seen < size_ && looked < kProcessesAtOnce; ++seen) {
    const int rank = next_process_;
    next_process_ = (rank + 1) % size_;
    if (!peers_[rank].process) continue;
    ++looked;
    if (process_state(rank) != ProcessState::kEnds) continue;
    lose_local(rank, kHasEnded);
    found = true;
  }
  return found;
}

void ConnectedMesh::handle_event(int rank, bool* moved) {
  Peer& peer = peers_[rank];
  if (peer.tcp) {
    static_cast<void>(peer.tcp->progress(moved));  // a failure stays in the channel until collect_losses
  } else if (local_end(rank)) {
    *moved = true;
  }
}

// Each loss once, and only when the engine has fetched the frames that the peer left behind: one may be its goodbye.
// Returns whether a loss still waits for that.
bool ConnectedMesh::collect_losses(std::vector<Loss>* losses) {
  bool waiting = false;
  for (int r = 0; r < size_; ++r) {
    Peer& peer = peers_[r];
    if (!peer.channel || peer.reported || peer.channel->failure().is_ok() || peer.channel->close_expected()) continue;
    if (peer.channel->held_back()) continue;
    if (peer.channel->has_frames()) {
      waiting = true;
      continue;
    }
    peer.reported = true;
    losses->push_back({r, peer.channel->reason()});
  }
  return waiting;
}

// How long poll may sleep: not at all when there is something to do already.
int ConnectedMesh::sleep_limit(int timeout_ms, bool* moved) {
  if (progress_shared()) {
    *moved = true;
    return 0;
  }
  if (doorbell_.take_ring()) return 0;
  if (traffic_.lingering.value() != 0) timeout_ms = timeout_ms < 0 ? kLingeringMs : std::min(timeout_ms, kLingeringMs);
  for (int r : tcp_peers_) {
    FramedChannel& channel = *peers_[r].channel;
    if (!channel.closing() || channel.close_expected()) continue;
    bool any = false;
    static_cast<void>(channel.progress(&any));
    timeout_ms = any ? 0 : timeout_ms < 0 ? kClosingMs : std::min(timeout_ms, kClosingMs);
    *moved |= any;
  }
  return timeout_ms;
}

Status ConnectedMesh::poll(int timeout_ms, bool* moved, std::vector<Loss>* losses) {
  if (!epoll_) return error(Code::kNotInitialized, "the connections to the other ranks are closed");
  const size_t losses_before = losses->size();
  if (has_failures()) collect_losses(losses);  // found meanwhile by progress() on a channel
  if (losses->size() > losses_before) timeout_ms = 0;
  bool slept_by_itself = false;
  if (timeout_ms != 0) {
    // A caller that has not said that it sleeps must not miss a doorbell either.
    if (doorbell_.says_awake()) {
      set_asleep(Sleep::kAsleepWaiting);
      slept_by_itself = true;
    }
    timeout_ms = sleep_limit(timeout_ms, moved);
  }
  epoll_event events[kEvents];
  const int count = ::epoll_wait(epoll_.get(), events, kEvents, timeout_ms);
  traffic_.syscalls.add(1);
  if (slept_by_itself) set_asleep(Sleep::kAwake);
  if (timeout_ms != 0) doorbell_.forget_ring();  // the sleep it was to end has ended
  if (count < 0 && errno != EINTR) return error(Code::kInternal, "epoll_wait: ", std::strerror(errno));
  bool links_due = false;  // last, once: what the others have received may be why
  for (int i = 0; i < count; ++i) {
    if (const uint64_t token = events[i].data.u64; token == 0)
      doorbell_.clear();
    else if (token == kLinksToken)
      links_due = true;
    else
      handle_event(static_cast<int>(token - 1), moved);
  }
  if (links_due) links_->step(moved);
  if (progress_shared()) *moved = true;
  if (has_failures() && collect_losses(losses)) {
    *moved = true;  // there are frames to fetch; and whoever sleeps on wait_fd() is to come back
    doorbell_.stay_readable();
  }
  return Status::ok();
}

}  // namespace hc
