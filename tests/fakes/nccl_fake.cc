// A FAKE of NCCL, built as libnccl.so.2 for the tests only: no GPU takes part. It works on the streams of the
// driver's fake (cuda_fake.cc); ranks are threads or processes of one machine and meet in shared memory. It is as
// unforgiving as the original where it matters: a dead peer is waited for until ncclCommAbort, and a non-blocking
// communicator says "in progress". It is stricter in one thing: ranks that launch different collectives get an error.
//   HC_FAKE_NCCL_VERSION=n   default 22809
//   HC_FAKE_NCCL_FAIL=r:n:c  on group rank r the n-th launch (from 1) fails asynchronously with code c
//   HC_FAKE_NCCL_INIT_US=n   time that a communicator takes to come up
//   HC_FAKE_NCCL_IN_PROGRESS_US=n  time that a group, or a registration, is in progress: on a thread of its own, with
//                              the communicator's state, or in the call where the communicator blocks. Other calls on
//                              it are refused meanwhile; before 2.27, every call of the thread that launched
//   NCCL_LAUNCH_ORDER_IMPLICIT=1   as in the original: groups of two threads that are launched on one device at once
//   are
//                              an error
//   NCCL_HOSTID (or HOROCLONE_NODE) is the host: two ranks on one device of one host are refused
//   HC_FAKE_NCCL_ALLOC_US=n    time that ncclMemAlloc takes: it may wait for the device
//   HC_FAKE_NCCL_WITHOUT_WINDOWS=1  windows are registered with success and a null handle
// -DHC_FAKE_WITHOUT_AVERAGING leaves a symbol out.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/half.h"

#define FAKE_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0, kSystemError = 2, kInternalError = 3, kInvalidArgument = 4, kInvalidUsage = 5,
              kInProgress = 7;
constexpr int kMaxRanks = 16;
constexpr size_t kSlotBytes = 64 << 10, kMailBytes = 8 << 10;
constexpr size_t kTypeBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

long number_from(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atol(text) : otherwise;
}

struct Id {
  char bytes[128];
};
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_blocks, max_blocks;
  const char* network;
  int split_share, traffic_class;
  const char* name;
};

struct Call {
  int kind = 0;  // see Kind
  size_t count = 0;
  int type = 0, op = 0, root = 0;
  bool in_windows = false;  // with the kernels for these, which each rank chooses by itself
  bool operator==(const Call&) const = default;
};
enum Kind { kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter };

struct Mail {  // one direction between two ranks
  std::atomic<unsigned> full;
  unsigned bytes;
  char data[kMailBytes];
};
struct Shared {
  std::atomic<int> attached, left;
  struct Place {
    uint64_t host;
    int device;
    bool shares;  // the device with other ranks
  } place[kMaxRanks];
  std::atomic<unsigned> arrived, phase;
  std::atomic<bool> mismatched;
  Call call[kMaxRanks];
  char slot[kMaxRanks][kSlotBytes];
  Mail mail[kMaxRanks][kMaxRanks];
};

struct Scalar {
  int type;
  double value;
};

struct Transfer {
  bool sends;
  char* data;
  size_t bytes;
  int peer;
};

struct Job {
  Call call;
  const char* in = nullptr;
  char* out = nullptr;
  double scale = 1;
  std::vector<Transfer> transfers;  // not empty: sends and receives instead
};

struct Comm {
  int rank = 0, size = 0;
  const char* called = nullptr;
  bool blocking = true;
  Shared* shared = nullptr;
  std::string name;
  int device = 0;
  std::atomic<int> state{kSuccess};
  std::atomic<bool> aborted{false};
  std::atomic<int> running{0};  // batches that live
  std::thread starter, worker;  // brings it up; does what is in progress
  std::atomic<int> inside{0};   // calls that block in it
  int launches = 0;
  std::mutex mu;
  std::map<int, Scalar> scalars;
  int next_scalar = 5;
  std::string trouble;
  struct Registered {
    char* block;
    size_t bytes;
    bool is_window;
  };
  std::map<void*, Registered> registered;  // what it was told of in advance, by handle
  bool has_window(const void* at) const {
    return std::any_of(registered.begin(), registered.end(), [&](const auto& entry) {
      const Registered& one = entry.second;
      return one.is_window && at >= one.block && at < one.block + one.bytes;
    });
  }
};

