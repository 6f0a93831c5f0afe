#include "engine/start_up.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace hc {
namespace {

constexpr size_t kProbeBytes[] = {64 * kKiB, 256 * kKiB, kMiB};
constexpr double kProbeLimitS = 0.02;  // no larger size is tried once a round took longer than this
constexpr int kRuns = 3;               // of each backend and size; the fastest counts, as nothing makes a run too fast
constexpr double kWorthwhile = 0.9;    // TCP is kept unless MPI takes at most this part of its time

constexpr size_t kFlatSizes[] = {8 * kKiB, 16 * kKiB, 32 * kKiB};  // the last is what a flat buffer holds
constexpr size_t kFlatCandidates[] = {4 * kKiB, 8 * kKiB, 16 * kKiB, 32 * kKiB};
constexpr int kFlatRuns = 3, kFlatRepeats = 8;  // the fastest of so many runs of so many allreduces
constexpr double kFlatBudgetS = 0.03;
constexpr double kFlatGain = 0.05;  // the default stays unless another size saves this much on average

struct FlatTimes {
  double flat_s[std::size(kFlatSizes)], blocked_s[std::size(kFlatSizes)];
};

// How much longer the sizes take with this threshold than each in its faster backend, on average.
double loss_of(size_t threshold, const FlatTimes& t) {
  double sum = 0;
  for (size_t i = 0; i < std::size(kFlatSizes); ++i)
    sum += (kFlatSizes[i] <= threshold ? t.flat_s[i] : t.blocked_s[i]) / std::min(t.flat_s[i], t.blocked_s[i]) - 1;
  return sum / std::size(kFlatSizes);
}

size_t best_threshold(size_t now, const FlatTimes& times) {
  size_t best = now;
  for (const size_t candidate : kFlatCandidates)
    if (loss_of(candidate, times) < loss_of(best, times)) best = candidate;
  return loss_of(now, times) - loss_of(best, times) > kFlatGain ? best : now;
}

// "flat_bytes=8192"
Status parse_selection(const std::string& text, double* flat_bytes) {
  constexpr std::string_view head = "flat_bytes=";
  const char* digits = text.c_str() + std::min(text.size(), head.size());
  char* end = nullptr;
  const unsigned long long value = std::strtoull(digits, &end, 10);
  if (!text.starts_with(head) || end == digits || *end != 0 || value > kMaxFlatBytes)
    return error(Code::kInvalidArgument, "HOROCLONE_SELECTION='", text,
                 "' is not valid: accepted is nothing, fixed, or flat_bytes=N with N from 0 to ", kMaxFlatBytes, ".");
  *flat_bytes = static_cast<double>(value);
  return Status::ok();
}

}  // namespace

Status StartUp::read(const Config& config, Tuning* start, Selected::Source* source) {
  *start = Tuning::of(config);
  *source = Selected::Source::kFixed;
  if (config.selection == "fixed" || config.given.contains("FLAT_BYTES")) return Status::ok();
  *source = Selected::Source::kProbe;
  if (config.selection.empty()) return Status::ok();
  *source = Selected::Source::kGiven;
  double flat_bytes = 0;
  HC_TRY(parse_selection(config.selection, &flat_bytes));
  start->flat_bytes = static_cast<size_t>(flat_bytes);
  return Status::ok();
}

// An operation of init: Ctrl-C and the time limit of init hold.
Status StartUp::call(const Submission& s) {
  const Deadline deadline = Deadline::in(members_.timeout_s);
  return calls_.run(s, [&]() -> Status {
    if (members_.cancelled && members_.cancelled()) return error(Code::kAborted, "init was interrupted");
    if (!deadline.passed()) return Status::ok();
    return error(Code::kTimeout, "init: connected, but not every rank finished its set-up within ", members_.timeout_s,
                 " s");
  });
}

Status StartUp::barrier(std::string_view name) {
  Submission s;
  s.op = Op::kBarrier;
  s.name = name;
  s.will_wait = true;
  return call(s);
}

Status StartUp::agree_on_settings() {
  Tuning start;
  Selected::Source source{};
  HC_TRY(read(context_.config, &start, &source));
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
  HC_TRY(call(s));
  const ProgressThreads::Hold held(progress_);
  Tuning agreed;
  for (int k = 0; k < kKnobCount; ++k) set_value(&agreed, static_cast<Knob>(k), table[k]);
  agreed.adasum_by_node = table[kKnobCount + 1] != 0;
  tuner_.agree(agreed);
  ProcessSet& world = sets_.world();
  world.limit_bypass();
  if (!tuner_.has_plan()) {  // rank 0 may have gone on and changed them already
    world.set_tuning(agreed);
    tuner_.adopt(agreed);
  }
  selected_.source.store(static_cast<Selected::Source>(static_cast<int>(table[kKnobCount])));
  return Status::ok();
}

Status StartUp::select() {
  const ProcessSet& world = sets_.world();
  if (world.members().size() > 1 && world.is_on_one_node() && selected_.source.load() == Selected::Source::kProbe)
    HC_TRY(probe_flat());
  HC_TRY(choose_backend_between_nodes());
  const ProgressThreads::Hold held(progress_);
  tuner_.start({world.is_on_one_node(), world.may_be_two_level()});
  return Status::ok();
}

