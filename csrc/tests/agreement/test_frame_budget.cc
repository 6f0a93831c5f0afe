// Long names in great number: what is said in one control frame has bounds, what is submitted has none.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "agreement/frame_budget.h"
#include "net/channel.h"
#include "tests/locked_checks.h"
#include "tests/sanitized.h"
#include "tests/world.h"

namespace hc {
namespace {

RequestList request_list_of(int requests, size_t name_bytes) {
  RequestList request_list;
  request_list.generation = 3;
  request_list.process_set = 2;
  request_list.rank = 1;
  request_list.joined = request_list.whole = true;
  request_list.cached = {{4, 5}, {6, 7}};
  for (int i = 0; i < requests; ++i) {
    Request& r = request_list.fresh.emplace_back();
    r.name = std::string(name_bytes, 'n') + std::to_string(i);
    r.signature.tensors = {{DType::kF32, {4, 1}}};
  }
  return request_list;
}

TEST_CASE("a request list in parts says the same in the same order, and each part fits") {
  constexpr size_t kMax = 10000;
  const RequestList whole = request_list_of(40, 1500);
  const std::vector<RequestList> parts = parts_of(whole, kMax);
  CHECK(parts.size() > 5);
  size_t seen = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    CHECK(parts[i].generation == 3);
    CHECK(parts[i].process_set == 2);
    CHECK(parts[i].rank == 1);
    CHECK(parts[i].whole);
    CHECK(parts[i].joined == (i + 1 == parts.size()));
    CHECK(parts[i].cached.size() == (i == 0 ? 2 : 0));
    Writer frame;
    encode(parts[i], &frame);
    CHECK(frame.size() <= encoded_bytes(parts[i]));
    CHECK(frame.size() <= kMax);
    for (const Request& r : parts[i].fresh) CHECK(r.name == whole.fresh[seen++].name);
  }
  CHECK(seen == whole.fresh.size());
  CHECK(parts_of(request_list_of(3, 10), kMax).size() == 1);
  CHECK(parts_of(request_list_of(2, 2 * kMax), kMax).size() == 3);  // one request is never cut; the cached go before
}

// 20 MB of names: more than a frame takes, on the way up, along a tree as well, and on the way down.
TEST_CASE("three hundred operations with names of 64 KiB can be in flight at once" * doctest::test_suite("long")) {
  constexpr int kOperations = 300;
  static_assert(kOperations * 65000 > kMaxControlBytes);
  for (const std::vector<std::string>& node : {std::vector<std::string>{"a", "a"}, {"a", "a", "b", "b"}}) {
    CAPTURE(node.size());
    const int size = static_cast<int>(node.size());
    if (kThreadSanitized && size == 2) continue;
    // Most are ready at once; a busy machine may keep a rank silent for long.
    World world(size, {{"HOROCLONE_CYCLE_TIME", "300"}, {"HOROCLONE_LIVENESS_ERROR_S", "120"}});
    CHECK_OK(world.on_nodes(node).each([&](Engine& engine, int) {
      // One step takes ten seconds under a sanitizer, and a minute where others use the cores.
      for (int step = 0; step < (kSanitized ? 1 : 2); ++step) {
        std::vector<std::vector<float>> v(kOperations, std::vector<float>(4, 1.0f));
        std::vector<int64_t> handles(kOperations);
        for (int i = 0; i < kOperations; ++i)
          CHECK_OK(submit(engine, Op::kAllreduce, std::string(65000, 'n') + std::to_string(i), v[i], &v[i], {4},
                          &handles[i]));
        int wrong = 0;
        for (int i = 0; i < kOperations; ++i) {
          CHECK_OK(finish(engine, handles[i]));
          engine.release(handles[i]);
          wrong += v[i][3] != static_cast<float>(size);
        }
        CHECK_LOCKED(wrong == 0);
      }
    }));
  }
}

}  // namespace
}  // namespace hc
