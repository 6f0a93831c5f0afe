// The measurements of one rank as they lie in shared memory, 4 KiB. horoclone/live/rank_metrics.py reads them; whoever
// changes this changes kRankMetricsMagic, and that file.
//
// Thread: see RankMetrics. Every word is an atomic, as other threads and processes read while it is written.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/dtype.h"

namespace hc {

inline constexpr char kRankMetricsMagic[9] = "HCPAGE03";
inline constexpr size_t kRankMetricsBytes = 4096;
inline constexpr int kLatencyBuckets = 24;
inline constexpr size_t kLateRanks = 8, kAwaitedRanks = 15, kRecentCalls = 24;

using MetricWord = std::atomic<uint64_t>;
using MetricHalf = std::atomic<uint32_t>;
using MetricNumber = std::atomic<int32_t>;

// A text of at most `kBytes` bytes; a shorter one ends with a zero byte.
template <size_t kBytes>
struct MetricText {
  MetricWord words[kBytes / 8];
  void store(std::string_view text) {
    const size_t bytes = std::min(text.size(), kBytes);
    for (size_t at = 0; at < kBytes && at <= bytes; at += 8) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + at, std::min<size_t>(8, bytes - at));
      words[at / 8].store(word, std::memory_order_relaxed);
    }
  }
};

struct MetricOperations {  // of one kind
  MetricWord count, bytes, queued_ns, running_ns;
  MetricWord histogram[kLatencyBuckets];  // queued and running together: [0, 1), [1, 2), [2, 4), [4, 8), ... us
};

// Moments are nanoseconds since the metrics were begun (`started_unix_ns`), 0: none.
struct RankMetricsLayout {
  MetricWord magic;
  MetricWord sequence;  // odd while RankMetrics's writer is at work

  MetricNumber rank, size, local_rank, pid;
  MetricWord process_start;  // of /proc/PID/stat, in ticks since the host was booted: another process has another one
  MetricWord process_namespace;  // the number of the namespace in which pid means something
  MetricWord generation;
  std::atomic<int64_t> started_unix_ns, heartbeat_unix_ns;
  MetricHalf state, stalled;
  MetricText<64> host, program;

  MetricWord step, step_began, step_ns, step_smoothed_ns, step_communication_ns, step_waited_ns;
  MetricWord communication_ns, communicates_since, under_way;

  MetricWord for_peers_ns, for_transfer_ns;              // of calls that need no handle
  MetricWord other_for_peers_ns, other_for_transfer_ns;  // of threads that wait for handles; any thread adds
  MetricWord waiting, waiting_since;                     // how many threads; the first of them

  MetricWord last_done, last_bytes;
  MetricHalf last_kind, last_name_bytes;
  MetricText<64> last_name;

  MetricText<128> awaited;
  MetricHalf awaited_count;
  MetricNumber awaited_ranks[kAwaitedRanks];
  struct Late {
    MetricNumber rank;
    MetricHalf times;
    MetricWord ns;
  } late[kLateRanks];

  // Of an elastic job, written by horoclone/elastic/recovery.py, since `elastic_began` (Unix nanoseconds, 0: never).
  MetricWord elastic_began;
  MetricHalf redone_ms, recovering_ms, joining_ms, saving_ms, stalled_before_ms;
  MetricHalf stalled_ms;  // by the core: stalls of this life that are over
  MetricOperations operations[kOpCount];

  // The calls that ended last, which readers have to add to the numbers above: `count` of them, which is to be read
  // before them. All are of one kind and have as many bytes, and begin a step each, or none does. Their callers ran
  // them alone: nothing else was under way.
  struct Recent {
    MetricWord count, bytes;
    MetricHalf kind, begin_steps;
    struct Call {
      MetricWord submitted, started, done;  // as they were measured: started may lie before submitted, or after done
    } calls[kRecentCalls];
  } recent;
};

inline constexpr size_t kRankMetricsNotesBytes = 24;  // at the end, for whoever passes the metrics on (launch)
static_assert(sizeof(RankMetricsLayout) + kRankMetricsNotesBytes <= kRankMetricsBytes);
static_assert(offsetof(RankMetricsLayout, rank) == 16 && offsetof(RankMetricsLayout, step) == 208);
static_assert(offsetof(RankMetricsLayout, for_peers_ns) == 280 && offsetof(RankMetricsLayout, last_done) == 328);
static_assert(offsetof(RankMetricsLayout, awaited) == 416 && offsetof(RankMetricsLayout, late) == 608);
static_assert(offsetof(RankMetricsLayout, elastic_began) == 736 && offsetof(RankMetricsLayout, stalled_ms) == 764);
static_assert(offsetof(RankMetricsLayout, operations) == 768 && MetricWord::is_always_lock_free);
static_assert(offsetof(RankMetricsLayout, recent) == 3456);

}  // namespace hc
