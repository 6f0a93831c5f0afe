// Thousands of random worlds: ranks submit in any order, cut request lists anywhere, bytes arrive late; groups, unnamed
// operations, mismatches, joins and departures are mixed in. Every operation must end exactly once on every rank that
// submitted it, with the outcome that an independent rule predicts, in one order, and nothing may be left behind. The
// same through random trees of request aggregators, which must come to the same plans.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>

#include "agreement/request_aggregator.h"
#include "tests/agreement/negotiation_script.h"
#include "tests/sanitized.h"

using namespace hc;
using namespace hc::samples;

namespace {

using Bytes = std::vector<uint8_t>;

// A doctest assertion costs more than the code under test; only a failure becomes one.
void must(bool ok, const char* what) {
  if (!ok) FAIL(std::string(what));
}

Bytes bytes_of(const auto& value) {
  Writer w;
  encode(value, &w);
  return {w.bytes().begin(), w.bytes().end()};
}

struct Rank {
  struct Pending {
    int operation = 0;
    bool announced = false;
    Request request;
  };
  PlanCache cache;
  size_t next_action = 0;
  std::deque<std::string> queue;  // keys: submitted, not announced
  std::map<std::string, Pending> pending;
  std::array<uint64_t, kOpCount> next_sequence{};
  bool joining = false, join_announced = false, gone = false;
  std::deque<Bytes> request_lists, plans;  // in flight, to and from whoever is above
  std::vector<Code> joins;
  std::unique_ptr<RequestAggregator> aggregator;  // of one that has others below it
  int goodbyes = 0;                               // in flight to it
};

class ScheduledWorld {
 public:
  ScheduledWorld(Random& random, int size, size_t capacity, std::shared_ptr<const ControlTree> tree = nullptr)
      : ScheduledWorld(random, size, capacity, ScriptMaker(random, size).make(), std::move(tree)) {}
  ScheduledWorld(Random& random, int size, size_t capacity, const Script& script,
                 std::shared_ptr<const ControlTree> tree)
      : random_(random),
        size_(size),
        capacity_(capacity),
        script_(script),
        tree_(std::move(tree)),
        ranks_(static_cast<size_t>(size)),
        options_(options_of(size, capacity, chance(random, 20) ? 0 : kFusionBytes, tree_)),
        coordinator_(options_),
        twin_(options_),
        ended_(script_.operations.size(), std::vector<int>(static_cast<size_t>(size), 0)),
        place_(script_.operations.size(), -1),
        words_(script_.operations.size()),
        flushes_(chance(random, 30)) {
    for (int r = 0; tree_ && r < size; r++)
      if (!tree_->children(r).empty())
        rank(r).aggregator = std::make_unique<RequestAggregator>(RequestAggregatorOptions{tree_, r, 0, 0});
  }

  // What the plan said of each operation that every rank submitted: its error, its rows.
  const std::vector<std::string>& words() const { return words_; }
  const Script& script() const { return script_; }

  void run() {
    for (int round = 0; round < 200000; round++) {
      if (round % 64 == 0 && finished()) break;
      int r = pick(random_, size_);
      switch (pick(random_, tree_ ? 6 : 5)) {
        case 5:
          combine(r);
          break;
        case 0:
          submit(r);
          break;
        case 1:
          send_requests(r);
          break;
        case 2:
          take_requests(r);
          break;
        case 3:
          decide();
          break;
        default:
          take_plan(r);
          break;
      }
    }
    check_end();
  }

 private:
  static CoordinatorOptions options_of(int size, size_t capacity, size_t fusion_bytes,
                                       std::shared_ptr<const ControlTree> tree) {
    CoordinatorOptions o = options(size, capacity, fusion_bytes);
    o.tree = std::move(tree);
    return o;
  }
  Rank& rank(int r) { return ranks_[static_cast<size_t>(r)]; }
  static std::string key_of(Op op, const std::string& name, uint64_t sequence) {
    std::string key = std::to_string(static_cast<int>(op));
    return name.empty() ? key + '#' + std::to_string(sequence) : key + '.' + name;
  }

  // Who joins or leaves in the middle of a clash decides how it ends; the script predicts it without.
  bool in_clash(const Rank& me) const {
    for (const auto& [key, p] : me.pending)
      if (script_.operations[static_cast<size_t>(p.operation)].clash) return true;
    return false;
  }

