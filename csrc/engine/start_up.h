// The settings on which all ranks agree at init, and the measurements by which init chooses between settings that give
// the same bits: up to which size shared memory uses the flat path, and whether data between nodes travels over TCP or
// MPI.
//
// Thread: the one that calls connect; no operation of the user runs yet. Owner: Engine::connect, during the call.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "engine/calls.h"

namespace hc {

// What init has chosen. Written by it, read by any thread.
struct Selected {
  enum class Source { kFixed, kGiven, kProbe };
  std::atomic<Source> source{Source::kFixed};  // of the thresholds that init may measure
  std::atomic<bool> by_mpi{false};             // data between nodes
  std::atomic<int> probes{0};  // sizes at which both backends between nodes were tried; 0: the choice was given
};

class StartUp {
 public:
  StartUp(Context& context, SetTable& sets, Tuner& tuner, Calls& calls, ProgressThreads& progress,
          const MeshMembers& members, Selected* selected)
      : context_(context),
        sets_(sets),
        tuner_(tuner),
        calls_(calls),
        progress_(progress),
        members_(members),
        selected_(*selected) {}

  // Reads the thresholds that init may measure, and where their values come from on this rank. InvalidArgument for a
  // malformed setting.
  static Status read(const Config& config, Tuning* start, Selected::Source* source);
  // Rank 0's settings win: algorithms and sizes are part of the protocol. This is also the first operation: no rank
  // uses the shared memory before every rank has prepared its own.
  Status agree_on_settings();
  // Measures; then autotune may start.
  Status select();

 private:
  struct BackendTimes;
  Status call(const Submission& s);
  Status barrier(std::string_view name);
  Status probe_flat();
  Status time_repeats(const std::string& name, std::vector<float>* values, double* took_s);
  Status use_mpi(bool on);
  Status choose_backend_between_nodes();
  Status time_backends(int round, size_t bytes, BackendTimes* times);

  Context& context_;
  SetTable& sets_;
  Tuner& tuner_;
  Calls& calls_;
  ProgressThreads& progress_;
  const MeshMembers& members_;
  Selected& selected_;
};

}  // namespace hc
