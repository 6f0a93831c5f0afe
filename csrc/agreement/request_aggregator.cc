// See request_aggregator.h. Every operation in flight is either held (only whole subtrees of children have announced
// it, all alike) or shown (each announcement is passed up as it arrives, until a plan ends the operation). An operation
// changes from held to shown at the first difference, so the coordinator comes to the same plans and errors as it would
// from the single request lists. In the steady state all members send one list of cache ids: a wave, which is compared
// as a whole and split into operations only when it must be.
#include "agreement/request_aggregator.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>

#include "agreement/rank_set.h"

namespace hc {
namespace {

struct Round;

// Announcements that are older or younger by more than this go up apart: a request list tells one age.
constexpr uint32_t kSameAgeUs = 100000;

uint32_t microseconds_between(TimePoint from, TimePoint to) {
  const double us = seconds_between(from, to) * 1e6;
  return static_cast<uint32_t>(std::clamp(us, 0.0, 4e9));
}

// The operations that share one name, at most one per kind.
struct Name {
  std::map<Op, Round> rounds;
  int active = 0;
};

// One operation, from its first announcement here until all of the subtree has announced it, or a plan has ended it.
struct Round {
  bool active = false, shown = false;
  uint32_t cache_id = kNoCacheId;          // announced as this cache id, or
  std::shared_ptr<const Request> request;  // in full
  uint64_t sequence = 0;
  RankSet said;    // held: which children (by position, 0 is this rank)
  int count = 0;   // of them
  RankSet passed;  // shown: whose announcement went up
  TimePoint since{};
  int last = -1;         // who announced it last
  Name* name = nullptr;  // null: unnamed
};

// An announcement in either form.
struct Word {
  const CachedRequest* cached = nullptr;
  const Request* fresh = nullptr;
};

// The same list of cache ids from some members, with nothing else under way.
struct Wave {
  std::vector<CachedRequest> list;
  RankSet said;
  int count = 0;  // of members; 0: there is none
  TimePoint since{};
  int last = -1;
};

bool same_words(const Round& r, const Word& word) {
  if (word.cached != nullptr) return r.cache_id == word.cached->cache_id;
  return r.request != nullptr && (r.request.get() == word.fresh || r.request->signature == word.fresh->signature);
}

}  // namespace

struct RequestAggregator::State {
  struct KnownId {
    Op op = Op::kAllreduce;
    bool known = false;
    Name* name = nullptr;    // null: unnamed
    Round* round = nullptr;  // named: its own
  };

  explicit State(RequestAggregatorOptions given) : options(std::move(given)), tree(*options.tree) {
    members = 1 + static_cast<int>(tree.children(options.rank).size());
    wave.said = RankSet(members);
  }

  Status take(const RequestList& b, TimePoint now);
  Status find(const Word& word, Round** round);
  Round& round_of(Op op, const std::string& name);
  Status announce(const RequestList& from, int member, const Word& word, TimePoint now);
  bool rides(const RequestList& b, int member) const;
  Status ride(const RequestList& b, int member, TimePoint now);
  Status dissolve(TimePoint now);
  bool is_entire(const RequestList& b) const;
  void begin(Round* r, TimePoint since);
  void combine(Round* r, TimePoint now);
  void show(Round* r, TimePoint now);
  void show_everything(TimePoint now);
  void send_up(Round* r, int rank, bool whole, const Word& word, TimePoint since, TimePoint now);
  RequestList& fitting(std::vector<RequestList>* request_lists, int rank, bool whole, uint32_t held_us);
  void end(Round* r);
  void end_round(const PlanBatch& batch, const PlanEntry& entry);
  int member_of(const RequestList& b) const;
  bool transparent() const { return someone_joined || someone_left || showing_all; }

