// How the ranks of a process set agree on who moves device memory. Each introduces itself in a record of fixed size, an
// allgather of the host spreads the records, every rank reads the same table and comes to the same answer; where that
// is NCCL, the communicator then comes up without blocking anybody; where it is peers, they show each other their
// memory and say whether they could map it. Resumable like every collective.
#include <algorithm>
#include <atomic>

#include "base/thread.h"
#include "collective/gpu/device_state.h"
#include "collective/shared/shared.h"

namespace hc {

namespace {

constexpr size_t kReasonBytes = 320;

struct Introduction {
  uint8_t has_device = 0;
  uint8_t has_nccl = 0;
  uint8_t has_kernels = 0;
  uint8_t has_shared_segment = 0;  // shares host memory with all members
  GpuOperations operations = GpuOperations::kAuto;
  int32_t nccl_version = 0;
  NcclPlace place;
  int32_t devices = 0;     // GPUs that its process sees
  uint8_t has_levels = 0;  // made where every rank wants them for one reason or the other
  uint8_t reduces_by_levels = 0;
  uint64_t peer_bytes = 0;
  char reason[kReasonBytes] = {};          // why there is no NCCL
  char kernels_reason[kReasonBytes] = {};  // why there are no kernels
};
static_assert(std::is_trivially_copyable_v<Introduction>);

// What communicators begin with: the world's comes from group rank 0, the others from the leaders. Made where NCCL is
// what moves the data, as it keeps a thread and a socket for each that it has given.
struct Ids {
  NcclId world{}, inner{}, outer{};
};
static_assert(std::is_trivially_copyable_v<Ids>);

// What peers tell when they have seen each other's introduction; the second time, whether they could map everything.
struct PeerRecord {
  PeerHandle handle;
  uint8_t ok = 0;
  char reason[kReasonBytes] = {};
};
static_assert(std::is_trivially_copyable_v<PeerRecord>);

using Table = std::vector<Introduction>;

std::string name_in(const Group& group, size_t r) { return text_of("rank ", group.world_rank[r]); }

bool anybody(const Table& table, GpuOperations wants) {
  return std::any_of(table.begin(), table.end(), [&](const Introduction& one) { return one.operations == wants; });
}

bool on_one_gpu(const Table& table, const Group& group, size_t a, size_t b) {
  return group.node[a] == group.node[b] && is_same_gpu(table[a].place, table[b].place);
}

// The first pair of ranks on one GPU that NCCL refuses; -1: none.
std::pair<int, int> sharing_a_gpu(const Table& table, const Group& group) {
  for (size_t r = 0; r < table.size(); ++r)
    for (size_t other = 0; other < r; ++other)
      if (group.node[r] == group.node[other] && nccl_refuses(table[r].place, table[other].place))
        return {static_cast<int>(other), static_cast<int>(r)};
  return {-1, -1};
}

// Empty: no rank shares a GPU while its process sees one that nobody uses.
std::string sharing_without_need(const Table& table, const Group& group) {
  const auto [first, second] = sharing_a_gpu(table, group);
  if (first < 0) return "";
  const auto at = static_cast<size_t>(second);
  int used = 0;  // GPUs of that machine
  for (size_t r = 0; r < table.size(); ++r) {
    bool is_first = group.node[r] == group.node[at];
    for (size_t other = 0; is_first && other < r; ++other) is_first = !on_one_gpu(table, group, r, other);
    used += is_first;
  }
  if (used >= table[at].devices) return "";
  return text_of(name_in(group, static_cast<size_t>(first)), " and ", name_in(group, at), " use the same GPU, and ",
                 name_in(group, at), " sees ", table[at].devices,
                 " of them: call torch.cuda.set_device(hvd.local_rank()) before anything is put on a GPU");
}

// Empty: peers can be tried.
std::string why_no_peers(const Table& table, const Group& group) {
  if (table.size() > kMaxPeers) return text_of("more than ", kMaxPeers, " ranks");
  for (size_t r = 0; r < table.size(); ++r) {
    if (!table[r].has_shared_segment)
      return text_of(name_in(group, r), " does not share memory with all others: they are not on one machine");
    if (!table[r].has_kernels) return text_of(name_in(group, r), ": ", table[r].kernels_reason);
  }
  return "";
}

enum class BackendKind { kNccl, kPeers, kHost };

struct Answer {
  BackendKind backend = BackendKind::kHost;
  std::string reason;
  bool for_good = true;  // false: ask again at the next batch
};

// Whether NCCL can be used by all.
Answer choose_nccl(const Table& table, const Group& group) {
  const auto name = [&](size_t r) { return name_in(group, r); };
  Answer answer;
  for (size_t r = 0; r < table.size(); ++r) {
    if (!table[r].has_nccl) {
      answer.reason = text_of(name(r), ": ", table[r].reason);
      return answer;
    }
    if (table[r].nccl_version != table[0].nccl_version) {
      answer.reason = text_of("NCCL is ", nccl_version_text(table[0].nccl_version), " on ", name(0), " and ",
                              nccl_version_text(table[r].nccl_version), " on ", name(r));
      return answer;
    }
  }
  if (const auto [first, second] = sharing_a_gpu(table, group); first >= 0) {
    answer.reason = text_of(name(static_cast<size_t>(first)), " and ", name(static_cast<size_t>(second)),
                            " use the same GPU, which NCCL refuses; give each rank a GPU of its own with "
                            "torch.cuda.set_device(hvd.local_rank())");
    return answer;
  }
  answer.backend = BackendKind::kNccl;
  answer.reason = "NCCL " + nccl_version_text(table[0].nccl_version);
  return answer;
}

// PURE: the same table gives the same answer on every rank.
Answer choose_backend(const Table& table, const Group& group) {
  Answer answer;
  for (size_t r = 0; r < table.size(); ++r)
    if (table[r].operations == GpuOperations::kHost) {
      answer.reason = text_of("HOROCLONE_GPU_OPERATIONS is host for ", name_in(group, r));
      return answer;
    }
  for (size_t r = 0; r < table.size(); ++r)
    if (!table[r].has_device) {
      answer.reason = text_of(name_in(group, r), " has joined and has not used a GPU yet");
      answer.for_good = false;
      return answer;
    }
  const bool demanded = anybody(table, GpuOperations::kPeers);
  const bool share = sharing_a_gpu(table, group).first >= 0;
  if (anybody(table, GpuOperations::kNccl) || (!demanded && !share)) return choose_nccl(table, group);
  const std::string why_not = why_no_peers(table, group);
  if (why_not.empty()) {
    answer.backend = BackendKind::kPeers;
    answer.reason = "kernels between peers";
    return answer;
  }
  if (demanded) {
    answer.reason = why_not;
    return answer;
  }
  answer = choose_nccl(table, group);
  answer.reason += text_of("; nor can our kernels reduce there: ", why_not);
  return answer;
}

}  // namespace

class BackendSelection : public Collective {
 public:
  BackendSelection(DeviceState* device, const DeviceOptions& options, const Group& group, Tag tag)
      : device_(*device), options_(options), group_(group), table_(static_cast<size_t>(group.size)), tag_(tag) {
    algorithm_ = "gpu set-up";
  }

