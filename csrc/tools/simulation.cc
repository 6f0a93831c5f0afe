// See simulation.h. One thread; events in the order of the virtual clock. A rank works like an engine's iteration: it
// takes all frames that have arrived, then sends up what it has (or decides), then passes plans down.
#include "tools/simulation.h"

#include <algorithm>
#include <array>
#include <memory>
#include <queue>
#include <vector>

#include "agreement/coordinator.h"
#include "agreement/frames.h"
#include "agreement/plan_cache.h"
#include "agreement/request_aggregator.h"

namespace hc {
namespace {

using Bytes = std::vector<uint8_t>;
using FramePtr = std::shared_ptr<const Bytes>;

struct Event {
  double at = 0;  // us
  uint64_t order = 0;
  int to = 0;
  int from = -1;   // -1: the rank begins its work
  FramePtr frame;  // null: the request list that all leaves share
  bool operator>(const Event& other) const { return at != other.at ? at > other.at : order > other.order; }
};

struct Rank {
  std::vector<Event> inbox;
  double busy_until = 0;
  bool scheduled = false;
  std::unique_ptr<RequestAggregator> aggregator;
  double messages = 0, bytes = 0, cpu_us = 0;  // of this step
};

// What a rank computes. Thousands of ranks share this core and its caches, and others this machine: the clock takes
// what the same kind of work took typically in the step before.
enum class Work : uint8_t { kTakeRequests, kSendUp, kTakeAll, kDecide, kPassPlan, kReadPlan, kAnnounce };
constexpr size_t kWorks = 7;
struct Typical {
  std::vector<double> samples;  // us, of this step
  double us = -1;               // median of the step before
};

struct Node {
  double messages = 0, bytes = 0;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

class Simulation {
 public:
  explicit Simulation(const SimulationOptions& options) : options_(options), ranks_(size()) {
    std::vector<int> node(size());
    for (size_t r = 0; r < size(); r++) node[r] = static_cast<int>(r) / options.ranks_per_node;
    tree_ = std::make_shared<const ControlTree>(node, options.fanout);
    aggregates_ = options.fanout > 0 && tree_->has_relays();
    nodes_.resize(static_cast<size_t>(node.back()) + 1);
    CoordinatorOptions c;
    c.size = options.ranks;
    if (aggregates_) c.tree = tree_;
    coordinator_ = std::make_unique<Coordinator>(c);
    for (int r = 0; aggregates_ && r < options.ranks; r++)
      if (!tree_->children(r).empty())
        at(r).aggregator = std::make_unique<RequestAggregator>(RequestAggregatorOptions{tree_, r, 0, 0});
    for (int i = 0; i < options.tensors; i++) {
      Request& request = step_.emplace_back();
      request.name = text_of("model.layer", i / 3, i % 3 ? ".weight" : ".bias");
      request.name += std::to_string(i);
      request.signature.tensors = {{DType::kF32, {64, 1 + i}}};
    }
  }

  // What work takes, from a world that fits the caches as each rank's own objects would.
  void take_costs_from(const Simulation& other) {
    for (size_t w = 0; w < kWorks; w++) fixed_[w] = other.typical_[w].us;
  }

  Result<SimulationResult> run() {
    SimulationResult result;
    result.depth = tree_->depth();
    std::vector<double> latency, root_cpu, busiest, mean;
    for (int step = 0; step <= options_.steps + 1; step++) {  // learn the names, get warm, count
      HC_TRY(run_step());
      for (Typical& t : typical_) {
        if (step != 0 && !t.samples.empty()) t.us = median(t.samples);
        t.samples.clear();
      }
      if (step < 2) continue;
      latency.push_back(finished_at_);
      root_cpu.push_back(at(0).cpu_us);
      double most = 0, sum = 0;
      for (const Rank& r : ranks_) {
        most = std::max(most, r.cpu_us);
        sum += r.cpu_us;
      }
      busiest.push_back(most);
      mean.push_back(sum / static_cast<double>(size()));
    }
    result.latency_us = median(latency);
    result.root_cpu_us = median(root_cpu);
    result.busiest_cpu_us = median(busiest);
    result.rank_cpu_us = median(mean);
    result.root_messages = at(0).messages;
    result.root_bytes = at(0).bytes;
    for (const Node& n : nodes_) {
      result.node_messages = std::max(result.node_messages, n.messages);
      result.node_bytes = std::max(result.node_bytes, n.bytes);
    }
    return result;
  }

 private:
  size_t size() const { return static_cast<size_t>(options_.ranks); }
  Rank& at(int rank) { return ranks_[static_cast<size_t>(rank)]; }
  int node_of(int rank) const { return rank / options_.ranks_per_node; }

