// Declared buckets over several nodes: they need no message, any rank may leave their plan at any point, and whoever
// waits then either gets its result or goes on without the plan.
#include <algorithm>
#include <atomic>
#include <latch>
#include <random>
#include <thread>

#include "tests/locked_checks.h"
#include "tests/sanitized.h"
#include "tests/world.h"

namespace hc {

namespace {

constexpr int kBuckets = 4;

struct Machines {
  std::vector<std::string> node;
  bool shared = true;
  bool two_level = true;
  int size() const { return static_cast<int>(node.size()); }
};
const std::vector<Machines> kLayouts = {{{"a", "b"}},
                                        {{"a", "b", "c"}, false},
                                        {{"a", "a", "b", "b"}},
                                        {{"a", "b", "a"}},  // a rank that carries no stripe
                                        {{"a", "a", "b", "b"}, false},
                                        {{"a", "a", "b", "b"}, true, false}};

Settings settings_of(const Machines& layout) {
  if (!layout.two_level) return {{"HOROCLONE_HIERARCHICAL_ALLREDUCE", "0"}};
  if (layout.shared) return {};
  return {{"HOROCLONE_SHARED_MEMORY", "0"},
          {"HOROCLONE_SEGMENT_BYTES", "1024"},
          {"HOROCLONE_SOCKET_BUFFER_BYTES", "32768"}};
}

// From a few bytes to more than the threshold of a ring.
class Buckets {
 public:
  explicit Buckets(Engine& engine, bool may_fail = false) : engine_(engine) {
    for (int b = 0; b < kBuckets; ++b) {
      const int64_t n = 9000 * b * b + 3;
      memory_.push_back(engine.allocate(static_cast<size_t>(n) * sizeof(float)).take());
      set_.buckets.push_back({"bucket" + std::to_string(b), memory_.back()->data(), {n}, DType::kF32});
    }
    const Status declared = engine.declare(0, set_, &id_);
    if (!may_fail) CHECK_OK(declared);
  }
  float* data(int b) { return reinterpret_cast<float*>(memory_[static_cast<size_t>(b)]->data()); }
  int64_t count(int b) const { return set_.buckets[static_cast<size_t>(b)].shape[0]; }
  void fill(int b, float value) { std::fill_n(data(b), count(b), value); }
  bool holds(int b, float value) { return std::count(data(b), data(b) + count(b), value) == count(b); }
  Status submit(int b, int64_t* handle, int priority = 0) {
    return engine_.submit_declared(0, id_, b, {nullptr, priority}, handle);
  }
  Status end(int64_t handle) {
    Status outcome = finish(engine_, handle);
    engine_.release(handle);
    return outcome;
  }
  int id() const { return id_; }