  // The kernels may have to be compiled: a thread of its own does that, and everybody waits here.
  Progress start() override {
    device_.nccl.load(device_.gpu, options_.nccl_library, options_.nccl_folders);
    Status started = loader_.start("hc-kernels", [this] {
      load_kernels();
      loaded_.store(true);
    });
    return started.is_ok() ? Progress::kPending : fail(started);
  }

  Progress step(bool* moved) override {
    if (loader_.running()) {
      if (!loaded_.load()) return Progress::kPending;
      loader_.join();
      *moved = true;
      if (begin_exchange() == Progress::kFailed) return Progress::kFailed;
    }
    if (exchange_) {
      const Progress progress = exchange_->step(moved);
      if (progress == Progress::kFailed) return fail(exchange_->status());
      if (progress == Progress::kPending) return progress;
      exchange_.reset();
      Status settled = stage_ == Stage::kIntroductions ? settle()
                       : stage_ == Stage::kIds         ? begin_nccl()
                                                       : settle_peers();
      if (!settled.is_ok()) return fail(settled);
      if (exchange_) return Progress::kPending;
    }
    return device_.nccl.world() && comes_up_ ? connecting(moved) : Progress::kDone;
  }

 private:
  enum class Stage { kIntroductions, kIds, kHandles, kMapped };

  Progress begin_exchange() {
    Status ready = introduce();
    if (ready.is_ok()) ready = exchange(&mine_, table_.data(), sizeof(Introduction));
    return ready.is_ok() ? Progress::kPending : fail(ready);
  }

