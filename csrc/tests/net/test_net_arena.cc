// Shared memory of one rank: layout, allocation, sharing within a process and between processes, limits, fork.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>

#include "net/arena.h"
#include "tests/net/net_world.h"

using namespace hc;

namespace {

std::shared_ptr<Arena> new_arena(size_t bytes = kMinArenaBytes) {
  auto arena = Arena::create(bytes);
  REQUIRE_MESSAGE(arena.is_ok(), arena.status().text());
  return arena.take();
}

std::byte* must_allocate(Arena& arena, size_t bytes) {
  auto block = arena.allocate(bytes);
  REQUIRE_MESSAGE(block.is_ok(), block.status().text());
  return block.take();
}

bool is_zero(const std::byte* p, size_t bytes) {
  return std::all_of(p, p + bytes, [](std::byte b) { return b == std::byte{0}; });
}

// Runs body in a child; true when it returned true.
template <class Body>
bool in_child(const Body& body) {
  pid_t child = fork();
  if (child == 0) {
    alarm(net_tests::kChildSeconds);
    _exit(body() ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

TEST_CASE("an arena that is too small is refused with the setting to change") {
  auto arena = Arena::create(1 << 20);
  CHECK(arena.status().code() == Code::kInvalidArgument);
  CHECK(arena.status().text().find("HOROCLONE_ARENA_BYTES") != std::string::npos);
}

TEST_CASE("its descriptor is sealed, close-on-exec, and takes address space only") {
  auto arena = new_arena(size_t{8} << 30);
  CHECK(arena->bytes() == size_t{8} << 30);
  CHECK(reinterpret_cast<uintptr_t>(arena->base()) % (2u << 20) == 0);
  CHECK((fcntl(arena->fd(), F_GETFD) & FD_CLOEXEC) != 0);
  CHECK((fcntl(arena->fd(), F_GET_SEALS) & F_SEAL_SHRINK) != 0);
  CHECK(ftruncate(arena->fd(), 4096) != 0);
  struct stat about{};
  REQUIRE(fstat(arena->fd(), &about) == 0);
  CHECK(about.st_blocks * 512 <= 2 << 20);
  CHECK(arena->contains(arena->base(), arena->bytes()));
  CHECK_FALSE(arena->contains(arena->base() + 1, arena->bytes()));
  CHECK_FALSE(arena->contains(&about, 1));
}

TEST_CASE("blocks are zero, page-aligned and apart; freed ones are merged and zero again") {
  auto arena = new_arena();
  std::byte* a = must_allocate(*arena, 100);
  std::byte* b = must_allocate(*arena, 5 << 20);
  std::byte* c = must_allocate(*arena, 4097);
  CHECK(arena->offset_of(a) == kHeapOffset);
  CHECK(b - a == 4096);
  CHECK(c - b == 5 << 20);
  CHECK(arena->allocated_bytes() == 4096 + (5 << 20) + 8192);
  CHECK(is_zero(b, 5 << 20));
  std::memset(a, 1, 4096);
  std::memset(b, 2, 5 << 20);
  arena->free(a);
  arena->free(b);
  std::byte* both = must_allocate(*arena, 4096 + (5 << 20));  // fits only if a and b were merged
  CHECK(both == a);
  CHECK(is_zero(both, 4096 + (5 << 20)));
  std::memset(c, 3, 8192);
  arena->free(c);
  arena->free(both);
  arena->free(both);  // a second time: ignored
  arena->free(nullptr);
  CHECK(arena->allocated_bytes() == 0);
  CHECK(is_zero(must_allocate(*arena, 6 << 20), 6 << 20));
}

TEST_CASE("random allocation never overlaps, always zero") {
  auto arena = new_arena();
  std::mt19937 random(4);
  std::map<std::byte*, size_t> live;
  for (int round = 0; round < 400; ++round) {
    if (live.size() > 8 || (!live.empty() && random() % 3 == 0)) {
      auto victim = std::next(live.begin(), random() % live.size());
      arena->free(victim->first);
      live.erase(victim);
      continue;
    }
    const size_t bytes = 1 + random() % (random() % 8 == 0 ? 5 << 20 : 60000);
    std::byte* block = must_allocate(*arena, bytes);
    REQUIRE(arena->contains(block, bytes));
    REQUIRE(is_zero(block, bytes));
    for (auto [at, size] : live) REQUIRE((block + bytes <= at || at + size <= block));
    std::memset(block, 0xff, bytes);
    live[block] = bytes;
  }
  size_t total = 0;
  for (auto [at, size] : live) total += (size + kPage - 1) / kPage * kPage;
  CHECK(arena->allocated_bytes() == total);
}

TEST_CASE("a full arena, and more memory than there is, are errors with a way out") {
  auto arena = new_arena();
  auto block = arena->allocate(65u << 20);
  CHECK(block.status().code() == Code::kInternal);
  CHECK(block.status().text().find("HOROCLONE_ARENA_BYTES") != std::string::npos);
  CHECK(arena->allocate(size_t{1} << 50).status().code() == Code::kInvalidArgument);
  CHECK(arena->commit(kMinArenaBytes, 1).code() == Code::kInvalidArgument);
  auto wide = new_arena(size_t{1} << 38);
  auto huge = wide->allocate(size_t{200} << 30);
  CHECK(huge.status().text().find("no shared memory for") != std::string::npos);
  CHECK(huge.status().text().find("HOROCLONE_SHARED_MEMORY=0") != std::string::npos);
  CHECK(wide->allocated_bytes() == 0);
  must_allocate(*wide, 4096);
}

TEST_CASE("two arenas of one process that name the same memory share one mapping") {
  auto owner = new_arena();
  auto peer = Arena::attach(dup(owner->fd()), owner->bytes());
  REQUIRE(peer.is_ok());
  CHECK(peer.value()->base() == owner->base());
  std::byte* base = owner->base();
  base[0] = std::byte{9};
  owner.reset();
  CHECK(base[0] == std::byte{9});  // the peer keeps it mapped
}

TEST_CASE("attach refuses what could shrink, what is too short and what is no memfd") {
  int loose = memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(ftruncate(loose, kMinArenaBytes) == 0);
  CHECK(Arena::attach(loose, kMinArenaBytes).status().code() == Code::kInternal);
  auto owner = new_arena();
  CHECK(Arena::attach(dup(owner->fd()), owner->bytes() * 2).status().code() == Code::kInternal);
  CHECK(Arena::attach(dup(owner->fd()), 4096).status().code() == Code::kInternal);
  CHECK(Arena::attach(open("/dev/null", O_RDWR | O_CLOEXEC), kMinArenaBytes).status().code() == Code::kInternal);
}

TEST_CASE("another process sees what the owner writes, and the other way round") {
  auto owner = new_arena();
  std::byte* block = must_allocate(*owner, 4096);
  const size_t offset = owner->offset_of(block);
  block[1] = std::byte{7};
  CHECK(in_child([&] {
    int fd = dup(owner->fd());
    munmap(owner->base(), owner->bytes());  // as if this process had never had it
    void* at = mmap(nullptr, kMinArenaBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return false;
    auto* p = static_cast<std::byte*>(at) + offset;
    p[2] = std::byte{8};
    return p[1] == std::byte{7};
  }));
  CHECK(block[2] == std::byte{8});
}

TEST_CASE("a forked child reads its views, writes its own copy and gets no new blocks") {
  auto arena = new_arena();
  std::byte* block = must_allocate(*arena, 8192);
  block[0] = std::byte{1};
  CHECK(in_child([&] {
    arena->remap_private();
    arena->remap_private();
    bool good = block[0] == std::byte{1};
    block[0] = std::byte{2};
    good &= arena->allocate(1).status().code() == Code::kNotInitialized;
    arena->free(block);
    return good && arena->fd() == -1;
  }));
  CHECK(block[0] == std::byte{1});
}

#if !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)  // whose shadow memory needs the address space itself
TEST_CASE("a limited address space gives a smaller arena, or says what to raise") {
  CHECK(in_child([] {
    rlimit limit{size_t{4} << 30, size_t{4} << 30};
    setrlimit(RLIMIT_AS, &limit);
    auto arena = Arena::create(size_t{64} << 30);
    return arena.is_ok() && arena.value()->bytes() >= kMinArenaBytes && arena.value()->bytes() <= size_t{2} << 30;
  }));
  CHECK(in_child([] {
    rlimit limit{size_t{512} << 20, size_t{512} << 20};
    setrlimit(RLIMIT_AS, &limit);
    auto arena = Arena::create(size_t{64} << 30);
    return !arena.is_ok() && arena.status().text().find("ulimit -v") != std::string::npos;
  }));
  CHECK(in_child([] {  // would be SIGXFSZ
    rlimit limit{size_t{1} << 30, size_t{1} << 30};
    setrlimit(RLIMIT_FSIZE, &limit);
    auto arena = Arena::create(size_t{64} << 30);
    return arena.is_ok() && arena.value()->bytes() <= size_t{1} << 30;
  }));
}
#endif