  void submit(int r) {
    Rank& me = rank(r);
    const std::vector<int>& actions = script_.actions[static_cast<size_t>(r)];
    if (me.joining || me.next_action == actions.size()) return;
    int action = actions[me.next_action];
    if (action == kJoinAction) {
      if (in_clash(me)) return;
      me.joining = true;
    } else {
      const Operation& o = script_.operations[static_cast<size_t>(action)];
      Request request{o.name, 0, o.on_rank[static_cast<size_t>(r)]};
      uint64_t& sequence = me.next_sequence[static_cast<size_t>(request.signature.op)];
      if (o.name.empty()) request.sequence = sequence;
      std::string key = key_of(request.signature.op, request.name, request.sequence);
      if (me.pending.count(key) != 0) return;  // a duplicate: later
      if (o.name.empty()) sequence++;
      me.queue.push_back(key);
      me.pending[key] = {action, false, request};
    }
    me.next_action++;
  }

  void send_requests(int r) {
    Rank& me = rank(r);
    RequestList b;
    b.rank = r;
    for (size_t n = me.queue.empty() ? 0 : 1 + static_cast<size_t>(pick(random_, static_cast<int>(me.queue.size())));
         n > 0; n--) {
      Rank::Pending& p = me.pending.at(me.queue.front());
      me.queue.pop_front();
      p.announced = true;
      me.cache.announce(p.request, &b);
    }
    if (me.joining && !me.join_announced && me.queue.empty()) b.joined = me.join_announced = true;
    if (b.cached.empty() && b.fresh.empty() && !b.joined) return;
    if (!me.aggregator) return me.request_lists.push_back(bytes_of(b));
    Status taken = me.aggregator->take(b, now_);
    must(taken.is_ok(), taken.text().c_str());
  }

  // A rank with others below it sends up what it has, shows what it holds, or hears that somebody has left.
  void combine(int r) {
    Rank& me = rank(r);
    if (!me.aggregator) return;
    if (me.goodbyes > 0 && chance(random_, 30)) {
      me.goodbyes--;
      me.aggregator->leave(now_);
    }
    if (flushes_ && chance(random_, 3)) me.aggregator->flush_held(now_);
    if (flushes_ && chance(random_, 2)) me.aggregator->hold_nothing(chance(random_, 50), now_);
    if (!me.aggregator->has_news()) return;
    Bytes frame;
    for (const RequestList& b : me.aggregator->collect()) {
      const Bytes bytes = bytes_of(b);
      frame.insert(frame.end(), bytes.begin(), bytes.end());
    }
    if (r == 0)
      coordinate(frame);
    else
      me.request_lists.push_back(frame);
  }

  void coordinate(const Bytes& frame) {
    Reader in(frame);
    while (in.remaining() > 0) {
      RequestList b;
      must(decode(&in, &b).is_ok(), "a request list is readable");
      now_ += std::chrono::milliseconds(1);
      Status taken = coordinator_.take(b, now_);
      must(taken.is_ok(), taken.text().c_str());
      must(twin_.take(b, {}).is_ok(), "the twin takes it too");
    }
  }

  void take_requests(int r) {
    Rank& me = rank(r);
    if (!me.request_lists.empty()) {
      const Bytes frame = me.request_lists.front();
      me.request_lists.pop_front();
      if (!tree_) return coordinate(frame);
      Reader in(frame);
      while (in.remaining() > 0) {
        RequestList b;
        must(decode(&in, &b).is_ok(), "a request list is readable");
        Status taken = rank(tree_->parent(r)).aggregator->take(b, now_);
        must(taken.is_ok(), taken.text().c_str());
      }
    } else if (script_.leaves[static_cast<size_t>(r)] && !me.gone && !me.joining && me.queue.empty() &&
               me.next_action == script_.actions[static_cast<size_t>(r)].size() && !in_clash(me) &&
               (!tree_ ||
                me.pending.empty())) {  // who leaves has finished: in a tree its request lists may still be on the way
      me.gone = true;
      for (Rank& other : ranks_) other.goodbyes++;
      coordinator_.leave(r, "rank left");
      twin_.leave(r, "rank left");
    }
  }

  void decide() {
    size_t room = static_cast<size_t>(pick(random_, 4));
    bool ready = coordinator_.anything_ready();
    Plan plan = coordinator_.decide(room);
    must((plan.batches.empty() == (!ready || room == 0)), "a plan if and only if something is ready");
    Bytes bytes = bytes_of(plan);
    must(bytes == bytes_of(twin_.decide(room)), "same request lists, same plan");
    if (plan.batches.empty()) return;
    for (int r = 0; r < size_; r++)
      if (!tree_ || r == 0 || tree_->parent(r) == 0) rank(r).plans.push_back(bytes);
    if (tree_) rank(0).aggregator->pass(plan);
  }

