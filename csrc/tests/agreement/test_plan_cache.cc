// The ranks' side of the cache: a number is sent only for what this very rank announced before.
#include <doctest/doctest.h>

#include "tests/agreement/negotiation_samples.h"

using namespace hc;
using namespace hc::samples;

namespace {

bool sent_whole(PlanCache* cache, const Request& r) {
  RequestList b;
  cache->announce(r, &b);
  CHECK(b.fresh.size() + b.cached.size() == 1);
  return b.fresh.size() == 1;
}

}  // namespace

TEST_CASE("plan cache: a name is sent whole until its cache id is known, then as a number") {
  PlanCache cache;
  Request x = allreduce("x");
  CHECK(sent_whole(&cache, x));
  CHECK(sent_whole(&cache, x));
  cache.learn(x, 5);
  RequestList b;
  CHECK(cache.announce(x, &b) == 5);
  REQUIRE(b.cached.size() == 1);
  CHECK(b.cached[0].cache_id == 5);
  CHECK(b.fresh.empty());
  CHECK(cache.size() == 1);
  CHECK(*cache.name_of(5) == "x");
  CHECK(*cache.signature_of(5) == x.signature);
  CHECK(cache.signature_of(4) == nullptr);
  CHECK(cache.name_of(6) == nullptr);
}

TEST_CASE("plan cache: a changed signature is sent whole once") {
  PlanCache cache;
  Request x = allreduce("x", {4}), y = allreduce("x", {8});
  cache.learn(x, 0);
  CHECK_FALSE(sent_whole(&cache, x));
  CHECK(cache.find(x) == 0);
  CHECK(cache.find(y) == kNoCacheId);
  CHECK(sent_whole(&cache, y));
  CHECK_FALSE(sent_whole(&cache, y));
  CHECK(cache.find(x) == kNoCacheId);
  CHECK(sent_whole(&cache, x));
  Signature in_arena = x.signature;
  in_arena.in_arena = true;
  CHECK(sent_whole(&cache, named("x", in_arena)));
  CHECK(cache.size() == 1);
}

TEST_CASE("plan cache: the operation belongs to the key") {
  PlanCache cache;
  cache.learn(allreduce("x"), 0);
  Request other = named("x", signature(Op::kBroadcast, {4}));
  CHECK(sent_whole(&cache, other));
  cache.learn(other, 1);
  CHECK_FALSE(sent_whole(&cache, other));
  CHECK_FALSE(sent_whole(&cache, allreduce("x")));
}

TEST_CASE("plan cache: unnamed operations are known by their content, whatever their number") {
  PlanCache cache;
  Request first = unnamed(0, signature(Op::kAllreduce, {4}));
  CHECK(sent_whole(&cache, first));
  cache.learn(first, 3);
  RequestList b;
  CHECK(cache.announce(unnamed(17, signature(Op::kAllreduce, {4})), &b) == 3);
  REQUIRE(b.cached.size() == 1);
  CHECK(b.cached[0].sequence == 17);
  CHECK(sent_whole(&cache, unnamed(18, signature(Op::kAllreduce, {5}))));
  CHECK(sent_whole(&cache, unnamed(18, signature(Op::kAllreduce, {4}, DType::kF64))));
}

TEST_CASE("plan cache: a rank that only watched (joined) knows the cache id but announces whole first") {
  PlanCache cache;
  PlanEntry e;
  e.cache_id = 2;
  e.assigned = e.has_signature = true;
  e.name = "x";
  e.signature = signature(Op::kAllreduce, {4});
  cache.learn(e);
  CHECK(*cache.name_of(2) == "x");
  CHECK(cache.find(allreduce("x")) == kNoCacheId);
  CHECK(sent_whole(&cache, allreduce("x")));
  CHECK_FALSE(sent_whole(&cache, allreduce("x")));
  cache.learn(e);  // once more: what this rank announced stays
  CHECK_FALSE(sent_whole(&cache, allreduce("x")));
}

TEST_CASE("plan cache: a cache id keeps its first meaning and absurd cache ids are ignored") {
  PlanCache cache;
  cache.learn(allreduce("x"), 0);
  cache.learn(allreduce("y"), 0);
  CHECK(*cache.name_of(0) == "x");
  CHECK(sent_whole(&cache, allreduce("y")));
  cache.learn(allreduce("z"), kNoCacheId);
  cache.learn(allreduce("z"), kMaxCacheIds);
  CHECK(cache.size() == 1);
}
