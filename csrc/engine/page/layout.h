// The measurements of one rank as they lie in shared memory, 4 KiB. horoclone/live/rank_metrics.py reads them; whoever
// changes this changes kPageMagic, and that file.
//
// Thread: see Page. Every word is an atomic, as other threads and processes read while it is written.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/dtype.h"

namespace hc {

inline constexpr char kPageMagic[9] = "HCPAGE03";
inline constexpr size_t kPageBytes = 4096;
inline constexpr int kLatencyBuckets = 24;
inline constexpr size_t kLateRanks = 8, kAwaitedRanks = 15, kRecentCalls = 24;

using PageWord = std::atomic<uint64_t>;
using PageHalf = std::atomic<uint32_t>;
using PageNumber = std::atomic<int32_t>;

// A text of at most `kBytes` bytes; a shorter one ends with a zero byte.
template <size_t kBytes>
struct PageText {
  PageWord words[kBytes / 8];
  void store(std::string_view text) {
    const size_t bytes = std::min(text.size(), kBytes);
    for (size_t at = 0; at < kBytes && at <= bytes; at += 8) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + at, std::min<size_t>(8, bytes - at));
      words[at / 8].store(word, std::memory_order_relaxed);
    }
  }
};

struct PageOperations {  // of one kind
  PageWord count, bytes, queued_ns, running_ns;
  PageWord histogram[kLatencyBuckets];  // queued and running together: [0, 1), [1, 2), [2, 4), [4, 8), ... us
};

// Moments are nanoseconds since the page was begun (`started_unix_ns`), 0: none.
struct PageLayout {
  PageWord magic;
  PageWord sequence;  // odd while Page's writer is at work

  PageNumber rank, size, local_rank, pid;
  PageWord process_start;      // of /proc/PID/stat, in ticks since the host was booted: another process has another one
  PageWord process_namespace;  // the number of the namespace in which pid means something
  PageWord generation;
  std::atomic<int64_t> started_unix_ns, heartbeat_unix_ns;
  PageHalf state, stalled;
  PageText<64> host, program;

  PageWord step, step_began, step_ns, step_smoothed_ns, step_communication_ns, step_waited_ns;
  PageWord communication_ns, communicates_since, under_way;

  PageWord for_peers_ns, for_transfer_ns;              // of calls that need no handle
  PageWord other_for_peers_ns, other_for_transfer_ns;  // of threads that wait for handles; any thread adds
  PageWord waiting, waiting_since;                     // how many threads; the first of them

  PageWord last_done, last_bytes;
  PageHalf last_kind, last_name_bytes;
  PageText<64> last_name;

  PageText<128> awaited;
  PageHalf awaited_count;
  PageNumber awaited_ranks[kAwaitedRanks];
  struct Late {
    PageNumber rank;
    PageHalf times;
    PageWord ns;
  } late[kLateRanks];

  PageWord unused[4];
  PageOperations operations[kOpCount];

  // The calls that ended last, which readers have to add to the numbers above: `count` of them, which is to be read
  // before them. All are of one kind and have as many bytes, and begin a step each, or none does. Their callers ran
  // them alone: nothing else was under way.
  struct Recent {
    PageWord count, bytes;
    PageHalf kind, begin_steps;
    struct Call {
      PageWord submitted, started, done;  // as they were measured: started may lie before submitted, or after done
    } calls[kRecentCalls];
  } recent;
};

inline constexpr size_t kPageNotesBytes = 24;  // at the end, for whoever passes the page on (launch)
static_assert(sizeof(PageLayout) + kPageNotesBytes <= kPageBytes);
static_assert(offsetof(PageLayout, rank) == 16 && offsetof(PageLayout, step) == 208);
static_assert(offsetof(PageLayout, for_peers_ns) == 280 && offsetof(PageLayout, last_done) == 328);
static_assert(offsetof(PageLayout, awaited) == 416 && offsetof(PageLayout, late) == 608);
static_assert(offsetof(PageLayout, operations) == 768 && PageWord::is_always_lock_free);
static_assert(offsetof(PageLayout, recent) == 3456);

}  // namespace hc