  void take_plan(int r) {
    Rank& me = rank(r);
    if (me.plans.empty()) return;
    Reader in(me.plans.front());
    Plan plan;
    must(decode(&in, &plan).is_ok(), "a plan is readable");
    if (me.aggregator && r != 0) {
      for (int child : tree_->children(r)) rank(child).plans.push_back(me.plans.front());
      me.aggregator->pass(plan);
    }
    me.plans.pop_front();
    for (const PlanBatch& batch : plan.batches) execute(r, batch);
  }

  void execute(int r, const PlanBatch& batch) {
    Rank& me = rank(r);
    if (batch.op == Op::kJoin) {
      if (!me.join_announced) return;  // failed for others
      me.joining = me.join_announced = false;
      me.joins.push_back(batch.error);
      must(batch.error != Code::kOk || (batch.last_joined >= 0 && batch.last_joined < size_), "somebody joined last");
      return;
    }
    std::vector<int> operations;
    for (const PlanEntry& e : batch.entries) {
      int o = execute(r, batch, e);
      if (o >= 0) operations.push_back(o);
    }
    if (batch.error == Code::kOk && operations.size() == batch.entries.size()) check_batch(batch, operations);
  }

  // Returns the operation's number, or -1 when this rank has no part in it.
  int execute(int r, const PlanBatch& batch, const PlanEntry& e) {
    Rank& me = rank(r);
    if (!e.failed_on.empty() && std::count(e.failed_on.begin(), e.failed_on.end(), r) == 0) return -1;
    std::string name = e.name;
    if (!e.unnamed && name.empty()) {
      must(me.cache.name_of(e.cache_id) != nullptr, "a bare cache id is known");
      name = *me.cache.name_of(e.cache_id);
    }
    auto at = me.pending.find(key_of(batch.op, name, e.sequence));
    if (at == me.pending.end()) {
      must(me.join_announced, "only a joined rank is asked for what it did not submit");
      must(batch.error != Code::kOk || e.has_signature, "a joined rank learns the signature");
      uint64_t& sequence = me.next_sequence[static_cast<size_t>(batch.op)];
      if (e.unnamed) sequence = std::max(sequence, e.sequence + 1);
      if (e.assigned && chance(random_, 80)) me.cache.learn(e);
      return -1;
    }
    must(at->second.announced, "nothing ends unannounced");
    if (e.assigned) me.cache.learn(at->second.request, e.cache_id);
    int o = at->second.operation;
    me.pending.erase(at);
    must(++ended_[static_cast<size_t>(o)][static_cast<size_t>(r)] == 1, "an operation ends once");
    const Operation& ended = script_.operations[static_cast<size_t>(o)];
    if (batch.error != ended.expected) FAIL("outcome of ", ended.name, ": ", batch.error_text);
    if (batch.error == Code::kOk) check_place(o, batch.id);
    words_[static_cast<size_t>(o)] = batch.error_text;
    for (int64_t rows : batch.rows) words_[static_cast<size_t>(o)] += ' ' + std::to_string(rows);
    return o;
  }

  // Successful operations run in the same batch everywhere.
  void check_place(int o, uint32_t batch) {
    int64_t& place = place_[static_cast<size_t>(o)];
    if (place < 0) place = batch;
    must(place == batch, "one place in the order on every rank");
  }

  static const Signature& said_by_first(const Operation& o) {
    size_t r = 0;
    while (!o.submitted_by[r]) r++;
    return o.on_rank[r];
  }

  void check_batch(const PlanBatch& batch, const std::vector<int>& numbers) {
    size_t bytes = 0;
    const Signature& first = said_by_first(script_.operations[static_cast<size_t>(numbers[0])]);
    bool arena = true;
    std::vector<int64_t> rows;
    for (int number : numbers) {
      const Operation& o = script_.operations[static_cast<size_t>(number)];
      const Signature& s = said_by_first(o);
      for (int r = 0; r < size_; r++) {
        const Signature& t = o.on_rank[static_cast<size_t>(r)];
        arena = arena && t.in_arena && o.submitted_by[static_cast<size_t>(r)];
        if (s.op == Op::kAllgather) rows.push_back(t.tensors[0].shape[0]);
        if (s.op == Op::kAlltoall && !t.splits.empty()) rows.insert(rows.end(), t.splits.begin(), t.splits.end());
        if (s.op == Op::kAlltoall && t.splits.empty())
          rows.insert(rows.end(), static_cast<size_t>(size_), t.tensors[0].shape[0] / size_);
      }
      if (numbers.size() == 1) break;
      must(s.op == Op::kAllreduce, "only allreduces are fused");
      must(s.reduce == first.reduce, "one reduce operation");
      must(s.reduce != Reduce::kAdasum, "no fused Adasum");
      must(s.prescale == first.prescale, "one prescale");
      for (const TensorMeta& t : s.tensors) {
        must(t.dtype == first.tensors[0].dtype, "one dtype");
        bytes += static_cast<size_t>(t.count()) * size_of(t.dtype);
      }
    }
    must(bytes <= kFusionBytes, "fusion limit");
    must(batch.in_arena == (arena && numbers.size() == 1), "in arena on all ranks, alone");
    if (batch.op != Op::kReducescatter) must(batch.rows == rows, "rows");
  }

