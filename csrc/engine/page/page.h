// Writes this rank's measurements into its page (layout.h), which lies in memory that other processes map, or in this
// process's own until share(). Without a lock or a system call where operations end, and without a reading of a clock
// that they do not need anyway.
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
#include "engine/page/layout.h"

namespace hc {

class Page {
 public:
  Page();
  ~Page() { forget(); }
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;

  // ---- slow: once in a life, or once a second

  // From now on the page is what lies at `offset` (a multiple of 4 KiB) of this file, which has it already and stays
  // the caller's; program: what runs. Before begin(). InvalidArgument where it cannot be mapped.
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
  // In a forked child, which must not write into its parent's page.
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
  // The whole page at one moment; any thread. After a thousand attempts, each met by a write: as it is.
  std::string copy() const;

  // ---- moments, in nanoseconds since the page was made, never 0

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
    if (under_way_++ == 0) set(memory_->communicates_since, submitted);
    set(memory_->under_way, under_way_);
  }
  struct Ended {
    Op op;
    uint64_t bytes;
    uint64_t submitted, started, now;  // started 0: its data never moved
    std::string_view name;
    uint64_t* seen = nullptr;  // ran(): see repeats(); null: it has no name
  };
  // One that began() was called for.
  [[gnu::always_inline]] void ended(const Ended& e) {
    const Update update(*memory_);
    count(e);
    if (--under_way_ == 0) {
      add(memory_->communication_ns, since(memory_->communicates_since.load(std::memory_order_relaxed), e.now));
      set(memory_->communicates_since, 0);
    }
    set(memory_->under_way, under_way_);
  }
  // One that its caller ran by itself, alone, without began() and repeats(). started: when all ranks were there.
  [[gnu::always_inline]] void ran(const Ended& e) {
    const Update update(*memory_);
    if (e.seen && is_step(*e.seen, e.seen, false)) begin_step(e.seen, false, e.submitted);
    if (e.seen) *e.seen = steps_ + 1;
    count(e);
    if (under_way_ == 0) add(memory_->communication_ns, since(e.submitted, e.now));
    add(memory_->for_peers_ns, since(e.submitted, e.started));
    add(memory_->for_transfer_ns, since(e.started, e.now));
  }
  // Something that has a name was submitted. What comes again and again tells one step from the next: seen is its own
  // place to note in which step it was seen last (0: never), declared: it is a bucket of an optimizer, which counts for
  // more than a name.
  void repeats(uint64_t* seen, bool declared, uint64_t submitted) {
    if (is_step(*seen, seen, declared)) {
      const Update update(*memory_);
      begin_step(seen, declared, submitted);
    }
    *seen = steps_ + 1;
  }

  // A thread of the user waits for an operation for as long as this lives.
  class Waiting {
   public:
    explicit Waiting(Page& page) : page_(page), from_(page.now()) {
      if (page.memory_->waiting.fetch_add(1, std::memory_order_relaxed) == 0) set(page.memory_->waiting_since, from_);
    }
    // started: when the operation's data began to move, 0: not yet.
    void over(uint64_t started) {
      const uint64_t now = page_.now();
      const uint64_t split = started == 0 ? now : std::clamp(started, from_, std::max(from_, now));
      page_.memory_->other_for_peers_ns.fetch_add(since(from_, split), std::memory_order_relaxed);
      page_.memory_->other_for_transfer_ns.fetch_add(since(split, now), std::memory_order_relaxed);
    }
    ~Waiting() { page_.memory_->waiting.fetch_sub(1, std::memory_order_relaxed); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    Page& page_;
    const uint64_t from_;
  };

 private:
  static constexpr uint64_t kShortSteps = 16, kShortNs = 3000;
  static constexpr int kFraction = 48;  // bits of ns_per_tick_ behind the point
  // Makes the sequence odd for as long as it lives.
  class Update {
   public:
    explicit Update(PageLayout& page) : sequence_(page.sequence) {
      set(sequence_, sequence_.load(std::memory_order_relaxed) + 1);
      std::atomic_thread_fence(std::memory_order_release);
    }
    ~Update() { sequence_.store(sequence_.load(std::memory_order_relaxed) + 1, std::memory_order_release); }
    Update(const Update&) = delete;
    Update& operator=(const Update&) = delete;

