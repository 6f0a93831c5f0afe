#include "engine/rank_metrics/rank_metrics.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <new>

namespace hc {

namespace {

constexpr uint64_t kBeatNs = 1'000'000'000, kFirstBeatNs = 10'000'000;
constexpr std::chrono::milliseconds kShortest{2};  // in which the length of a tick can be told
constexpr uint64_t kNominalTick = uint64_t{1} << 48;
constexpr uint32_t kRunning = 1, kEnded = 2;
constexpr int kTriesToCopy = 1000;

using AnyWord [[gnu::may_alias]] = uint64_t;  // whatever lies there: halves, too
constexpr size_t kWords = sizeof(RankMetricsLayout) / sizeof(AnyWord);

int64_t unix_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// When this process was started: field 22 of its line, behind the name, which may have anything in it. 0: unknown.
uint64_t start_of_process() {
  char line[1024];
  std::FILE* file = std::fopen("/proc/self/stat", "re");
  if (!file) return 0;
  const size_t bytes = std::fread(line, 1, sizeof line - 1, file);
  std::fclose(file);
  line[bytes] = 0;
  const char* at = std::strrchr(line, ')');
  for (int field = 2; at && field < 22; ++field) at = std::strchr(at + 1, ' ');
  return at ? std::strtoull(at, nullptr, 10) : 0;
}

uint64_t namespace_of_process() {
  struct stat found{};
  return ::stat("/proc/self/ns/pid", &found) == 0 ? found.st_ino : 0;
}

}  // namespace

RankMetrics::RankMetrics()
    : own_(new RankMetricsLayout{}),
      memory_(own_.get()),
      first_time_(Clock::now()),
      first_ticks_(processor_ticks()),
      ns_per_tick_(kNominalTick) {}

Status RankMetrics::share(int fd, size_t offset, std::string_view program) {
  struct stat found{};
  if (offset % kRankMetricsBytes != 0 || ::fstat(fd, &found) != 0 ||
      static_cast<size_t>(found.st_size) < offset + kRankMetricsBytes)
    return error(Code::kInvalidArgument, "descriptor ", fd, " has no ", kRankMetricsBytes, " bytes at ", offset);
  const size_t before = offset % static_cast<size_t>(::sysconf(_SC_PAGESIZE));  // the kernel's pages may be larger
  const size_t bytes = before + kRankMetricsBytes;
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset - before));
  if (at == MAP_FAILED)
    return error(Code::kInvalidArgument, "descriptor ", fd, " cannot be mapped: ", std::strerror(errno));
  forget();
  mapped_ = at;
  mapped_bytes_ = bytes;
  memory_ = reinterpret_cast<RankMetricsLayout*>(static_cast<std::byte*>(at) + before);
  program_ = program;
  return Status::ok();
}

void RankMetrics::begin(const Identity& identity) {
  measure_ticks();
  RankMetricsLayout& rank_metrics = *memory_;
  // A killed writer may have left an odd number, and readers of the life before must not take the new one for it.
  const uint64_t sequence = rank_metrics.sequence.load(std::memory_order_relaxed) | 1;
  set(rank_metrics.sequence, sequence);
  std::atomic_thread_fence(std::memory_order_release);
  auto* words = reinterpret_cast<AnyWord*>(&rank_metrics);
  for (size_t i = 2; i < kWords; ++i) __atomic_store_n(words + i, 0, __ATOMIC_RELAXED);
  rank_metrics.rank.store(identity.rank, std::memory_order_relaxed);
  rank_metrics.size.store(identity.size, std::memory_order_relaxed);
  rank_metrics.local_rank.store(identity.local_rank, std::memory_order_relaxed);
  rank_metrics.pid.store(::getpid(), std::memory_order_relaxed);
  set(rank_metrics.process_start, start_of_process());
  set(rank_metrics.process_namespace, namespace_of_process());
  set(rank_metrics.generation, identity.generation);
  rank_metrics.host.store(identity.host);
  rank_metrics.program.store(program_);
  rank_metrics.state.store(kRunning, std::memory_order_relaxed);
  uint64_t magic = 0;
  std::memcpy(&magic, kRankMetricsMagic, sizeof magic);
  set(rank_metrics.magic, magic);
  rank_metrics.sequence.store(sequence + 1, std::memory_order_release);
  named_ = nullptr;
  under_way_ = steps_ = unwritten_ = communication_before_ = waited_before_ = last_done_ = 0;
  leader_ = nullptr;
  is_declared_ = false;
  kept_ = 0;
  loop_ = nullptr;
  beat({});
}

