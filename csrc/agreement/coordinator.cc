// The rules of the agreement: when an operation is ready, in which order and in which batches it runs, what joining and
// leaving do. The ledger remembers, mismatch.cc compares; nothing here knows a socket, a clock or a lock.
#include "agreement/coordinator.h"

#include <algorithm>

#include "agreement/frame_budget.h"
#include "agreement/ledger.h"
#include "agreement/stall_hint.h"

namespace hc {
namespace {

// How far a batch looks for more of its kind, and how many that do not fit it passes over.
constexpr size_t kLookAhead = 4096;
constexpr size_t kMaxTooLarge = 64;
constexpr size_t kSmallBytes = 256u << 10;  // what moves faster than a plan of its own

// An item of the queue of what can run (or must fail): by priority, among equals in the order in which it became so.
struct Ready {
  uint32_t entry = kNoEntry;  // kNoEntry: the rest of a batch in parts, or everybody has joined, or nobody can
  bool taken = false;         // fused into an earlier batch
  bool adasum = false;        // cannot be cut: its coefficients are of the whole
  uint64_t fuse_hash = 0;     // 0: by itself
  size_t bytes = 0;
  int32_t priority = 0;
  Part part{};  // the next one of a batch under way; the first has index 0
  bool is_join() const { return entry == kNoEntry && part.index == 0; }
  int32_t last_joined = -1;  // of a join; -1: it failed, see State::join_failures
};

}  // namespace

struct Coordinator::State {
  explicit State(CoordinatorOptions given)
      : options(std::move(given)),
        world_rank{options.world_rank},
        ledger(options.size, options.cache_capacity),
        joined(options.size),
        left(options.size),
        why_left(static_cast<size_t>(options.size)) {}

  Status check(const RequestList& request_list) const;
  Status take(const RequestList& request_list, int rank, TimePoint since, TimePoint now);
  Status take_for_all(const RequestList& request_list, TimePoint since, TimePoint now);
  void arrived(uint32_t entry, int rank, TimePoint since, TimePoint now);
  void arrived_for_all(uint32_t entry, int last, TimePoint since, TimePoint now);
  void join(int rank);
  void leave(int rank, const std::string& text);
  void end_deadlock(const std::vector<int>& stuck, const std::string& text);
  void end_join(int last, Status failure);
  void review();
  void review(uint32_t entry);
  void review_join();
  void review_namesakes(const Namesakes& names);
  void fail_early(uint32_t entry, Code code, std::string text);
  void make_ready(uint32_t entry);
  void enqueue(Ready item);
  void cut(const Ready& item, size_t bytes, PlanBatch* batch);
  PlanBatch next_part();
  std::string departure(int rank) const;

  PlanBatch next_batch();
  size_t fuse(PlanBatch* batch, const Ready& first);
  void close(uint32_t entry, PlanBatch* batch);
  bool runs_alone(const Ready& item) const;
  size_t fusion_limit(const Agreement& agreement) const;
  void drop_taken();