   private:
    PageWord& sequence_;
  };
  static void set(PageWord& word, uint64_t value) { word.store(value, std::memory_order_relaxed); }
  // One thread writes these words, so it needs no instruction that locks the bus.
  static void add(PageWord& word, uint64_t n) { set(word, word.load(std::memory_order_relaxed) + n); }
  static uint64_t since(uint64_t from, uint64_t to) { return to > from ? to - from : 0; }
  [[gnu::always_inline]] void count(const Ended& e) {
    PageOperations& of_kind = memory_->operations[static_cast<size_t>(e.op)];
    const uint64_t started = e.started ? std::max(e.started, e.submitted) : e.now;
    add(of_kind.count, 1);
    add(of_kind.bytes, e.bytes);
    add(of_kind.queued_ns, since(e.submitted, started));
    add(of_kind.running_ns, since(started, e.now));
    const auto place = static_cast<int>(std::bit_width(since(e.submitted, e.now) / 1000));
    add(of_kind.histogram[std::min(place, kLatencyBuckets - 1)], 1);
    set(memory_->last_done, e.now);
    set(memory_->last_bytes, e.bytes);
    memory_->last_kind.store(static_cast<uint32_t>(e.op), std::memory_order_relaxed);
    if (e.seen && e.seen == named_) return;  // the name stands there
    named_ = e.seen;
    memory_->last_name_bytes.store(static_cast<uint32_t>(std::min<size_t>(e.name.size(), 64)),
                                   std::memory_order_relaxed);
    memory_->last_name.store(e.name);
  }
  bool is_step(uint64_t seen_in, const uint64_t* whose, bool declared) const {
    const bool again = seen_in == steps_ + 1;
    return whose == leader_ || (declared ? !is_declared_ || again : !is_declared_ && again);
  }
  [[gnu::always_inline]] void begin_step(const uint64_t* leader, bool declared, uint64_t at);
  void measure_ticks();

  const std::unique_ptr<PageLayout> own_;
  PageLayout* memory_;      // own_, or in what is mapped
  void* mapped_ = nullptr;  // of share()
  size_t mapped_bytes_ = 0;
  std::string program_;
  const TimePoint first_time_;
  const uint64_t first_ticks_;
  std::atomic<uint64_t> ns_per_tick_;
  uint64_t next_beat_ = 0;
  uint64_t under_way_ = 0;
  uint64_t steps_ = 0;
  uint64_t unwritten_ = 0;                                 // steps since the page was told of the last one
  const uint64_t* named_ = nullptr;                        // Ended::seen of the operation whose name the page has last
  const uint64_t* leader_ = nullptr;                       // what begins a step: only compared
  bool is_declared_ = false;                               // it is a bucket
  uint64_t communication_before_ = 0, waited_before_ = 0;  // at the beginning of the step
};

[[gnu::always_inline]] inline void Page::begin_step(const uint64_t* leader, bool declared, uint64_t at) {
  const auto get = [](const PageWord& word) { return word.load(std::memory_order_relaxed); };
  PageLayout& page = *memory_;
  const uint64_t began = get(page.step_began);
  ++steps_;
  // Of steps that are over in a moment several are told of together, by their mean.
  if (++unwritten_ < kShortSteps && leader == leader_ && since(began, at) < kShortNs) return;
  const uint64_t under_way = under_way_ ? since(get(page.communicates_since), at) : 0;
  const uint64_t communication = get(page.communication_ns) + under_way;
  const uint64_t waited = get(page.for_peers_ns) + get(page.for_transfer_ns) + get(page.other_for_peers_ns) +
                          get(page.other_for_transfer_ns);
  if (leader == leader_ && began != 0) {  // else the time since then is not one of this kind of step
    const uint64_t took = since(began, at) / unwritten_, before = get(page.step_smoothed_ns);
    set(page.step_ns, took);
    set(page.step_smoothed_ns, before == 0 ? took : before - before / 5 + took / 5);
    set(page.step_communication_ns, since(communication_before_, communication) / unwritten_);
    set(page.step_waited_ns, since(waited_before_, waited) / unwritten_);
  }
  unwritten_ = 0;
  leader_ = leader;
  is_declared_ = declared;
  communication_before_ = communication;
  waited_before_ = waited;
  set(page.step_began, at);
  set(page.step, steps_);
}

}  // namespace hc
