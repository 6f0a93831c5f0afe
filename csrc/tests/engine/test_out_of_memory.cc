// Memory that is refused while the engine works: the operation ends with an error that says whose memory and how much.
#include <doctest/doctest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <barrier>
#include <fstream>
#include <optional>

#include "tests/locked_checks.h"
#include "tests/sanitized.h"
#include "tests/world.h"

namespace hc {
namespace {

// While it lives, this process may map `bytes` more than it has mapped.
class AddressSpaceLimit {
 public:
  explicit AddressSpaceLimit(size_t bytes) {
    ::getrlimit(RLIMIT_AS, &before_);
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit now = before_;
    now.rlim_cur = pages * static_cast<size_t>(::sysconf(_SC_PAGESIZE)) + bytes;
    ::setrlimit(RLIMIT_AS, &now);
  }
  ~AddressSpaceLimit() { ::setrlimit(RLIMIT_AS, &before_); }

 private:
  rlimit before_{};
};

// Two tensors are packed into memory of the engine's own, 192 MiB on each rank, of which 100 MiB are to be had at the
// second call.
void lacks_memory(Reduce reduce, const std::string& said) {
  if (kSanitized) return;  // their allocators have all address space mapped
  World world(2);
  std::barrier<> barrier(2);
  std::optional<AddressSpaceLimit> limit;
  (void)world.on_nodes({"a", "b"}).each([&](Engine& engine, int rank) {
    std::vector<float> a(24u << 20, 1.0f), b(24u << 20, 2.0f);
    const std::vector<int64_t> shape{static_cast<int64_t>(a.size())};
    std::vector<Submission::Tensor> two;
    const auto together = [&](int64_t* handle) {
      return submit(engine, Op::kAllreduce, "big", a, &a, shape, handle, [&](Submission& s) {
        two = {s.tensors[0], {b.data(), b.data(), shape, DType::kF32}};
        s.tensors = two;
        s.reduce = reduce;
      });
    };
    int64_t handle = 0;
    CHECK_OK(together(&handle));
    CHECK_OK(finish(engine, handle));
    (void)engine.describe();  // with the progress lock held: the memory of the first call is given back
    barrier.arrive_and_wait();
    if (rank == 0) limit.emplace(100u << 20);
    barrier.arrive_and_wait();
    CHECK_OK(together(&handle));
    const std::string text = finish(engine, handle, 30).text();
    CHECK_LOCKED(text.find(said) != std::string::npos);
    CHECK_LOCKED(text.find(": rank ") != std::string::npos);
    barrier.arrive_and_wait();
    if (rank == 0) limit.reset();
    CHECK_LOCKED(submit(engine, Op::kAllreduce, "next", a, &a, shape, &handle).code() == Code::kInternal);
  });
}

TEST_CASE("out of memory: a batch that finds none to work in fails on every rank, and nobody waits") {
  lacks_memory(Reduce::kSum, "no memory to work in: 201326592 bytes");
}

TEST_CASE("out of memory: what is thrown while progress is made fails every operation, and nobody waits" *
          doctest::test_suite("long")) {
  lacks_memory(Reduce::kAdasum, " ran out of memory");
}

}  // namespace
}  // namespace hc
