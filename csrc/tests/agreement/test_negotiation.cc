// Bytes of request lists and plans: what goes in comes out, it is small, and no broken frame does harm.
#include <doctest/doctest.h>

#include <limits>
#include <random>

#include "tests/agreement/negotiation_samples.h"

using namespace hc;
using namespace hc::samples;

namespace {

using Random = std::mt19937_64;

int pick(Random& random, int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); }

template <class T>
std::vector<uint8_t> encoded(const T& value) {
  Writer w;
  encode(value, &w);
  return {w.bytes().begin(), w.bytes().end()};
}

template <class T>
Status read(const std::vector<uint8_t>& bytes, T* value, size_t* left = nullptr) {
  Reader r(bytes);
  Status s = decode(&r, value);
  if (left != nullptr) *left = r.remaining();
  return s;
}

Signature random_signature(Random& random) {
  Signature s;
  s.op = static_cast<Op>(pick(random, kOpCount));
  s.reduce = static_cast<Reduce>(pick(random, kReduceCount));
  s.device = static_cast<uint8_t>(pick(random, 2));
  s.in_arena = pick(random, 2) == 1;
  s.root = pick(random, 9) - 4;
  if (pick(random, 3) == 0) s.left_out = pick(random, 300);
  if (pick(random, 3) == 0) s.prescale = 0.1 * pick(random, 50) - 2;
  if (pick(random, 3) == 0) s.postscale = 1.0 / (1 + pick(random, 50));
  s.tensors.resize(static_cast<size_t>(pick(random, 4)));
  for (TensorMeta& t : s.tensors) {
    t.dtype = static_cast<DType>(pick(random, kDTypeCount));
    t.shape.resize(static_cast<size_t>(pick(random, 5)));
    for (int64_t& d : t.shape) d = pick(random, 1 << (1 + pick(random, 12)));
  }
  for (int i = pick(random, 6) - 2; i > 0; i--) s.splits.push_back(pick(random, 1000));
  return s;
}

std::string random_name(Random& random) {
  std::string name(static_cast<size_t>(pick(random, 40)), 'x');
  for (char& c : name) c = static_cast<char>(pick(random, 256));
  return name;
}

RequestList random_request_list(Random& random) {
  RequestList b;
  b.generation = static_cast<uint64_t>(random()) << 32 | pick(random, 1 << 30);
  b.process_set = static_cast<uint16_t>(random());
  b.rank = pick(random, 40000);
  b.joined = pick(random, 2) == 1;
  bool sequences = pick(random, 3) == 0, ascending = pick(random, 2) == 0;
  if (pick(random, 4) == 0) {  // rows of one step
    for (int rows = pick(random, 4); rows > 0; rows--) {
      uint32_t at = static_cast<uint32_t>(pick(random, 100)), step = static_cast<uint32_t>(pick(random, 3));
      uint64_t number = random() >> pick(random, 63);
      for (int i = pick(random, 100); i > 0; i--, at += step) b.cached.push_back({at, sequences ? number++ : 0});
    }
    return b;
  }
  uint32_t cache_id = static_cast<uint32_t>(pick(random, 100));
  for (int i = pick(random, 200); i > 0; i--) {
    cache_id = ascending ? cache_id + 1 + static_cast<uint32_t>(pick(random, 3) / 2)
                         : static_cast<uint32_t>(pick(random, kMaxCacheIds));
    b.cached.push_back({cache_id, sequences ? random() >> pick(random, 63) : 0});
  }
  for (int i = pick(random, 5); i > 0; i--)
    b.fresh.push_back({random_name(random), random() >> pick(random, 63), random_signature(random)});
  return b;
}

PlanBatch random_batch(Random& random) {
  PlanBatch b;
  b.id = static_cast<uint32_t>(random());
  b.op = static_cast<Op>(pick(random, kOpCount));
  b.algorithm = static_cast<Algorithm>(pick(random, 9));
  b.in_arena = pick(random, 2) == 1;
  bool steady = pick(random, 2) == 1, unnamed = pick(random, 2) == 1;
  for (int i = pick(random, 30); i > 0; i--) {
    PlanEntry& e = b.entries.emplace_back();
    e.cache_id = static_cast<uint32_t>(pick(random, kMaxCacheIds));
    e.unnamed = steady ? unnamed : pick(random, 2) == 1;
    if (e.unnamed) e.sequence = random() >> pick(random, 63);
    if (steady) continue;
    if (pick(random, 3) == 0) e.cache_id = kNoCacheId;
    if (!e.unnamed) e.name = random_name(random);
    e.assigned = e.cache_id != kNoCacheId && pick(random, 2) == 0;
    e.has_signature = pick(random, 2) == 0;
    if (e.has_signature) e.signature = random_signature(random);
    e.with_joined = pick(random, 4) == 0;
    for (int r = pick(random, 6) - 3; r > 0; r--) e.failed_on.push_back(pick(random, 1000));
  }
  for (int i = pick(random, 20) - 10; i > 0; i--)
    b.rows.push_back(static_cast<int64_t>(random() >> (10 + pick(random, 50))));
  if (pick(random, 4) == 0) b.last_joined = pick(random, 100);
  if (pick(random, 4) == 0) {
    b.error = static_cast<Code>(1 + pick(random, 8));
    b.error_text = random_name(random);
  }
  return b;
}