 private:
  Engine& engine_;
  std::vector<std::shared_ptr<Memory>> memory_;
  BucketSet set_;
  int id_ = -1;
};

std::vector<int> shuffled(std::mt19937& random) {
  std::vector<int> order(kBuckets);
  for (int b = 0; b < kBuckets; ++b) order[static_cast<size_t>(b)] = b;
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

}  // namespace

TEST_CASE("declared buckets between nodes need no message") {
  for (const Machines& layout : kLayouts) {
    CAPTURE(layout.size());
    std::atomic<int64_t> sent{0};
    std::barrier<> all(layout.size());
    auto settings = settings_of(layout);
    settings.emplace_back("HOROCLONE_LIVENESS_PROBE_S", "60");  // a busy machine is slow, and nobody asks why
    settings.emplace_back("HOROCLONE_LIVENESS_ERROR_S", "120");
    CHECK_OK(World(layout.size(), settings).on_nodes(layout.node).each([&](Engine& engine, int rank) {
      Buckets buckets(engine);
      std::mt19937 random(static_cast<uint32_t>(rank));
      const int64_t persistent = counter(engine, "persistent");
      int64_t before = 0;
      for (int step = 0; step < 12; ++step) {
        if (step == 2) {
          all.arrive_and_wait();
          before = counter(engine, "control_frames_sent");
          all.arrive_and_wait();
        }
        int64_t handles[kBuckets];
        for (int b : shuffled(random)) {
          buckets.fill(b, static_cast<float>(step + rank));
          CHECK_OK(buckets.submit(b, &handles[b]));
        }
        for (int b : shuffled(random)) {
          CHECK_OK(buckets.end(handles[b]));
          const int n = layout.size();
          CHECK_LOCKED(buckets.holds(b, static_cast<float>(n * step + n * (n - 1) / 2)));
        }
      }
      sent += counter(engine, "control_frames_sent") - before;
      CHECK_LOCKED(counter(engine, "persistent") - persistent == 12 * kBuckets);
      all.arrive_and_wait();
    }));
    CHECK(sent == 0);
  }
}

namespace {

// What a rank does at the point at which it leaves the plan.
enum class Way { kPriority, kDrops, kJoins, kEnd };

// One rank or several leave the plan, each in some step before some bucket of it; everything has its result all the
// same.
void leave_somewhere(const Machines& layout, uint32_t seed) {
  CAPTURE(seed);
  std::mt19937 drawn(seed);
  const int size = layout.size(), steps = 4;
  const auto way = static_cast<Way>(drawn() % static_cast<uint32_t>(Way::kEnd));
  std::vector<int> leaves(static_cast<size_t>(size), -1);  // [rank] at which submission
  for (int leavers = 1 + static_cast<int>(drawn() % 2); leavers > 0; --leavers)
    leaves[drawn() % static_cast<uint32_t>(size)] = static_cast<int>(drawn() % (steps * kBuckets));
  const bool waits_each = drawn() % 2 == 0;
  CHECK_OK(World(size, settings_of(layout)).on_nodes(layout.node).each([&](Engine& engine, int rank) {
    Buckets buckets(engine);
    std::mt19937 random(seed * 100 + static_cast<uint32_t>(rank));
    const int at = leaves[static_cast<size_t>(rank)];
    const auto steps_of = [&](int r) {  // with kJoins ranks do what is left of their step, and then no other
      return way == Way::kJoins && leaves[static_cast<size_t>(r)] >= 0 ? leaves[static_cast<size_t>(r)] / kBuckets
                                                                       : steps;
    };
    int done = 0;
    for (int step = 0; step < steps_of(rank); ++step) {
      int64_t handles[kBuckets];
      std::vector<int> order = shuffled(random);
      if (waits_each) std::ranges::sort(order);  // who waits for one after the other needs the others' order
      const auto end = [&](int b) {
        float expected = 0;
        for (int r = 0; r < size; ++r) expected += step < steps_of(r) ? static_cast<float>(step + r) : 0;
        CHECK_OK(buckets.end(handles[b]));
        CHECK_LOCKED(buckets.holds(b, expected));
      };
      for (int b : order) {
        buckets.fill(b, static_cast<float>(step + rank));
        CHECK_OK(buckets.submit(b, &handles[b], way == Way::kPriority && done++ == at ? 1 : 0));
        if (random() % 4 == 0) std::this_thread::yield();
        if (waits_each) end(b);
      }
      if (way == Way::kDrops && at >= 0 && step == steps - 1) CHECK_OK(engine.undeclare(0, buckets.id()));
      if (!waits_each)
        for (int b : order) end(b);
    }
    CHECK_OK(perform<float>(engine, Op::kJoin));
    std::vector<float> one{1};
    CHECK_OK(perform(engine, Op::kAllreduce, "after", one, &one, {1}));
    CHECK_LOCKED(one[0] == static_cast<float>(size));
  }));
}

}  // namespace

TEST_CASE("ranks leave the plan of buckets between nodes at any point, and every bucket ends") {
  for (uint32_t seed = 0; seed < (kSanitized ? 24 : 60); ++seed)
    leave_somewhere(kLayouts[seed % kLayouts.size()], seed);
}

TEST_CASE("a rank that shuts down or fails at any point ends what waits for it in buckets between nodes") {
  for (const Machines& layout : kLayouts)
    for (int at = 0; at <= 2 * kBuckets; at += kSanitized ? 3 : 1)
      for (const bool fails : {false, true}) {
        CAPTURE(layout.size());
        CAPTURE(at);
        CAPTURE(fails);
        std::latch all_ended(layout.size() - 1);
        // The shutdown of a rank that has failed says so.
        (void)World(layout.size(), settings_of(layout)).on_nodes(layout.node).each([&](Engine& engine, int rank) {
          Buckets buckets(engine, fails);
          const int last = layout.size() - 1;
          // As long as a rank of this machine does not know of the failure, it writes into the memory of the others.
          const std::unique_ptr<std::latch, void (*)(std::latch*)> keeps_memory(
              rank == last ? nullptr : &all_ended, [](std::latch* latch) { latch->arrive_and_wait(); });
          for (int i = 0; i < 3 * kBuckets; ++i) {
            if (rank == last && i == at) {
              if (fails) engine.abort("a rank of the test gives up");
              return;
            }
            buckets.fill(i % kBuckets, 1);
            int64_t handle = 0;
            Status outcome = buckets.submit(i % kBuckets, &handle);
            if (outcome.is_ok()) outcome = buckets.end(handle);
            // A failure overtakes what is under way; a shutdown lets it end first.
            const bool is_due = fails ? !outcome.is_ok() || i < at : outcome.is_ok() == (i < at);
            CHECK_LOCKED(is_due);
            if (!outcome.is_ok() && !fails)
              CHECK_LOCKED(outcome.text().find("rank " + std::to_string(last)) != std::string::npos);
            if (!outcome.is_ok()) return;
            CHECK_LOCKED(buckets.holds(i % kBuckets, static_cast<float>(layout.size())));
          }
        });
      }
}

TEST_CASE("ranks that wait for one another leave the plan of buckets between nodes") {
  for (const Machines& layout : kLayouts) {
    CAPTURE(layout.size());
    auto settings = settings_of(layout);
    settings.emplace_back("HOROCLONE_LOG_LEVEL", "error");
    settings.emplace_back("HOROCLONE_DEADLOCK_TIME_SECONDS", "0.4");
    CHECK_OK(World(layout.size(), settings).on_nodes(layout.node).each([&](Engine& engine, int rank) {
      Buckets buckets(engine);
      int64_t handle = 0;
      std::vector<float> one{1};
      const Status outcome =
          rank == 0 ? perform(engine, Op::kAllreduce, "loss", one, &one, {1}, [](Submission& s) { s.will_wait = true; })
                    : [&] {
                        CHECK_OK(buckets.submit(0, &handle));
                        return buckets.end(handle);
                      }();
      CHECK_LOCKED(outcome.code() == Code::kMismatch);
      for (int i = 0; i < 5; ++i) {
        buckets.fill(i % kBuckets, 1);
        CHECK_OK(buckets.submit(i % kBuckets, &handle));
        CHECK_OK(buckets.end(handle));
        CHECK_LOCKED(buckets.holds(i % kBuckets, static_cast<float>(layout.size())));
      }
    }));
  }
}

TEST_CASE("buckets that were declared differently leave nothing behind in those that are declared alike") {
  for (const std::vector<std::string>& node : {std::vector<std::string>{"a", "b"}, {"a", "a"}, {"a", "a", "b", "b"}}) {
    CAPTURE(node.size());
    const int size = static_cast<int>(node.size());
    CHECK_OK(World(size).on_nodes(node).each([&](Engine& engine, int rank) {
      const auto memory = engine.allocate(4 * sizeof(float)).take();
      BucketSet other;
      for (int b = 0; b < (rank == 0 ? 1 : 2); ++b)
        other.buckets.push_back({"bucket" + std::to_string(b), memory->data(), {4}, DType::kF32});
      int id = -1;
      const Status refused = engine.declare(0, other, &id);
      CHECK_LOCKED(refused.code() == Code::kMismatch);
      Buckets buckets(engine);
      const int64_t before = counter(engine, "persistent");
      int64_t handles[kBuckets];
      for (int b = 0; b < kBuckets; ++b) {
        buckets.fill(b, static_cast<float>(b + 1));
        CHECK_OK(buckets.submit(b, &handles[b]));
      }
      for (int b = 0; b < kBuckets; ++b) {
        CHECK_OK(buckets.end(handles[b]));
        CHECK_LOCKED(buckets.holds(b, static_cast<float>(size * (b + 1))));
      }
      CHECK_LOCKED(counter(engine, "persistent") - before == kBuckets);
    }));
  }
}

TEST_CASE("who drops its buckets while one of them is under way holds up nobody who has the others") {
  for (const Machines& layout : kLayouts) {
    CAPTURE(layout.size());
    std::barrier<> all(layout.size());
    CHECK_OK(World(layout.size(), settings_of(layout)).on_nodes(layout.node).each([&](Engine& engine, int rank) {
      Buckets buckets(engine);
      buckets.fill(0, 1);
      buckets.fill(1, 1);
      int64_t handle = 0;
      if (rank == 0) {
        CHECK_OK(buckets.submit(1, &handle));
        CHECK_OK(engine.undeclare(0, buckets.id()));
      }
      all.arrive_and_wait();
      if (rank != 0) CHECK_OK(buckets.submit(1, &handle));
      int64_t first = 0;
      std::vector<float> mine(static_cast<size_t>(buckets.count(0)), 1);
      if (rank == 0)
        CHECK_OK(perform(engine, Op::kAllreduce, "bucket0", mine, &mine, {buckets.count(0)}));
      else
        CHECK_OK(buckets.submit(0, &first));
      if (rank != 0) CHECK_OK(buckets.end(first));
      CHECK_OK(buckets.end(handle));
      CHECK_LOCKED(buckets.holds(1, static_cast<float>(layout.size())));
      const auto sum = static_cast<float>(layout.size());
      const bool first_is_right = rank == 0 ? mine[0] == sum : buckets.holds(0, sum);
      CHECK_LOCKED(first_is_right);
    }));
  }
}

TEST_CASE("buckets that are declared while a rank has joined, or where a setting forbids it, are agreed on") {
  for (const bool joins : {true, false}) {
    CAPTURE(joins);
    Settings settings;
    if (!joins) settings.emplace_back("HOROCLONE_PERSISTENT_BUCKETS", "0");
    CHECK_OK(World(3, settings).on_nodes({"a", "b", "c"}).each([&](Engine& engine, int rank) {
      if (!joins || rank != 0) {
        Buckets buckets(engine);
        for (int b = 0; b < kBuckets; ++b) {
          buckets.fill(b, 1);
          int64_t handle = 0;
          CHECK_OK(buckets.submit(b, &handle));
          CHECK_OK(buckets.end(handle));
          CHECK_LOCKED(buckets.holds(b, joins ? 2.0f : 3.0f));
        }
        CHECK_LOCKED(counter(engine, "persistent") == 0);
      }
      CHECK_OK(perform<float>(engine, Op::kJoin));
    }));
  }
}

}  // namespace hc