// Memory of ncclMemAlloc, and what communicators know of it.
struct OwnMemory {
  std::mutex mu;
  std::map<char*, size_t> blocks;
  std::map<char*, int> known;  // registrations of it
  int windows = 0, buffers = 0, freed_while_known = 0;
};
OwnMemory& own_memory() {
  static auto* one = new OwnMemory;
  return *one;
}

std::atomic<int> communicators{0}, ids{0};
std::atomic<int> groups{0};       // ever
std::atomic<int> collectives[6];  // ever, by Kind; of them allreduces with the kernels for windows
thread_local int group_depth = 0;
// Before 2.27: of the group that this thread launched last; ends with it.
thread_local std::shared_ptr<std::atomic<bool>> running_group;
struct Launch {
  Comm* comm;
  void* stream;
  Job job;
};
thread_local std::vector<Launch> group;
thread_local std::string last_error;

using Enqueue = int (*)(void*, void (*)(void*), void*, void (*)(void*));
using Holds = int (*)(const void*, size_t);
template <class Function>
Function from_cuda_fake(const char* name) {
#ifdef HC_FAKE_HIP
  void* library = dlopen("libamdhip64.so", RTLD_NOW | RTLD_NOLOAD);
#else
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
#endif
  return library ? reinterpret_cast<Function>(dlsym(library, name)) : nullptr;
}

// The group that each device was given last.
struct LaunchOrder {
  std::mutex mu;
  std::map<int, const void*> last;
  void begin(int device, const void* group) {
    std::lock_guard lock(mu);
    last[device] = group;
  }
  bool ends(int device, const void* group) {
    std::lock_guard lock(mu);
    return last[device] == group;
  }
};
LaunchOrder& launch_order() {
  static auto* one = new LaunchOrder;
  return *one;
}

