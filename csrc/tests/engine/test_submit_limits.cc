// What one rank alone can see to be too long for the others' readers is refused at submit, and nothing is broken.
#include <doctest/doctest.h>

#include "agreement/negotiation.h"
#include "tests/locked_checks.h"
#include "tests/world.h"

namespace hc {
namespace {

// Every rank: refused at once, with a text that has `word`; then an allreduce works.
void check_refused(Engine& engine, const Status& status, const std::string& word) {
  CHECK_LOCKED(status.code() == Code::kInvalidArgument);
  CHECK_LOCKED(status.text().find(word) != std::string::npos);
  CHECK_LOCKED(status.text().size() < 1000);
  std::vector<float> one(3, 1.0f), sum(3);
  CHECK_OK(perform(engine, Op::kAllreduce, "after", one, &sum, {3}));
  CHECK_LOCKED(sum[0] == 2.0f);
}

}  // namespace

TEST_CASE("limits: the longest name works, and one that is longer is refused at submit") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int) {
    std::vector<float> in(3, 1.0f), out(3);
    int64_t handle = 0;
    CHECK_OK(perform(engine, Op::kAllreduce, std::string(kMaxTextBytes, 'n'), in, &out, {3}));
    CHECK_LOCKED(out[2] == 2.0f);
    const std::string longer(kMaxTextBytes + 1, 'n');
    check_refused(engine, submit(engine, Op::kAllreduce, longer, in, &out, {3}, &handle), "65537 bytes");
  }));
}

TEST_CASE("limits: a name that is too long on one rank does not disturb the other") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    std::vector<float> in(3, 1.0f), out(3);
    int64_t handle = 0;
    if (rank == 0)
      CHECK_LOCKED(submit(engine, Op::kBroadcast, std::string(1 << 20, 'n'), in, &out, {3}, &handle).code() ==
                   Code::kInvalidArgument);
    CHECK_OK(perform(engine, Op::kAllreduce, "same", in, &out, {3}));
    CHECK_LOCKED(out[0] == 2.0f);
  }));
}

TEST_CASE("limits: shapes that the readers would not take") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int) {
    std::vector<float> in(1, 1.0f), out(1);
    int64_t handle = 0;
    CHECK_OK(perform(engine, Op::kAllreduce, "flat", in, &out, std::vector<int64_t>(kMaxDimensions, 1)));
    const std::vector<int64_t> deep(kMaxDimensions + 1, 1);
    check_refused(engine, submit(engine, Op::kAllreduce, "deep", in, &out, deep, &handle), "65 dimensions");
    for (const std::vector<int64_t>& huge :
         {std::vector<int64_t>{int64_t{1} << 59}, {int64_t{1} << 31, int64_t{1} << 31}, {0, int64_t{1} << 62}})
      check_refused(engine, submit(engine, Op::kAllreduce, "huge", in, &out, huge, &handle), "too many elements");
  }));
}

TEST_CASE("limits: a group whose shapes take more than a message") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int) {
    float value = 1.0f;
    const std::vector<int64_t> shape(kMaxDimensions, 1);
    std::vector<Submission::Tensor> tensors(80'000, {&value, &value, shape, DType::kF32});
    Submission s;
    s.op = Op::kAllreduce;
    s.reduce = Reduce::kSum;
    s.name = "many";
    s.tensors = tensors;
    int64_t handle = 0;
    check_refused(engine, engine.submit(s, &handle), "several groups");
  }));
}

}  // namespace hc