void RankMetrics::end() {
  memory_->heartbeat_unix_ns.store(unix_ns(), std::memory_order_relaxed);
  memory_->stalled.store(0, std::memory_order_relaxed);
  memory_->state.store(kEnded, std::memory_order_relaxed);
}

void RankMetrics::forget() {
  if (mapped_) (void)::munmap(mapped_, mapped_bytes_);
  mapped_ = nullptr;
  memory_ = own_.get();
  set(memory_->recent.count, 0);
  kept_ = 0;
  loop_ = nullptr;
}

// Two readings of both clocks tell how long a tick is, the better the further they lie apart.
void RankMetrics::measure_ticks() {
  TimePoint time = Clock::now();
  while (time - first_time_ < kShortest) time = Clock::now();
  const uint64_t elapsed = processor_ticks() - first_ticks_;
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(time - first_time_).count();
  if (elapsed == 0) return;
  const auto scaled = static_cast<unsigned __int128>(ns) << kFraction;
  ns_per_tick_.store(static_cast<uint64_t>(scaled / elapsed), std::memory_order_relaxed);
}

void RankMetrics::beat(const std::vector<Late>& late) {
  measure_ticks();
  const int64_t unix_now = unix_ns();
  const uint64_t moment = now();
  // At first more often: the length of a tick is known only as well as the time since then allows.
  next_beat_ = moment + std::clamp(moment, kFirstBeatNs, kBeatNs);
  const Update update(*this);
  // Anew each time: somebody may have set the clock.
  memory_->started_unix_ns.store(unix_now - static_cast<int64_t>(moment), std::memory_order_relaxed);
  memory_->heartbeat_unix_ns.store(unix_now, std::memory_order_relaxed);
  for (size_t i = 0; i < std::min(late.size(), kLateRanks); ++i) {
    memory_->late[i].rank.store(late[i].rank, std::memory_order_relaxed);
    memory_->late[i].times.store(static_cast<uint32_t>(std::min<uint64_t>(late[i].times, UINT32_MAX)),
                                 std::memory_order_relaxed);
    set(memory_->late[i].ns, late[i].ns);
  }
}

void RankMetrics::stall(std::string_view what, const std::vector<int>& ranks) {
  const Update update(*this);
  memory_->awaited.store(what);
  const size_t known = std::min(ranks.size(), kAwaitedRanks);
  for (size_t i = 0; i < known; ++i) memory_->awaited_ranks[i].store(ranks[i], std::memory_order_relaxed);
  memory_->awaited_count.store(static_cast<uint32_t>(known), std::memory_order_relaxed);
  if (memory_->stalled.exchange(1, std::memory_order_relaxed) == 0) stalled_since_ = now();
}

void RankMetrics::go_on() {
  const Update update(*this);
  if (memory_->stalled.exchange(0, std::memory_order_relaxed) != 0)
    memory_->stalled_ms.fetch_add(static_cast<uint32_t>(since(stalled_since_, now()) / 1'000'000),
                                  std::memory_order_relaxed);
}

void RankMetrics::ran_outside_of_a_loop(const Ended& e, const void* like) {
  if (kept_ != 0) add_up();
  if (e.seen) {
    if (is_step(*e.seen, e.seen, false)) begin_step(e.seen, false, e.submitted);
    *e.seen = steps_ + 1;
  }
  const Update update(*this);
  const uint64_t now = std::max(e.now, e.submitted), started = std::clamp(e.started, e.submitted, now);
  count({e.op, e.bytes, e.submitted, started, now, e.name, e.seen});
  add_waits(*memory_, started - e.submitted, now - started, under_way_ == 0);
  begin_loop(e, like);
}

// In a loop either every call begins a step or none does. A name that is not the leader may become it with its next
// call, unless buckets tell the steps: it is not in a loop yet.
void RankMetrics::begin_loop(const Ended& e, const void* like) {
  const bool may_begin_steps = e.seen && e.seen != leader_ && !is_declared_;
  loop_ = under_way_ == 0 && !may_begin_steps ? like : nullptr;
  RankMetricsLayout::Recent& recent = memory_->recent;
  set(recent.bytes, e.bytes);
  recent.kind.store(static_cast<uint32_t>(e.op), std::memory_order_relaxed);
  recent.begin_steps.store(e.seen && e.seen == leader_, std::memory_order_relaxed);
}

