// Writes this rank's measurements into its block of metrics (layout.h), in memory that other processes map, or in this
// process's own until share(). Without a lock or a system call where operations end, and without a reading of a clock
// that they do not need anyway. What a loop of short calls measures is added up for several calls together.
//
// Thread: the thread that makes progress, or one that holds the progress lock: one at a time; waits() and its object
// from any thread. Readers see a whole update or none (sequence, and copy()). Owner: Context.
#pragma once

#include <bit>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "engine/rank_metrics/layout.h"

namespace hc {

class RankMetrics {
 public:
  RankMetrics();
  ~RankMetrics() { forget(); }
  RankMetrics(const RankMetrics&) = delete;
  RankMetrics& operator=(const RankMetrics&) = delete;

  // ---- slow: once in a life, or once a second

  // From now on the metrics are what lies at `offset` (a multiple of 4 KiB) of this file, which has it already and
  // stays the caller's; program: what runs. Before begin(). InvalidArgument where it cannot be mapped.
  Status share(int fd, size_t offset, std::string_view program);
  struct Identity {
    int rank, size, local_rank;
    uint64_t generation;
    std::string host;
  };
  // The ranks are connected: everything is counted from here.
  void begin(const Identity& identity);
  // The runtime is shut down.
  void end();
  // In a forked child, which must not write into its parent's metrics.
  void forget();
  struct Late {
    int rank;
    uint64_t times, ns;
  };
  // A sign of life, with the ranks that were waited for longest.
  void beat(const std::vector<Late>& late);
  bool is_beat_due(uint64_t now) const { return now > next_beat_; }
  // This rank waits for `what`, for too long; ranks: for which, where that is known.
  void stall(std::string_view what, const std::vector<int>& ranks);
  bool is_stalled() const { return memory_->stalled.load(std::memory_order_relaxed) != 0; }
  void go_on();
  // All of them at one moment; any thread. After a thousand attempts, each met by a write: as it is.
  std::string copy() const;

  // ---- moments, in nanoseconds since the object was made, never 0

  uint64_t at(uint64_t ticks) const {
    const auto elapsed = static_cast<int64_t>(ticks - first_ticks_);
    if (elapsed <= 0) return 1;
    const auto ns = static_cast<unsigned __int128>(elapsed) * ns_per_tick_.load(std::memory_order_relaxed);
    return 1 + static_cast<uint64_t>(ns >> kFraction);
  }
  uint64_t at(TimePoint time) const {
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(time - first_time_).count();
    return ns <= 0 ? 1 : 1 + static_cast<uint64_t>(ns);
  }
  uint64_t now() const { return at(processor_ticks()); }

  // ---- operations

  // An operation is under way from now on.
  void began(uint64_t submitted) {
    loop_ = nullptr;
    if (under_way_++ == 0) set(memory_->communicates_since, submitted);
    set(memory_->under_way, under_way_);
  }
  struct Ended {
    Op op;
    uint64_t bytes;
    uint64_t submitted, started, now;  // started 0: its data never moved
    std::string_view name;
    uint64_t* seen = nullptr;  // see repeats(); null: it has no name, or none that is remembered
  };
  // One that began() was called for.
  [[gnu::always_inline]] void ended(const Ended& e) {
    const Update update(*this);
    count(e);
    if (--under_way_ == 0) {
      add(memory_->communication_ns, since(memory_->communicates_since.load(std::memory_order_relaxed), e.now));
      set(memory_->communicates_since, 0);
    }
    set(memory_->under_way, under_way_);
  }
  // One that its caller ran by itself, alone, without began() and repeats(). started: when all ranks were there.
  // Of calls that are alike and follow one another without a pause only the moments are noted, in
  // RankMetricsLayout::recent, where readers find them; many are added up together. like, not null: is the same for
  // calls of one name, kind and size; what it stands for changes only with a call of began() in between.
  [[gnu::always_inline]] void ran(const Ended& e, const void* like) {
    const bool goes_on = like == loop_ && since(last_done_, e.submitted) < kShortNs;
    last_done_ = e.now;
    if (!goes_on) [[unlikely]]
      return ran_outside_of_a_loop(e, like);
    if (kept_ == kRecentCalls) [[unlikely]]
      add_up();
    RankMetricsLayout::Recent& recent = memory_->recent;
    RankMetricsLayout::Recent::Call& call = recent.calls[kept_];
    set(call.submitted, e.submitted);
    set(call.started, e.started);
    set(call.done, e.now);
    recent.count.store(++kept_, std::memory_order_release);
  }
  // Something that has a name was submitted. What comes again and again tells one step from the next: seen is its own
  // place to note in which step it was seen last (0: never), declared: it is a bucket of an optimizer, which counts for
  // more than a name. True where it begins a step, whose number steps() is then.
  bool repeats(uint64_t* seen, bool declared, uint64_t submitted) {
    end_loop();
    if (*seen == 0 && seen == named_) named_ = nullptr;  // a new name, where one that was forgotten had its place
    const bool begins = is_step(*seen, seen, declared);
    if (begins) begin_step(seen, declared, submitted);
    *seen = steps_ + 1;
    return begins;
  }
  uint64_t steps() const { return steps_; }  // that have begun

