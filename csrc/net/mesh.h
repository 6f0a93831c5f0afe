// The ranks of one job, connected: who is where, one authenticated channel to each, the node's shared memory, the
// doorbells that wake a sleeping rank, and the detection of a peer's death.
//
// Bootstrap in two steps, with the exchange of addresses left to the caller (Python: a launcher's key-value store, PMI,
// MPI ...; tests: a vector): listen() opens the listeners and gives an opaque endpoint; connect() takes everybody's.
//
// Thread: listen/connect on the caller's thread, then everything on the thread that makes progress; wake_self and
// the const accessors from any.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/settings_table.h"
#include "base/status.h"
#include "base/topology.h"
#include "net/arena.h"
#include "net/channel.h"
#include "net/mpi_link.h"
#include "net/process.h"
#include "net/traffic.h"

namespace hc {

inline constexpr uint32_t kProtocolVersion = 1;
inline constexpr int kSilentLookUs = 50;  // see silent_look_us()

struct MeshOptions {
  bool shared_memory = defaults::shared_memory;  // false: every pair talks TCP, also on one host
  size_t arena_bytes = defaults::arena_bytes;    // address space of one arena
  std::string interfaces;  // comma list of NICs to advertise; empty = every one that is up, loopback last
  int socket_buffer_bytes = defaults::socket_buffer_bytes;  // 0 = left to the kernel's autotuning; tests use 4096
  int tcp_streams = defaults::tcp_streams;                  // connections for data of a pair; 0: by its way
  double keepalive_s = defaults::keepalive_s;               // TCP keep-alive and user timeout
  Locality locality;                                        // where in its machine this rank runs
  std::string fabric;                                       // libfabric's provider for data between nodes; empty: none
  std::string node;  // ranks with different texts are different nodes (tests of several nodes on one host)
  // With more ranks than this on a node a rank looks at those rings only of which there is news: each look at a ring
  // may miss the caches and the page tables, which a small node's rings do not.
  int few_local_ranks = 8;
  // Name and value of each setting that is part of the protocol; connect() fails with Mismatch unless all ranks say the
  // same.
  std::vector<std::pair<std::string, std::string>> must_agree;
};

struct MeshMembers {
  int rank = 0;
  std::vector<std::string> endpoints;  // by rank, as given by listen()
  std::string secret;                  // job secret, >= 16 bytes; authenticates every connection
  std::string job;                     // job id, in every handshake
  uint64_t generation = 0;             // in every handshake, whole: a stale rank of an older life is refused
  double timeout_s = defaults::init_timeout_s;
  double report_after_s = defaults::init_report_s;  // then `say` hears who is missing and which address was tried
  // Also told, as long as the mesh lives, which connections were lost and made again. May be empty.
  std::function<void(const std::string&)> say;
  std::function<bool()> cancelled;  // polled every 50 ms (Ctrl-C); may be empty
  std::optional<MpiLink> mpi;       // a second backend for data between nodes
};

// What RankBlock::asleep says. A peer that sleeps idle has announced nothing, so nobody can be waiting for it to move
// data, and it will look at its rings before it next waits: it needs no doorbell. That keeps a loop of blocking calls
// free of system calls. One that sleeps with what it has begun will look before it next waits, too; but others may come
// to wait for it to move data, and who is about to sleep for that rings it (wake_those_with_work).
enum class Sleep : uint32_t { kAwake = 0, kAsleepIdle = 1, kAsleepWaiting = 2, kAsleepBegun = 3 };

// A peer that will not answer any more.
struct Loss {
  int rank = -1;
  std::string reason;  // "closed its connection without a goodbye", "reset by peer", "has ended" ...
};

class Mesh {
 public:
  static Result<std::unique_ptr<Mesh>> listen(const MeshOptions& options);
  virtual ~Mesh() = default;

