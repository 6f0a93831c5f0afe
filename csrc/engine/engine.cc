// Birth: the settings, the mesh, the global process set, and what all ranks agree on first. Submission is in
// engine_submit.cc, the turn of the engine in engine_step.cc, waiting, sleeping and failing in engine_drive.cc.
#include "engine/engine.h"

#include <algorithm>

namespace hc {

Engine::Engine(Config config) : config_(std::move(config)), log_(config_.log_level, config_.log_hide_time) {}

Result<std::unique_ptr<Engine>> Engine::create(Config config) {
  std::unique_ptr<Engine> engine(new Engine(std::move(config)));
  const Config& c = engine->config_;
  MeshOptions options;
  options.shared_memory = c.shared_memory;
  options.arena_bytes = c.arena_bytes;
  options.interfaces = c.interfaces;
  options.socket_buffer_bytes = static_cast<int>(c.socket_buffer_bytes);
  options.keepalive_s = c.keepalive_s;
  options.tcp_streams = c.tcp_streams;
  options.node = c.node;
  // Who talks to whom, and how. Whatever else the ranks must share is rank 0's (agree_on_settings), or agreed on as it
  // is needed.
  options.must_agree = {{"HOROCLONE_SHARED_MEMORY", c.shared_memory ? "1" : "0"},
                        {"HOROCLONE_CONTROL_FANOUT", std::to_string(c.control_fanout)}};
  if (c.simd != "auto" && !select_simd(c.simd.c_str()))
    return error(Code::kInvalidArgument, "HOROCLONE_SIMD=", c.simd, ": this processor does not have it");
  // Before anybody connects: to the others, a rank that fails later has left, for a reason that its own log has.
  Tuning start = Tuning::of(c);
  SelectionSource source{};
  HC_TRY(engine->start_selection(&start, &source));
  auto mesh = Mesh::listen(options);
  if (!mesh.is_ok()) return mesh.status();
  engine->mesh_ = mesh.take();
  return engine;
}

Status Engine::connect(const MeshMembers& members) {
  log_.set_rank(members.rank);
  MeshMembers with_log = members;
  with_log.report_after_s = config_.init_report_s;
  with_log.say = [this](const std::string& text) { log_.warning(text); };
  HC_TRY(mesh_->connect(with_log));
  generation_ = members.generation;
  left_.assign(mesh_->size(), false);
  liveness_ = Liveness(mesh_->size(), {config_.liveness_probe_s, config_.liveness_warn_s, config_.liveness_error_s});
  // With more ranks than cores whoever waits is in the way of those it waits for.
  const bool crowded = mesh_->local_size() > static_cast<int>(allowed_cpus().size());
  spin_pauses_ = crowded && !config_.given.contains("SPIN_PAUSES") ? 0 : config_.spin_pauses;
  timer_s_ = std::min({1.0, config_.liveness_probe_s, config_.stall_check_s});
  next_timer_ = Clock::now();
  next_stall_report_ = Clock::now();
  std::vector<int> everybody(mesh_->size());
  for (int r = 0; r < mesh_->size(); ++r) everybody[r] = r;
  auto set = make_set(0, everybody);
  if (set->lane) HC_TRY(set->lane->prepare(), "rank ", mesh_->rank());
  if (set->lane && set->lane->size() == mesh_->size()) device_turns_.attach(set->lane.get());
  sets_[0] = std::move(set);
  attach_messages();
  HC_TRY(thread_.start("hc-engine", [this] { run(); }));
  connected_.store(true);
  // The coordinator's runs before anybody is let go: it shows what the others announce. They measure its clock for
  // theirs, which it answers as soon as it runs.
  if (members.rank == 0) start_configured_timeline();
  HC_TRY(agree_on_settings(members));
  HC_TRY(select(members));
  if (members.rank != 0) start_configured_timeline();
  return Status::ok();
}

// An operation of init: nothing else runs yet, and Ctrl-C and the time limit of init hold.
Status Engine::run_in_init(const Submission& s, const MeshMembers& members) {
  int64_t handle = 0;
  HC_TRY(submit(s, &handle));
  bool done = false;
  const Deadline deadline = Deadline::in(members.timeout_s);
  Status outcome;
  while (!done && outcome.is_ok()) {
    outcome = wait(handle, 0.05, &done);
    if (!done && outcome.is_ok() && deadline.passed())
      outcome = error(Code::kTimeout, "init: connected, but not every rank finished its set-up within ",
                      members.timeout_s, " s");
    if (!done && members.cancelled && members.cancelled()) outcome = error(Code::kAborted, "init was interrupted");
  }
  release(handle);
  return outcome;
}

// Rank 0's settings that all ranks must share decide for everybody: algorithms and sizes are part of the layout. This
// is also the first operation: nobody uses a lane before everybody has prepared its own.
Status Engine::agree_on_settings(const MeshMembers& members) {
  Tuning start = Tuning::of(config_);
  SelectionSource source{};
  HC_TRY(start_selection(&start, &source));
  double table[kKnobCount + 2] = {};
  for (int k = 0; k < kKnobCount; ++k) table[k] = value_of(start, static_cast<Knob>(k));
  table[kKnobCount] = static_cast<double>(source);
  table[kKnobCount + 1] = start.adasum_by_node;
  const int64_t shape[] = {std::size(table)};
  const Submission::Tensor tensor{table, table, shape, DType::kF64};
  Submission s;
  s.op = Op::kBroadcast;
  s.name = "horoclone.settings";
  s.tensors = {&tensor, 1};
  s.will_wait = true;
  HC_TRY(run_in_init(s, members));
  const GateHold held(this);
  for (int k = 0; k < kKnobCount; ++k) set_value(&agreed_tuning_, static_cast<Knob>(k), table[k]);
  agreed_tuning_.adasum_by_node = table[kKnobCount + 1] != 0;
  flat_bytes_ = agreed_tuning_.flat_bytes;
  sets_[0]->express_bytes = express_limit(*sets_[0]);
  if (!tuned_) {  // rank 0 may have gone on and changed them already
    sets_[0]->tuning = agreed_tuning_;
    adopt(agreed_tuning_);
  }
  if (sets_[0]->coordinator) tell_sizes(sets_[0].get(), agreed_tuning_);
  selection_source_.store(static_cast<SelectionSource>(static_cast<int>(table[kKnobCount])));
  return Status::ok();
}

void Engine::attach_messages() {
  Messages::Host host;
  host.rank = mesh_->rank();
  host.generation = generation_;
  host.segment_bytes = config_.segment_bytes;
  host.send = [this](int to, const Writer& frame) {
    frame_.clear();
    frame_.put_raw(frame.bytes().data(), frame.size());
    return send_frame(to, false);
  };
  host.channel = [this](int rank) -> Channel& { return mesh_->channel(rank); };
  host.complete = [this](Operation* op, Status status) { finish(op, std::move(status)); };
  host.has_left = [this](int rank) { return static_cast<bool>(left_[rank]); };
  host.members = [this](uint16_t process_set) -> const std::vector<int>& { return find_set(process_set)->ranks; };
  host.device_options = [this, options = device_options()]() -> const DeviceOptions& { return options; };
  host.same_node = [this](int rank) { return mesh_->node_of(rank) == mesh_->node_of(mesh_->rank()); };
  host.settle_device = [this](Operation* op) { settle_device(op); };
  host.ask_turn = [this](int receiver, uint32_t id) { ask_message_turn(receiver, id); };
  const auto turn = [](int sender, uint32_t id) {
    return DeviceTurn{kMessageStream, static_cast<int32_t>(id), static_cast<uint16_t>(sender)};
  };
  host.turn_is_granted = [this, turn](int sender, uint32_t id) { return device_turns_.contains(turn(sender, id)); };
  host.turn_is_next = [this, turn](int sender, uint32_t id) { return device_turns_.is_next(turn(sender, id)); };
  host.turn_is_over = [this] { device_turns_.over(); };
  host.device_failed = [this](const Status& reason) { device_failed(reason); };
  host.warn = [this](const std::string& text) { log_.warning(text); };
  messages_.attach(std::move(host));
}

// Several nodes, of which at least one has several ranks that share memory.
bool Engine::may_be_two_level(const ProcessSet& set) const {
  const std::vector<int>& node = set.group.node;
  if (!config_.shared_memory || node.empty()) return false;
  std::vector<int> distinct = node;
  std::sort(distinct.begin(), distinct.end());
  const bool repeats = std::adjacent_find(distinct.begin(), distinct.end()) != distinct.end();
  return repeats && distinct.front() != distinct.back();
}

// Two ranks read as much of each other's memory in a turn as in blocks, and meet once instead of three times.
size_t Engine::express_limit(const ProcessSet& set) const { return set.size() == 2 ? 4 * flat_bytes_ : flat_bytes_; }

std::unique_ptr<ProcessSet> Engine::make_set(uint16_t id, std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  const int me = mesh_->rank();
  const auto at = std::find(ranks.begin(), ranks.end(), me);
  auto set = std::make_unique<ProcessSet>(id, generation_, ranks,
                                          at == ranks.end() ? -1 : static_cast<int>(at - ranks.begin()));
  if (set->group_rank < 0) return set;
  Group& group = set->group;
  group.rank = set->group_rank;
  group.size = set->size();
  group.world_rank = ranks;
  std::vector<std::shared_ptr<Arena>> arenas;
  std::vector<int> positions;
  int my_index = 0;
  for (int position = 0; position < group.size; ++position) {
    const int r = ranks[position];
    group.node.push_back(mesh_->node_of(r));
    group.channel.push_back(r == me ? nullptr : &mesh_->channel(r));
    if (!mesh_->shares_memory(r) || mesh_->node_of(r) != mesh_->node_of(me)) continue;
    if (r == me) my_index = static_cast<int>(arenas.size());
    arenas.push_back(mesh_->arena(r));
    positions.push_back(position);
  }
  if (!arenas.empty()) {
    set->lane = std::make_unique<SharedLane>(std::move(arenas), std::move(positions), my_index, id);
    group.lane = set->lane.get();
    set->express.attach(set->lane.get());
    set->express_allowed = config_.express;
    set->express_bytes = express_limit(*set);
  }
  set->may_be_two_level = may_be_two_level(*set);
  set->tree = ControlTree::make(group.node, config_.control_fanout);
  if (set->tree && !set->tree->children(set->group_rank).empty())
    set->combiner = std::make_unique<Combiner>(CombinerOptions{set->tree, set->group_rank, generation_, id});
  set->tuning = agreed_tuning_;  // not tuning_, which ranks may have learnt of at different moments
  if (set->group_rank == 0) {
    CoordinatorOptions options;
    options.size = set->size();
    options.fusion_bytes = agreed_tuning_.fusion_bytes;
    options.fuse_groups = !config_.disable_group_fusion;
    const bool one_node = set->lane && set->lane->size() == set->size();
    options.part_bytes = one_node ? 0 : config_.partition_bytes;
    options.cache_capacity = static_cast<size_t>(config_.cache_capacity);
    options.generation = generation_;
    options.process_set = id;
    options.world_rank = ranks;
    options.tree = set->tree;
    set->watch = std::make_unique<TimelineWatch>(&timeline_, id, ranks);
    options.watch = set->watch.get();
    options.lateness = &set->lateness;
    set->coordinator = std::make_unique<Coordinator>(options);
    tell_sizes(set.get(), agreed_tuning_);
  }
  return set;
}

// How much the set's coordinator fuses.
void Engine::tell_sizes(ProcessSet* set, const Tuning& tuning) const {
  const bool one_node = set->lane && set->lane->size() == set->size();
  set->coordinator->set_fusion_bytes(tuning.fusion_bytes);
  set->coordinator->set_arena_fusion_bytes(one_node || tuning.ring_from_bytes == 0 ? 0 : tuning.ring_from_bytes - 1);
}

ProcessSet* Engine::find_set(int id) const {
  auto at = sets_.find(id);
  return at == sets_.end() ? nullptr : at->second.get();
}

}  // namespace hc