  // Every rank's record of so many bytes to all.
  Status exchange(const void* mine, void* all, size_t bytes) {
    Task task;
    task.op = Op::kAllgather;
    task.dtype = DType::kU8;
    task.counts.assign(table_.size(), bytes);
    task.tag = tag_;
    task.pieces = {{static_cast<const std::byte*>(mine), static_cast<std::byte*>(all), bytes}};
    auto made = hc::make_collective(std::move(task), group_);
    HC_TRY(made.status());
    exchange_ = made.take();
    return exchange_->start() == Progress::kFailed ? exchange_->status() : Status::ok();
  }

  Status introduce() {
    mine_.operations = options_.operations;
    mine_.has_device = device_.gpu != nullptr;
    mine_.has_nccl = device_.nccl.library() != nullptr;
    mine_.has_kernels = device_.kernels != nullptr;
    const SharedSegment* shared_segment = group_.shared_segment;
    mine_.has_shared_segment = shared_segment && shared_segment->size() == group_.size;
    mine_.peer_bytes = options_.peer_bytes;
    device_.kernels_missing.text().copy(mine_.kernels_reason, kReasonBytes - 1);
    if (device_.gpu) {
      mine_.place = NcclPlace::of(device_.gpu->uuid(), mine_.has_nccl ? device_.nccl.api().version : 0);
      (void)device_.gpu->api().cuDeviceGetCount(&mine_.devices);
    }
    device_.nccl.missing().text().copy(mine_.reason, kReasonBytes - 1);
    if (!mine_.has_nccl) return Status::ok();
    mine_.nccl_version = device_.nccl.api().version;
    const DeviceOptions& options = options_;
    place_ = options.two_level || options.adasum_by_node ? level_place(group_.node, group_.rank) : LevelPlace{};
    mine_.has_levels = place_.inner_size > 1;
    mine_.reduces_by_levels = options.two_level;
    return Status::ok();
  }

  Status make_id(NcclId* id) const {
    const NcclApi& nccl = device_.nccl.api();
    return nccl.check(nccl.ncclGetUniqueId(id), "ncclGetUniqueId", nullptr);
  }

  Status settle() {
    const Answer answer = choose_backend(table_, group_);
    device_.reason = answer.reason;
    device_.refusal = Status::ok();
    device_.kernels_everywhere =
        std::all_of(table_.begin(), table_.end(), [](const Introduction& one) { return one.has_kernels; });
    device_.kernels_reason.clear();
    for (size_t r = table_.size(); r-- > 0;)
      if (!table_[r].has_kernels) device_.kernels_reason = text_of(name_in(group_, r), ": ", table_[r].kernels_reason);
    if (answer.backend == BackendKind::kHost) {
      go_by_host(answer);
      return Status::ok();
    }
    if (!anybody(table_, GpuOperations::kPeers)) device_.advice = sharing_without_need(table_, group_);
    return answer.backend == BackendKind::kPeers ? show_peers() : tell_ids();
  }

  Status tell_ids() {
    stage_ = Stage::kIds;
    const int me = group_.rank;
    if (me == 0) HC_TRY(make_id(&my_ids_.world));
    if (mine_.has_levels && place_.inner_leader == me) HC_TRY(make_id(&my_ids_.inner));
    if (mine_.has_levels && place_.outer_leader == me) HC_TRY(make_id(&my_ids_.outer));
    ids_.resize(table_.size());
    return exchange(&my_ids_, ids_.data(), sizeof(Ids));
  }

  Status begin_nccl() {
    const std::string name = text_of("horoclone process set ", tag_.process_set);
    const Status begun = device_.nccl.begin(group_.size, ids_[0].world, group_.rank, name);
    comes_up_ = true;
    rising_ = device_.nccl.world();
    const auto all = [&](auto wanted) { return std::all_of(table_.begin(), table_.end(), wanted); };
    device_.nccl.reduce_by_levels(all([](const Introduction& one) { return one.reduces_by_levels; }));
    if (all([](const Introduction& one) { return one.has_levels; })) device_.nccl.make_levels(place_);
    deadline_ = Deadline::in(options_.init_timeout_s);
    return begun.with("HOROCLONE_GPU_OPERATIONS=host goes without NCCL");
  }

  void go_by_host(const Answer& answer) {
    device_.reason = answer.reason;
    const bool nccl = anybody(table_, GpuOperations::kNccl);
    if (nccl || anybody(table_, GpuOperations::kPeers))
      device_.refusal = error(Code::kUnsupported, "HOROCLONE_GPU_OPERATIONS=", nccl ? "nccl" : "peers", ", but ",
                              nccl ? "NCCL" : "peers", " cannot be used: ", answer.reason,
                              ". Set it to auto to reduce through host memory instead.");
    if (answer.for_good) device_.backend = make_staged_backend(&device_, group_);
  }