  // A thread of the user waits for an operation for as long as this lives. Readers know of it from tell() on: a wait
  // that is over in a moment is only added up.
  class Waiting {
   public:
    Waiting(RankMetrics& rank_metrics, TimePoint from) : rank_metrics_(rank_metrics), from_(rank_metrics.at(from)) {}
    void tell() {
      if (std::exchange(has_told_, true)) return;
      if (rank_metrics_.memory_->waiting.fetch_add(1, std::memory_order_relaxed) == 0)
        set(rank_metrics_.memory_->waiting_since, from_);
    }
    // started: when the operation's data began to move, 0: not yet; ended: when it was done, 0: not yet, or unknown.
    void over(uint64_t started, uint64_t ended) {
      const uint64_t now = std::max(from_, has_told_ || ended == 0 ? rank_metrics_.now() : ended);
      const uint64_t split = started == 0 ? now : std::clamp(started, from_, now);
      if (split > from_) rank_metrics_.memory_->other_for_peers_ns.fetch_add(split - from_, std::memory_order_relaxed);
      if (now > split) rank_metrics_.memory_->other_for_transfer_ns.fetch_add(now - split, std::memory_order_relaxed);
    }
    ~Waiting() {
      if (has_told_) rank_metrics_.memory_->waiting.fetch_sub(1, std::memory_order_relaxed);
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    RankMetrics& rank_metrics_;
    const uint64_t from_;
    bool has_told_ = false;
  };

 private:
  static constexpr uint64_t kShortSteps = 16, kShortNs = 3000;
  static constexpr int kFraction = 48;  // bits of ns_per_tick_ behind the point
  // Makes the sequence odd for as long as it lives. What ran() has kept is added up before.
  class Update {
   public:
    explicit Update(RankMetrics& rank_metrics) : sequence_(rank_metrics.memory_->sequence) {
      if (rank_metrics.kept_ != 0) rank_metrics.add_up();
      at_work_ = sequence_.load(std::memory_order_relaxed) | 1;
      set(sequence_, at_work_);
      std::atomic_thread_fence(std::memory_order_release);
    }
    ~Update() { sequence_.store(at_work_ + 1, std::memory_order_release); }
    Update(const Update&) = delete;
    Update& operator=(const Update&) = delete;