// kFlatRepeats allreduces, one after the other, on every rank; the time is rank 0's.
Status StartUp::time_repeats(const std::string& name, std::vector<float>* values, double* took_s) {
  const int64_t shape[] = {static_cast<int64_t>(values->size())};
  const Submission::Tensor tensor{values->data(), values->data(), shape, DType::kF32};
  Submission s;
  s.reduce = Reduce::kMax;
  s.name = name;
  s.tensors = {&tensor, 1};
  s.will_wait = true;
  HC_TRY(call(s));
  const TimePoint start = Clock::now();
  for (int repeat = 0; repeat < kFlatRepeats; ++repeat) HC_TRY(call(s));
  *took_s = std::min(*took_s, seconds_between(start, Clock::now()));
  return Status::ok();
}

// Rank 0 changes the threshold as autotune does, with its next plan, and says at the end what it is to be.
Status StartUp::probe_flat() {
  FlatTimes times;
  double verdict[2] = {1, 0};  // go on; the threshold
  const int64_t two[] = {2};
  const Submission::Tensor tensor{verdict, verdict, two, DType::kF64};
  Submission say;
  say.op = Op::kBroadcast;
  say.tensors = {&tensor, 1};
  say.will_wait = true;
  const TimePoint begun = Clock::now();
  const auto set_flat = [this](size_t bytes) {
    if (context_.mesh->rank() != 0) return;
    const ProgressThreads::Hold held(progress_);
    Tuning tuning = tuner_.newest();
    tuning.flat_bytes = bytes;
    tuner_.adopt(tuning);
  };
  const size_t start = tuner_.agreed().flat_bytes;
  const auto allow_bypass = [this](bool allowed) {  // it would hide what is to be compared
    const ProgressThreads::Hold held(progress_);
    sets_.world().allow_bypass(allowed);
  };
  allow_bypass(false);
  for (size_t i = 0; i < std::size(kFlatSizes) && verdict[0] != 0; ++i) {
    std::vector<float> values(kFlatSizes[i] / sizeof(float), 1.0f);
    times.flat_s[i] = times.blocked_s[i] = 1e9;
    for (int run = 0; run < 2 * kFlatRuns; ++run) {
      const bool flat = run % 2 == 0;
      set_flat(flat ? kFlatSizes[i] : 0);
      HC_TRY(time_repeats(text_of("horoclone.probe.flat.", i), &values, flat ? &times.flat_s[i] : &times.blocked_s[i]));
    }
    const bool last = i + 1 == std::size(kFlatSizes);
    const double spent_s = seconds_between(begun, Clock::now());
    verdict[0] = !last && spent_s * (i + 2) / (i + 1) < kFlatBudgetS;
    verdict[1] = static_cast<double>(last ? best_threshold(start, times) : start);
    say.name = "horoclone.probe.flat";
    HC_TRY(call(say));
  }
  allow_bypass(true);
  const ProgressThreads::Hold held(progress_);
  tuner_.agree_on_flat_bytes(static_cast<size_t>(verdict[1]));
  sets_.world().set_tuning(tuner_.agreed());
  tuner_.adopt(tuner_.agreed());
  return Status::ok();
}

struct StartUp::BackendTimes {
  double tcp_s = 1e9, mpi_s = 1e9;
};

Status StartUp::use_mpi(bool on) {
  const ProgressThreads::Hold held(progress_);
  return context_.mesh->use_mpi(on);
}

// One allreduce after the other, the two backends alternately; then the slowest rank's times on every rank.
Status StartUp::time_backends(int round, size_t bytes, BackendTimes* times) {
  std::vector<float> values(bytes / sizeof(float), 1.0f);
  const int64_t shape[] = {static_cast<int64_t>(values.size())};
  const Submission::Tensor tensor{values.data(), values.data(), shape, DType::kF32};
  Submission s;
  s.reduce = Reduce::kMax;
  s.tensors = {&tensor, 1};
  s.will_wait = true;
  double best[2] = {1e9, 1e9};
  for (int run = 0; run < 2 * kRuns; ++run) {
    const bool mpi = run % 2 == 1;
    const std::string name = text_of("horoclone.probe.", round, ".", run);
    s.name = name;
    HC_TRY(barrier(name));
    HC_TRY(use_mpi(mpi));
    const TimePoint start = Clock::now();
    const Status outcome = call(s);
    best[mpi] = std::min(best[mpi], seconds_between(start, Clock::now()));
    HC_TRY(use_mpi(false));
    HC_TRY(outcome);
  }
  const int64_t two[] = {2};
  const Submission::Tensor both{best, best, two, DType::kF64};
  const std::string name = text_of("horoclone.probe.", round);
  s.name = name;
  s.tensors = {&both, 1};
  HC_TRY(call(s));
  *times = {best[0], best[1]};
  return Status::ok();
}

// Every rank takes the same decisions: from what all were given, and from times that all have agreed on.
Status StartUp::choose_backend_between_nodes() {
  if (!members_.mpi || !context_.mesh->has_mpi()) return Status::ok();
  bool mpi = members_.mpi->forced;
  if (!mpi) {
    BackendTimes times;
    for (int round = 0; round < static_cast<int>(std::size(kProbeBytes)); ++round) {
      HC_TRY(time_backends(round, kProbeBytes[round], &times));
      selected_.probes.fetch_add(1);
      if (2 * kRuns * std::max(times.tcp_s, times.mpi_s) > kProbeLimitS) break;
    }
    mpi = times.mpi_s < kWorthwhile * times.tcp_s;
    if (context_.mesh->rank() == 0)
      context_.log.debug("data between nodes goes ", mpi ? "through MPI" : "over TCP", " (MPI took ", times.mpi_s * 1e3,
                         " ms, TCP ", times.tcp_s * 1e3, " ms)");
  }
  HC_TRY(barrier("horoclone.way"));
  selected_.by_mpi.store(mpi);
  return use_mpi(mpi);
}

}  // namespace hc