  const RequestAggregatorOptions options;
  const ControlTree& tree;
  int members = 1;
  bool someone_joined = false, someone_left = false, showing_all = false;
  std::vector<KnownId> known_ids;
  std::unordered_map<std::string, Name> names;
  std::array<std::map<uint64_t, Round>, kOpCount> unnamed;
  std::vector<RequestList> combined, single;  // what goes up
  size_t held = 0;                            // rounds that are active and not shown
  size_t active = 0;                          // rounds
  Wave wave;
};

int RequestAggregator::State::member_of(const RequestList& b) const {
  if (b.rank == options.rank) return b.whole ? -1 : 0;
  if (b.rank < 0 || b.rank >= tree.size()) return -1;
  const int child = tree.child_towards(options.rank, b.rank);
  if (child < 0) return -1;
  const auto children = tree.children(options.rank);
  return 1 + static_cast<int>(std::lower_bound(children.begin(), children.end(), child) - children.begin());
}

Round& RequestAggregator::State::round_of(Op op, const std::string& name) {
  Name& n = names[name];
  Round& r = n.rounds[op];
  r.name = &n;
  return r;
}

Status RequestAggregator::State::find(const Word& word, Round** round) {
  if (word.fresh != nullptr) {
    const Op op = word.fresh->signature.op;
    *round = word.fresh->name.empty() ? &unnamed[static_cast<size_t>(op)][word.fresh->sequence]
                                      : &round_of(op, word.fresh->name);
    return Status::ok();
  }
  const uint32_t cache_id = word.cached->cache_id;
  if (cache_id >= known_ids.size() || !known_ids[cache_id].known)
    return error(Code::kInternal, "cache id ", cache_id, " was announced before a plan gave it");
  const KnownId& s = known_ids[cache_id];
  *round = s.round != nullptr ? s.round : &unnamed[static_cast<size_t>(s.op)][word.cached->sequence];
  return Status::ok();
}

void RequestAggregator::State::begin(Round* r, TimePoint since) {
  r->active = true;
  r->shown = false;
  r->since = since;
  if (r->said.capacity() == 0) r->said = RankSet(members);
  r->said.clear();
  r->count = 0;
  held++;
  active++;
  if (r->name != nullptr) r->name->active++;
}

// This round is over here. Names without a cache id go with it.
void RequestAggregator::State::end(Round* r) {
  if (!r->shown) held--;
  active--;
  r->active = r->shown = false;
  r->cache_id = kNoCacheId;
  r->request = nullptr;
  r->passed = RankSet();
  if (r->name != nullptr) r->name->active--;
}

// The last request list, if it is of this kind, else a new one.
RequestList& RequestAggregator::State::fitting(std::vector<RequestList>* request_lists, int rank, bool whole,
                                               uint32_t held_us) {
  const RequestList* last = request_lists->empty() ? nullptr : &request_lists->back();
  if (last == nullptr || last->rank != rank || last->whole != whole || last->joined ||
      std::max(last->held_us, held_us) - std::min(last->held_us, held_us) > kSameAgeUs) {
    RequestList& b = request_lists->emplace_back();
    b.generation = options.generation;
    b.process_set = options.process_set;
    b.rank = rank;
    b.whole = whole;
    b.last = rank;
  }
  RequestList& b = request_lists->back();
  b.held_us = std::max(b.held_us, held_us);
  return b;
}

void RequestAggregator::State::send_up(Round* r, int rank, bool whole, const Word& word, TimePoint since,
                                       TimePoint now) {
  RequestList& b = fitting(&single, rank, whole, microseconds_between(since, now));
  if (word.cached != nullptr)
    b.cached.push_back(*word.cached);
  else
    b.fresh.push_back(*word.fresh);
  if (r->passed.capacity() == 0) r->passed = RankSet(tree.size());
  if (!whole)
    r->passed.add(rank);
  else
    for (int each : tree.subtree(rank)) r->passed.add(each);
}

void RequestAggregator::State::show(Round* r, TimePoint now) {
  if (r->shown) return;
  r->shown = true;
  held--;
  const CachedRequest as_cache_id{r->cache_id, r->sequence};
  const Word word{r->cache_id != kNoCacheId ? &as_cache_id : nullptr, r->request.get()};
  const auto children = tree.children(options.rank);
  for (int m = 0; m < members; m++) {
    if (!r->said.has(m)) continue;
    const int rank = m == 0 ? options.rank : children[static_cast<size_t>(m) - 1];
    send_up(r, rank, m != 0 && tree.subtree(rank).size() > 1, word, r->since, now);
  }
}

void RequestAggregator::State::show_everything(TimePoint now) {
  (void)dissolve(now).is_ok();  // what rode was fit to ride
  if (held == 0) return;
  for (auto& [text, name] : names)
    for (auto& [op, round] : name.rounds)
      if (round.active) show(&round, now);
  for (auto& kind : unnamed)
    for (auto& [sequence, round] : kind)
      if (round.active) show(&round, now);
}

// All of the subtree has said the same: one announcement, and the round is over here.
void RequestAggregator::State::combine(Round* r, TimePoint now) {
  RequestList& b = fitting(&combined, options.rank, true, microseconds_between(r->since, now));
  if (r->cache_id != kNoCacheId)
    b.cached.push_back({r->cache_id, r->sequence});
  else
    b.fresh.push_back(*r->request);
  b.last = r->last;
  end(r);
}

// It speaks for all of a member.
bool RequestAggregator::State::is_entire(const RequestList& b) const {
  if (b.rank == options.rank) return true;
  return tree.parent(b.rank) == options.rank && (b.whole || tree.subtree(b.rank).size() == 1);
}

bool RequestAggregator::State::rides(const RequestList& b, int member) const {
  if (b.cached.empty() || !b.fresh.empty() || b.joined || transparent() || !is_entire(b)) return false;
  if (wave.count != 0) return !wave.said.has(member) && b.cached == wave.list;
  return active == 0 && std::all_of(b.cached.begin(), b.cached.end(), [this](const CachedRequest& c) {
           return c.cache_id < known_ids.size() && known_ids[c.cache_id].known;
         });
}

Status RequestAggregator::State::ride(const RequestList& b, int member, TimePoint now) {
  const TimePoint since = now - std::chrono::microseconds(b.held_us);
  if (wave.count == 0) wave.list = b.cached;
  wave.since = wave.count == 0 ? since : std::min(wave.since, since);
  wave.last = b.whole ? b.last : b.rank;
  wave.said.add(member);
  if (++wave.count < members) return Status::ok();
  RequestList& up = fitting(&combined, options.rank, true, microseconds_between(wave.since, now));
  up.cached.insert(up.cached.end(), wave.list.begin(), wave.list.end());
  up.last = wave.last;
  wave.said.clear();
  wave.count = 0;
  return Status::ok();
}

// The wave becomes one round for each of its cache ids.
Status RequestAggregator::State::dissolve(TimePoint now) {
  if (wave.count == 0) return Status::ok();
  wave.count = 0;
  const auto children = tree.children(options.rank);
  for (int m = 0; m < members; m++) {
    if (!wave.said.has(m)) continue;
    RequestList b;
    b.rank = m == 0 ? options.rank : children[static_cast<size_t>(m) - 1];
    b.whole = m != 0 && tree.subtree(b.rank).size() > 1;
    b.last = wave.last;
    b.held_us = microseconds_between(wave.since, now);
    for (const CachedRequest& c : wave.list) HC_TRY(announce(b, m, {&c, nullptr}, now));
  }
  wave.said.clear();
  return Status::ok();
}

Status RequestAggregator::State::announce(const RequestList& from, int member, const Word& word, TimePoint now) {
  Round* r = nullptr;
  HC_TRY(find(word, &r), "rank ", from.rank);
  const TimePoint since = now - std::chrono::microseconds(from.held_us);
  const bool begins = !r->active;
  if (begins) begin(r, since);
  const bool entire = is_entire(from);
  const bool alone = r->name == nullptr || r->name->active == 1;
  if (entire && alone && !r->shown && !transparent() && (begins || same_words(*r, word))) {
    if (!r->said.add(member))
      return error(Code::kInternal, "rank ", from.rank, " announced an operation twice before it completed");
    if (begins && word.cached != nullptr) r->cache_id = word.cached->cache_id;
    if (begins && word.fresh != nullptr) r->request = std::make_shared<const Request>(*word.fresh);
    if (begins) r->sequence = word.cached != nullptr ? word.cached->sequence : word.fresh->sequence;
    r->since = std::min(r->since, since);
    r->last = from.whole ? from.last : from.rank;
    if (++r->count == members) combine(r, now);
    if (r->name == nullptr && !r->active) {
      const Op op = word.fresh != nullptr ? word.fresh->signature.op : known_ids[word.cached->cache_id].op;
      unnamed[static_cast<size_t>(op)].erase(r->sequence);
    }
    return Status::ok();
  }
  if (!alone)  // one name, several operations: the coordinator judges
    for (auto& [op, other] : r->name->rounds)
      if (other.active) show(&other, now);
  show(r, now);
  send_up(r, from.rank, from.whole, word, since, now);
  return Status::ok();
}

Status RequestAggregator::State::take(const RequestList& b, TimePoint now) {
  if (b.generation != options.generation || b.process_set != options.process_set)
    return error(Code::kInternal, "a request list of rank ", b.rank, " is for another process set or generation");
  const int member = member_of(b);
  if (member < 0) return error(Code::kInternal, "a request list of rank ", b.rank, " came to rank ", options.rank);
  if (rides(b, member)) return ride(b, member, now);
  HC_TRY(dissolve(now));
  if (b.joined && !someone_joined) {
    someone_joined = true;
    show_everything(now);
  }
  for (const CachedRequest& c : b.cached) HC_TRY(announce(b, member, {&c, nullptr}, now));
  for (const Request& f : b.fresh) HC_TRY(announce(b, member, {nullptr, &f}, now));
  if (b.joined) fitting(&single, b.rank, false, 0).joined = true;
  return Status::ok();
}

void RequestAggregator::State::end_round(const PlanBatch& batch, const PlanEntry& entry) {
  Round* r = nullptr;
  auto& numbered = unnamed[static_cast<size_t>(batch.op)];
  auto at = numbered.end();
  Name* name = nullptr;
  if (entry.unnamed) {
    at = numbered.find(entry.sequence);
    if (at != numbered.end()) r = &at->second;
  } else if (entry.cache_id < known_ids.size() && known_ids[entry.cache_id].round != nullptr) {
    r = known_ids[entry.cache_id].round;
  } else if (auto found = names.find(entry.name); found != names.end()) {
    name = &found->second;
    if (auto kind = name->rounds.find(batch.op); kind != name->rounds.end()) r = &kind->second;
  }
  // What is held is not known to the coordinator: the plan ended an announcement of somebody else.
  if (r != nullptr && r->active && r->shown) {
    for (int32_t rank : entry.failed_on)
      if (rank >= 0 && rank < tree.size()) r->passed.remove(rank);
    if (entry.failed_on.empty() || r->passed.first() < 0) end(r);
  }
  if (at != numbered.end() && !r->active) numbered.erase(at);
  const bool remembered = entry.cache_id < known_ids.size() && known_ids[entry.cache_id].known;
  if (name != nullptr && name->active == 0 && !remembered) {
    for (const KnownId& s : known_ids)
      if (s.name == name) return;
    names.erase(entry.name);
  }
}

RequestAggregator::RequestAggregator(RequestAggregatorOptions options)
    : state_(std::make_unique<State>(std::move(options))) {}
RequestAggregator::~RequestAggregator() = default;

Status RequestAggregator::take(const RequestList& request_list, TimePoint now) {
  return state_->take(request_list, now);
}

bool RequestAggregator::has_news() const { return !state_->single.empty() || !state_->combined.empty(); }

std::vector<RequestList> RequestAggregator::collect() {
  State& s = *state_;
  // First: nobody joins in `single` whose announcements are still in `combined`.
  std::vector<RequestList> up = std::exchange(s.combined, {});
  std::move(s.single.begin(), s.single.end(), std::back_inserter(up));
  s.single.clear();
  return up;
}

void RequestAggregator::pass(const Plan& plan) {
  State& s = *state_;
  for (const PlanBatch& batch : plan.batches) {
    if (batch.op == Op::kJoin) s.someone_joined = false;
    for (const PlanEntry& e : batch.entries) {
      if (s.active == 0 && !e.assigned && e.cache_id < s.known_ids.size() && s.known_ids[e.cache_id].known) continue;
      if (e.assigned && e.cache_id != kNoCacheId && e.cache_id < kMaxCacheIds) {
        if (e.cache_id >= s.known_ids.size()) s.known_ids.resize(e.cache_id + 1);
        State::KnownId& cache_id = s.known_ids[e.cache_id];
        cache_id.known = true;
        cache_id.op = batch.op;
        if (!e.unnamed && cache_id.round == nullptr) {
          cache_id.round = &s.round_of(batch.op, e.name);
          cache_id.name = cache_id.round->name;
        }
      }
      s.end_round(batch, e);
    }
  }
}

void RequestAggregator::flush_held(TimePoint now) { state_->show_everything(now); }

void RequestAggregator::leave(TimePoint now) {
  state_->someone_left = true;
  flush_held(now);
}

void RequestAggregator::hold_nothing(bool on, TimePoint now) {
  state_->showing_all = on;
  if (on) flush_held(now);
}

size_t RequestAggregator::held() const {
  return state_->held + (state_->wave.count != 0 ? state_->wave.list.size() : 0);
}

}  // namespace hc
