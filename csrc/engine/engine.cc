#include "engine/engine.h"

#include <algorithm>
#include <cstring>

#include "arithmetic/reduce.h"
#include "base/hash.h"
#include "base/nvtx.h"
#include "base/thread.h"
#include "base/topology.h"

namespace hc {
namespace {

// Times its limit shutdown() waits for ranks that go on, and that may never come to what this rank has submitted.
constexpr double kWhileOthersGoOn = 3;

}  // namespace

Engine::Engine(Config config)
    : context_(std::move(config)),
      link_(context_),
      tuner_(context_, notifier_),
      intake_(context_),
      records_(context_, intake_, notifier_),
      completion_(context_.rank_metrics, intake_, timeline_, tuner_, records_, notifier_, progress_lock_),
      backend_(make_gpu_backend(context_, tuner_, link_, intake_)),
      messages_(context_, link_, intake_, completion_, backend_->messages()),
      sets_({context_, link_, intake_, completion_, timeline_, tuner_, *backend_}),
      stalls_(context_, link_, intake_, records_, stacks_),
      deadlocks_(context_, link_, stacks_, DeadlockWatch::Scope::kWorld),
      between_worlds_(context_, link_, stacks_, DeadlockWatch::Scope::kBetweenWorlds),
      peers_(context_, link_),
      clock_(link_),
      loop_({context_, link_, intake_, completion_, records_, *backend_, sets_, messages_, stalls_, deadlocks_,
             between_worlds_, seat_, peers_, clock_, timeline_}),
      progress_(context_, loop_, progress_lock_),
      calls_(context_, intake_, *backend_, sets_, loop_, progress_),
      changes_(context_, intake_, *backend_, sets_, messages_, progress_, calls_) {}

Engine::~Engine() {
  if (context_.connected.load()) (void)shutdown(0);
  progress_.end_thread();
  notifier_.stop();
}

// ---- birth

Result<std::unique_ptr<Engine>> Engine::create(Config config) {
  std::unique_ptr<Engine> engine(new Engine(std::move(config)));
  const Config& c = engine->context_.config;
  if (const std::string wrong = nvtx::attach(); !wrong.empty()) engine->context_.log.warning(wrong);
  MeshOptions options;
  options.shared_memory = c.shared_memory;
  options.arena_bytes = c.arena_bytes;
  options.interfaces = c.interfaces;
  options.socket_buffer_bytes = static_cast<int>(c.socket_buffer_bytes);
  options.tcp_streams = c.tcp_streams;
  options.keepalive_s = c.keepalive_s;
  options.node = c.node;
  options.fabric = c.fabric;
  if (c.topology != "off")
    options.locality = locality_of_cpus(c.topology.empty() ? kSystemFolder : c.topology, allowed_cpus());
  // Who talks to whom, and how. Whatever else the ranks must share is rank 0's (StartUp::agree_on_settings), or agreed
  // on as it is needed.
  options.must_agree = {{"HOROCLONE_SHARED_MEMORY", c.shared_memory ? "1" : "0"},
                        {"HOROCLONE_CONTROL_FANOUT", std::to_string(c.control_fanout)},
                        {"HOROCLONE_FABRIC", c.fabric.empty() ? "off" : c.fabric}};
  if (c.simd != "auto" && !select_simd(c.simd.c_str()))
    return error(Code::kInvalidArgument, "HOROCLONE_SIMD=", c.simd, ": this processor does not have it");
  // Before anybody connects: to the others, a rank that fails later has left, for a reason that its own log has.
  Tuning start;
  Selected::Source source{};
  HC_TRY(StartUp::read(c, &start, &source));
  auto mesh = Mesh::listen(options);
  if (!mesh.is_ok()) return mesh.status();
  engine->context_.mesh = mesh.take();
  return engine;
}

Status Engine::connect(const MeshMembers& members) {
  context_.log.set_rank(members.rank);
  MeshMembers with_log = members;
  with_log.report_after_s = context_.config.init_report_s;
  with_log.say = [this](const std::string& text) { context_.log.warning(text); };
  Mesh& mesh = *context_.mesh;
  HC_TRY(mesh.connect(with_log));
  context_.generation = members.generation;
  link_.attach();
  peers_.start();
  stalls_.start();
  loop_.start();
  std::vector<int> everybody(static_cast<size_t>(mesh.size()));
  for (int r = 0; r < mesh.size(); ++r) everybody[static_cast<size_t>(r)] = r;
  HC_TRY(sets_.add(0, everybody));
  if (sets_.world().is_on_one_node()) backend_->attach(sets_.world().shared_segment());
  begin_page();
  HC_TRY(progress_.start());
  context_.connected.store(true);
  // The coordinator's runs before anybody is let go: it shows what the others announce. They measure its clock for
  // theirs, which it answers as soon as it runs.
  if (members.rank == 0) start_configured_timeline();
  StartUp start(context_, sets_, tuner_, calls_, progress_, members, &selected_);
  HC_TRY(start.agree_on_settings());
  HC_TRY(start.select());
  if (members.rank != 0) start_configured_timeline();
  take_seat(members);
  return Status::ok();
}

void Engine::take_seat(const MeshMembers& members) {
  WorldSeat::World world;
  world.key = hash_of_text(members.job);
  mix(&world.key, members.generation);
  for (const std::string& endpoint : members.endpoints) mix(&world.key, hash_of_text(endpoint));
  world.rank = members.rank;
  for (int r = 0; r < context_.mesh->size(); ++r) world.processes.push_back(context_.mesh->process_of(r));
  world.submitted = &context_.counters.operations;
  world.wake = [this] { progress_.wake_sleepers(); };
  const ProgressThreads::Hold held(progress_);
  seat_.take(std::move(world));
}

// ---- memory and places

Engine::Place Engine::place_in(int process_set) const {
  const auto set = intake_.find(process_set);
  return set ? Place{set->members.size(), set->members.group_rank} : Place{};
}

Result<std::shared_ptr<Memory>> Engine::allocate(size_t bytes) {
  HC_TRY(context_.check_connected());
  const Mesh& mesh = *context_.mesh;
  if (mesh.shares_memory(mesh.rank())) return Memory::make_shared(mesh.arena(mesh.rank()), bytes);
  auto memory = Memory::make_private(bytes);
  if (!memory) return error(Code::kInternal, "no memory for a block of ", bytes, " bytes");
  std::memset(memory->data(), 0, bytes);
  return memory;
}

bool Engine::shares_memory() const {
  const Mesh& mesh = *context_.mesh;
  if (mesh.local_size() != mesh.size()) return false;
  for (int r = 0; r < mesh.size(); ++r)
    if (!mesh.shares_memory(r)) return false;
  return true;
}

// ---- ends

void Engine::abort(const std::string& text) {
  if (!context_.connected.load()) return;
  loop_.abort(text);
  context_.mesh->wake_self();
  // Make sure that it leaves this process even if it ends right after this call.
  const std::function<bool()> is_told = [this] { return !loop_.has_abort() || context_.stopping.load(); };
  progress_.until(is_told, Deadline::in(1.0));
}

void Engine::break_off(int64_t handle, const std::string& text) {
  const Operation* op = intake_.handles().find(handle);
  abort(text_of(context_.me(), " ", text, op ? text_of(" during ", op->describe()) : ""));
}

void Engine::say_ending() {
  const ProgressThreads::Hold held(progress_);
  if (context_.connected.load() && !context_.has_failed()) link_.say_ending();
}

bool Engine::all_are_ending() {
  const ProgressThreads::Hold held(progress_);
  return !context_.connected.load() || context_.has_failed() || link_.all_are_ending();
}

// Waits until every operation of this rank has ended. As long as one of the others goes on, it may still come to them.
// When all are ending, nobody submits any more, and what has not ended `timeout_s` later never will.
void Engine::finish_operations(double timeout_s) {
  const std::function<bool()> idle = [this] {
    return context_.has_failed() || !context_.connected.load() ||
           (loop_.outstanding() == 0 && !intake_.has_news() && !loop_.in_flight());
  };
  if (timeout_s > 0) {
    say_ending();
    const std::function<bool()> idle_or_last = [&] { return idle() || link_.all_are_ending(); };
    (void)progress_.until_under_lock(idle_or_last, Deadline::in(kWhileOthersGoOn * timeout_s));
  }
  (void)progress_.until_under_lock(idle, Deadline::in(timeout_s));
}

Status Engine::shutdown(double timeout_s) {
  if (!context_.connected.load()) return Status::ok();
  // What the backend has launched waits there for ranks that are slower: they need this one until they have launched
  // it, too.
  loop_.watch_flights();
  {
    const ProgressThreads::Hold held(progress_);
    backend_->stop_ahead();
  }
  finish_operations(timeout_s);
  progress_.lock();
  if (!context_.connected.load()) {  // another thread has ended it meanwhile
    progress_.unlock();
    return Status::ok();
  }
  if (loop_.outstanding() > 0)
    loop_.fail(Status(Code::kAborted,
                      text_of(context_.me(), " shut down while ", loop_.outstanding(),
                              " of its operations were still waiting for other ranks"),
                      context_.rank()));
  intake_.refuse(error(Code::kNotInitialized, "Horovod has been shut down; use hvd.init() to start it again."));
  seat_.leave();
  for (ProcessSet* set : sets_.mine()) set->leave_shared_rounds();
  link_.say_goodbye(3.0);
  context_.stopping.store(true);
  context_.connected.store(false);
  progress_.end_thread();
  loop_.fail_latecomers();
  context_.rank_metrics.end();
  for (ProcessSet* set : sets_.mine()) set->close();
  backend_->close();
  progress_.unlock();
  notifier_.stop();
  timeline_.stop();
  timeline_.stop_listening();
  context_.mesh->close();
  return Status::ok();
}

void Engine::after_fork_child() {
  context_.connected.store(false);
  seat_.forget();
  context_.rank_metrics.forget();
  progress_.forget();
  notifier_.forget();
  timeline_.forget();
  context_.mesh->after_fork_child();
}

}  // namespace hc