  CoordinatorOptions options;  // constant, except fusion_bytes and arena_fusion_bytes
  const WorldRanks world_rank;
  Ledger ledger;
  RankSet joined, left;
  std::vector<std::string> why_left;  // [size]
  int joined_count = 0;
  int left_count = 0;
  int last_joined = -1;
  std::deque<Ready> ready;
  std::deque<Status> join_failures;  // in the order of their items in `ready`
  size_t ready_count = 0;            // not taken
  bool prioritised = false;          // something has had a priority
  size_t pending = 0;                // announced by somebody, in no plan yet
  uint32_t next_id = 0;
  size_t written = 0;  // bytes of the plan that is being made, about
};

Status Coordinator::State::check(const RequestList& b) const {
  if (b.generation != options.generation || b.process_set != options.process_set)
    return error(Code::kInternal, "a request list of rank ", b.rank, " is for process set ", b.process_set,
                 ", generation ", b.generation, "; this is process set ", options.process_set, ", generation ",
                 options.generation);
  if (b.rank < 0 || b.rank >= options.size)
    return error(Code::kInternal, "a request list names rank ", b.rank, " of ", options.size);
  if (b.whole && (options.tree == nullptr || b.joined))
    return error(Code::kInternal, "rank ", world_rank(b.rank), " speaks for others; nobody asked it to");
  if (b.whole) return Status::ok();  // announced before any of them joined
  if (left.has(b.rank) && options.tree == nullptr)
    return error(Code::kInternal, "rank ", world_rank(b.rank), " sent a request list after it had left");
  if (joined.has(b.rank) && (b.joined || !b.cached.empty() || !b.fresh.empty()))
    return error(Code::kInternal, "rank ", world_rank(b.rank), " announced something while it was joined");
  return Status::ok();
}

// `since`: when the announcement was made, as far as is known; not later than now.
void Coordinator::State::arrived(uint32_t index, int rank, TimePoint since, TimePoint now) {
  Entry& e = ledger.at(index);
  if (e.announced == 1) {
    e.since = since;
    pending++;
  }
  e.since = std::min(e.since, since);
  if (options.watch && options.watch->on()) options.watch->announced(ledger.subject(e), rank, now);
  if (options.stragglers && e.announced == static_cast<uint32_t>(options.size))
    options.stragglers->last_was(rank, seconds_between(e.since, now));
  if (e.state != Entry::State::kWaiting) return;  // already failing; this rank fails with the others
  if (e.announced == static_cast<uint32_t>(options.size))
    make_ready(index);
  else if (joined_count + left_count != 0)
    review(index);
  if (e.named != nullptr && e.named->second.count > 1) review_namesakes(e.named->second);
}

void Coordinator::State::arrived_for_all(uint32_t index, int last, TimePoint since, TimePoint now) {
  Entry& e = ledger.at(index);
  e.since = since;
  pending++;
  if (options.watch && options.watch->on())
    for (int r = 0; r < options.size; r++) options.watch->announced(ledger.subject(e), r, now);
  if (options.stragglers && last < options.size) options.stragglers->last_was(last, seconds_between(since, now));
  make_ready(index);
  if (e.named != nullptr && e.named->second.count > 1) review_namesakes(e.named->second);
}

// Somebody is joined or has left: that may complete the entry, or doom it.
void Coordinator::State::review(uint32_t index) {
  const Entry& e = ledger.at(index);
  int gone = left_count == 0 ? -1 : left.first_not_in(e.marks);
  if (gone >= 0)
    fail_early(index, Code::kAborted, text_of(label_of(ledger.subject(e)), ": ", departure(gone)));
  else if (e.marks.count_with(joined) == options.size)
    make_ready(index);
}

void Coordinator::State::review() {
  for (uint32_t entry : ledger.waiting()) {
    const Entry& e = ledger.at(entry);
    if (e.state == Entry::State::kWaiting) review(entry);  // a namesake's failure may have struck it
    if (e.state == Entry::State::kWaiting && e.named != nullptr && e.named->second.count > 1)
      review_namesakes(e.named->second);
  }
}

// One name, several operations: once every rank is in exactly one of them, none can complete.
void Coordinator::State::review_namesakes(const Namesakes& namesakes) {
  std::vector<uint32_t> list;
  RankSet ranks(options.size);
  int announcements = 0;
  for (uint32_t index : namesakes.entry) {
    if (index == kNoEntry || ledger.at(index).state != Entry::State::kWaiting) continue;
    list.push_back(index);
    ranks.add_all(ledger.at(index).marks);
    announcements += static_cast<int>(ledger.at(index).announced);
  }
  if (list.size() < 2 || ranks.count() != announcements || ranks.count_with(joined) != options.size) return;
  std::sort(list.begin(), list.end(),
            [this](uint32_t a, uint32_t b) { return ledger.at(a).order < ledger.at(b).order; });
  const Entry& a = ledger.at(list[0]);
  const Entry& b = ledger.at(list[1]);
  std::string text =
      mismatched_operations(a.named->first, {a.op, a.marks.first()}, {b.op, b.marks.first()}, world_rank);
  for (uint32_t index : list) fail_early(index, Code::kMismatch, text);
}

void Coordinator::State::fail_early(uint32_t index, Code code, std::string text) {
  Entry& e = ledger.at(index);
  e.agreement = Agreement{};
  e.agreement.error = code;
  e.agreement.text = std::move(text);
  e.early = e.dirty = true;
  e.state = Entry::State::kReady;
  Ready item;
  item.entry = index;
  enqueue(item);
}

// Behind everything that is as urgent. Nothing overtakes a join.
void Coordinator::State::enqueue(Ready item) {
  auto at = ready.end();
  while (at != ready.begin() && !(at - 1)->is_join() && (at - 1)->priority < item.priority) --at;
  ready.insert(at, item);
  ready_count++;
}

void Coordinator::State::make_ready(uint32_t index) {
  Entry& e = ledger.at(index);
  ledger.settle(&e, world_rank);
  e.state = Entry::State::kReady;
  e.with_joined = joined_count != 0;
  const Agreement& a = ledger.agreement(e);
  Ready item;
  item.entry = index;
  item.bytes = a.bytes;
  item.priority = ledger.reference(e).priority;
  item.adasum = ledger.reference(e).reduce == Reduce::kAdasum;
  prioritised |= item.priority != 0;
  if (a.error == Code::kOk) ledger.choose_cache_id(index);
  const bool alone = !options.fuse_groups && ledger.reference(e).tensors.size() > 1;
  const size_t limit = fusion_limit(a);
  if (a.fusable && !alone && a.bytes <= limit && limit != 0) item.fuse_hash = a.fuse_hash;
  enqueue(item);
}

size_t Coordinator::State::fusion_limit(const Agreement& agreement) const {
  if (!agreement.in_arena) return options.fusion_bytes;
  return std::min(options.fusion_bytes, options.arena_fusion_bytes);
}

std::string Coordinator::State::departure(int rank) const {
  return text_of(why_left[static_cast<size_t>(rank)], " (rank ", world_rank(rank), " left before it announced this)");
}

void Coordinator::State::join(int rank) {
  joined.add(rank);
  joined_count++;
  last_joined = rank;
  review();
  review_join();
}

// Everybody has joined: the join is an operation like any other, and behind it everybody starts afresh. If a rank left
// without joining, nobody's join can complete.
void Coordinator::State::review_join() {
  if (joined_count == 0) return;
  if (const int gone = left.first_not_in(joined); gone >= 0)
    end_join(-1, error(Code::kAborted, "join: ", departure(gone)));
  else if (joined_count == options.size)
    end_join(last_joined, Status::ok());
}

void Coordinator::State::end_join(int last, Status failure) {
  if (!failure.is_ok()) join_failures.push_back(std::move(failure));
  Ready item;
  item.last_joined = last;
  ready.push_back(item);
  ready_count++;
  joined.clear();
  joined_count = 0;
}

void Coordinator::State::end_deadlock(const std::vector<int>& stuck, const std::string& text) {
  for (uint32_t index : ledger.waiting_between(stuck, joined))
    if (const Entry& e = ledger.at(index); e.state == Entry::State::kWaiting)
      fail_early(index, Code::kMismatch, text_of(label_of(ledger.subject(e)), ": ", text));
  const auto has_joined = [this](int rank) { return joined.has(rank); };
  if (std::any_of(stuck.begin(), stuck.end(), has_joined) && !std::all_of(stuck.begin(), stuck.end(), has_joined))
    end_join(-1, error(Code::kMismatch, "join: ", text));
}

void Coordinator::State::leave(int rank, const std::string& text) {
  if (rank < 0 || rank >= options.size || !left.add(rank)) return;
  left_count++;
  why_left[static_cast<size_t>(rank)] = text;
  review();
  review_join();
}

// Writes the entry into the plan and forgets this round of it.
void Coordinator::State::close(uint32_t index, PlanBatch* batch) {
  Entry& e = ledger.at(index);
  PlanEntry& p = batch->entries.emplace_back();
  p.unnamed = e.unnamed;
  p.sequence = e.unnamed ? e.sequence : 0;
  bool failed = ledger.agreement(e).error != Code::kOk;
  if (!failed) {
    p.cache_id = e.plan_cache_id;
    p.assigned = e.assigned;
  } else if (!e.unnamed) {
    p.cache_id = e.cache_id;
  }
  p.has_signature = !failed && (p.assigned || e.with_joined);
  if (p.has_signature) p.signature = ledger.reference(e);
  p.with_joined = !failed && e.announced < static_cast<uint32_t>(options.size);
  if (!failed && e.op == Op::kScatter) {  // the others know nothing of what the root sends
    p.has_signature = true;
    p.signature = *ledger.announced_by(e, ledger.reference(e).root);
  }
  if (e.named != nullptr && (failed || p.has_signature || p.cache_id == kNoCacheId)) p.name = e.named->first;
  for (int r = 0; e.early && r < options.size; r++)
    if (e.marks.has(r)) p.failed_on.push_back(r);
  written += p.name.size() + (p.has_signature ? encoded_bytes(p.signature) : 0);
  if (options.watch && options.watch->on()) options.watch->decided(ledger.subject(e));
  ledger.close(index);
  pending--;
}

// Adds what is ready behind the first entry, has the same key and fits; the others keep their places. What is less
// urgent than the first joins it only as far as one part goes: it may not delay it by more. Returns the bytes of all.
size_t Coordinator::State::fuse(PlanBatch* batch, const Ready& first) {
  const uint64_t hash = first.fuse_hash;
  const int32_t priority = first.priority;
  const FuseKey key = ledger.agreement(ledger.at(first.entry)).fuse;
  size_t bytes = first.bytes, too_large = 0;
  const size_t most = fusion_limit(ledger.agreement(ledger.at(first.entry)));
  close(first.entry, batch);
  for (size_t i = 1; i < std::min(ready.size(), kLookAhead) && too_large < kMaxTooLarge && written < kFrameBudget;
       i++) {
    Ready& next = ready[i];
    if (next.is_join()) break;  // nothing overtakes a join
    if (next.entry == kNoEntry || next.taken || next.fuse_hash != hash) continue;
    if (!(ledger.agreement(ledger.at(next.entry)).fuse == key)) continue;
    // The threshold may have shrunk since these became ready.
    size_t limit = most;
    if (next.priority != priority && options.part_bytes != 0) limit = std::min(limit, options.part_bytes);
    if (bytes > limit || next.bytes > limit - bytes) {
      too_large++;
      continue;
    }
    bytes += next.bytes;
    close(next.entry, batch);
    next.taken = true;
    ready_count--;
  }
  if (batch->in_arena && batch->entries.size() > 1) {
    batch->in_arena = false;
    batch->algorithm = Algorithm::kRecursiveDoubling;  // as each of them alone would be
  }
  return bytes;
}

// If the batch is large, it becomes part 0 of several, and the others wait for their turn where `item` was.
void Coordinator::State::cut(const Ready& item, size_t bytes, PlanBatch* batch) {
  if (!prioritised || options.part_bytes == 0 || bytes <= options.part_bytes || batch->error != Code::kOk) return;
  if (batch->op != Op::kAllreduce || batch->on_device || item.adasum) return;
  const size_t parts = (bytes + options.part_bytes - 1) / options.part_bytes;
  batch->part = {0, static_cast<uint32_t>(std::min<size_t>(parts, kMaxParts)), batch->id};
  Ready rest;
  rest.priority = item.priority;
  rest.part = {1, batch->part.count, batch->id};
  ready.push_front(rest);
  ready_count++;
}

PlanBatch Coordinator::State::next_part() {
  Ready& item = ready.front();
  PlanBatch batch;
  batch.id = next_id++;
  batch.part = item.part;
  if (++item.part.index < item.part.count) return batch;
  item.taken = true;
  ready_count--;
  drop_taken();
  return batch;
}

PlanBatch Coordinator::State::next_batch() {
  if (ready.front().part.index != 0) return next_part();
  const Ready item = ready.front();
  PlanBatch batch;
  batch.id = next_id++;
  size_t bytes = item.bytes;
  if (item.is_join()) {
    batch.op = Op::kJoin;
    batch.last_joined = item.last_joined;
    if (item.last_joined < 0) {
      batch.error = join_failures.front().code();
      batch.error_text = join_failures.front().text();
      join_failures.pop_front();
    }
  } else {
    const Agreement& a = ledger.agreement(ledger.at(item.entry));
    batch.op = ledger.at(item.entry).op;
    batch.error = a.error;
    batch.error_text = a.text;
    batch.in_arena = a.in_arena;
    batch.on_device = a.on_device;
    batch.rows = a.rows;
    if (item.fuse_hash != 0)
      bytes = fuse(&batch, item);
    else
      close(item.entry, &batch);
  }
  ready.front().taken = true;
  ready_count--;
  drop_taken();
  cut(item, bytes, &batch);
  return batch;
}

// A small operation that is never fused: in the arena.
bool Coordinator::State::runs_alone(const Ready& item) const {
  return item.entry != kNoEntry && item.fuse_hash == 0 && item.bytes <= kSmallBytes &&
         ledger.agreement(ledger.at(item.entry)).in_arena;
}

void Coordinator::State::drop_taken() {
  while (!ready.empty() && ready.front().taken) ready.pop_front();
}

Coordinator::Coordinator(CoordinatorOptions options) : state_(std::make_unique<State>(std::move(options))) {}
Coordinator::~Coordinator() = default;

Status Coordinator::State::take(const RequestList& request_list, int rank, TimePoint since, TimePoint now) {
  uint32_t entry = kNoEntry;
  for (const CachedRequest& c : request_list.cached) {
    HC_TRY(ledger.announce(rank, c, &entry), "rank ", world_rank(rank));
    arrived(entry, rank, since, now);
  }
  for (const Request& r : request_list.fresh) {
    HC_TRY(ledger.announce(rank, r, &entry), "rank ", world_rank(rank));
    arrived(entry, rank, since, now);
  }
  return Status::ok();
}

Status Coordinator::State::take_for_all(const RequestList& request_list, TimePoint since, TimePoint now) {
  uint32_t entry = kNoEntry;
  for (const CachedRequest& c : request_list.cached) {
    HC_TRY(ledger.announce_for_all(c, &entry));
    arrived_for_all(entry, request_list.last, since, now);
  }
  for (const Request& r : request_list.fresh) {
    HC_TRY(ledger.announce_for_all(r, &entry));
    arrived_for_all(entry, request_list.last, since, now);
  }
  return Status::ok();
}

Status Coordinator::take(const RequestList& request_list, TimePoint now) {
  State& s = *state_;
  HC_TRY(s.check(request_list));
  const TimePoint since = now - std::chrono::microseconds(request_list.held_us);
  if (request_list.whole && request_list.rank == 0 && s.left_count == 0)
    return s.take_for_all(request_list, since, now);
  if (request_list.whole) {
    for (int rank : s.options.tree->subtree(request_list.rank))
      if (!s.left.has(rank)) HC_TRY(s.take(request_list, rank, since, now));
    return Status::ok();
  }
  // Passed on by others, a request list may come behind its rank's goodbye: that rank has given up what it announced.
  if (s.left.has(request_list.rank)) return Status::ok();
  HC_TRY(s.take(request_list, request_list.rank, since, now));
  if (request_list.joined) s.join(request_list.rank);
  return Status::ok();
}

Plan Coordinator::decide(size_t room) {
  State& s = *state_;
  Plan plan;
  plan.generation = s.options.generation;
  plan.process_set = s.options.process_set;
  size_t entries = 0, used = 0;
  s.written = 0;
  while (s.ready_count != 0 && used < room && s.written < kFrameBudget) {
    // Nothing can join what runs by itself, so nothing is lost by deciding on it early: it takes no room of its own.
    const bool alone = s.runs_alone(s.ready.front());
    // A batch takes at most kLookAhead entries, so the plan stays below kMaxPlanEntries.
    if (entries + kLookAhead > kMaxPlanEntries || plan.batches.size() + 1 >= kMaxPlanEntries) break;
    plan.batches.push_back(s.next_batch());
    entries += plan.batches.back().entries.size();
    s.written += plan.batches.back().error_text.size() + sizeof(int64_t) * plan.batches.back().rows.size();
    if (!alone || s.ready_count == 0 || !s.runs_alone(s.ready.front())) used++;
  }
  return plan;
}

bool Coordinator::anything_ready() const { return state_->ready_count != 0; }

size_t Coordinator::pending() const { return state_->pending; }

void Coordinator::set_fusion_bytes(size_t bytes) { state_->options.fusion_bytes = bytes; }
void Coordinator::set_arena_fusion_bytes(size_t bytes) { state_->options.arena_fusion_bytes = bytes; }

void Coordinator::end_deadlock(const std::vector<int>& stuck, const std::string& text) {
  state_->end_deadlock(stuck, text);
}

void Coordinator::leave(int rank, const std::string& text) { state_->leave(rank, text); }

std::vector<Stall> Coordinator::stalled(TimePoint now, double older_than_s) const {
  constexpr size_t kHinted = 16;  // a hint compares names with everything that waits
  const State& s = *state_;
  std::vector<Stall> list;
  std::vector<uint32_t> waiting = s.ledger.waiting();
  for (uint32_t index : waiting) {
    const Entry& e = s.ledger.at(index);
    Stall stall;
    stall.waited_s = seconds_between(e.since, now);
    if (stall.waited_s < older_than_s) continue;
    stall.name = key_of(s.ledger.subject(e));
    for (int r = 0; r < s.options.size; r++) {
      if (e.marks.has(r))
        stall.present.push_back(r);
      else if (!s.joined.has(r))
        stall.missing.push_back(r);
    }
    if (list.size() < kHinted) stall.hint = stall_hint(s.ledger, waiting, index, s.world_rank);
    list.push_back(std::move(stall));
  }
  return list;
}

}  // namespace hc