  // A rank that has none says why, and all take another backend together.
  Status show_peers() {
    device_.peer_bytes = table_[0].peer_bytes;
    for (const Introduction& one : table_) device_.peer_bytes = std::min<size_t>(device_.peer_bytes, one.peer_bytes);
    auto made = PeerMemory::create(device_.gpu, options_.peer_bytes);
    if (made.is_ok()) {
      device_.peers = made.take();
      peer_.handle = device_.peers->handle();
    }
    return tell_peers(Stage::kHandles, made.status());
  }

  Status tell_peers(Stage stage, const Status& outcome) {
    stage_ = stage;
    peer_.ok = outcome.is_ok();
    outcome.text().copy(peer_.reason, kReasonBytes - 1);
    peers_.resize(table_.size());
    return exchange(&peer_, peers_.data(), sizeof(PeerRecord));
  }

  Status settle_peers() {
    for (size_t r = 0; r < peers_.size(); ++r)
      if (!peers_[r].ok) {
        device_.peers.reset();
        go_by_host({BackendKind::kHost, text_of(name_in(group_, r), ": ", peers_[r].reason), true});
        return Status::ok();
      }
    if (stage_ == Stage::kMapped) {
      device_.backend = make_peers_backend(&device_, group_);
      return Status::ok();
    }
    std::vector<PeerHandle> handles;
    for (const PeerRecord& one : peers_) handles.push_back(one.handle);
    return tell_peers(Stage::kMapped, device_.peers->open(handles));
  }

  Progress connecting(bool* moved) {
    auto pending = rising_->is_pending();
    if (!pending.is_ok())
      return fail(pending.status()
                      .with("NCCL could not connect the ranks' GPUs")
                      .with("NCCL_DEBUG=INFO shows more, HOROCLONE_GPU_OPERATIONS=host goes without it"));
    if (pending.value()) {
      if (!deadline_.passed()) return Progress::kPending;
      return fail(error(Code::kTimeout, "NCCL has not connected the ranks' GPUs within ", options_.init_timeout_s,
                        " s; NCCL_DEBUG=INFO shows what it tries, HOROCLONE_GPU_OPERATIONS=host goes without it"));
    }
    *moved = true;
    DeviceLevels* levels = device_.nccl.levels();
    if (levels && !levels->complete()) {
      const bool inner = !levels->inner();
      const Ids& leader = ids_[static_cast<size_t>(inner ? place_.inner_leader : place_.outer_leader)];
      Status begun = levels->begin(inner, inner ? leader.inner : leader.outer, &rising_);
      return begun.is_ok() ? Progress::kPending : fail(begun);
    }
    device_.backend = make_nccl_backend(&device_, group_);
    return Progress::kDone;
  }

  void load_kernels() {
    if (!device_.gpu || device_.kernels || options_.operations == GpuOperations::kHost) return;
    auto loaded = device_.gpu->kernels(options_.kernels);  // may take seconds
    device_.kernels_missing = loaded.status();
    if (loaded.is_ok()) device_.kernels = loaded.value();
  }

  DeviceState& device_;
  const DeviceOptions& options_;
  const Group& group_;
  Introduction mine_;
  std::vector<Introduction> table_;
  Stage stage_ = Stage::kIntroductions;
  PeerRecord peer_;
  Ids my_ids_;
  std::vector<Ids> ids_;
  std::vector<PeerRecord> peers_;
  const Tag tag_;
  std::atomic<bool> loaded_{false};
  NamedThread loader_;  // runs while the kernels are loaded
  std::unique_ptr<Collective> exchange_;
  bool comes_up_ = false;
  LevelPlace place_;
  NcclComm* rising_ = nullptr;  // the communicator that is being made
  Deadline deadline_ = Deadline::in(0);
};

Status DeviceState::make_stream() {
  if (stream || !gpu) return Status::ok();
  auto made = gpu->make_stream();
  HC_TRY(made.status());
  stream = made.take();
  return Status::ok();
}

std::unique_ptr<Collective> make_backend_selection(DeviceState* state, const DeviceOptions& options, const Group& group,
                                                   Tag tag) {
  return std::make_unique<BackendSelection>(state, options, group, tag);
}

}  // namespace hc
