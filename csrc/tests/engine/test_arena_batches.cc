// Which tensors in the arena are reduced where they lie and which go with the private ones: counted in batches.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/locked_checks.h"
#include "tests/world.h"

namespace hc {
namespace {

constexpr int kTensors = 40;
// Milliseconds in which what one test submits gets ready before the coordinator decides. The checks leave room for a
// rank that is late, as every window that opens for the rest costs this time again: hundreds of long ones took minutes.
const std::pair<std::string, std::string> kGathers{"HOROCLONE_CYCLE_TIME", "5"};

int64_t batches_of(const Engine& engine) { return counter(engine, "batches"); }

// Submits `count` tensors of `n` floats that lie one after the other in `memory`, waits and checks the sums. Returns
// the batches that it took.
int64_t reduce_many(Engine& engine, float* data, int64_t n, int count, int64_t step) {
  const int size = engine.mesh().size(), rank = engine.mesh().rank();
  for (int64_t i = 0; i < n * count; ++i) data[i] = static_cast<float>((i + step) % 1000 + rank);
  const int64_t before = batches_of(engine);
  std::vector<int64_t> handles(static_cast<size_t>(count));
  for (int t = 0; t < count; ++t) {
    const Submission::Tensor tensor{data + t * n, data + t * n, {&n, 1}, DType::kF32};
    const std::string name = "t" + std::to_string(n) + "." + std::to_string(t);
    Submission s;
    s.name = name;
    s.tensors = {&tensor, 1};
    CHECK_OK(engine.submit(s, &handles[static_cast<size_t>(t)]));
  }
  for (int64_t h : handles) {
    CHECK_OK(finish(engine, h));
    engine.release(h);
  }
  int64_t wrong = 0;
  for (int64_t i = 0; i < n * count; ++i)
    wrong += data[i] != static_cast<float>(size * ((i + step) % 1000) + size * (size - 1) / 2);
  CHECK_LOCKED(wrong == 0);
  return batches_of(engine) - before;
}

}  // namespace

TEST_CASE("many small tensors in the arena are fused like private ones, large ones are reduced where they lie") {
  World world(3, {kGathers});
  CHECK_OK(world.each([&](Engine& engine, int) {
    constexpr int64_t kSmall = 16, kLarge = 32 << 10;
    auto memory = engine.allocate(kTensors * kLarge * sizeof(float)).take();
    auto* data = reinterpret_cast<float*>(memory->data());
    // Not within the checks, which hold a lock.
    const int64_t first = reduce_many(engine, data, kSmall, kTensors, 1);
    CHECK_LOCKED(first < kTensors / 2);
    const int64_t again = reduce_many(engine, data, kSmall, kTensors, 2);
    CHECK_LOCKED(again < kTensors / 2);
    const int64_t large = reduce_many(engine, data, kLarge, kTensors, 3);
    CHECK_LOCKED(large == kTensors);
  }));
}

TEST_CASE("a small tensor may lie in the arena on some ranks only, and beside private ones") {
  World world(3, {kGathers});
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    constexpr int64_t kElements = 1001;
    auto memory = engine.allocate(kTensors * kElements * sizeof(float)).take();
    std::vector<float> own(kTensors * kElements);
    float* data = rank == 1 ? own.data() : reinterpret_cast<float*>(memory->data());
    const int64_t beside_none = reduce_many(engine, data, kElements, kTensors, 1);
    CHECK_LOCKED(beside_none < kTensors / 2);
    const int64_t beside_private = reduce_many(engine, rank == 1 ? data : own.data(), kElements, kTensors, 2);
    CHECK_LOCKED(beside_private < kTensors / 2);
  }));
}