template <class Done>
bool wait_for(Comm* c, Done&& done) {
  for (int turn = 0; !done(); ++turn) {
    if (c->aborted.load()) return false;
    if (turn < 100)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

bool barrier(Comm* c) {
  Shared& s = *c->shared;
  const unsigned phase = s.phase.load();
  if (s.arrived.fetch_add(1) + 1 == static_cast<unsigned>(c->size)) {
    s.arrived.store(0);
    s.phase.fetch_add(1);
    return true;
  }
  return wait_for(c, [&] { return s.phase.load() != phase; });
}

// The arithmetic is done in double, integers in 64 bits with wrap-around; one rounding at the end.
template <class T>
double widen(T v) {
  if constexpr (std::is_arithmetic_v<T>)
    return static_cast<double>(v);
  else
    return hc::to_float(v);
}
template <class T>
T narrow(double v) {
  if constexpr (std::is_same_v<T, hc::Float16>)
    return hc::to_float16(static_cast<float>(v));
  else if constexpr (std::is_same_v<T, hc::BFloat16>)
    return hc::to_bfloat16(static_cast<float>(v));
  else
    return static_cast<T>(v);
}
// Integers wrap, as the original's do: also what nobody asked for, the padding between packed tensors, is reduced.
template <class W>
W combine(int op, W a, W b) {
  if (op == 2) return std::max(a, b);
  if (op == 3) return std::min(a, b);
  if constexpr (std::is_integral_v<W>) {
    const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    return static_cast<W>(op == 1 ? x * y : x + y);
  } else {
    return op == 1 ? a * b : a + b;
  }
}

// out[i] = over all ranks' slots, from element `begin` on.
template <class T>
void reduce_as(const Comm& c, char* out, size_t begin, size_t count, int op, double scale) {
  using Integer = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  using Wide = std::conditional_t<std::is_integral_v<T>, Integer, double>;
  for (size_t i = 0; i < count; ++i) {
    Wide total{};
    for (int r = 0; r < c.size; ++r) {
      T value;
      std::memcpy(&value, c.shared->slot[r] + (begin + i) * sizeof(T), sizeof(T));
      Wide v;
      if constexpr (std::is_integral_v<T>)
        v = value;
      else
        v = widen(value) * scale;
      total = r == 0 ? v : combine(op, total, v);
    }
    T made;
    if constexpr (std::is_integral_v<T>)
      made = static_cast<T>(total);
    else
      made = narrow<T>(total);
    std::memcpy(out + i * sizeof(T), &made, sizeof(T));
  }
}

using ReduceAs = void (*)(const Comm&, char*, size_t, size_t, int, double);
constexpr ReduceAs kReduceAs[] = {
    reduce_as<int8_t>,   reduce_as<uint8_t>,     reduce_as<int32_t>, reduce_as<uint32_t>, reduce_as<int64_t>,
    reduce_as<uint64_t>, reduce_as<hc::Float16>, reduce_as<float>,   reduce_as<double>,   reduce_as<hc::BFloat16>};

// One chunk of one collective: everybody fills its slot, then everybody reads.
bool run_chunk(Comm* c, const Job& job, size_t at, size_t n) {
  const size_t e = kTypeBytes[job.call.type], rank = static_cast<size_t>(c->rank);
  const size_t size = static_cast<size_t>(c->size), total = job.call.count;
  Shared& s = *c->shared;
  if (job.call.kind == kReduceScatter) {  // a part of each rank's share
    for (size_t r = 0; r < size; ++r) std::memcpy(s.slot[rank] + r * n * e, job.in + (r * total + at) * e, n * e);
  } else if (job.call.kind != kBroadcast || c->rank == job.call.root) {
    std::memcpy(s.slot[rank], job.in + at * e, n * e);
  }
  if (!barrier(c)) return false;
  const ReduceAs reduce = kReduceAs[job.call.type];
  switch (job.call.kind) {
    case kReduce:
      if (c->rank != job.call.root) break;
      [[fallthrough]];
    case kAllReduce:
      reduce(*c, job.out + at * e, 0, n, job.call.op, job.scale);
      break;
    case kBroadcast:
      std::memcpy(job.out + at * e, s.slot[job.call.root], n * e);
      break;
    case kAllGather:
      for (size_t r = 0; r < size; ++r) std::memcpy(job.out + (r * total + at) * e, s.slot[r], n * e);
      break;
    case kReduceScatter:
      reduce(*c, job.out + at * e, rank * n, n, job.call.op, job.scale);
      break;
  }
  return barrier(c);
}

bool run_collective(Comm* c, const Job& job) {
  Shared& s = *c->shared;
  s.call[c->rank] = job.call;
  if (!barrier(c)) return false;
  for (int r = 0; r < c->size; ++r)
    if (!(s.call[r] == s.call[0])) s.mismatched.store(true);
  if (!barrier(c)) return false;
  if (s.mismatched.load()) {
    c->trouble = std::string("fake: the ranks launched different collectives in ") + (c->called ? c->called : "one");
    c->state.store(kInvalidUsage);
    return false;
  }
  size_t chunk = kSlotBytes / kTypeBytes[job.call.type];
  if (job.call.kind == kReduceScatter) chunk /= static_cast<size_t>(c->size);
  for (size_t at = 0; at < job.call.count; at += chunk)
    if (!run_chunk(c, job, at, std::min(chunk, job.call.count - at))) return false;
  return true;
}

bool run_transfers(Comm* c, const Job& job) {
  struct Open {
    Transfer t;
    size_t moved = 0;
  };
  std::vector<Open> open;
  for (const Transfer& t : job.transfers) open.push_back({t, 0});
  return wait_for(c, [&] {
    bool all = true;
    for (Open& o : open) {
      if (o.moved == o.t.bytes) continue;
      all = false;
      Mail& m = o.t.sends ? c->shared->mail[c->rank][o.t.peer] : c->shared->mail[o.t.peer][c->rank];
      if ((m.full.load() != 0) == o.t.sends) continue;
      if (o.t.sends) {
        m.bytes = static_cast<unsigned>(std::min(kMailBytes, o.t.bytes - o.moved));
        std::memcpy(m.data, o.t.data + o.moved, m.bytes);
      } else {
        std::memcpy(o.t.data + o.moved, m.data, m.bytes);
      }
      o.moved += m.bytes;
      m.full.store(o.t.sends ? 1 : 0);
    }
    return all;
  });
}

// Lives until it has run, or as long as the graph that it was captured into; so does its communicator.
struct Batch {
  Batch(Comm* comm, std::vector<Job> jobs) : comm(comm), jobs(std::move(jobs)) { comm->running.fetch_add(1); }
  ~Batch() { comm->running.fetch_sub(1); }
  Comm* comm;
  std::vector<Job> jobs;
};

bool in_trouble(const Comm* c) {
  const int state = c->state.load();  // once: it may change from one to the other
  return state != kSuccess && state != kInProgress;
}

void drop_batch(void* argument) { delete static_cast<Batch*>(argument); }

void run_batch(void* argument) {
  const auto* batch = static_cast<const Batch*>(argument);
  Comm* c = batch->comm;
  for (const Job& job : batch->jobs) {
    if (c->aborted.load() || in_trouble(c)) break;
    if (!(job.transfers.empty() ? run_collective(c, job) : run_transfers(c, job))) break;
  }
  // A communicator in trouble keeps its stream until it is aborted, as kernels of the original do.
  if (in_trouble(c)) (void)wait_for(c, [] { return false; });
}

int fail(int code, const char* text) {
  last_error = text;
  return code;
}

// Sends and receives of a group become one job, as the original overlaps them.
std::vector<Job> merged(std::vector<Launch>& launches, Comm* comm) {
  std::vector<Job> jobs;
  Job exchange;
  for (Launch& l : launches) {
    if (l.comm != comm) continue;
    if (l.job.transfers.empty())
      jobs.push_back(std::move(l.job));
    else
      exchange.transfers.push_back(l.job.transfers[0]);
  }
  if (!exchange.transfers.empty()) jobs.push_back(std::move(exchange));
  return jobs;
}

void fail_on_demand(Comm* c) {
  const char* wish = std::getenv("HC_FAKE_NCCL_FAIL");
  int rank = 0, number = 0, code = 0;
  ++c->launches;
  if (!wish || std::sscanf(wish, "%d:%d:%d", &rank, &number, &code) != 3) return;
  if (rank != c->rank || number != c->launches) return;
  c->trouble = "fake: failed on demand";
  c->state.store(code);
}

// Does `work` at once, or in progress for the time that was asked for.
int progress(Comm* c, std::function<int()> work) {
  const long us = number_from("HC_FAKE_NCCL_IN_PROGRESS_US", 0);
  const auto takes = [us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); };
  if (c->blocking) {
    if (us) takes();
    return work();
  }
  if (!us) {
    const int done = work();
    return done == kSuccess ? kInProgress : done;
  }
  if (c->worker.joinable()) c->worker.join();
  int up = kSuccess;
  (void)c->state.compare_exchange_strong(up, kInProgress);
  const auto runs = std::make_shared<std::atomic<bool>>(true);
  running_group = runs;
  c->worker = std::thread([=] {
    takes();
    const int done = work();
    runs->store(false);
    int still = kInProgress;
    (void)c->state.compare_exchange_strong(still, done);
  });
  return kInProgress;
}

// What a thread may not do while its last group runs.
bool stumbles() { return number_from("HC_FAKE_NCCL_VERSION", 22809) < 22700 && running_group && running_group->load(); }

int launch_all() {
  static const auto enqueue = from_cuda_fake<Enqueue>("hc_fake_enqueue");
  if (!enqueue) return fail(kSystemError, "fake: the fake libcuda is not loaded");
  std::vector<Launch> launches = std::move(group);
  group.clear();
  ++groups;
  int outcome = kSuccess;
  while (!launches.empty()) {
    Comm* c = launches[0].comm;
    void* stream = launches[0].stream;
    auto* batch = new Batch(c, merged(launches, c));
    std::erase_if(launches, [&](const Launch& l) { return l.comm == c; });
    fail_on_demand(c);
    const bool ordered = number_from("NCCL_LAUNCH_ORDER_IMPLICIT", 0) == 1;
    launch_order().begin(c->device, batch);
    const int done = progress(c, [=, device = c->device] {
      if (ordered && !launch_order().ends(device, batch)) {
        delete batch;
        return fail(kInvalidUsage, "fake: host threads racing to launch NCCL on the same device");
      }
      return enqueue(stream, run_batch, batch, drop_batch) != 0 ? fail(1, "fake: no such stream") : kSuccess;
    });
    if (done != kSuccess && done != kInProgress) return done;
    outcome = std::max(outcome, done);
  }
  return outcome;
}

int add(Launch launch) {
  if (!launch.comm || launch.comm->aborted.load()) return fail(kInvalidUsage, "fake: the communicator is gone");
  if (launch.comm->state.load() == kInProgress) return fail(kInvalidUsage, "fake: the communicator is in progress");
  group.push_back(std::move(launch));
  return group_depth ? kSuccess : launch_all();
}

bool on_device(const void* at, size_t bytes) {
  static const auto holds = from_cuda_fake<Holds>("hc_fake_holds");
  return holds && holds(at, bytes);
}

int collective(Call call, const void* in, void* out, size_t in_count, size_t out_count, void* comm, void* stream) {
  auto* c = static_cast<Comm*>(comm);
  const size_t e = kTypeBytes[call.type];
  const bool is_root = call.root == c->rank;
  const bool reads = call.kind != kBroadcast || is_root, writes = call.kind != kReduce || is_root;
  if ((reads && !on_device(in, in_count * e)) || (writes && !on_device(out, out_count * e)))
    return fail(kInvalidArgument, "fake: a pointer is not device memory");
  ++collectives[call.kind];
  // As of the original: these kernels sum floats of up to 32 bits.
  const bool sums = call.kind == kAllReduce && call.op == 0 && (call.type == 6 || call.type == 7 || call.type == 9);
  call.in_windows = sums && c->has_window(in) && c->has_window(out);
  collectives[5] += call.in_windows;
  if (c->size == 1 && in == out && call.op < 4) return kSuccess;  // the original launches nothing
  Job job{call, static_cast<const char*>(in), static_cast<char*>(out), 1.0, {}};
  if (call.op == 4) {
    job.scale = 1.0 / c->size;
    job.call.op = 0;
  } else if (call.op > 4) {
    std::lock_guard lock(c->mu);
    auto at = c->scalars.find(call.op);
    if (at == c->scalars.end() || at->second.type != call.type)
      return fail(kInvalidArgument, "fake: no such reduction for this type");
    job.scale = at->second.value;
    job.call.op = 0;
  }
  return add({c, stream, std::move(job)});
}

Shared::Place place_of(const Comm* c) {
  const char* host = std::getenv("NCCL_HOSTID");
  if (!host) host = std::getenv("HOROCLONE_NODE");
  const bool shares = number_from("NCCL_MULTI_RANK_GPU_ENABLE", 0) == 1;
  return {std::hash<std::string>{}(host ? host : ""), c->device,
          shares && number_from("HC_FAKE_NCCL_VERSION", 22809) >= 23003};
}

bool shares_a_device(const Comm* c) {
  const Shared::Place& mine = c->shared->place[c->rank];
  for (int r = 0; r < c->size; ++r) {
    const Shared::Place& other = c->shared->place[r];
    if (r != c->rank && other.host == mine.host && other.device == mine.device && !(other.shares && mine.shares))
      return true;
  }
  return false;
}

void attach(Comm* c, std::string name) {
  if (const long us = number_from("HC_FAKE_NCCL_INIT_US", 0))
    std::this_thread::sleep_for(std::chrono::microseconds(us));
  const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(Shared)) != 0) {
    c->state.store(kSystemError);
    return;
  }
  void* at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  c->shared = static_cast<Shared*>(at);
  c->shared->place[c->rank] = place_of(c);
  if (c->shared->attached.fetch_add(1) + 1 == c->size) shm_unlink(name.c_str());
  if (wait_for(c, [&] { return c->shared->attached.load() >= c->size; })) {
    const bool refused = shares_a_device(c);
    if (refused) c->trouble = "fake: Duplicate GPU detected";
    c->state.store(refused ? kInvalidUsage : kSuccess);
  }
}

