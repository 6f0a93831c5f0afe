// Chooses, during init, by which way data goes between nodes: TCP, or MPI where the ranks share one. Thread: the one
// that calls connect; nothing else runs.
#include <algorithm>

#include "engine/engine.h"

namespace hc {
namespace {

constexpr size_t kProbeBytes[] = {64 * kKiB, 256 * kKiB, kMiB};
constexpr double kProbeLimitS = 0.02;  // no larger size is tried once a round took longer than this
constexpr int kRuns = 3;               // of each way and size; the fastest counts, as nothing makes a run too fast
constexpr double kWorthwhile = 0.9;    // TCP is kept unless MPI takes at most this part of its time

}  // namespace

struct Engine::WayTimes {
  double tcp_s = 1e9, mpi_s = 1e9;
};

Status Engine::use_mpi(bool on) {
  enter_gate();
  const Status used = mesh_->use_mpi(on);
  leave_gate();
  return used;
}

// One allreduce after the other, the two ways in turn; then the slowest rank's times on every rank.
Status Engine::time_ways(const MeshMembers& members, int round, size_t bytes, WayTimes* times) {
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
    HC_TRY(barrier(0, name));
    HC_TRY(use_mpi(mpi));
    const TimePoint start = Clock::now();
    const Status outcome = run_in_init(s, members);
    best[mpi] = std::min(best[mpi], seconds_between(start, Clock::now()));
    HC_TRY(use_mpi(false));
    HC_TRY(outcome);
  }
  const int64_t two[] = {2};
  const Submission::Tensor both{best, best, two, DType::kF64};
  const std::string name = text_of("horoclone.probe.", round);
  s.name = name;
  s.tensors = {&both, 1};
  HC_TRY(run_in_init(s, members));
  *times = {best[0], best[1]};
  return Status::ok();
}

// Every rank takes the same decisions: from what all were given, and from times that all have agreed on.
Status Engine::choose_way_between_nodes(const MeshMembers& members) {
  if (!members.mpi || !mesh_->has_mpi()) return Status::ok();
  bool mpi = members.mpi->forced;
  if (!mpi) {
    WayTimes times;
    for (int round = 0; round < static_cast<int>(std::size(kProbeBytes)); ++round) {
      HC_TRY(time_ways(members, round, kProbeBytes[round], &times));
      if (2 * kRuns * std::max(times.tcp_s, times.mpi_s) > kProbeLimitS) break;
    }
    mpi = times.mpi_s < kWorthwhile * times.tcp_s;
    if (mesh_->rank() == 0)
      log_.debug("data between nodes goes ", mpi ? "through MPI" : "over TCP", " (MPI took ", times.mpi_s * 1e3,
                 " ms, TCP ", times.tcp_s * 1e3, " ms)");
  }
  HC_TRY(barrier(0, "horoclone.way"));
  by_mpi_.store(mpi);
  return use_mpi(mpi);
}

}  // namespace hc