  Status run_step() {
    for (Rank& r : ranks_) {
      r.busy_until = r.messages = r.bytes = r.cpu_us = 0;
      r.scheduled = false;
    }
    std::fill(nodes_.begin(), nodes_.end(), Node{});
    finished_at_ = 0;
    plan_read_us_ = -1;
    announced_ = RequestList{};
    const TimePoint before = Clock::now();
    for (const Request& request : step_) cache_.announce(request, &announced_);
    Writer encoded;
    encode(announced_, &encoded);
    announce_us_ = typically(Work::kAnnounce, since(before));
    for (int r = 0; r < options_.ranks; r++) post({0, order_++, r, -1, nullptr});
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      now_ = event.at;
      HC_TRY(event.to >= 0 ? arrive(event) : work(-1 - event.to));
    }
    if (coordinator_->pending() != 0) return error(Code::kInternal, "the simulated step did not end");
    return Status::ok();
  }

  void post(Event event) { events_.push(std::move(event)); }

  Status arrive(const Event& event) {
    Rank& r = at(event.to);
    r.inbox.push_back(event);
    if (r.scheduled) return Status::ok();
    r.scheduled = true;
    post({std::max(event.at, r.busy_until), order_++, -1 - event.to, -1, nullptr});
    return Status::ok();
  }

  const MessageCost& cost(int from, int to) const {
    return node_of(from) == node_of(to) ? options_.local : options_.network;
  }

  static double since(TimePoint start) { return seconds_between(start, Clock::now()) * 1e6; }
  TimePoint virtual_now() const { return TimePoint{} + std::chrono::nanoseconds(static_cast<int64_t>(now_ * 1e3)); }

  // One iteration of a rank, from now_ on.
  Status work(int rank) {
    Rank& r = at(rank);
    r.scheduled = false;
    busy_ = now_;
    std::vector<Event> inbox = std::exchange(r.inbox, {});
    for (const Event& event : inbox) {
      if (event.from >= 0) {
        busy_ += cost(event.from, rank).receive;
        r.messages++;
      }
      HC_TRY(take(rank, event));
    }
    HC_TRY(send_up(rank));
    r.busy_until = busy_;
    return Status::ok();
  }

  // What `rank` computes: real time, and virtual time too.
  template <class F>
  auto computes(int rank, Work work, F&& f) {
    const TimePoint start = Clock::now();
    auto value = f();
    spend(rank, typically(work, since(start)));
    return value;
  }
  double typically(Work work, double us) {
    Typical& t = typical_[static_cast<size_t>(work)];
    t.samples.push_back(us);
    const double fixed = fixed_[static_cast<size_t>(work)];
    return fixed >= 0 ? fixed : t.us >= 0 ? t.us : us;
  }
  void spend(int rank, double us) {
    at(rank).cpu_us += us;
    if (options_.processing) busy_ += us;
  }

  Status take(int rank, const Event& event) {
    if (event.from < 0) return announce(rank);
    if (event.frame && event.frame->front() == static_cast<uint8_t>(FrameKind::kPlan))
      return take_plan(rank, event.frame);
    Bytes own;
    if (!event.frame) own = request_list_of(event.from);
    const Bytes& bytes = event.frame ? *event.frame : own;
    count(rank, event.from, bytes.size());
    return computes(rank, Work::kTakeRequests, [&]() -> Status {
      Reader in(bytes);
      (void)in.get<FrameKind>();
      while (in.remaining() > 0) {
        RequestList request_list;
        HC_TRY(decode(&in, &request_list));
        HC_TRY(aggregates_ ? at(rank).aggregator->take(request_list, virtual_now())
                           : coordinator_->take(request_list, virtual_now()));
      }
      return Status::ok();
    });
  }

  Bytes request_list_of(int rank) {
    Writer out;
    out.put(FrameKind::kRequests);
    announced_.rank = rank;
    encode(announced_, &out);
    return {out.bytes().begin(), out.bytes().end()};
  }

  Status announce(int rank) {
    spend(rank, announce_us_);
    announced_.rank = rank;
    if (at(rank).aggregator)
      return computes(rank, Work::kTakeRequests, [&] { return at(rank).aggregator->take(announced_, virtual_now()); });
    if (rank == 0)
      return computes(0, Work::kTakeRequests, [&] { return coordinator_->take(announced_, virtual_now()); });
    send(rank, aggregates_ ? tree_->parent(rank) : 0, nullptr, request_list_of(rank).size());
    return Status::ok();
  }

  Status send_up(int rank) {
    Rank& r = at(rank);
    if (r.aggregator && r.aggregator->has_news()) {
      std::vector<RequestList> up;
      const FramePtr frame = computes(rank, Work::kSendUp, [&] {
        up = r.aggregator->collect();
        Writer out;
        out.put(FrameKind::kRequests);
        if (rank != 0)
          for (const RequestList& b : up) encode(b, &out);
        return std::make_shared<const Bytes>(out.bytes().begin(), out.bytes().end());
      });
      if (rank != 0)
        send(rank, tree_->parent(rank), frame, frame->size());
      else
        for (const RequestList& b : up)
          HC_TRY(computes(0, Work::kTakeAll, [&] { return coordinator_->take(b, virtual_now()); }));
    }
    return rank == 0 && coordinator_->anything_ready() ? decide() : Status::ok();
  }