void RankMetrics::add_recent(RankMetricsLayout& rank_metrics, uint64_t from, uint64_t to) {
  const auto get = [](const MetricWord& word) { return word.load(std::memory_order_relaxed); };
  const RankMetricsLayout::Recent& recent = rank_metrics.recent;
  MetricOperations& of_kind = rank_metrics.operations[recent.kind.load(std::memory_order_relaxed)];
  uint64_t queued_ns = 0, running_ns = 0, counted = from;
  uint32_t bucket = 0;
  const auto count_until = [&](uint64_t i) { add(of_kind.histogram[bucket], i - std::exchange(counted, i)); };
  for (uint64_t i = from; i < to; ++i) {
    const RankMetricsLayout::Recent::Call& call = recent.calls[i];
    const uint64_t submitted = get(call.submitted), done = std::max(submitted, get(call.done));
    const uint64_t started = std::clamp(get(call.started), submitted, done);
    queued_ns += started - submitted;
    running_ns += done - started;
    const uint32_t belongs = bucket_of(done - submitted);
    if (belongs == bucket) continue;
    count_until(i);
    bucket = belongs;
  }
  count_until(to);
  add(of_kind.count, to - from);
  add(of_kind.bytes, (to - from) * get(recent.bytes));
  add(of_kind.queued_ns, queued_ns);
  add(of_kind.running_ns, running_ns);
  add_waits(rank_metrics, queued_ns, running_ns, true);
  if (from == to) return;
  set(rank_metrics.last_done, get(recent.calls[to - 1].done));
  set(rank_metrics.last_bytes, get(recent.bytes));
  rank_metrics.last_kind.store(recent.kind.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

void RankMetrics::add_up() {
  const uint64_t calls = std::exchange(kept_, 0);
  const Update update(*this);
  RankMetricsLayout::Recent& recent = memory_->recent;
  add_recent(*memory_, 0, calls - 1);
  if (recent.begin_steps.load(std::memory_order_relaxed) != 0) {  // the last one begins a step that is not over
    steps_ += calls;
    unwritten_ += calls;
    write_step(leader_, is_declared_, recent.calls[calls - 1].submitted.load(std::memory_order_relaxed));
  }
  add_recent(*memory_, calls - 1, calls);
  set(recent.count, 0);
}

void RankMetrics::write_step(const uint64_t* leader, bool declared, uint64_t at) {
  const auto get = [](const MetricWord& word) { return word.load(std::memory_order_relaxed); };
  RankMetricsLayout& rank_metrics = *memory_;
  const uint64_t began = get(rank_metrics.step_began);
  const uint64_t under_way = under_way_ ? since(get(rank_metrics.communicates_since), at) : 0;
  const uint64_t communication = get(rank_metrics.communication_ns) + under_way;
  const uint64_t waited = get(rank_metrics.for_peers_ns) + get(rank_metrics.for_transfer_ns) +
                          get(rank_metrics.other_for_peers_ns) + get(rank_metrics.other_for_transfer_ns);
  if (leader == leader_ && began != 0) {  // else the time since then is not one of this kind of step
    const uint64_t took = since(began, at) / unwritten_, before = get(rank_metrics.step_smoothed_ns);
    set(rank_metrics.step_ns, took);
    set(rank_metrics.step_smoothed_ns, before == 0 ? took : before - before / 5 + took / 5);
    set(rank_metrics.step_communication_ns, since(communication_before_, communication) / unwritten_);
    set(rank_metrics.step_waited_ns, since(waited_before_, waited) / unwritten_);
  }
  unwritten_ = 0;
  leader_ = leader;
  is_declared_ = declared;
  communication_before_ = communication;
  waited_before_ = waited;
  set(rank_metrics.step_began, at);
  set(rank_metrics.step, steps_);
}

std::string RankMetrics::copy() const {
  std::string bytes(kRankMetricsBytes, '\0');
  const auto* words = reinterpret_cast<const AnyWord*>(memory_);
  for (int attempt = 0; attempt < kTriesToCopy; ++attempt) {
    const uint64_t before = memory_->sequence.load(std::memory_order_acquire);
    const uint64_t calls = memory_->recent.count.load(std::memory_order_acquire);
    for (size_t i = 0; i < kWords; ++i) {
      const uint64_t word = __atomic_load_n(words + i, __ATOMIC_RELAXED);
      std::memcpy(bytes.data() + i * sizeof word, &word, sizeof word);
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    if (before % 2 != 0 || memory_->sequence.load(std::memory_order_relaxed) != before) continue;
    auto& copied = *reinterpret_cast<RankMetricsLayout*>(bytes.data());
    set(copied.recent.count, 0);
    if (calls == 0) break;
    add_recent(copied, 0, calls);
    if (copied.recent.begin_steps.load(std::memory_order_relaxed) == 0) break;
    add(copied.step, calls);
    set(copied.step_began, copied.recent.calls[calls - 1].submitted.load(std::memory_order_relaxed));
    break;
  }
  return bytes;
}

}  // namespace hc