   private:
    MetricWord& sequence_;
    uint64_t at_work_;
  };
  static void set(MetricWord& word, uint64_t value) { word.store(value, std::memory_order_relaxed); }
  // One thread writes these words, so it needs no instruction that locks the bus.
  static void add(MetricWord& word, uint64_t n) { set(word, word.load(std::memory_order_relaxed) + n); }
  static uint64_t since(uint64_t from, uint64_t to) { return to > from ? to - from : 0; }
  static uint32_t bucket_of(uint64_t ns) {
    return std::min(static_cast<uint32_t>(std::bit_width(ns / 1000)), uint32_t{kLatencyBuckets - 1});
  }
  [[gnu::always_inline]] void count(const Ended& e) {
    const uint64_t now = std::max(e.now, e.submitted);
    const uint64_t started = e.started ? std::clamp(e.started, e.submitted, now) : now;
    RankMetricsLayout& rank_metrics = *memory_;
    MetricOperations& of_kind = rank_metrics.operations[static_cast<size_t>(e.op)];
    add(of_kind.count, 1);
    add(of_kind.bytes, e.bytes);
    add(of_kind.queued_ns, started - e.submitted);
    add(of_kind.running_ns, now - started);
    add(of_kind.histogram[bucket_of(now - e.submitted)], 1);
    set(rank_metrics.last_done, e.now);
    set(rank_metrics.last_bytes, e.bytes);
    rank_metrics.last_kind.store(static_cast<uint32_t>(e.op), std::memory_order_relaxed);
    last_done_ = e.now;
    write_name(e);
  }
  // Of calls that their callers ran. alone: nothing else was under way.
  static void add_waits(RankMetricsLayout& rank_metrics, uint64_t queued_ns, uint64_t running_ns, bool alone) {
    if (alone) add(rank_metrics.communication_ns, queued_ns + running_ns);
    add(rank_metrics.for_peers_ns, queued_ns);
    add(rank_metrics.for_transfer_ns, running_ns);
  }
  [[gnu::noinline]] void ran_outside_of_a_loop(const Ended& e, const void* like);
  // From here on another call that is like this one goes on with a loop.
  void begin_loop(const Ended& e, const void* like);
  void end_loop() {
    if (kept_ != 0) add_up();
    loop_ = nullptr;
  }
  // Adds the recent calls [from, to) to the numbers.
  static void add_recent(RankMetricsLayout& rank_metrics, uint64_t from, uint64_t to);
  void add_up();
  // What tells one name from another; null: nothing does.
  static const uint64_t* whose_name(const Ended& e) {
    static constexpr uint64_t kNobody = 0;
    return e.seen ? e.seen : e.name.empty() ? &kNobody : nullptr;
  }
  [[gnu::always_inline]] void write_name(const Ended& e) {
    const uint64_t* whose = whose_name(e);
    if (whose && whose == named_) return;  // the name stands there
    named_ = whose;
    memory_->last_name_bytes.store(static_cast<uint32_t>(std::min<size_t>(e.name.size(), 64)),
                                   std::memory_order_relaxed);
    memory_->last_name.store(e.name);
  }
  bool is_step(uint64_t seen_in, const uint64_t* whose, bool declared) const {
    const bool again = seen_in == steps_ + 1;
    return whose == leader_ || (declared ? !is_declared_ || again : !is_declared_ && again);
  }
  [[gnu::always_inline]] void begin_step(const uint64_t* leader, bool declared, uint64_t at);
  // The block is told of the last `unwritten_` steps. An Update lives.
  void write_step(const uint64_t* leader, bool declared, uint64_t at);
  void measure_ticks();

  const std::unique_ptr<RankMetricsLayout> own_;
  RankMetricsLayout* memory_;  // own_, or in what is mapped
  void* mapped_ = nullptr;     // of share()
  size_t mapped_bytes_ = 0;
  std::string program_;
  const TimePoint first_time_;
  const uint64_t first_ticks_;
  std::atomic<uint64_t> ns_per_tick_;
  uint64_t next_beat_ = 0;
  uint64_t last_done_ = 0, stalled_since_ = 0;  // moments
  uint64_t under_way_ = 0;
  uint64_t steps_ = 0;
  uint64_t unwritten_ = 0;                                 // steps since the block was told of the last one
  const uint64_t* named_ = nullptr;                        // whose_name() of the operation whose name the page has
  const uint64_t* leader_ = nullptr;                       // what begins a step: only compared
  bool is_declared_ = false;                               // it is a bucket
  uint64_t communication_before_ = 0, waited_before_ = 0;  // at the beginning of the step
  uint64_t kept_ = 0;                                      // calls in RankMetricsLayout::recent
  const void* loop_ = nullptr;                             // what calls are like that may go on with it; null: none may
};

[[gnu::always_inline]] inline void RankMetrics::begin_step(const uint64_t* leader, bool declared, uint64_t at) {
  ++steps_;
  // Of steps that are over in a moment several are told of together, by their mean.
  const uint64_t began = memory_->step_began.load(std::memory_order_relaxed);
  if (++unwritten_ < kShortSteps && leader == leader_ && since(began, at) < kShortNs) return;
  const Update update(*this);
  write_step(leader, declared, at);
}

}  // namespace hc