  // This rank's endpoint: protocol version, host identity (boot id, network namespace, user), host name, pid, abstract
  // unix socket, TCP port and addresses. Opaque; at most 4 KiB; parsed with bounds, as it may come from anybody.
  virtual std::string endpoint() const = 0;
  // Connects to every other rank, both sides proving that they know the secret before anything else is parsed.
  virtual Status connect(const MeshMembers& members) = 0;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Nodes are numbered by their lowest rank. Local ranks = same boot id, network namespace and user.
  virtual int node_of(int rank) const = 0;
  virtual Locality locality_of(int rank) const = 0;  // within its node
  virtual int local_rank() const = 0;
  virtual int local_size() const = 0;
  virtual int cross_rank() const = 0;  // position of this node among those with a rank of my local_rank
  virtual int cross_size() const = 0;
  virtual bool is_homogeneous() const = 0;
  virtual std::string describe(int rank) const = 0;  // "rank 3 (node-b, pid 812)"
  // Equal for one process in each mesh that it is in; no other process of the job has it.
  virtual std::string process_of(int rank) const = 0;
  // kUnknown: it is on another host, or its process cannot be seen from here.
  virtual ProcessState process_state(int rank) const = 0;
  // poll() reports a peer of this node whose process ends as lost, long before its connections close. Looks at some of
  // them in turn; whether it found one.
  virtual bool look_at_processes() = 0;
  // Has grown since the last look: `rank` is alive.
  virtual uint64_t bytes_from(int rank) const = 0;
  // Whether `rank` (or this rank itself) has its arena mapped here.
  virtual bool shares_memory(int rank) const = 0;
  virtual const std::shared_ptr<Arena>& arena(int rank) const = 0;  // null unless shares_memory
  virtual Channel& channel(int rank) = 0;                           // rank != own
  // Whether data between nodes goes through libfabric.
  virtual bool has_fabric() const = 0;
  // Whether there is MPI between some of the nodes, and to send data that way from now on, or over TCP. All ranks
  // change it between the same operations, none of which moves data.
  virtual bool has_mpi() const = 0;
  virtual Status use_mpi(bool on) = 0;
  // Something is under way that ends no sleep in poll(); silent_look_us: look again so soon, 0 without.
  virtual bool moves_silently() const = 0;
  virtual int silent_look_us() = 0;

  // Sleeps until a socket or the doorbell has something, at most timeout_ms (0 = just look, -1 = no limit), then moves
  // what can be moved on every channel; *moved is set when anything did. Losses are reported once each, and only when
  // the frames that the lost rank left behind were received.
  virtual Status poll(int timeout_ms, bool* moved, std::vector<Loss>* losses) = 0;
  // Moves what can be moved on the channels to ranks of this node; true when anything did.
  virtual bool progress_shared() = 0;
  // Control frames have come in that nobody has fetched with receive() yet.
  bool has_frames() const { return traffic_.frames_received.value() != traffic_.frames_taken.value(); }
  // True when every peer shares memory: then spinning needs no look at sockets in every iteration.
  bool all_shared() const { return all_shared_; }
  // True when every rank, of every node, shares memory with the others of its node.
  bool every_rank_shares() const { return every_rank_shares_; }
  // Readable (poll(2)) whenever poll() would find something. Lets a thread sleep without touching any channel. Any
  // thread.
  virtual int wait_fd() const = 0;
  // Sets this rank's asleep word; after kAsleep* the caller must look at every source of work once more before it
  // sleeps.
  virtual void set_asleep(Sleep state) = 0;
  // Whether that word says kAwake: set so, or by a peer that has rung the doorbell.
  virtual bool is_awake() const = 0;
  // Rings the doorbell of a local rank if it sleeps with operations outstanding; with `even_if_idle` also when it
  // sleeps with nothing to do (goodbye, abort, liveness probe). Cheap (one load after a fence) when it is awake. No-op
  // for a remote rank.
  virtual void wake(int rank, bool even_if_idle) = 0;
  // The caller waits, has said so with set_asleep(), and is about to sleep: rings the local ranks that say
  // kAsleepBegun.
  virtual void wake_those_with_work() = 0;
  // Ends this rank's own sleep in poll(). Any thread; async-signal-safe.
  virtual void wake_self() = 0;

  // After this a peer's end is no loss: it has said goodbye (engine saw the frame).
  virtual void expect_close(int rank) = 0;
  // Counters for tests: syscalls, bytes, frames, wakes.
  virtual std::string counters_json() const = 0;
  // Closes every descriptor; arenas live on while somebody holds them.
  virtual void close() = 0;
  // In a forked child: closes the inherited descriptors, remaps arenas private.
  virtual void after_fork_child() = 0;

 protected:
  // What each iteration of the engine asks for: no virtual call.
  int rank_ = 0, size_ = 1;
  bool all_shared_ = true, every_rank_shares_ = false;
  Traffic traffic_;
};

}  // namespace hc