Plan random_plan(Random& random) {
  Plan p;
  p.generation = static_cast<uint64_t>(random()) << 32 | pick(random, 1 << 30);
  p.process_set = static_cast<uint16_t>(random());
  for (int i = pick(random, 6); i > 0; i--) p.batches.push_back(random_batch(random));
  for (int i = pick(random, 3); i > 0; i--)
    p.tickets.push_back({static_cast<uint32_t>(random()), static_cast<uint32_t>(pick(random, 40000)), 1});
  for (uint32_t i = static_cast<uint32_t>(pick(random, 3) * pick(random, 20)); i > 0; i--) {  // nearly alike
    PlanBatch& b = p.batches.emplace_back();
    b.id = pick(random, 9) == 0 || p.batches.size() == 1 ? 7 : p.batches[p.batches.size() - 2].id + 1;
    b.in_arena = pick(random, 9) != 0;
    PlanEntry& e = b.entries.emplace_back();
    e.cache_id = 100 - i;
    e.unnamed = pick(random, 9) == 0;
    if (e.unnamed) e.sequence = i;
    if (pick(random, 20) == 0) b.rows = {1, 2};
  }
  return p;
}

bool same(const CachedRequest& a, const CachedRequest& b) {
  return a.cache_id == b.cache_id && a.sequence == b.sequence;
}
bool same(const Request& a, const Request& b) {
  return a.name == b.name && a.sequence == b.sequence && a.signature == b.signature;
}
bool same(const PlanEntry& a, const PlanEntry& b) {
  return a.cache_id == b.cache_id && a.sequence == b.sequence && a.name == b.name && a.unnamed == b.unnamed &&
         a.assigned == b.assigned && a.has_signature == b.has_signature && a.signature == b.signature &&
         a.with_joined == b.with_joined && a.failed_on == b.failed_on;
}
bool same(const PlanBatch& a, const PlanBatch& b);
template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); i++)
    if (!same(a[i], b[i])) return false;
  return true;
}
bool same(const RequestList& a, const RequestList& b) {
  return a.generation == b.generation && a.process_set == b.process_set && a.rank == b.rank && a.joined == b.joined &&
         same(a.cached, b.cached) && same(a.fresh, b.fresh);
}
bool same(const PlanBatch& a, const PlanBatch& b) {
  return a.id == b.id && a.op == b.op && a.algorithm == b.algorithm && a.in_arena == b.in_arena &&
         same(a.entries, b.entries) && a.rows == b.rows && a.last_joined == b.last_joined && a.error == b.error &&
         a.error_text == b.error_text;
}
bool same(const Plan& a, const Plan& b) {
  return a.generation == b.generation && a.process_set == b.process_set && same(a.batches, b.batches) &&
         a.tickets == b.tickets;
}

template <class T>
void check_round_trip(const T& value) {
  std::vector<uint8_t> bytes = encoded(value);
  T back;
  size_t left = 1;
  REQUIRE(read(bytes, &back, &left).is_ok());
  REQUIRE(left == 0);
  REQUIRE(same(value, back));
}

// What decode accepts must be sane: whoever uses it multiplies and indexes without looking.
bool sane(const Signature& s) {
  for (const TensorMeta& t : s.tensors) {
    int64_t n = 1;
    for (int64_t d : t.shape)
      if (d < 0 || __builtin_mul_overflow(n, d, &n)) return false;
    if (t.shape.size() > 64) return false;
  }
  for (int64_t rows : s.splits)
    if (rows < 0) return false;
  return true;
}
bool sane(const RequestList& b) {
  for (const CachedRequest& c : b.cached)
    if (c.cache_id >= kMaxCacheIds) return false;
  for (const Request& r : b.fresh)
    if (r.name.size() > kMaxTextBytes || !sane(r.signature)) return false;
  return b.rank >= 0;
}
bool sane(const Plan& p) {
  size_t entries = 0;
  for (const PlanBatch& b : p.batches) {
    entries += b.entries.size();
    for (const PlanEntry& e : b.entries)
      if ((e.cache_id >= kMaxCacheIds && e.cache_id != kNoCacheId) || !sane(e.signature)) return false;
  }
  return entries <= kMaxPlanEntries;
}

template <class T>
void feed_mutations(Random& random, const std::vector<uint8_t>& good) {
  std::vector<uint8_t> bytes = good;
  for (int i = 1 + pick(random, 4); i > 0 && !bytes.empty(); i--) {
    size_t at = static_cast<size_t>(pick(random, static_cast<int>(bytes.size())));
    switch (pick(random, 4)) {
      case 0:
        bytes[at] = static_cast<uint8_t>(random());
        break;
      case 1:
        bytes.resize(at);
        break;
      case 2:
        bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(at), static_cast<uint8_t>(pick(random, 2) == 0 ? 0xff : 0));
        break;
      default:
        bytes[at] = static_cast<uint8_t>(bytes[at] ^ 1u << pick(random, 8));
        break;
    }
  }
  T value;
  if (read(bytes, &value).is_ok()) REQUIRE(sane(value));
}

}  // namespace

