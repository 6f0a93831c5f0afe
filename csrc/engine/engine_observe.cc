// What the engine tells about itself while it runs and after it failed: the timeline, the flight recorder, counters.
// Stall reports are in engine_stall.cc, texts for humans in engine_state.cc.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "agreement/frames.h"
#include "engine/engine.h"

namespace hc {

namespace {

constexpr int kClockRounds = 16;        // the fastest of them has the smallest error
constexpr double kClockLimitS = 2.0;    // then the offset is taken as it is
constexpr double kMismatchSaveS = 1.0;  // a program that catches mismatches may make many

int64_t nanoseconds_of(TimePoint at) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}

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

// Complete or not there: a reader may come at any moment.
Status write_whole(const std::string& path, const std::string& text) {
  const std::string unfinished = text_of(path, ".", ::getpid(), ".part");
  const int file = ::open(unfinished.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  bool good = file >= 0;
  for (size_t at = 0; good && at < text.size();) {
    const ssize_t n = ::write(file, text.data() + at, text.size() - at);
    if (n > 0) at += static_cast<size_t>(n);
    good = n > 0 || (n < 0 && errno == EINTR);
  }
  if (file >= 0) good = ::close(file) == 0 && good;
  if (good && std::rename(unfinished.c_str(), path.c_str()) == 0) return Status::ok();
  const int why = errno;
  if (file >= 0) ::unlink(unfinished.c_str());
  return error(Code::kInvalidArgument, "'", path, "' cannot be written: ", std::strerror(why));
}

}  // namespace

// ---- timeline

void Engine::start_configured_timeline() {
  if (config_.timeline.empty() || is_dynamic(config_.timeline)) return;
  if (Status begun = start_timeline(config_.timeline, config_.timeline_mark_cycles); !begun.is_ok())
    log_.warning(begun.text(), "; the job runs without it");
}

Status Engine::start_timeline(const std::string& path, bool mark_cycles) {
  if (!connected_.load()) return error(Code::kNotInitialized, "Horovod has not been initialized; use hvd.init().");
  if (config_.timeline.empty())
    return error(
        Code::kInvalidArgument,
        "start_timeline: set HOROVOD_TIMELINE=DYNAMIC before the job starts (or a path, to trace from init on)");
  if (path.empty()) return error(Code::kInvalidArgument, "start_timeline: the path of the file is empty");
  if (mesh_->rank() != 0 && !config_.timeline_all_ranks) return Status::ok();
  Trace::Origin origin;
  origin.rank = mesh_->rank();
  origin.size = mesh_->size();
  origin.all_ranks = config_.timeline_all_ranks;
  origin.operation_names = config_.timeline_operation_names;
  if (origin.all_ranks && mesh_->rank() != 0 && !mesh_->shares_memory(0)) measure_clock(&origin);
  origin.start = Clock::now();
  origin.epoch_micros =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  return timeline_.start(origin.all_ranks ? path_of_rank(path, mesh_->rank()) : path, origin, mark_cycles,
                         [this](const std::string& text) { log_.warning(text); });
}

Status Engine::stop_timeline() {
  if (!connected_.load()) return error(Code::kNotInitialized, "Horovod has not been initialized; use hvd.init().");
  if (config_.timeline.empty())
    return error(Code::kInvalidArgument,
                 "stop_timeline: HOROVOD_TIMELINE was not set, so there is no timeline to stop");
  timeline_.stop();
  return Status::ok();
}

// How far rank 0's monotonic clock is ahead of mine: it answers with its time, and half a round trip is the error.
void Engine::measure_clock(Trace::Origin* origin) {
  {
    const GateHold held(this);
    clock_ = {};
    clock_.rounds_left = kClockRounds;
    ask_clock();
  }
  (void)drive_until([this] { return clock_.rounds_left == 0 || failed_.load(); }, false, Deadline::in(kClockLimitS));
  const GateHold held(this);
  clock_.rounds_left = 0;
  origin->clock_ahead_s = clock_.ahead_s;
  origin->clock_error_s = clock_.error_s;
}

void Engine::ask_clock() {
  frame_.clear();
  frame_.put(FrameKind::kClockAsk);
  frame_.put(nanoseconds_of(Clock::now()));
  if (Status sent = send_frame(0, true); !sent.is_ok()) fail_everything(sent);
}

Status Engine::take_clock_frame(FrameKind kind, int from, Reader* in) {
  const TimePoint now = Clock::now();
  const auto asked_ns = in->get<int64_t>();
  if (kind == FrameKind::kClockAsk) {
    frame_.clear();
    frame_.put(FrameKind::kClockAnswer);
    frame_.put(asked_ns);
    frame_.put(nanoseconds_of(now));
    return send_frame(from, true);
  }
  const auto theirs_ns = in->get<int64_t>();
  if (from != 0 || clock_.rounds_left == 0 || !in->ok()) return Status::ok();
  const double trip_s = static_cast<double>(nanoseconds_of(now) - asked_ns) * 1e-9;
  if (trip_s / 2 < clock_.error_s) {
    clock_.error_s = trip_s / 2;
    clock_.ahead_s = static_cast<double>(theirs_ns - asked_ns) * 1e-9 - trip_s / 2;
  }
  if (--clock_.rounds_left > 0) ask_clock();
  return Status::ok();
}

// ---- control frames of reports and clocks

Status Engine::take_report_frame(FrameKind kind, int from, Reader* in) {
  switch (kind) {
    case FrameKind::kInquiry:
      return answer_inquiry(from, in->get<uint8_t>() != 0);
    case FrameKind::kTestimony:
      inquiry_.answer(from, in->get_text());
      return Status::ok();
    case FrameKind::kClockAsk:
    case FrameKind::kClockAnswer:
      return take_clock_frame(kind, from, in);
    default:
      return error(Code::kInternal, "unknown control frame ", static_cast<int>(kind));
  }
}

// ---- flight recorder

std::string Engine::flight_record(const std::string& reason) {
  char host[256] = "";
  (void)::gethostname(host, sizeof host - 1);
  const auto epoch = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  char stamp[40];
  std::snprintf(stamp, sizeof stamp, "%.6f", epoch);
  std::lock_guard lock(submit_mu_);
  std::string sets;
  for (const auto& [id, set] : sets_) {
    sets += text_of(sets.empty() ? "" : ",", "\"", id, "\":[");
    for (size_t i = 0; i < set->ranks.size(); ++i) sets += text_of(i ? "," : "", set->ranks[i]);
    sets += "]";
  }
  return text_of("{\"version\":1,\"rank\":", mesh_->rank(), ",\"size\":", mesh_->size(),
                 ",\"generation\":", generation_, ",\"host\":", json_text(host), ",\"pid\":", ::getpid(),
                 ",\"time\":", stamp, ",\"reason\":", json_text(reason), ",\"process_sets\":{", sets,
                 "},\"submitted\":", recorder_.submissions(), ",\"operations\":", recorder_.json(), "}\n");
}

// On hc-notify: neither a slow disk nor the formatting holds up the engine.
void Engine::save_record(const std::string& reason) {
  if (config_.recorder_dir.empty()) return;
  notifier_.push([this, reason] {
    (void)::mkdir(config_.recorder_dir.c_str(), 0755);  // it may be there
    const std::string path = text_of(config_.recorder_dir, "/horoclone-rank", mesh_->rank(), ".json");
    if (Status saved = write_whole(path, flight_record(reason)); !saved.is_ok())
      log_.warning("HOROCLONE_RECORDER_DIR: ", saved.text());
  });
}

// What every finished operation leaves behind.
void Engine::note_done(const Operation& op, const Status& status) {
  recorder_.done(op.record, status.code(), Recorder::now());
  if (tuner_ && status.is_ok()) tune(op);
  if (timeline_.on() && !is_message(op.signature().op)) timeline_.done(op, status);
  if (status.code() != Code::kMismatch || config_.recorder_dir.empty()) return;
  const TimePoint now = Clock::now();
  if (seconds_between(last_mismatch_save_, now) < kMismatchSaveS) return;
  last_mismatch_save_ = now;
  save_record(status.text());
}

// The set's runner has just got its batch.
void Engine::note_batch(const ProcessSet& set, TimePoint planned) {
  const uint64_t now = Recorder::now();
  for (const Operation* op : set.runner->operations()) {
    if (!op) continue;
    recorder_.agreed(*op, now);
    if (!timeline_.on()) continue;
    const TimePoint at = planned == TimePoint{} ? Clock::now() : planned;
    if (!set.coordinator) timeline_.agreed(Timeline::key_of(*op), at);  // the coordinator showed it when it decided
    timeline_.started(*op, "queue", false, at);
  }
}

void Engine::note_arrival(ProcessSet& set, TimePoint submitted, const FrozenCollective::Arrival& arrival) {
  if (arrival.last < 0)
    set.lateness.last_was(set.group_rank, 0);  // nobody was missing when this rank came
  else
    set.lateness.last_was(arrival.last, std::max(0.0, seconds_between(submitted, arrival.at)));
}

// A bucket of a frozen plan has run: its ranks' arrival was the agreement.
void Engine::note_frozen(ProcessSet& set, const Operation& op, const FrozenCollective& run) {
  const FrozenCollective::Arrival arrival = run.arrival();
  note_arrival(set, op.submitted, arrival);
  if (!timeline_.on()) return;
  const TimePoint at = arrival.last < 0 ? op.submitted : arrival.at;
  timeline_.agreed(Timeline::key_of(op), at);
  timeline_.started(op, run.algorithm(), true, at);
}

const char* Engine::selected_by() const {
  const SelectionSource source = selection_source_.load();
  return source == SelectionSource::kProbe ? "probe" : source == SelectionSource::kGiven ? "given" : "fixed";
}

std::string Engine::counters_json() const {
  const auto get = [](const std::atomic<uint64_t>& c) { return c.load(std::memory_order_relaxed); };
  std::string lateness;
  {
    std::lock_guard lock(submit_mu_);
    for (const auto& [id, set] : sets_)
      if (set->group_rank >= 0)
        lateness += text_of(lateness.empty() ? "" : ",", "\"", id, "\":", set->lateness.json(set->ranks));
  }
  std::string autotune;
  {
    std::lock_guard lock(tuning_mu_);
    autotune = to_json(tuning_shown_);
  }
  return text_of("{\"operations\":", get(counters_.operations), ",\"batches\":", get(counters_.batches),
                 ",\"fused\":", get(counters_.fused), ",\"plans_sent\":", get(counters_.plans_sent),
                 ",\"ballots_sent\":", get(counters_.ballots_sent),
                 ",\"control_frames_sent\":", get(counters_.control_frames_sent),
                 ",\"control_bytes_sent\":", get(counters_.control_bytes_sent),
                 ",\"between_nodes_frames\":", get(counters_.between_nodes_frames),
                 ",\"between_nodes_bytes\":", get(counters_.between_nodes_bytes),
                 ",\"bytes\":", get(counters_.bytes_reduced), ",\"frozen\":", get(counters_.frozen),
                 ",\"express\":", get(counters_.express), ",\"sleeps\":", get(counters_.sleeps),
                 ",\"steps\":", get(counters_.steps), ",\"pings\":", get(counters_.pings),
                 ",\"live_handles\":", handles_.live(), ",\"last_ready\":{", lateness, "},\"autotune\":", autotune,
                 ",\"between_nodes\":\"", by_mpi_.load() ? "mpi" : "tcp", "\",\"way_probes\":", way_probes_.load(),
                 ",\"selection\":\"", selected_by(), "\",\"mesh\":", mesh_->counters_json(), "}");
}

}  // namespace hc
