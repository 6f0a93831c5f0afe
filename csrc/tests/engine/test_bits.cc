// And, Or and Xor of every integer type and of bool: in shared memory, over channels and on two levels, fused with
// other reductions, in place in the arena, and beside a rank that has joined.
#include <doctest/doctest.h>

#include <array>
#include <cstring>
#include <deque>

#include "tests/locked_checks.h"
#include "tests/sanitized.h"
#include "tests/world.h"

namespace hc::bits {
namespace {

using Bytes = std::vector<std::byte>;
constexpr DType kTypes[] = {DType::kBool, DType::kU8, DType::kI8, DType::kU16, DType::kI16, DType::kI32, DType::kI64};
constexpr std::array kReductions = {Reduce::kAnd, Reduce::kOr, Reduce::kXor};

// Most bits are set, so that And leaves some; a byte of bool is 0 or 1.
std::byte value(DType dtype, int rank, size_t byte) {
  const size_t mixed = (byte * 2654435761u + static_cast<size_t>(rank) * 40503u) >> 3;
  if (dtype == DType::kBool) return std::byte{static_cast<uint8_t>(mixed % 4 != 0)};
  return static_cast<std::byte>(mixed) | static_cast<std::byte>(mixed >> 9);
}

Bytes input(DType dtype, int rank, size_t count) {
  Bytes data(count * size_of(dtype));
  for (size_t i = 0; i < data.size(); ++i) data[i] = value(dtype, rank, i);
  return data;
}

// Bits know nothing of the elements they belong to.
Bytes expected(DType dtype, Reduce reduce, int ranks, size_t count) {
  Bytes data = input(dtype, 0, count);
  for (int r = 1; r < ranks; ++r)
    for (size_t i = 0; i < data.size(); ++i) {
      const std::byte next = value(dtype, r, i);
      data[i] = reduce == Reduce::kAnd ? data[i] & next : reduce == Reduce::kOr ? data[i] | next : data[i] ^ next;
    }
  return data;
}

struct Run {
  DType dtype;
  Reduce reduce;
  size_t count;
  Bytes in = {}, out = {};
  int64_t handle = 0;