// Buckets of one size in an arena, declared: bucket b has its n elements at b * n.
struct DeclaredBuckets {
  DeclaredBuckets(Engine& engine, int count, int64_t n) : engine(engine), count(count), n(n) {
    memory = engine.allocate(static_cast<size_t>(n) * static_cast<size_t>(count) * sizeof(float)).take();
    BucketSet set;
    for (int b = 0; b < count; ++b)
      set.buckets.push_back(
          {"b" + std::to_string(b), memory->data() + b * n * static_cast<int64_t>(sizeof(float)), {n}, DType::kF32});
    CHECK_OK(engine.declare(0, set, &id));
  }
  // Numbers whose sum depends on the order in which they are added.
  void fill() {
    const int rank = engine.mesh().rank();
    for (int64_t i = 0; i < n * count; ++i)
      data()[i] = (static_cast<float>((i * 7919 + rank * 104729) % 100003) - 5e4f) * (rank % 2 ? 1e-3f : 1.7f);
  }
  // In one go, or each alone. Returns the batches that it took.
  int64_t reduce(bool in_one_go, int priority = 0) {
    const int64_t before = batches_of(engine);
    std::vector<int64_t> handles;
    for (int b = 0; b < count; ++b) {
      handles.push_back(0);
      CHECK_OK(engine.submit_declared(0, id, b, {nullptr, priority}, &handles.back()));
      if (in_one_go && b + 1 < count) continue;
      for (int64_t h : handles) {
        CHECK_OK(finish(engine, h));
        engine.release(h);
      }
      handles.clear();
    }
    return batches_of(engine) - before;
  }
  float* data() { return reinterpret_cast<float*>(memory->data()); }
  std::vector<float> values() { return {data(), data() + n * count}; }

  Engine& engine;
  const int count;
  const int64_t n;
  std::shared_ptr<Memory> memory;
  int id = -1;
};

// Several machines and many small buckets: they are negotiated, so that they are fused.
TEST_CASE("many small declared buckets between machines travel in few batches, with the bits of each alone") {
  for (const std::vector<std::string>& node :
       {std::vector<std::string>{"a", "b"}, {"a", "b", "c"}, {"a", "b", "c", "d"}, {"a", "a", "b", "b"}}) {
    CAPTURE(node.size());
    const int size = static_cast<int>(node.size());
    std::vector<std::vector<float>> together(static_cast<size_t>(size));
    constexpr int kBuckets = 161;
    constexpr int64_t kElements = 64;
    World gathering(size, {kGathers});
    CHECK_OK(gathering.on_nodes(node).each([&](Engine& engine, int rank) {
      DeclaredBuckets buckets(engine, kBuckets, kElements);
      for (int step = 0; step < 2; ++step) {
        buckets.fill();
        const int64_t batches = buckets.reduce(true);
        CHECK_LOCKED(batches <= 4);
      }
      together[static_cast<size_t>(rank)] = buckets.values();
    }));
    World one_by_one(size);
    CHECK_OK(one_by_one.on_nodes(node).each([&](Engine& engine, int rank) {
      DeclaredBuckets buckets(engine, kBuckets, kElements);
      buckets.fill();
      const int64_t batches = buckets.reduce(false);
      CHECK_LOCKED(batches == kBuckets);
      const bool alike = buckets.values() == together[static_cast<size_t>(rank)];
      CHECK_LOCKED(alike);
    }));
  }
}

// Private tensors of nearly 16 KiB are reduced on two levels here, where the order of an element's sum depends on its
// place. Tensors in an arena use recursive doubling, alone and fused.
TEST_CASE("declared buckets have the same bits alone and together where machines have several ranks") {
  const std::vector<std::string> node{"a", "b", "a", "b"};
  const int size = static_cast<int>(node.size());
  constexpr int kBuckets = 8;
  constexpr int64_t kElements = (4 << 10) - 16;
  std::vector<std::vector<float>> values[2];
  for (const bool in_one_go : {true, false}) {
    auto& found = values[in_one_go];
    found.resize(static_cast<size_t>(size));
    World world(size, {kGathers});
    CHECK_OK(world.on_nodes(node).each([&](Engine& engine, int rank) {
      DeclaredBuckets buckets(engine, kBuckets, kElements);
      buckets.fill();
      const int64_t batches = buckets.reduce(in_one_go);
      CHECK_LOCKED((batches < kBuckets) == in_one_go);
      found[static_cast<size_t>(rank)] = buckets.values();
    }));
  }
  CHECK(values[0] == values[1]);
}

TEST_CASE("declared buckets that a ring reduces share no batch") {
  World world(2, {kGathers});
  CHECK_OK(world.on_nodes({"a", "b"}).each([&](Engine& engine, int) {
    DeclaredBuckets buckets(engine, 5, 20 << 10);
    buckets.fill();
    const int64_t batches = buckets.reduce(true, 1);  // what has a priority is negotiated
    CHECK_LOCKED(batches == 5);
  }));
}

}  // namespace hc