int end(Comm* c) {
  if (c->starter.joinable()) c->starter.join();
  if (c->worker.joinable()) c->worker.join();
  while (c->inside.load() > 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  while (c->running.load() > 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  if (c->shared && c->shared->attached.load() < c->size) shm_unlink(c->name.c_str());  // not everybody came
  if (c->shared) munmap(c->shared, sizeof(Shared));
  {  // the original forgets registrations with the communicator
    OwnMemory& own = own_memory();
    std::lock_guard lock(own.mu);
    for (auto& [handle, memory] : c->registered) {
      --own.known[memory.block];
      --(memory.is_window ? own.windows : own.buffers);
      delete static_cast<char*>(handle);
    }
  }
  delete c;
  --communicators;
  return kSuccess;
}

}  // namespace

// What communicators know in advance. what: "windows", "buffers", "blocks" (of ncclMemAlloc), "freed while known"
FAKE_API int hc_fake_registered(const char* what) {
  OwnMemory& own = own_memory();
  std::lock_guard lock(own.mu);
  const std::string name = what;
  if (name == "blocks") return static_cast<int>(own.blocks.size());
  if (name == "freed while known") return own.freed_while_known;
  return name == "windows" ? own.windows : own.buffers;
}
FAKE_API int ncclMemAlloc(void** at, size_t bytes) {
  static const auto allocate = from_cuda_fake<int (*)(uint64_t*, size_t)>("cuMemAlloc_v2");
  uint64_t made = 0;
  std::this_thread::sleep_for(std::chrono::microseconds(number_from("HC_FAKE_NCCL_ALLOC_US", 0)));
  if (!allocate || allocate(&made, bytes) != 0) return fail(1, "fake: no memory");
  *at = reinterpret_cast<void*>(made);
  OwnMemory& own = own_memory();
  std::lock_guard lock(own.mu);
  own.blocks[static_cast<char*>(*at)] = bytes;
  return kSuccess;
}
FAKE_API int ncclMemFree(void* at) {
  static const auto release = from_cuda_fake<int (*)(uint64_t)>("cuMemFree_v2");
  OwnMemory& own = own_memory();
  {
    std::lock_guard lock(own.mu);
    if (!own.blocks.erase(static_cast<char*>(at))) return fail(kInvalidArgument, "fake: not from ncclMemAlloc");
    own.freed_while_known += own.known[static_cast<char*>(at)] != 0;
    own.known.erase(static_cast<char*>(at));
  }
  return release(reinterpret_cast<uint64_t>(at)) == 0 ? kSuccess : fail(1, "fake: cuMemFree");
}

static int add_registration(void* comm, void* at, size_t bytes, void** handle, int OwnMemory::* count) {
  auto* c = static_cast<Comm*>(comm);
  if (c->state.load() == kInProgress) return fail(kInvalidUsage, "fake: the communicator is in progress");
  OwnMemory& own = own_memory();
  std::lock_guard lock(own.mu);
  const auto block = own.blocks.find(static_cast<char*>(at));
  if (block == own.blocks.end() || bytes > block->second)
    return fail(kInvalidArgument, "fake: only memory of ncclMemAlloc is registered");
  ++own.known[block->first];
  ++(own.*count);
  void* const made = new char;
  c->registered[made] = {block->first, bytes, count == &OwnMemory::windows};
  return progress(c, [=] {
    *handle = made;
    return kSuccess;
  });
}
static int end_registration(void* comm, void* handle, int OwnMemory::* count) {
  auto* c = static_cast<Comm*>(comm);
  const auto known = c->registered.find(handle);
  if (known == c->registered.end()) return fail(kInvalidArgument, "fake: no such registration");
  char* const block = known->second.block;
  c->registered.erase(known);
  delete static_cast<char*>(handle);
  return progress(c, [=] {
    OwnMemory& own = own_memory();
    std::lock_guard lock(own.mu);
    --own.known[block];
    --(own.*count);
    return kSuccess;
  });
}
FAKE_API int ncclCommRegister(void* comm, void* at, size_t bytes, void** handle) {
  return add_registration(comm, at, bytes, handle, &OwnMemory::buffers);
}
FAKE_API int ncclCommDeregister(void* comm, void* handle) {
  return end_registration(comm, handle, &OwnMemory::buffers);
}
FAKE_API int ncclCommWindowRegister(void* comm, void* at, size_t bytes, void** handle, int flags) {
  if (flags != 1) return fail(kInvalidArgument, "fake: a window that is not symmetric");
  if (number_from("HC_FAKE_NCCL_WITHOUT_WINDOWS", 0)) return kSuccess;
  return add_registration(comm, at, bytes, handle, &OwnMemory::windows);
}
FAKE_API int ncclCommWindowDeregister(void* comm, void* handle) {
  return end_registration(comm, handle, &OwnMemory::windows);
}

// For tests that ask what is left.
FAKE_API int hc_fake_communicators() { return communicators.load(); }
FAKE_API int hc_fake_ids() { return ids.load(); }  // given, ever: the original keeps a thread and a socket for each
FAKE_API int hc_fake_groups() { return groups.load(); }  // launched, ever
// kind: 0 allreduce, 1 reduce, 2 broadcast, 3 allgather, 4 reduce-scatter, 5 allreduce with the kernels for windows
FAKE_API int hc_fake_collectives(int kind) { return collectives[kind].load(); }

FAKE_API int ncclGetVersion(int* version) {
  *version = static_cast<int>(number_from("HC_FAKE_NCCL_VERSION", 22809));
  return kSuccess;
}
FAKE_API const char* ncclGetErrorString(int result) {
  constexpr const char* texts[] = {"no error",
                                   "unhandled cuda error",
                                   "unhandled system error",
                                   "internal error",
                                   "invalid argument",
                                   "invalid usage",
                                   "remote process exited or there was a network error",
                                   "NCCL operation in progress"};
  return result >= 0 && result < 8 ? texts[result] : "unknown result code";
}
FAKE_API const char* ncclGetLastError(void* comm) {
  if (comm && !static_cast<Comm*>(comm)->trouble.empty()) return static_cast<Comm*>(comm)->trouble.c_str();
  return last_error.c_str();
}
FAKE_API int ncclGetUniqueId(Id* id) {
  std::memset(id, 0, sizeof(*id));
  std::snprintf(id->bytes, sizeof(id->bytes), "/hc-nccl-fake-%d-%d", getpid(), ids.fetch_add(1));
  return kSuccess;
}
FAKE_API int ncclCommInitRankConfig(void** comm, int size, Id id, int rank, const Config* config) {
  if (!config || config->magic != 0xcafebeef) return fail(kInvalidArgument, "fake: no configuration");
  if (size > kMaxRanks || rank < 0 || rank >= size) return fail(kInvalidArgument, "fake: rank or size");
  auto* c = new Comm;
  c->rank = rank;
  c->size = size;
  c->blocking = config->blocking != 0;
  c->name = id.bytes;
  if (config->size >= sizeof(Config) && config->version >= 22700) c->called = config->name;
  static const auto device_now = from_cuda_fake<int (*)()>("hc_fake_device");
  c->device = device_now ? device_now() : 0;
  c->state.store(kInProgress);
  ++communicators;
  ++c->inside;
  __atomic_store_n(comm, c, __ATOMIC_SEQ_CST);  // as in the original it can be aborted from now on
  if (c->blocking) {
    attach(c, c->name);
    const int state = c->state.load();
    --c->inside;
    return state == kInProgress ? fail(kInvalidUsage, "fake: aborted") : state;
  }
  --c->inside;
  c->starter = std::thread([c] { attach(c, c->name); });
  return kInProgress;
}
FAKE_API int ncclCommGetAsyncError(void* comm, int* state) {
  *state = static_cast<Comm*>(comm)->state.load();
  return kSuccess;
}
FAKE_API int ncclCommFinalize(void*) { return kSuccess; }
FAKE_API int ncclCommDestroy(void* comm) { return end(static_cast<Comm*>(comm)); }
FAKE_API int ncclCommAbort(void* comm) {
  static_cast<Comm*>(comm)->aborted.store(true);
  return end(static_cast<Comm*>(comm));
}
FAKE_API int ncclGroupStart() {
  if (stumbles()) return fail(kInternalError, "fake: the group before still runs in this thread");
  ++group_depth;
  return kSuccess;
}
FAKE_API int ncclGroupEnd() {
  if (--group_depth > 0) return kSuccess;
  return group.empty() ? kSuccess : launch_all();
}
FAKE_API int ncclAllReduce(const void* in, void* out, size_t n, int type, int op, void* comm, void* stream) {
  return collective({kAllReduce, n, type, op, 0}, in, out, n, n, comm, stream);
}
FAKE_API int ncclReduce(const void* in, void* out, size_t n, int type, int op, int root, void* comm, void* stream) {
  return collective({kReduce, n, type, op, root}, in, out, n, n, comm, stream);
}
FAKE_API int ncclBroadcast(const void* in, void* out, size_t n, int type, int root, void* comm, void* stream) {
  return collective({kBroadcast, n, type, 0, root}, in, out, n, n, comm, stream);
}
FAKE_API int ncclAllGather(const void* in, void* out, size_t n, int type, void* comm, void* stream) {
  const auto size = static_cast<size_t>(static_cast<Comm*>(comm)->size);
  return collective({kAllGather, n, type, 0, 0}, in, out, n, n * size, comm, stream);
}
FAKE_API int ncclReduceScatter(const void* in, void* out, size_t n, int type, int op, void* comm, void* stream) {
  const auto size = static_cast<size_t>(static_cast<Comm*>(comm)->size);
  return collective({kReduceScatter, n, type, op, 0}, in, out, n * size, n, comm, stream);
}

static int transfer(bool sends, void* data, size_t n, int type, int peer, void* comm, void* stream) {
  const size_t bytes = n * kTypeBytes[type];
  if (!on_device(data, bytes)) return fail(kInvalidArgument, "fake: a pointer is not device memory");
  Job job;
  job.transfers.push_back({sends, static_cast<char*>(data), bytes, peer});
  return add({static_cast<Comm*>(comm), stream, std::move(job)});
}
FAKE_API int ncclSend(const void* data, size_t n, int type, int peer, void* comm, void* stream) {
  return transfer(true, const_cast<void*>(data), n, type, peer, comm, stream);
}
FAKE_API int ncclRecv(void* data, size_t n, int type, int peer, void* comm, void* stream) {
  return transfer(false, data, n, type, peer, comm, stream);
}
FAKE_API int ncclRedOpDestroy(int op, void* comm) {
  auto* c = static_cast<Comm*>(comm);
  std::lock_guard lock(c->mu);
  c->scalars.erase(op);
  return kSuccess;
}
#ifndef HC_FAKE_WITHOUT_AVERAGING
FAKE_API int ncclRedOpCreatePreMulSum(int* op, const void* scalar, int type, int, void* comm) {
  auto* c = static_cast<Comm*>(comm);
  if (c->state.load() == kInProgress) return fail(kInvalidUsage, "fake: the communicator is in progress");
  double value = 0;
  if (type == 8)
    std::memcpy(&value, scalar, 8);
  else if (type == 7)
    value = *static_cast<const float*>(scalar);
  else if (type == 6)
    value = hc::to_float(*static_cast<const hc::Float16*>(scalar));
  else if (type == 9)
    value = hc::to_float(*static_cast<const hc::BFloat16*>(scalar));
  else
    return fail(kInvalidArgument, "fake: a scaled sum of integers");
  std::lock_guard lock(c->mu);
  c->scalars[c->next_scalar] = {type, value};
  *op = c->next_scalar++;
  return kSuccess;
}
#endif
