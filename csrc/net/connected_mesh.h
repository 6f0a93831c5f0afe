// The one implementation of Mesh: connecting is in mesh_connect.cc, sleeping and noticing deaths in mesh_poll.cc.
// Thread: as in mesh.h. Owner: the engine.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "net/bootstrap.h"
#include "net/fabric.h"
#include "net/links.h"
#include "net/mesh.h"
#include "net/message_channel.h"
#include "net/mpi_api.h"
#include "net/own_doorbell.h"
#include "net/ring_news.h"
#include "net/shm_channel.h"
#include "net/tcp_channel.h"

namespace hc {

// What the thread that makes progress must do, and when.
//
// Spinning: progress_shared(), receive() once has_frames(); poll(0) now and then, as a death shows only there.
//
// Before sleeping: set_asleep(kAsleep*), then every source of work once more (progress_shared(), shared segments,
// submissions), then poll(timeout), or poll(2) on wait_fd() and a poll(0) afterwards; then set_asleep(kAwake).
//
// After storing flags in a shared segment: wake(r) for every rank that may wait for them. Channels ring by themselves a
// peer that sleeps waiting; one that sleeps idle is rung with wake(r, true), one that sleeps with what it has begun
// with wake_those_with_work() as well.
//
// When something moved: receive() until false. A Loss comes only after the peer's last frames were fetched; receives
// posted later than that are still served from what it had sent.
class ConnectedMesh final : public Mesh {
 public:
  explicit ConnectedMesh(const MeshOptions& options) : options_(options) {}
  ~ConnectedMesh() override { close(); }
  Status open();  // the work of Mesh::listen

  std::string endpoint() const override { return own_endpoint_.encode(); }
  Status connect(const MeshMembers& members) override;

  int node_of(int rank) const override { return node_[rank]; }
  Locality locality_of(int rank) const override { return locality_[rank]; }
  int local_rank() const override { return local_[rank_]; }
  int local_size() const override { return local_size_; }
  int cross_rank() const override { return cross_rank_; }
  int cross_size() const override { return cross_size_; }
  bool is_homogeneous() const override { return homogeneous_; }
  std::string describe(int rank) const override;
  std::string process_of(int rank) const override { return peers_[rank].process_name; }
  ProcessState process_state(int rank) const override;
  bool look_at_processes() override;
  uint64_t bytes_from(int rank) const override { return peers_[rank].channel->bytes_received(); }
  bool shares_memory(int rank) const override { return arena(rank) != nullptr; }
  const std::shared_ptr<Arena>& arena(int rank) const override;
  Channel& channel(int rank) override {
    Peer& peer = peers_[rank];
    return peer.messages ? static_cast<Channel&>(*peer.messages) : *peer.channel;
  }
  bool has_fabric() const override { return fabric_ && !tcp_peers_.empty(); }
  bool has_mpi() const override { return mpi_ && !tcp_peers_.empty(); }
  Status use_mpi(bool on) override;
  bool moves_silently() const override;
  int silent_look_us() override;

  Status poll(int timeout_ms, bool* moved, std::vector<Loss>* losses) override;
  bool progress_shared() override;
  int wait_fd() const override { return epoll_.get(); }
  void set_asleep(Sleep state) override { doorbell_.set_asleep(state); }
  bool is_awake() const override { return doorbell_.is_awake(); }
  void wake(int rank, bool even_if_idle) override;
  void wake_those_with_work() override;
  void wake_self() override { doorbell_.ring(); }

  void expect_close(int rank) override;
  std::string counters_json() const override;
  void close() override;
  void after_fork_child() override;

 private:
  static constexpr uint64_t kLinksToken = ~uint64_t{0};  // in the epoll set; 0 is the doorbell, r + 1 rank r
  struct Peer {
    std::unique_ptr<FramedChannel> channel;
    TcpChannel* tcp = nullptr;                 // the same one, when it is of that kind,
    ShmChannel* shm = nullptr;                 // or of this one
    std::unique_ptr<MessageChannel> messages;  // in front of it, for data
    std::shared_ptr<Arena> arena;
    Doorbell doorbell;
    Fd doorbell_fd, liveness, process;  // eventfd, unix socket, pidfd
    pid_t pid = 0;                      // of that process
    std::string name;                   // "rank 3 (node-b, pid 812)"
    std::string process_name;           // process_of
    bool reported = false;
  };

  Status check_members(const MeshMembers& members) const;
  Status read_endpoints(const MeshMembers& members, std::vector<Endpoint>* endpoints) const;
  void number_nodes(const std::vector<Endpoint>& endpoints);
  void find_who_shares(const std::vector<Endpoint>& endpoints);
  Status prepare_rings();
  Status make_channels(const std::vector<Endpoint>& endpoints, std::vector<PeerLinks> links,
                       const MeshMembers& members);
  Status keep_links(const MeshMembers& members, const std::vector<Endpoint>& endpoints,
                    const std::vector<std::string>& reached_at);
  Status make_shared_channel(int rank, PeerLinks links);
  Status check_fabric(const std::vector<Endpoint>& endpoints, const MeshMembers& members) const;
  Status greet_through_fabric(const MeshMembers& members);
  bool moves_by_messages() const;
  void open_arena();
  void open_fabric();
  Status watch(int fd, uint64_t token);
  void unwatch(Fd* fd);

  bool progress(int rank);
  void handle_event(int rank, bool* moved);
  bool local_end(int rank);
  void lose_local(int rank, const std::string& reason);
  bool has_failures() const { return traffic_.failed_channels.value() != 0; }
  bool collect_losses(std::vector<Loss>* losses);
  int sleep_limit(int timeout_ms, bool* moved);

  const MeshOptions options_;
  Endpoint own_endpoint_;
  Listeners listeners_;
  Fd epoll_;
  OwnDoorbell doorbell_;
  std::shared_ptr<Arena> arena_;
  std::string no_arena_because_;

  int local_size_ = 1, cross_rank_ = 0, cross_size_ = 1;
  bool homogeneous_ = true, connected_ = false;
  std::vector<int> node_{0}, local_{0};
  std::vector<Locality> locality_{1};
  std::vector<bool> shares_{false};  // by rank: it maps the arenas of its node, and the others map its own
  std::unique_ptr<Links> links_;     // null where every peer shares memory; outlives the channels
  int next_process_ = 0;             // rank at which look_at_processes() goes on
  std::vector<Peer> peers_;
  RingNews shared_peers_;
  std::vector<int> tcp_peers_;
  std::shared_ptr<MpiApi> mpi_;
  std::shared_ptr<Fabric> fabric_;  // null where it was not asked for, or could not be opened
};

}  // namespace hc