  Status decide() {
    const FramePtr frame = computes(0, Work::kDecide, [&] {
      Plan plan = coordinator_->decide(kMaxPlanEntries);
      Writer out;
      out.put(FrameKind::kPlan);
      encode(plan, &out);
      return std::make_shared<const Bytes>(out.bytes().begin(), out.bytes().end());
    });
    return take_plan(0, frame);
  }

  // Reads it, hands it down, learns. What it costs a rank with nobody below is the same for all of them.
  Status take_plan(int rank, const FramePtr& frame) {
    const bool leaf = rank != 0 && !at(rank).aggregator;
    if (rank != 0) count(rank, aggregates_ ? tree_->parent(rank) : 0, frame->size());
    if (leaf && plan_read_us_ >= 0) {
      spend(rank, plan_read_us_);
    } else {
      const TimePoint start = Clock::now();
      Reader in(*frame);
      (void)in.get<FrameKind>();
      Plan plan;
      HC_TRY(decode(&in, &plan));
      if (at(rank).aggregator) at(rank).aggregator->pass(plan);
      const double us = typically(leaf ? Work::kReadPlan : Work::kPassPlan, since(start));
      if (leaf) plan_read_us_ = us;
      spend(rank, us);
      if (rank == 0) learn(plan);
    }
    if (aggregates_) {
      for (int child : tree_->children(rank)) send(rank, child, frame, frame->size());
    } else if (rank == 0) {
      for (int r = 1; r < options_.ranks; r++) send(0, r, frame, frame->size());
    }
    finished_at_ = std::max(finished_at_, busy_);
    return Status::ok();
  }

  void learn(const Plan& plan) {
    for (const PlanBatch& batch : plan.batches)
      for (const PlanEntry& e : batch.entries)
        if (e.assigned)
          for (const Request& request : step_)
            if (request.name == e.name) cache_.learn(request, e.cache_id);
  }

  void send(int from, int to, const FramePtr& frame, size_t bytes) {
    const MessageCost& c = cost(from, to);
    busy_ += c.send;
    at(from).messages++;
    at(from).bytes += static_cast<double>(bytes);
    if (node_of(from) != node_of(to)) {
      Node& n = nodes_[static_cast<size_t>(node_of(from))];
      n.messages++;
      n.bytes += static_cast<double>(bytes);
    }
    post({busy_ + c.latency, order_++, to, from, frame});
  }

  // A frame that has come.
  void count(int rank, int from, size_t bytes) {
    at(rank).bytes += static_cast<double>(bytes);
    if (node_of(rank) == node_of(from)) return;
    Node& n = nodes_[static_cast<size_t>(node_of(rank))];
    n.messages++;
    n.bytes += static_cast<double>(bytes);
  }

  const SimulationOptions options_;
  std::vector<Rank> ranks_;
  std::vector<Node> nodes_;
  std::shared_ptr<const ControlTree> tree_;
  bool aggregates_ = false;
  std::unique_ptr<Coordinator> coordinator_;
  PlanCache cache_;            // every rank's: all learn the same
  std::vector<Request> step_;  // what every rank announces
  RequestList announced_;      // as a request list; `rank` changes
  double announce_us_ = 0;     // what it takes a rank to make it
  double plan_read_us_ = -1;   // what it takes a leaf to read this step's plan
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  uint64_t order_ = 0;
  std::array<Typical, kWorks> typical_;
  std::array<double, kWorks> fixed_{-1, -1, -1, -1, -1, -1, -1};
  double now_ = 0, busy_ = 0;  // us of the step; busy_: until when the rank that works is busy
  double finished_at_ = 0;
};

}  // namespace

std::string SimulationResult::to_json() const {
  return text_of("{\"latency_us\":", latency_us, ",\"root_messages\":", root_messages, ",\"root_bytes\":", root_bytes,
                 ",\"node_messages\":", node_messages, ",\"node_bytes\":", node_bytes, ",\"root_cpu_us\":", root_cpu_us,
                 ",\"busiest_cpu_us\":", busiest_cpu_us, ",\"rank_cpu_us\":", rank_cpu_us, ",\"depth\":", depth, "}");
}

Result<SimulationResult> simulate(const SimulationOptions& o) {
  if (o.ranks < 1 || o.ranks > 1 << 20 || o.ranks_per_node < 1 || o.fanout < 0 || o.tensors < 1 || o.tensors > 1000 ||
      o.steps < 1)
    return error(Code::kInvalidArgument, "simulate: ", o.ranks, " ranks (at most 1048576), ", o.ranks_per_node,
                 " per node, fan-out ", o.fanout, ", ", o.tensors, " tensors (at most 1000), ", o.steps, " steps");
  // In a tree no rank has more to do in a larger world.
  constexpr int kFitsCaches = 512;
  Simulation simulation(o);
  if (o.fanout > 0 && o.ranks > kFitsCaches) {
    SimulationOptions small = o;
    small.ranks = kFitsCaches;
    small.steps = std::max(5, o.steps);
    Simulation calibration(small);
    HC_TRY(calibration.run().status());
    simulation.take_costs_from(calibration);
  }
  return simulation.run();
}

}  // namespace hc
