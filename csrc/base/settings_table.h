// The fields of Config, each with its type and its default, which stands nowhere else: structures that hold a setting
// take it from `defaults`. settings_table.cc has their names, ranges and texts, apart from this file, so that a change
// of a text compiles one file. Includes nothing that is not needed for a default.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/log_level.h"

namespace hc {

inline constexpr size_t kKiB = size_t{1} << 10, kMiB = size_t{1} << 20, kGiB = size_t{1} << 30;
inline constexpr size_t kMaxFlatBytes = 32 * kKiB;  // a rank's flat buffer in shared memory (SharedSegment)

// clang-format off
// X(type, field, default)
#define HC_SETTINGS(X)                        \
  /* fusion and negotiation */                \
  X(size_t, fusion_bytes, 128 * kMiB)         \
  X(bool, disable_group_fusion, false)        \
  X(size_t, partition_bytes, kMiB)            \
  X(double, batching_delay_ms, 0)           \
  X(int64_t, cache_capacity, 8192)            \
  X(bool, dynamic_process_sets, false)        \
  /* shared memory and algorithms */          \
  X(bool, shared_memory, true)                \
  X(size_t, arena_bytes, 64 * kGiB)           \
  X(std::string, topology, "")                \
  X(size_t, segment_bytes, 256 * kKiB)        \
  X(size_t, flat_bytes, 16 * kKiB)            \
  X(bool, bypass, true)                       \
  X(bool, persistent_buckets, true)           \
  X(size_t, block_bytes, 256 * kKiB)          \
  X(size_t, ring_threshold_bytes, 64 * kKiB)  \
  X(int, hierarchical_allreduce, -1)          \
  X(std::string, cpu_operations, "auto")      \
  X(std::string, selection, "")               \
  X(std::string, adasum, "ranks")             \
  X(std::string, simd, "auto")                \
  /* devices */                               \
  X(std::string, gpu_operations, "auto")      \
  X(size_t, gpu_peer_bytes, 32 * kMiB)        \
  X(bool, gpu_register, true)                 \
  X(std::string, cuda_library, "")            \
  X(std::string, nccl_library, "")            \
  X(std::string, nccl_folders, "")            \
  X(std::string, gpu_kernels, "auto")         \
  X(std::string, nvrtc_library, "")           \
  X(std::string, nvrtc_folders, "")           \
  X(std::string, kernel_cache, "")            \
  /* network */                               \
  X(std::string, interfaces, "")              \
  X(std::string, node, "")                    \
  X(std::string, fabric, "")                  \
  X(size_t, socket_buffer_bytes, 0)           \
  X(int, tcp_streams, 0) \
  X(int, control_fanout, 8)                   \
  X(double, keepalive_s, 30)                  \
  /* deadlines */                             \
  X(double, init_timeout_s, 300)              \
  X(double, init_report_s, 10)                \
  X(bool, stall_check_disable, false)         \
  X(double, stall_check_s, 60)                \
  X(double, stall_shutdown_s, 0)              \
  X(double, deadlock_s, 60)                   \
  X(bool, stall_stacks, true)                 \
  X(bool, why, false)                         \
  X(double, liveness_probe_s, 0.25)           \
  X(double, liveness_warn_s, 5)               \
  X(double, liveness_error_s, 2)              \
  /* waiting */                               \
  X(int, spin_pauses, 20)                     \
  X(double, yield_us, 80)                     \
  X(std::string, thread_affinity, "")         \
  /* what is told */                          \
  X(LogLevel, log_level, LogLevel::kWarning)  \
  X(bool, log_hide_time, false)               \
  X(std::string, timeline, "")                \
  X(bool, timeline_mark_cycles, false)        \
  X(bool, timeline_operation_names, false)    \
  X(bool, timeline_all_ranks, false)          \
  X(std::string, recorder_dir, "")            \
  X(bool, autotune, false)                    \
  X(std::string, autotune_log, "")            \
  X(int, autotune_warmup_samples, 3)          \
  X(int, autotune_steps_per_sample, 10)       \
  X(int, autotune_max_samples, 20)            \
  X(double, autotune_noise, 0.8)
// clang-format on

// The defaults alone, by the name of the field.
namespace defaults {
#define HC_DEFAULT(type, field, default_value) inline constexpr auto field = default_value;
HC_SETTINGS(HC_DEFAULT)
#undef HC_DEFAULT
}  // namespace defaults

}  // namespace hc