  void start(Engine& engine, const std::string& name) {
    in = input(dtype, engine.mesh().rank(), count);
    out.resize(in.size());
    const int64_t shape[] = {static_cast<int64_t>(count)};
    const Submission::Tensor tensor{in.data(), out.data(), shape, dtype};
    Submission s;
    s.name = name;
    s.reduce = reduce;
    s.tensors = {&tensor, 1};
    CHECK_OK(engine.submit(s, &handle));
  }
  void check(Engine& engine, int ranks) {
    CHECK_OK(finish(engine, handle));
    engine.release(handle);
    const bool right = out == expected(dtype, reduce, ranks, count);
    std::lock_guard lock(check_mu);
    CHECK_MESSAGE(right, name_of(reduce), " of ", count, " ", name_of(dtype), " over ", ranks, " ranks");
  }
};

// All types and reductions at once, with sums between them, so that what may share a batch does.
void reduces_all(Engine& engine, int ranks, size_t count) {
  std::deque<Run> runs;
  std::vector<int32_t> ones(100, 1);
  int64_t sum = 0;
  for (DType dtype : kTypes)
    for (Reduce reduce : kReductions)
      for (size_t of : {count, count / 3 + 2}) {
        runs.push_back({dtype, reduce, of});
        runs.back().start(engine, text_of(name_of(reduce), name_of(dtype), of));
      }
  CHECK_OK(submit(engine, Op::kAllreduce, "sum", ones, &ones, {100}, &sum));
  for (Run& run : runs) run.check(engine, ranks);
  CHECK_OK(finish(engine, sum));
  engine.release(sum);
  CHECK_LOCKED(ones == std::vector<int32_t>(100, ranks));
}

struct Row {
  int size;
  Settings settings = {};
  std::vector<std::string> nodes = {};
};
const Row kRows[] = {
    {2},
    {4, {{"HOROCLONE_FLAT_BYTES", "512"}, {"HOROCLONE_BLOCK_BYTES", "4096"}}},
    {2, {{"HOROCLONE_SHARED_MEMORY", "0"}, {"HOROCLONE_RING_THRESHOLD_BYTES", "0"}}},
    {4, {{"HOROCLONE_SHARED_MEMORY", "0"}, {"HOROCLONE_SEGMENT_BYTES", "1024"}}},
    {4, {{"HOROCLONE_HIERARCHICAL_ALLREDUCE", "1"}}, {"a", "a", "b", "b"}},
};

}  // namespace

TEST_CASE("bits of integers and bools are reduced alike on every layout, beside sums, also while a rank has joined") {
  for (const Row& row : kRows) {
    CAPTURE(row.size);
    World world(row.size, row.settings);
    CHECK_OK(world.on_nodes(row.nodes).each([&](Engine& engine, int rank) {
      for (size_t count : {size_t{1}, size_t{77}, size_t{kThreadSanitized ? 5'003 : 20'011}})
        reduces_all(engine, row.size, count);
      // The last rank joins: what stands in for its bits changes nothing.
      if (rank < row.size - 1)
        for (size_t count : {size_t{5}, size_t{9'001}}) {
          std::deque<Run> runs;
          for (DType dtype : kTypes)
            for (Reduce reduce : kReductions) {
              runs.push_back({dtype, reduce, count});
              runs.back().start(engine, text_of("joined", name_of(reduce), name_of(dtype), count));
            }
          for (Run& run : runs) run.check(engine, row.size - 1);
        }
      CHECK_OK(perform(engine, Op::kJoin));
    }));
  }
}

TEST_CASE("bits in the arena are reduced where they lie, and reduce leaves them on the root") {
  World world(3);
  CHECK_OK(world.each([](Engine& engine, int rank) {
    constexpr size_t kCount = 30'000;
    for (Reduce reduce : kReductions) {
      const Bytes in = input(DType::kI64, rank, kCount), right = expected(DType::kI64, reduce, 3, kCount);
      auto memory = engine.allocate(in.size()).take();
      std::copy(in.begin(), in.end(), memory->data());
      const int64_t shape[] = {static_cast<int64_t>(kCount)};
      const Submission::Tensor there{memory->data(), memory->data(), shape, DType::kI64};
      Submission s;
      s.name = "arena";
      s.reduce = reduce;
      s.tensors = {&there, 1};
      CHECK_OK(perform(engine, s));
      CHECK_LOCKED(std::equal(right.begin(), right.end(), memory->data()));
      Bytes out(rank == 1 ? in.size() : 0);
      const Submission::Tensor rooted{in.data(), rank == 1 ? out.data() : nullptr, shape, DType::kI64};
      s.op = Op::kReduce;
      s.root = 1;
      s.tensors = {&rooted, 1};
      CHECK_OK(perform(engine, s));
      CHECK_LOCKED((rank != 1 || out == right));
    }
  }));
}

TEST_CASE("bits of floats are refused on the rank that asks, with the tensor and the next move") {
  World world(1);
  CHECK_OK(world.each([](Engine& engine, int) {
    for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64})
      for (Op op : {Op::kAllreduce, Op::kReduce}) {
        Bytes data(64);
        const int64_t shape[] = {4};
        const Submission::Tensor tensor{data.data(), data.data(), shape, dtype};
        Submission s;
        s.op = op;
        s.name = "layer1.mask";
        s.reduce = Reduce::kXor;
        s.tensors = {&tensor, 1};
        int64_t handle = 0;
        const Status refused = engine.submit(s, &handle);
        CHECK(refused.code() == Code::kInvalidArgument);
        CHECK(refused.text() == text_of("rank 0: ", name_of(op),
                                        " 'layer1.mask': Xor works on the bits of integers and "
                                        "bools, not on ",
                                        name_of(dtype),
                                        "; use Min, Max, Sum or Product, or pass the "
                                        "bits as an integer type of the same width"));
      }
  }));
}

}  // namespace hc::bits