  bool finished() {
    for (int r = 0; r < size_; r++) {
      Rank& me = rank(r);
      if (me.next_action != script_.actions[static_cast<size_t>(r)].size() || !me.queue.empty() ||
          !me.request_lists.empty() || !me.plans.empty() || me.joining || !me.pending.empty() ||
          (script_.leaves[static_cast<size_t>(r)] && !me.gone))
        return false;
      if (me.aggregator && (me.aggregator->has_news() || me.aggregator->held() != 0)) return false;
    }
    return !coordinator_.anything_ready();
  }

  void check_end() {
    must(finished(), "everything ends");
    must(coordinator_.pending() == 0, "nothing pending");
    must(coordinator_.stalled(now_ + std::chrono::hours(1), 0).empty(), "nothing stalled");
    for (size_t o = 0; o < ended_.size(); o++)
      for (size_t r = 0; r < ended_[o].size(); r++)
        must(ended_[o][r] == (script_.operations[o].submitted_by[r] ? 1 : 0), "what was submitted has ended");
    for (int r = 0; r < size_; r++) {
      must(rank(r).cache.size() <= capacity_, "cache bounded");
      std::vector<Code> joins = script_.join_outcomes;
      if (script_.leaves[static_cast<size_t>(r)] && rank(r).joins.size() < joins.size()) joins.pop_back();
      must(rank(r).joins == joins, "joins ended");
    }
  }

  Random& random_;
  const int size_;
  const size_t capacity_;
  const Script script_;
  const std::shared_ptr<const ControlTree> tree_;
  std::vector<Rank> ranks_;
  const CoordinatorOptions options_;
  Coordinator coordinator_, twin_;  // the twin gets the same request lists and must make the same plans
  TimePoint now_{};
  std::vector<std::vector<int>> ended_;  // [operation][rank]
  std::vector<int64_t> place_;           // [operation] batch
  std::vector<std::string> words_;
  const bool flushes_;  // now and then, for no reason; it could hide what is held too long
};

std::shared_ptr<const ControlTree> random_tree(Random& random, int size) {
  std::vector<int> node;
  const int nodes = 1 + pick(random, size);
  for (int r = 0; r < size; r++) node.push_back(r == 0 ? 0 : pick(random, nodes));
  return std::make_shared<const ControlTree>(node, 1 + pick(random, 3));
}

}  // namespace

TEST_CASE("negotiation: random schedules end the same way on every rank" * doctest::test_suite("long")) {
  const size_t capacities[] = {0, 3, 1024};
  for (uint64_t seed = 1; seed <= (kSanitized ? 200 : 2000); seed++) {
    INFO("seed ", seed);
    Random random(seed);
    int size = 2 + pick(random, 5);
    ScheduledWorld(random, size, capacities[seed % 3]).run();
  }
}

TEST_CASE("negotiation: random schedules through random trees end as they do without" * doctest::test_suite("long")) {
  const size_t capacities[] = {0, 3, 1024};
  for (uint64_t seed = 1; seed <= (kSanitized ? 120 : 1200); seed++) {
    INFO("seed ", seed);
    Random random(seed);
    const int size = 2 + pick(random, 8);
    ScheduledWorld through_tree(random, size, capacities[seed % 3], random_tree(random, size));
    through_tree.run();
    if (seed % 4 != 0) continue;
    ScheduledWorld star(random, size, capacities[seed % 3], through_tree.script(), nullptr);
    star.run();
    for (size_t o = 0; o < star.words().size(); o++) {
      const Operation& operation = star.script().operations[o];
      const auto& by = operation.submitted_by;
      if (operation.clash || std::count(by.begin(), by.end(), true) != size) continue;
      must(operation.expected == Code::kAborted || star.words()[o] == through_tree.words()[o], "the same words");
    }
  }
}
