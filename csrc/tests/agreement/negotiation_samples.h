// Requests, request lists and coordinators in few words, for the tests of the agreement.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "agreement/coordinator.h"
#include "agreement/negotiation.h"
#include "agreement/plan_cache.h"

namespace hc::samples {

inline Signature signature(Op op, std::vector<int64_t> shape, DType dtype = DType::kF32) {
  Signature s;
  s.op = op;
  if (op != Op::kBarrier) s.tensors = {{dtype, std::move(shape)}};
  return s;
}
inline Request named(std::string name, Signature s) { return {std::move(name), 0, std::move(s)}; }
inline Request unnamed(uint64_t sequence, Signature s) { return {"", sequence, std::move(s)}; }
inline Request allreduce(std::string name, std::vector<int64_t> shape = {4}, DType dtype = DType::kF32) {
  return named(std::move(name), signature(Op::kAllreduce, std::move(shape), dtype));
}

inline CoordinatorOptions options(int size, size_t capacity = 1024, size_t fusion_bytes = 1 << 20) {
  CoordinatorOptions o;
  o.size = size;
  o.cache_capacity = capacity;
  o.fusion_bytes = fusion_bytes;
  return o;
}

inline RequestList request_list(int rank, std::vector<Request> fresh, bool joined = false) {
  RequestList b;
  b.rank = rank;
  b.fresh = std::move(fresh);
  b.joined = joined;
  return b;
}

// Ranks that announce through real caches and bytes, and learn from every plan.
class Ranks {
 public:
  explicit Ranks(CoordinatorOptions o) : size_(o.size), coordinator(std::move(o)), cache(static_cast<size_t>(size_)) {}

  // Announces, sends the request list as bytes; returns the number of bytes.
  size_t say(int rank, const std::vector<Request>& requests, bool joined = false) {
    RequestList b;
    b.rank = rank;
    for (const Request& r : requests) {
      cache[static_cast<size_t>(rank)].announce(r, &b);
      said.push_back(r);
    }
    b.joined = joined;
    Writer w;
    encode(b, &w);
    Reader r(w.bytes());
    RequestList arrived;
    status = decode(&r, &arrived);
    if (status.is_ok()) status = coordinator.take(arrived, now);
    return w.size();
  }
  void everybody_says(const std::vector<Request>& requests) {
    for (int r = 0; r < size_; r++) say(r, requests);
  }
  // Decides, sends the plan as bytes; every rank learns the cache ids of what it said.
  Plan decide(size_t room = 1000) {
    Writer w;
    encode(coordinator.decide(room), &w);
    plan_bytes = w.size();
    Reader r(w.bytes());
    Plan plan;
    status = decode(&r, &plan);
    for (const PlanBatch& b : plan.batches)
      for (const PlanEntry& e : b.entries)
        if (e.assigned) learn(b.op, e);
    return plan;
  }

  const int size_;
  Coordinator coordinator;
  std::vector<PlanCache> cache;
  std::vector<Request> said;
  Status status;
  TimePoint now{};
  size_t plan_bytes = 0;

 private:
  void learn(Op op, const PlanEntry& e) {
    for (auto r = said.rbegin(); r != said.rend(); ++r) {
      if (r->signature.op != op || r->name != e.name || (e.unnamed && r->sequence != e.sequence)) continue;
      for (PlanCache& c : cache) c.learn(*r, e.cache_id);
      return;
    }
  }
};

}  // namespace hc::samples
