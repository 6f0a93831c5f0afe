#include "net/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <utility>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace hc {
namespace {

constexpr size_t kHugePage = 2u << 20;
// A freed block from this size on gives its pages back, a smaller one is cleared.
constexpr size_t kPunchBytes = 4u << 20;
constexpr size_t kReserveStep = 16u << 20;       // a signal makes the kernel undo one step at most
constexpr size_t kCheckMemoryBytes = 64u << 20;  // from here on memory is looked at before it is taken

constexpr size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

std::string mib(size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

size_t number_in(const char* path, size_t otherwise) {
  std::ifstream in(path);
  size_t value = 0;
  return in >> value ? value : otherwise;  // "max" is no number
}

// What may still be used before the kernel would have to kill somebody: free memory, or the rest of a container's
// limit.
size_t memory_left() {
  constexpr size_t unknown = std::numeric_limits<size_t>::max();
  size_t left = unknown;
  std::ifstream info("/proc/meminfo");
  std::string word, unit;
  for (size_t kib = 0; info >> word >> kib; std::getline(info, unit)) {
    if (word == "MemAvailable:") left = kib << 10;
  }
  size_t limit = number_in("/sys/fs/cgroup/memory.max", unknown);
  size_t used = number_in("/sys/fs/cgroup/memory.current", 0);
  if (limit != unknown) left = std::min(left, limit > used ? limit - used : 0);
  return left;
}

// Address space that this process may still map.
size_t mappable_bytes() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::numeric_limits<size_t>::max();
  const size_t used = number_in("/proc/self/statm", 0) * kPage;
  return limit.rlim_cur > used + kHugePage ? limit.rlim_cur - used - kHugePage : 0;
}

// ftruncate beyond RLIMIT_FSIZE would raise SIGXFSZ.
size_t file_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return std::numeric_limits<size_t>::max();
  return limit.rlim_cur;
}

Status out_of_memory(size_t bytes, int error_number) {
  return error(Code::kInternal, "no shared memory for ", mib(bytes), " (", std::strerror(error_number), "); ",
               mib(memory_left()),
               " is left. Give the job or container more memory, or set HOROCLONE_SHARED_MEMORY=0 to use TCP instead");
}

}  // namespace

size_t room_for_arenas() { return mappable_bytes() / 4 * 3; }

struct Arena::Mapping {
  using Key = std::pair<dev_t, ino_t>;
  struct Registry {
    Mutex mu;
    std::map<Key, std::weak_ptr<Mapping>> maps HC_GUARDED_BY(mu);
  };
  // Never destroyed: a view may outlive every other object of the process.
  static Registry& registry() {
    static Registry* const all = new Registry;
    return *all;
  }

  ~Mapping() {
    if (base) munmap(base, bytes);
    if (is_private) return;  // a forked child must not touch a lock that another thread may have held
    Registry& all = registry();
    MutexLock lock(all.mu);
    auto at = all.maps.find(key);
    if (at != all.maps.end() && at->second.expired()) all.maps.erase(at);
  }

  Key key{};
  std::byte* base = nullptr;
  size_t bytes = 0;
  bool is_private = false;
};

// Maps `bytes` of fd at a multiple of the huge page, unless this process has it mapped already.
Result<std::shared_ptr<Arena::Mapping>> Arena::map(int fd, size_t bytes) {
  struct stat about{};
  if (fstat(fd, &about) != 0) return error(Code::kInternal, "shared memory: fstat: ", std::strerror(errno));
  const Mapping::Key key{about.st_dev, about.st_ino};
  Mapping::Registry& all = Mapping::registry();
  MutexLock lock(all.mu);
  if (auto at = all.maps.find(key); at != all.maps.end()) {
    if (auto mapping = at->second.lock(); mapping && mapping->bytes >= bytes) return mapping;
  }
  const size_t span = bytes + kHugePage;
  void* range = mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    return error(Code::kInternal, "no address space for ", mib(bytes), " of shared memory (", std::strerror(errno),
                 "). Raise `ulimit -v`, lower HOROCLONE_ARENA_BYTES, or set HOROCLONE_SHARED_MEMORY=0");
  }
  auto* from = static_cast<std::byte*>(range);
  auto* base = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(from), kHugePage));
  if (mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0) == MAP_FAILED) {
    int saved = errno;
    munmap(range, span);
    return error(Code::kInternal, "cannot map ", mib(bytes), " of shared memory: ", std::strerror(saved));
  }
  if (base > from) munmap(from, base - from);
  std::byte* end = base + round_up(bytes, kPage);
  if (end < from + span) munmap(end, from + span - end);
  madvise(base, bytes, MADV_DONTDUMP);  // a core file of 64 GiB helps nobody
  madvise(base + kSharedSegmentsOffset, bytes - kSharedSegmentsOffset, MADV_HUGEPAGE);
  auto mapping = std::make_shared<Mapping>();
  mapping->key = key, mapping->base = base, mapping->bytes = bytes;
  all.maps[key] = mapping;
  return mapping;
}