TEST_CASE("negotiation: request lists and plans survive the wire") {
  Random random(1);
  for (int i = 0; i < 1500; i++) {
    check_round_trip(random_request_list(random));
    check_round_trip(random_plan(random));
  }
}

TEST_CASE("negotiation: a steady step of 161 tensors is small, in order, in any order and unnamed") {
  RequestList in_order, shuffled, unnamed_ones;
  Plan plan;
  plan.batches.resize(3);
  for (uint32_t i = 0; i < 161; i++) {
    in_order.cached.push_back({40 + i, 0});
    shuffled.cached.push_back({(i * 67) % 161, 0});
    unnamed_ones.cached.push_back({i, 1000000 + i});
    plan.batches[i * 3 / 161].entries.emplace_back().cache_id = i;
  }
  CHECK(encoded(in_order).size() <= 20);
  CHECK(encoded(shuffled).size() <= 340);
  CHECK(encoded(unnamed_ones).size() <= 24);
  CHECK(encoded(plan).size() <= 64);
  CHECK(encoded(in_order).size() + encoded(plan).size() <= 128);
  check_round_trip(in_order);
  check_round_trip(shuffled);
  check_round_trip(unnamed_ones);
  Plan alone;  // a batch for each, as in the arena
  for (uint32_t i = 0; i < 161; i++) {
    PlanBatch& b = alone.batches.emplace_back();
    b.id = 5000 + i;
    b.in_arena = true;
    b.entries.emplace_back().cache_id = i;
  }
  CHECK(encoded(alone).size() <= 32);
  check_round_trip(alone);
}

TEST_CASE("negotiation: every truncation of a frame is refused") {
  Random random(2);
  for (int i = 0; i < 30; i++) {
    std::vector<uint8_t> whole = encoded(random_request_list(random));
    for (size_t n = 0; n < whole.size(); n++) {
      RequestList b;
      CHECK_FALSE(read(std::vector<uint8_t>(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(n)), &b).is_ok());
    }
    whole = encoded(random_plan(random));
    for (size_t n = 0; n < whole.size(); n++) {
      Plan p;
      CHECK_FALSE(read(std::vector<uint8_t>(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(n)), &p).is_ok());
    }
  }
}

TEST_CASE("negotiation: shapes that overflow, negative numbers and long names are refused") {
  auto refused = [](const Signature& s, const std::string& name = "x") {
    RequestList b = request_list(0, {named(name, s)});
    RequestList back;
    return !read(encoded(b), &back).is_ok();
  };
  Signature s = signature(Op::kAllreduce, {1 << 20, 1 << 20});
  CHECK_FALSE(refused(s));
  s.tensors[0].shape = {int64_t{1} << 40, int64_t{1} << 40};
  CHECK(refused(s));
  s.tensors[0].shape = {int64_t{1} << 40, int64_t{1} << 40, 0};
  CHECK(refused(s));
  s.tensors[0].shape = {0, 5};
  CHECK_FALSE(refused(s));
  s.tensors[0].shape = {-1};
  CHECK(refused(s));
  s.tensors[0].shape.assign(64, 1);
  CHECK_FALSE(refused(s));
  s.tensors[0].shape.assign(65, 1);
  CHECK(refused(s));
  s = signature(Op::kAlltoall, {4});
  s.splits = {2, -2};
  CHECK(refused(s));
  s.splits = {std::numeric_limits<int64_t>::max(), 1};
  CHECK(refused(s));
  s.splits = {};
  CHECK_FALSE(refused(s, std::string(kMaxTextBytes, 'n')));
  CHECK(refused(s, std::string(kMaxTextBytes + 1, 'n')));
}

TEST_CASE("negotiation: an error text longer than the limit is cut, not refused") {
  Plan p;
  p.batches.resize(1);
  p.batches[0].error = Code::kMismatch;
  p.batches[0].error_text = std::string(kMaxTextBytes + 100, 'e');
  Plan back;
  REQUIRE(read(encoded(p), &back).is_ok());
  CHECK(back.batches[0].error_text.size() == kMaxTextBytes);
}

TEST_CASE("negotiation: random and mutated bytes are refused or sane") {
  Random random(3);
  for (int i = 0; i < 5000; i++) {
    std::vector<uint8_t> noise(static_cast<size_t>(pick(random, 200)));
    for (uint8_t& byte : noise) byte = static_cast<uint8_t>(random() >> pick(random, 57));
    RequestList b;
    if (read(noise, &b).is_ok()) REQUIRE(sane(b));
    Plan p;
    if (read(noise, &p).is_ok()) REQUIRE(sane(p));
    feed_mutations<RequestList>(random, encoded(random_request_list(random)));
    feed_mutations<Plan>(random, encoded(random_plan(random)));
  }
}
