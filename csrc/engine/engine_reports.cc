// The engine's reports about itself: counters, a description for people, the timeline.
#include <unistd.h>

#include <algorithm>
#include <cctype>

#include "engine/engine.h"

namespace hc {

namespace {

constexpr int kBeforeLaterGenerations = 60;  // seconds

// timeline.json of rank 3 -> timeline.rank3.json
std::string path_of_rank(const std::string& path, int rank) {
  if (rank == 0) return path;
  const size_t slash = path.rfind('/'), dot = path.rfind('.');
  const bool has_ending = dot != std::string::npos && (slash == std::string::npos || dot > slash + 1) && dot > 0;
  const size_t at = has_ending ? dot : path.size();
  return text_of(path.substr(0, at), ".rank", rank, path.substr(at));
}

bool is_dynamic(const std::string& setting) {
  std::string word = setting;
  for (char& c : word) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return word == "DYNAMIC";
}

const char* name_of(Selected::Source source) {
  switch (source) {
    case Selected::Source::kFixed:
      return "fixed";
    case Selected::Source::kGiven:
      return "given";
    case Selected::Source::kProbe:
      return "probe";
  }
  return "";
}

}  // namespace

// ---- timeline

void Engine::start_configured_timeline() {
  const Config& config = context_.config;
  if (config.timeline.empty() || is_dynamic(config.timeline)) return;
  if (Status begun = start_timeline(config.timeline, config.timeline_mark_cycles); !begun.is_ok())
    context_.log.warning(begun.text(), "; the job runs without it");
}

Status Engine::start_timeline(const std::string& path, bool mark_cycles) {
  HC_TRY(context_.check_connected());
  const Config& config = context_.config;
  const Mesh& mesh = *context_.mesh;
  if (config.timeline.empty())
    return error(
        Code::kInvalidArgument,
        "start_timeline: set HOROVOD_TIMELINE=DYNAMIC before the job starts (or a path, to trace from init on)");
  if (path.empty()) return error(Code::kInvalidArgument, "start_timeline: the path of the file is empty");
  if (mesh.rank() != 0 && !config.timeline_all_ranks) return Status::ok();
  Trace::Origin origin;
  origin.rank = mesh.rank();
  origin.size = mesh.size();
  origin.all_ranks = config.timeline_all_ranks;
  origin.operation_names = config.timeline_operation_names;
  if (origin.all_ranks && mesh.rank() != 0 && !mesh.shares_memory(0)) {
    measure_clock();
    origin.clock_ahead_s = clock_.ahead_s();
    origin.clock_error_s = clock_.error_s();
  }
  // A later generation leaves room for what began it: timeline_span() tells about it when it is over.
  const std::chrono::seconds before{context_.generation > 1 ? kBeforeLaterGenerations : 0};
  origin.start = Clock::now() - before;
  origin.epoch_micros = std::chrono::duration_cast<std::chrono::microseconds>(
                            std::chrono::system_clock::now().time_since_epoch() - before)
                            .count();
  return timeline_.start(origin.all_ranks ? path_of_rank(path, mesh.rank()) : path, origin, mark_cycles,
                         [this](const std::string& text) { context_.log.warning(text); });
}

// Rank 0's clock against this one's.
void Engine::measure_clock() {
  {
    const ProgressThreads::Hold held(progress_);
    if (Status asked = clock_.begin(); !asked.is_ok()) loop_.fail(asked);
  }
  const std::function<bool()> measured = [this] { return clock_.is_over() || context_.has_failed(); };
  (void)progress_.until_under_lock(measured, Deadline::in(ClockOffset::kLimitS));
  const ProgressThreads::Hold held(progress_);
  clock_.end();
}

void Engine::timeline_span(const std::string& name, double from_s, double seconds, const std::string& args) {
  const TimePoint from{std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(from_s))};
  if (timeline_.on()) timeline_.span(name, from, seconds, args);
}

Status Engine::listen_to_timeline() {
  HC_TRY(context_.check_connected());
  timeline_.listen(context_.rank());
  return Status::ok();
}

Status Engine::stop_timeline() {
  HC_TRY(context_.check_connected());
  if (context_.config.timeline.empty())
    return error(Code::kInvalidArgument,
                 "stop_timeline: HOROVOD_TIMELINE was not set, so there is no timeline to stop");
  timeline_.stop();
  return Status::ok();
}

// ---- the rank metrics

void Engine::begin_page() {
  char host[256] = "";
  (void)::gethostname(host, sizeof host - 1);
  const Mesh& mesh = *context_.mesh;
  context_.rank_metrics.begin({mesh.rank(), mesh.size(), mesh.local_rank(), context_.generation, host});
}

// ---- state

std::string Engine::describe() {
  if (!context_.connected.load()) return "not connected";
  const ProgressThreads::Hold held(progress_);
  // Whoever asks again and again holds the lock nearly all the time: the work goes on here, too.
  if (!context_.has_failed() && !context_.stopping.load()) (void)loop_.step();
  std::string text = text_of(context_.me(), " of ", context_.mesh->size());
  if (context_.has_failed()) text += text_of(", failed: ", intake_.failure().text());
  const TimePoint now = Clock::now();
  for (const auto& [id, set] : sets_.all()) text += set->describe(now);
  for (const Operation* op : messages_.operations())
    text += text_of("\n  ", op->describe(), " for ", seconds_between(op->submitted, now), " s");
  progress_.rest();
  return text;
}

std::string Engine::counters_json() const {
  const Counters& c = context_.counters;
  const auto get = [](const Counters::Count& count) { return count.load(std::memory_order_relaxed); };
  return text_of(
      "{\"operations\":", get(c.operations), ",\"batches\":", get(c.batches), ",\"fused\":", get(c.fused),
      ",\"plans_sent\":", get(c.plans_sent), ",\"request_lists_sent\":", get(c.request_lists_sent),
      ",\"control_frames_sent\":", get(c.control_frames_sent), ",\"control_bytes_sent\":", get(c.control_bytes_sent),
      ",\"between_nodes_frames\":", get(c.between_nodes_frames),
      ",\"between_nodes_bytes\":", get(c.between_nodes_bytes), ",\"bytes\":", get(c.bytes_reduced),
      ",\"persistent\":", get(c.persistent), ",\"bypassed\":", get(c.bypassed), ",\"sleeps\":", get(c.sleeps),
      ",\"steps\":", get(c.steps), ",\"pings\":", get(c.pings), ",\"live_handles\":", intake_.handles().live(),
      ",\"last_ready\":{", intake_.stragglers_json(), "},\"autotune\":", tuner_.json(), ",\"between_nodes\":\"",
      selected_.by_mpi.load()       ? "mpi"
      : context_.mesh->has_fabric() ? "libfabric"
                                    : "tcp",
      "\",\"way_probes\":", selected_.probes.load(), ",\"selection\":\"", name_of(selected_.source.load()),
      "\",\"gpu\":", backend_->json(), ",\"mesh\":", context_.mesh->counters_json(), "}");
}

}  // namespace hc