Result<std::shared_ptr<Arena>> Arena::create(size_t bytes) {
  bytes = round_up(bytes, kPage);
  if (bytes < kMinArenaBytes) {
    return error(Code::kInvalidArgument, "an arena of ", mib(bytes),
                 " is too small; HOROCLONE_ARENA_BYTES must be at least ", mib(kMinArenaBytes),
                 " (address space, not memory)");
  }
  // Half of what a limit leaves, since the peers' arenas and the program need some, too.
  const size_t fits = std::min(mappable_bytes() / 2, file_limit()) / kPage * kPage;
  if (fits < kMinArenaBytes) {
    return error(
        Code::kUnsupported, "the process may map only ", mib(fits), " more; shared memory needs ", mib(kMinArenaBytes),
        " of address space per local rank. Raise `ulimit -v` and `ulimit -f`, or set HOROCLONE_SHARED_MEMORY=0");
  }
  bytes = std::min(bytes, fits);
  int fd = memfd_create("horoclone", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    return error(Code::kUnsupported, "memfd_create: ", std::strerror(errno),
                 ". Set HOROCLONE_SHARED_MEMORY=0 to use TCP instead");
  }
  std::shared_ptr<Arena> arena(new Arena);
  arena->fd_ = fd;  // closed by ~Arena from here on
  // Sealed, so that no peer can shrink it under another's feet (which would be SIGBUS).
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return error(Code::kInternal, "cannot size ", mib(bytes), " of shared memory: ", std::strerror(errno));
  }
  auto mapping = map(fd, bytes);
  if (!mapping.is_ok()) return mapping.status();
  arena->mapping_ = mapping.take();
  arena->base_ = arena->mapping_->base;
  arena->bytes_ = bytes;
  HC_TRY(arena->commit(0, kPage));
  return arena;
}

Result<std::shared_ptr<Arena>> Arena::attach(int fd, size_t bytes) {
  std::shared_ptr<Arena> arena(new Arena);
  arena->fd_ = fd;
  struct stat about{};
  int seals = fcntl(fd, F_GET_SEALS);
  if (fstat(fd, &about) != 0 || seals < 0) {
    return error(Code::kInternal, "a peer's shared memory is no memfd: ", std::strerror(errno));
  }
  if (bytes < kMinArenaBytes || about.st_size < 0 || static_cast<size_t>(about.st_size) < bytes ||
      !(seals & F_SEAL_SHRINK)) {
    return error(Code::kInternal, "a peer's shared memory has ", about.st_size, " bytes and seals ", seals,
                 ", expected ", bytes, " bytes that cannot shrink");
  }
  auto mapping = map(fd, bytes);
  if (!mapping.is_ok()) return mapping.status();
  arena->mapping_ = mapping.take();
  arena->base_ = arena->mapping_->base;
  arena->bytes_ = bytes;
  return arena;
}

Arena::~Arena() {
  if (fd_ >= 0) ::close(fd_);
}

