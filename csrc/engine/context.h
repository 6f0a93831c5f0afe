// What every part of one engine knows: the settings, the log, the channels to the other ranks, the counters and the
// rank metrics.
//
// Owner: the engine. Thread: any; `config`, `mesh` and `generation` are constant once connect() has returned.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "base/config.h"
#include "base/log.h"
#include "base/status.h"
#include "engine/rank_metrics/rank_metrics.h"
#include "net/mesh.h"

namespace hc {

struct Counters {  // anyone reads
  using Count = std::atomic<uint64_t>;
  Count operations{0}, batches{0}, fused{0}, plans_sent{0}, request_lists_sent{0}, control_frames_sent{0},
      control_bytes_sent{0}, bytes_reduced{0}, persistent{0}, bypassed{0}, sleeps{0}, steps{0}, pings{0};
  Count between_nodes_frames{0}, between_nodes_bytes{0};  // of control, sent and received

  static void add(Count& count, uint64_t n = 1) { count.fetch_add(n, std::memory_order_relaxed); }
  // For what is written under one lock, progress or submit: an instruction that locks the bus costs 5 ns.
  static void add_locked(Count& count, uint64_t n = 1) {
    count.store(count.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
};

struct Context {
  explicit Context(Config settings) : config(std::move(settings)), log(config.log_level, config.log_hide_time) {}

  Config config;
  Logger log;
  std::unique_ptr<Mesh> mesh;
  uint64_t generation = 0;
  Counters counters;
  RankMetrics rank_metrics;
  std::atomic<bool> connected{false};
  std::atomic<bool> failed{false};    // no operation succeeds any more; Intake has the reason
  std::atomic<bool> stopping{false};  // shutdown has said goodbye

  int rank() const { return mesh->rank(); }
  bool has_failed() const { return failed.load(std::memory_order_relaxed); }
  // "rank 3 (host a, pid 4711)"
  std::string me() const { return mesh->describe(mesh->rank()); }
  Status check_connected() const {
    if (connected.load(std::memory_order_acquire)) return Status::ok();
    return error(Code::kNotInitialized, "Horovod has not been initialized; use hvd.init().");
  }
};

}  // namespace hc