// Touching the pages through the mapping lets the kernel use huge ones; where it cannot, the plain way names the error.
Status Arena::reserve(size_t offset, size_t bytes) {
  if (bytes >= kCheckMemoryBytes && bytes > memory_left()) return out_of_memory(bytes, ENOSPC);
  if (bytes >= kHugePage) {
    int result;
    do result = madvise(base_ + offset, bytes, MADV_POPULATE_WRITE);
    while (result != 0 && (errno == EINTR || errno == EAGAIN));
    if (result == 0) return Status::ok();
  }
  for (size_t done = 0; done < bytes;) {
    size_t step = std::min(bytes - done, kReserveStep);
    int failure = posix_fallocate(fd_, static_cast<off_t>(offset + done), static_cast<off_t>(step));
    if (failure == EINTR) continue;
    if (failure != 0) return out_of_memory(bytes, failure);
    done += step;
  }
  return Status::ok();
}

Status Arena::commit(size_t offset, size_t bytes) {
  if (bytes == 0) return Status::ok();
  if (fd_ < 0)
    return error(Code::kNotInitialized, "this process was forked after init; its shared memory is a private copy");
  if (offset > bytes_ || bytes > bytes_ - offset) {
    return error(Code::kInvalidArgument, "bytes ", offset, " to ", offset + bytes, " lie outside the arena of ",
                 mib(bytes_));
  }
  size_t from = offset / kPage * kPage;
  return reserve(from, round_up(offset + bytes, kPage) - from);
}

Result<std::byte*> Arena::allocate(size_t bytes) {
  if (bytes > bytes_)
    return error(Code::kInvalidArgument, mib(bytes), " of shared memory: the arena has ", mib(bytes_));
  bytes = std::max(round_up(bytes, kPage), kPage);
  MutexLock lock(mu_);
  auto best = free_.end();
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    if (at->second >= bytes && (best == free_.end() || at->second < best->second)) best = at;
  }
  const size_t offset = best != free_.end() ? best->first : heap_end_;
  if (best == free_.end() && bytes > bytes_ - heap_end_) {
    return error(Code::kInternal, "the arena of ", mib(bytes_), " is full: ", mib(bytes), " asked, ",
                 mib(bytes_ - heap_end_), " left. Raise HOROCLONE_ARENA_BYTES (it costs address space only)");
  }
  HC_TRY(commit(offset, bytes));
  if (best == free_.end()) {
    heap_end_ += bytes;
  } else {
    size_t rest = best->second - bytes;
    free_.erase(best);
    if (rest) free_[offset + bytes] = rest;
  }
  used_[offset] = bytes;
  return base_ + offset;
}

void Arena::zero(size_t offset, size_t bytes) {
  if (fd_ < 0) return;  // forked: nothing is handed out any more
  if (bytes >= kPunchBytes && fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                                        static_cast<off_t>(bytes)) == 0) {
    return;
  }
  std::memset(base_ + offset, 0, bytes);
}

void Arena::free(std::byte* block) {
  if (!block) return;
  MutexLock lock(mu_);
  auto at = used_.find(offset_of(block));
  if (at == used_.end()) return;
  size_t offset = at->first, bytes = at->second;
  used_.erase(at);
  zero(offset, bytes);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      free_.erase(before);
    }
  }
  if (offset + bytes == heap_end_) {
    heap_end_ = offset;
  } else {
    free_[offset] = bytes;
  }
}

size_t Arena::allocated_bytes() const {
  MutexLock lock(mu_);
  size_t total = 0;
  for (const auto& [offset, bytes] : used_) total += bytes;
  return total;
}

// The child has one thread; another thread of the parent may have held mu_, so it is made anew and no lock is taken.
void Arena::remap_private() {
  if (fd_ < 0) return;
  new (&mu_) Mutex;
  if (!mapping_->is_private) {
    mapping_->is_private = true;
    const int copy_on_write = MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED;
    if (mmap(base_, mapping_->bytes, PROT_READ | PROT_WRITE, copy_on_write, fd_, 0) == MAP_FAILED) {
      mprotect(base_, mapping_->bytes, PROT_READ);  // strict overcommit: still readable, and the parent is safe
    } else {
      madvise(base_, mapping_->bytes, MADV_DONTDUMP);
    }
  }
  ::close(fd_);
  fd_ = -1;
}

}  // namespace hc
