// A FAKE of NVIDIA's driver library, built as libcuda.so.1 for the tests only: no GPU takes part. With -DHC_FAKE_HIP it
// is one of AMD's, built as libamdhip64.so: the tests go on to use the names here, the library finds HIP's. Device
// memory is host memory, a stream is a worker thread with a queue, an event is a ticket in that queue. It is stricter
// than the original: a device pointer must lie in what cuMemAlloc gave, and most calls need a current context.
//   HC_FAKE_DEVICES=n        devices (default 4)
//   HC_FAKE_DELAY_US=n       before each thing that a stream does (default 0); n@d: on device d only
//   HC_FAKE_CUDA_FAIL=f:n:r  the n-th call (from 1) of function f returns r
//   HC_FAKE_CUDA_VERSION=n   default 12080
//   HC_FAKE_MEMORY_BYTES=n   of all devices together, at most; default without limit
//   HC_FAKE_CUDA_STICKY=f:n:r  the same, and so does every call from then on, as after an illegal access
//   HC_FAKE_CAPABILITY=n     of every device; default 90
//   HC_FAKE_WITHOUT_POOLS=1  no device has memory pools
//   HC_FAKE_KERNELS=path     kernels are this library's (tests/ptx makes one of the PTX) instead of its own
// Streams can be captured into a graph, which a replay then runs. As with the original, what would disturb a capture is
// refused in threads that have not said that they know, and ends the capture in vain (but only on the same device:
// ranks are threads here). What loads, frees, maps or waits disturbs; what is only enqueued does not.
// Kernels are the project's own, compiled by the C++ compiler and run thread by thread; a module's image is looked at
// for their names only.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "capture.h"
#include "device/cuda_api.h"
#include "device/kernels/kernels.cu"

#define FAKE_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kInvalidDevice = 101,
              kInvalidImage = 200, kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500, kNotReady = 600,
              kIllegalAddress = 700, kNotSupported = 801, kHighestPriority = -5;
constexpr size_t kShareableBytes = 2u << 20;  // smaller ones share a page with others in the original
constexpr int kCaptureUnsupported = 900, kCaptureInvalidated = 901, kCaptureMerge = 902, kCaptureUnmatched = 903,
              kCaptureUnjoined = 904, kCaptureIsolation = 905, kCapturedEvent = 907, kRelaxed = 2;
using hc_fake::Capture;
using hc_fake::Nodes;

long number_from(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atol(text) : otherwise;
}
int current_device();
long delay_here() {
  const char* text = std::getenv("HC_FAKE_DELAY_US");
  const char* device = text ? std::strchr(text, '@') : nullptr;
  return device && std::atoi(device + 1) != current_device() ? 0 : number_from("HC_FAKE_DELAY_US", 0);
}

struct Context {
  int device = 0;
  int users = 0;  // retained so many times
};

// What an event stands for: done when the stream has come to the place where it was recorded.
struct Ticket {
  std::mutex mu;
  std::condition_variable changed;
  bool done = false;
  void finish() {
    std::lock_guard lock(mu);
    done = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mu);
    changed.wait(lock, [&] { return done; });
  }
  bool poll() {
    std::lock_guard lock(mu);
    return done;
  }
};

struct Event {
  std::mutex mu;
  std::shared_ptr<Ticket> last;  // null: never recorded, or
  bool captured = false;
  std::weak_ptr<Capture> capture;  // streams own it while it goes on
  hc_fake::Seen place;             // in it
};

class Stream {
 public:
  explicit Stream(bool urgent = false) : urgent(urgent), worker_([this] { run(); }) {}
  const bool urgent;  // of the highest priority
  // Read by the thread that makes it: one of its own would read the environment while a test changes it.
  const std::chrono::microseconds delay{delay_here()};
  ~Stream() {
    {
      std::lock_guard lock(mu_);
      ending_ = true;
      changed_.notify_all();
    }
    worker_.join();
  }
  void push(std::function<void()> job) {
    std::lock_guard lock(mu_);
    if (capture_) return capture_->add(this, std::move(job));
    jobs_.push_back(std::move(job));
    changed_.notify_all();
  }
  bool idle() {
    std::lock_guard lock(mu_);
    return jobs_.empty() && !busy_;
  }
  std::shared_ptr<Capture> capture() {
    std::lock_guard lock(mu_);
    return capture_;
  }
  void capture_into(std::shared_ptr<Capture> capture) {
    std::lock_guard lock(mu_);
    capture_ = std::move(capture);
  }

 private:
  void run() {
    std::unique_lock lock(mu_);
    while (true) {
      changed_.wait(lock, [&] { return ending_ || !jobs_.empty(); });
      if (jobs_.empty()) return;  // what was queued is done first, as cuStreamDestroy promises
      auto job = std::move(jobs_.front());
      jobs_.pop_front();
      busy_ = true;
      lock.unlock();
      if (delay.count()) std::this_thread::sleep_for(delay);
      job();
      lock.lock();
      busy_ = false;
    }
  }
  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  std::shared_ptr<Capture> capture_;  // null: what comes is done
  bool ending_ = false, busy_ = false;
  std::thread worker_;
};

// What was taken from a pool and has been freed stays there until somebody waits for a stream, if that is more than the
// pool may keep. Owned by its creator and by what is on its way back.
struct Pool {
  std::mutex mu;
  size_t keeps = 0;  // bytes
  std::map<uint64_t, size_t> unused;
  size_t unused_bytes() {
    size_t all = 0;
    for (const auto& [at, bytes] : unused) all += bytes;
    return all;
  }
  void trim() {
    std::lock_guard lock(mu);  // another device's thread may be changing `keeps`
    trim_to(keeps);
  }
  void trim_to(size_t most) {
    if (unused_bytes() <= most) return;
    for (const auto& [at, bytes] : unused) std::free(reinterpret_cast<void*>(at));
    unused.clear();
  }
  ~Pool() {
    keeps = 0;
    trim();
  }
};

struct Driver {
  std::mutex mu;
  std::map<Pool*, std::shared_ptr<Pool>> pools;
  std::map<uint64_t, std::shared_ptr<Pool>> pooled;  // what is in use of them
  std::set<uint64_t> leaving;                        // what nobody may be given, and earlier work still finds
  std::map<int, Context> contexts;                   // by device; addresses are stable
  std::map<int, int> retained;                       // ever, by device
  std::map<uint64_t, size_t> memory;                 // of ours and what is mapped of other processes
  std::map<uint64_t, int> shared;                    // large allocations: the descriptor that others can map
  std::map<uint64_t, size_t> mapped;                 // of other processes
  std::map<std::string, int> calls;                  // that a wish has counted
  std::map<int, std::unique_ptr<Stream>> default_streams;
  std::map<int, int> captures;                        // under way, by device
  std::map<Capture*, std::vector<Stream*>> captured;  // the streams of each
  std::atomic<int> streams{0}, urgent_streams{0}, events{0}, modules{0}, launches{0}, rows{0}, pinned{0}, pinned_now{0};
  std::atomic<int> calls_in_all{0}, events_made{0}, copies{0}, look_ups{0}, illegal{0};

  std::atomic<int> process{0};  // that has called cuInit: a child of it cannot go on
  std::atomic<int> stuck{0};    // what every call returns

  bool fails(const char* function, int* result) {
    if (process.load() && process.load() != getpid()) {
      *result = kNotInitialized;
      return true;
    }
    if (!std::getenv("HC_FAKE_CUDA_STICKY")) stuck.store(0);
    *result = stuck.load();
    if (*result) return true;
    if (fails_by("HC_FAKE_CUDA_STICKY", function, result)) {
      stuck.store(*result);
      return true;
    }
    return fails_by("HC_FAKE_CUDA_FAIL", function, result);
  }
  bool fails_by(const char* variable, const char* function, int* result) {
    const char* wish = std::getenv(variable);
    if (!wish) return false;
    const std::string text = wish;
    const size_t first = text.find(':'), second = text.find(':', first + 1);
    if (second == std::string::npos || text.substr(0, first) != function) return false;
    std::lock_guard lock(mu);
    if (++calls[text] != std::atoi(text.c_str() + first + 1)) return false;
    *result = std::atoi(text.c_str() + second + 1);
    return true;
  }
  // at_call: for what is to be done from now on.
  bool holds(uint64_t at, size_t bytes, bool at_call = true) {
    std::lock_guard lock(mu);
    auto after = memory.upper_bound(at);
    if (after == memory.begin()) return false;
    --after;
    if (at_call && leaving.contains(after->first)) return false;
    return at + bytes <= after->first + after->second;
  }
};
Driver& driver() {
  static auto* one = new Driver;  // outlives every thread
  return *one;
}

thread_local std::vector<Context*> current;
int current_device() { return current.empty() ? -1 : current.back()->device; }
thread_local int capture_mode = 0;  // of this thread: global

// A call that is not allowed while something is captured, unless the thread has said that it knows. As in the original
// it also makes what is captured invalid.
bool disturbs_capture() {
  if (capture_mode == kRelaxed || current.empty()) return false;
  std::lock_guard lock(driver().mu);
  const int device = current.back()->device;
  for (const auto& [capture, streams] : driver().captured)
    if (capture->device == device) capture->is_valid = false;
  return driver().captures[device] > 0;
}

Stream* stream_of(void* handle) {
  if (handle) return static_cast<Stream*>(handle);
  if (current.empty()) return nullptr;
  std::lock_guard lock(driver().mu);
  auto& made = driver().default_streams[current.back()->device];
  if (!made) made = std::make_unique<Stream>();
  return made.get();
}

int copy(void* to, const void* from, size_t bytes, void* stream) {
  Stream* s = stream_of(stream);
  if (!s) return kInvalidContext;
  if (bytes) s->push([=] { std::memcpy(to, from, bytes); });
  return kSuccess;
}

void* host(uint64_t pointer) { return reinterpret_cast<void*>(pointer); }

struct Module {
  std::string image;        // as far as it can be read
  bool compressed = false;  // a fat binary: its names cannot be read
};
struct Function {
  std::string name;
  void (*body)(const void* arguments, const hc::Place& here);
  size_t bytes;  // of its arguments
};

// The image's length is in its head: an ELF file, a fat binary, or text (PTX).
bool read_image(const void* data, Module* module) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  if (std::memcmp(bytes,
                  "\x7f"
                  "ELF",
                  4) == 0) {
    uint64_t sections = 0;
    uint16_t entry = 0, count = 0;
    std::memcpy(&sections, bytes + 0x28, 8);
    std::memcpy(&entry, bytes + 0x3a, 2);
    std::memcpy(&count, bytes + 0x3c, 2);
    module->image.assign(static_cast<const char*>(data), sections + size_t{entry} * count);
    return true;
  }
  uint32_t magic = 0;
  std::memcpy(&magic, bytes, 4);
  module->compressed = magic == 0xba55ed50;
  if (!module->compressed) module->image = static_cast<const char*>(data);
  return module->compressed || module->image.find(".entry") != std::string::npos;
}

// Of what is compiled into this library, unless HC_FAKE_KERNELS names another. None where that one cannot be loaded.
void* kernel_symbol(const std::string& name) {
  static void* library = [] {
    const char* other = std::getenv("HC_FAKE_KERNELS");
    if (other && *other) return dlopen(other, RTLD_NOW | RTLD_LOCAL);
    Dl_info here{};
    dladdr(reinterpret_cast<void*>(&read_image), &here);
    return dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  return library ? dlsym(library, name.c_str()) : nullptr;
}

bool all_held(const unsigned long long* at, int count, bool at_call) {
  for (int i = 0; i < count; ++i)
    if (!driver().holds(at[i], 1, at_call)) return false;
  return true;
}

// Whether all that a kernel is given lies in memory of the device.
bool holds_arguments(const Function& f, const void* arguments, unsigned rows, bool at_call) {
  if (f.name.find("_reduce_") != std::string::npos) {
    const auto& a = *static_cast<const hc::ReduceArguments*>(arguments);
    return all_held(a.in, a.sources, at_call) && all_held(a.out, a.destinations, at_call);
  }
  const auto holds = [at_call](uint64_t at, size_t bytes) { return driver().holds(at, bytes, at_call); };
  if (f.name == "hc_adasum_fold") {
    const auto& a = *static_cast<const hc::AdasumFoldArguments*>(arguments);
    const size_t in = 3 * sizeof(double) * a.lanes_in, out = 3 * sizeof(double) * a.lanes_out;
    for (unsigned r = 0; r < rows; ++r)
      if (a.sum[r].count && !holds(a.from + a.sum[r].first * in, a.sum[r].count * in)) return false;
    return holds(a.to, rows * out);
  }
  if (f.name.find("_adasum_") != std::string::npos) {
    const auto& a = *static_cast<const hc::AdasumArguments*>(arguments);
    const bool wide = f.name.ends_with("f64"), makes = f.name.find("products") != std::string::npos;
    const size_t item = wide ? 8 : 4, sums = 3 * sizeof(double) * (makes ? hc::kAdasumLanes : 1);
    for (unsigned r = 0; r < rows; ++r)
      if (!holds(a.row[r].a, a.row[r].count * item) || !holds(a.row[r].b, a.row[r].count * item) ||
          !holds(a.sums + a.row[r].place * sums, sums))
        return false;
    return true;
  }
  const auto& a = *static_cast<const hc::PackArguments*>(arguments);
  for (unsigned r = 0; r < rows; ++r)
    if (!holds(a.piece[r].at, a.piece[r].count) || !holds(a.packed + a.piece[r].place * 16ull, 1)) return false;
  return a.packed % hc::kPlaceBytes == 0;
}

}  // namespace

#define CALLED ++driver().calls_in_all
#define MAY_FAIL \
  if (int wished = 0; driver().fails(__func__, &wished)) return wished
#define NEEDS_CONTEXT \
  MAY_FAIL;           \
  if (current.empty()) return kInvalidContext
#define MUST_NOT_DISTURB \
  if (disturbs_capture()) return kCaptureUnsupported

// For the fake of NCCL, and for tests that ask what is left.
// The job runs once, or at each replay; `drop` then forgets its argument.
FAKE_API int hc_fake_enqueue(void* stream, void (*job)(void*), void* argument, void (*drop)(void*)) {
  const std::shared_ptr<void> kept(argument, drop);
  Stream* s = stream_of(stream);
  if (!s) return kInvalidContext;
  s->push([=] { job(kept.get()); });
  return kSuccess;
}
FAKE_API int hc_fake_holds(const void* at, size_t bytes) {
  return bytes == 0 || driver().holds(reinterpret_cast<uint64_t>(at), bytes);
}
// what: "memory" (allocations), "streams", "urgent streams" (of the highest priority), "events", "modules", "launches"
// (of kernels, ever), "rows" (of blocks in these), "pinned" (allocations of host memory, ever), "pinned now",
// "pools", "unused" (bytes that pools keep and nobody uses), "contexts" (ever made on `device`), "calls" (of the
// driver, ever), "events made" (ever), "copies" (within devices, ever), "illegal" (launches whose memory was gone when
// they ran, ever), "look-ups" (of kernels that are there, ever)
FAKE_API int hc_fake_count(const char* what, int device) {
  std::lock_guard lock(driver().mu);
  const std::string name = what;
  if (name == "memory") return static_cast<int>(driver().memory.size());
  if (name == "pools") return static_cast<int>(driver().pools.size());
  if (name == "unused") {
    size_t all = 0;
    for (const auto& [at, pool] : driver().pools) {
      std::lock_guard inside(pool->mu);
      all += pool->unused_bytes();
    }
    return static_cast<int>(all);
  }
  if (name == "streams") return driver().streams.load();
  if (name == "urgent streams") return driver().urgent_streams.load();
  if (name == "events") return driver().events.load();
  if (name == "modules") return driver().modules.load();
  if (name == "pinned now") return driver().pinned_now.load();
  if (name == "pinned") return driver().pinned.load();
  if (name == "launches") return driver().launches.load();
  if (name == "rows") return driver().rows.load();
  if (name == "calls") return driver().calls_in_all.load();
  if (name == "events made") return driver().events_made.load();
  if (name == "copies") return driver().copies.load();
  if (name == "illegal") return driver().illegal.load();
  if (name == "look-ups") return driver().look_ups.load();
  return driver().retained[device];
}

FAKE_API int hc_fake_device() { return current_device(); }
FAKE_API int cuInit(unsigned) {
  CALLED;
  MAY_FAIL;
  driver().process.store(getpid());
  return kSuccess;
}
FAKE_API int cuDriverGetVersion(int* version) {
  CALLED;
#ifdef HC_FAKE_HIP
  *version = 60342131;
#else
  *version = static_cast<int>(number_from("HC_FAKE_CUDA_VERSION", 12080));
#endif
  return kSuccess;
}
FAKE_API int cuGetErrorString(int result, const char** text) {
  switch (result) {
    case kSuccess:
      *text = "no error";
      return kSuccess;
    case kInvalidValue:
      *text = "invalid argument";
      return kSuccess;
    case kOutOfMemory:
      *text = "out of memory";
      return kSuccess;
    case kNotInitialized:
      *text = "initialization error";
      return kSuccess;
    case kInvalidContext:
      *text = "invalid device context";
      return kSuccess;
    case kInvalidImage:
      *text = "device kernel image is invalid";
      return kSuccess;
    case kNotFound:
      *text = "named symbol not found";
      return kSuccess;
    case kIllegalAddress:
      *text = "an illegal memory access was encountered";
      return kSuccess;
    case kNotReady:
      *text = "device not ready";
      return kSuccess;
  }
  *text = nullptr;
  return kInvalidValue;
}
FAKE_API int cuDeviceGetCount(int* count) {
  CALLED;
  MAY_FAIL;
  *count = static_cast<int>(number_from("HC_FAKE_DEVICES", 4));
  return kSuccess;
}
FAKE_API int cuDeviceGet(int* device, int ordinal) {
  CALLED;
  if (ordinal < 0 || ordinal >= number_from("HC_FAKE_DEVICES", 4)) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}
FAKE_API int cuDeviceGetName(char* name, int length, int device) {
  CALLED;
  std::snprintf(name, static_cast<size_t>(length), "Test fake %d (no GPU)", device);
  return kSuccess;
}
FAKE_API int cuDeviceGetUuid(void* uuid, int device) {
  CALLED;
  std::memset(uuid, 0, 16);
  static_cast<unsigned char*>(uuid)[0] = static_cast<unsigned char>(device + 1);
  return kSuccess;
}
FAKE_API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  CALLED;
  std::lock_guard lock(driver().mu);
  *flags = 0;
  auto at = driver().contexts.find(device);
  *active = at != driver().contexts.end() && at->second.users > 0;
  return kSuccess;
}
FAKE_API int cuDevicePrimaryCtxRetain(void** context, int device) {
  CALLED;
  MAY_FAIL;
  std::lock_guard lock(driver().mu);
  Context& c = driver().contexts[device];
  c.device = device;
  if (c.users++ == 0) ++driver().retained[device];
  *context = &c;
  return kSuccess;
}
FAKE_API int cuDevicePrimaryCtxRelease_v2(int device) {
  CALLED;
  std::lock_guard lock(driver().mu);
  --driver().contexts[device].users;
  return kSuccess;
}
FAKE_API int cuCtxPushCurrent_v2(void* context) {
  CALLED;
  if (!context) return kInvalidContext;
  current.push_back(static_cast<Context*>(context));
  return kSuccess;
}
FAKE_API int cuCtxPopCurrent_v2(void** context) {
  CALLED;
  if (current.empty()) return kInvalidContext;
  if (context) *context = current.back();
  current.pop_back();
  return kSuccess;
}
FAKE_API int cuCtxGetCurrent(void** context) {
  CALLED;
  *context = current.empty() ? nullptr : current.back();
  return kSuccess;
}
FAKE_API int cuCtxSetCurrent(void* context) {
  CALLED;
  if (!current.empty()) current.pop_back();
  if (context) current.push_back(static_cast<Context*>(context));
  return kSuccess;
}
FAKE_API int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  CALLED;
  NEEDS_CONTEXT;
  *least = 0;
  *greatest = kHighestPriority;
  return kSuccess;
}
FAKE_API int cuStreamCreateWithPriority(void** stream, unsigned, int priority) {
  CALLED;
  NEEDS_CONTEXT;
  MUST_NOT_DISTURB;
  *stream = new Stream(priority == kHighestPriority);
  driver().urgent_streams += priority == kHighestPriority;
  ++driver().streams;
  return kSuccess;
}
FAKE_API int cuStreamDestroy_v2(void* stream) {
  CALLED;
  MUST_NOT_DISTURB;
  if (!stream) return kInvalidHandle;
  driver().urgent_streams -= static_cast<Stream*>(stream)->urgent;
  delete static_cast<Stream*>(stream);
  --driver().streams;
  return kSuccess;
}
FAKE_API int cuStreamQuery(void* stream) {
  CALLED;
  NEEDS_CONTEXT;
  if (const auto capture = stream_of(stream)->capture()) {
    capture->is_valid = false;
    return kCaptureUnsupported;
  }
  MUST_NOT_DISTURB;
  return stream_of(stream)->idle() ? kSuccess : kNotReady;
}
FAKE_API int cuStreamSynchronize(void* stream) {
  CALLED;
  NEEDS_CONTEXT;
  if (const auto capture = stream_of(stream)->capture()) {
    capture->is_valid = false;
    return kCaptureUnsupported;
  }
  MUST_NOT_DISTURB;
  auto ticket = std::make_shared<Ticket>();
  stream_of(stream)->push([ticket] { ticket->finish(); });
  ticket->wait();
  std::lock_guard lock(driver().mu);
  for (const auto& [at, pool] : driver().pools) pool->trim();
  return kSuccess;
}
FAKE_API int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  CALLED;
  NEEDS_CONTEXT;
  auto* e = static_cast<Event*>(event);
  std::shared_ptr<Ticket> ticket;
  std::shared_ptr<Capture> capture;
  hc_fake::Seen place;
  {
    std::lock_guard lock(e->mu);
    ticket = e->last;
    if (e->captured) capture = e->capture.lock();
    place = e->place;
    if (e->captured && !capture) return kInvalidValue;  // that capture is over
  }
  Stream* waits = stream_of(stream);
  const auto own = waits->capture();
  if (own && !capture) return kCaptureIsolation;
  if (capture) {
    if (own && own != capture) return kCaptureMerge;
    if (!own) {
      std::lock_guard lock(driver().mu);
      const auto at = driver().captured.find(capture.get());
      if (at == driver().captured.end()) return kInvalidValue;
      at->second.push_back(waits);
      waits->capture_into(capture);
    }
    capture->wait(waits, place);
    return kSuccess;
  }
  if (ticket) stream_of(stream)->push([ticket] { ticket->wait(); });
  return kSuccess;
}
FAKE_API int cuEventCreate(void** event, unsigned) {
  CALLED;
  NEEDS_CONTEXT;
  *event = new Event;
  ++driver().events;
  ++driver().events_made;
  return kSuccess;
}
FAKE_API int cuEventDestroy_v2(void* event) {
  CALLED;
  if (!event) return kInvalidHandle;
  delete static_cast<Event*>(event);
  --driver().events;
  return kSuccess;
}
FAKE_API int cuEventRecord(void* event, void* stream) {
  CALLED;
  NEEDS_CONTEXT;
  auto* e = static_cast<Event*>(event);
  if (auto capture = stream_of(stream)->capture()) {
    std::lock_guard lock(e->mu);
    e->last = nullptr;
    e->captured = true;
    e->capture = capture;
    e->place = capture->seen_by(stream_of(stream));
    return kSuccess;
  }
  auto ticket = std::make_shared<Ticket>();
  {
    std::lock_guard lock(e->mu);
    e->captured = false;
    e->last = ticket;
  }
  stream_of(stream)->push([ticket] { ticket->finish(); });
  return kSuccess;
}
FAKE_API int cuEventQuery(void* event) {
  CALLED;
  MAY_FAIL;
  MUST_NOT_DISTURB;
  auto* e = static_cast<Event*>(event);
  std::lock_guard lock(e->mu);
  if (e->captured) return kCapturedEvent;
  return !e->last || e->last->poll() ? kSuccess : kNotReady;
}
// Whether so many bytes more find place; a pool takes first what it has itself.
static bool has_place(size_t bytes, Pool* taker) {
  const auto most = static_cast<size_t>(number_from("HC_FAKE_MEMORY_BYTES", 0));
  if (!most) return true;
  std::lock_guard lock(driver().mu);
  for (const auto& [at, size] : driver().memory)
    if (!taker || !driver().leaving.contains(at)) bytes += size;
  for (const auto& [at, pool] : driver().pools) {
    if (pool.get() == taker) continue;
    std::lock_guard inside(pool->mu);
    bytes += pool->unused_bytes();
  }
  return bytes <= most;
}
FAKE_API int cuMemPoolCreate(void** pool, const void* properties) {
  CALLED;
  NEEDS_CONTEXT;
  int given[4] = {};  // the kind of allocation, handles, the kind of place, the device
  std::memcpy(given, properties, sizeof given);
  if (given[0] != 1 || given[1] != 0 || given[2] != 1 || given[3] != current.back()->device) return kInvalidValue;
  if (number_from("HC_FAKE_WITHOUT_POOLS", 0)) return kNotSupported;
  auto made = std::make_shared<Pool>();
  std::lock_guard lock(driver().mu);
  driver().pools[made.get()] = made;
  *pool = made.get();
  return kSuccess;
}
FAKE_API int cuMemPoolDestroy(void* pool) {
  CALLED;
  std::lock_guard lock(driver().mu);
  return driver().pools.erase(static_cast<Pool*>(pool)) ? kSuccess : kInvalidValue;
}
FAKE_API int cuMemPoolSetAttribute(void* pool, int attribute, void* value) {
  CALLED;
  if (attribute == 3)
    return *static_cast<const int*>(value) ? kInvalidValue : kSuccess;  // no stream waits for another here
  if (attribute != 4) return kInvalidValue;
  std::lock_guard lock(static_cast<Pool*>(pool)->mu);
  static_cast<Pool*>(pool)->keeps = *static_cast<const uint64_t*>(value);
  return kSuccess;
}
FAKE_API int cuMemPoolTrimTo(void* pool, size_t most) {
  CALLED;
  NEEDS_CONTEXT;
  MUST_NOT_DISTURB;
  std::lock_guard lock(static_cast<Pool*>(pool)->mu);
  static_cast<Pool*>(pool)->trim_to(most);
  return kSuccess;
}
// On a stream that is captured the original makes nodes of the graph, which nobody here means.
FAKE_API int cuMemAllocFromPoolAsync(uint64_t* pointer, size_t bytes, void* pool, void* stream) {
  CALLED;
  NEEDS_CONTEXT;
  if (!bytes || stream_of(stream)->capture()) return kInvalidValue;
  if (!has_place(bytes, static_cast<Pool*>(pool))) return kOutOfMemory;
  void* made = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!made) return kOutOfMemory;
  std::memset(made, 0xcd, std::min<size_t>(bytes, 4096));
  std::lock_guard lock(driver().mu);
  *pointer = reinterpret_cast<uint64_t>(made);
  driver().memory[*pointer] = bytes;
  driver().pooled[*pointer] = driver().pools.at(static_cast<Pool*>(pool));
  return kSuccess;
}
// From now on nobody may be given it; what the stream was given before still finds it.
FAKE_API int cuMemFreeAsync(uint64_t pointer, void* stream) {
  CALLED;
  NEEDS_CONTEXT;
  if (stream_of(stream)->capture()) return kInvalidValue;
  std::shared_ptr<Pool> pool;
  size_t bytes = 0;
  {
    std::lock_guard lock(driver().mu);
    const auto at = driver().pooled.find(pointer);
    if (at == driver().pooled.end()) return kInvalidValue;
    pool = std::move(at->second);
    driver().pooled.erase(at);
    bytes = driver().memory[pointer];
    driver().leaving.insert(pointer);
  }
  stream_of(stream)->push([=] {
    std::memset(host(pointer), 0xdd, std::min<size_t>(bytes, 4096));
    std::lock_guard lock(driver().mu);
    driver().memory.erase(pointer);
    driver().leaving.erase(pointer);
    std::lock_guard inside(pool->mu);
    pool->unused[pointer] = bytes;
  });
  return kSuccess;
}
FAKE_API int cuMemAlloc_v2(uint64_t* pointer, size_t bytes) {
  CALLED;
  NEEDS_CONTEXT;
  MUST_NOT_DISTURB;
  if (!bytes) return kInvalidValue;
  if (!has_place(bytes, nullptr)) return kOutOfMemory;
  const bool large = bytes >= kShareableBytes;
  const int fd = large ? memfd_create("hc fake", MFD_CLOEXEC) : -1;
  if (large && (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0)) return kOutOfMemory;
  void* made = large ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                     : std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!made || made == MAP_FAILED) return kOutOfMemory;
  std::memset(made, 0xcd, large ? 4096 : bytes);
  std::lock_guard lock(driver().mu);
  *pointer = reinterpret_cast<uint64_t>(made);
  driver().memory[*pointer] = bytes;
  if (large) driver().shared[*pointer] = fd;
  return kSuccess;
}
FAKE_API int cuMemFree_v2(uint64_t pointer) {
  CALLED;
  MAY_FAIL;
  MUST_NOT_DISTURB;
  std::lock_guard lock(driver().mu);
  const auto at = driver().memory.find(pointer);
  if (at == driver().memory.end() || driver().mapped.contains(pointer) || driver().pooled.contains(pointer))
    return kInvalidValue;  // the original takes back what comes from a pool, but waits for the device
  if (const auto shared = driver().shared.find(pointer); shared != driver().shared.end()) {
    munmap(host(pointer), at->second);
    close(shared->second);
    driver().shared.erase(shared);
  } else {
    std::free(host(pointer));
  }
  driver().memory.erase(at);
  return kSuccess;
}
// Between processes, through the descriptor of the memory, found in /proc.
struct IpcHandle {
  char bytes[64];
};
struct IpcContent {
  int pid, fd;
  size_t bytes;
};
FAKE_API int cuIpcGetMemHandle(IpcHandle* handle, uint64_t pointer) {
  CALLED;
  NEEDS_CONTEXT;
  MUST_NOT_DISTURB;
  std::lock_guard lock(driver().mu);
  const auto shared = driver().shared.find(pointer);
  if (shared == driver().shared.end()) return kInvalidValue;
  const IpcContent content{getpid(), shared->second, driver().memory[pointer]};
  std::memcpy(handle->bytes, &content, sizeof content);
  return kSuccess;
}
FAKE_API int cuIpcOpenMemHandle_v2(uint64_t* pointer, IpcHandle handle, unsigned) {
  CALLED;
  NEEDS_CONTEXT;
  MUST_NOT_DISTURB;
  IpcContent content;
  std::memcpy(&content, handle.bytes, sizeof content);
  if (content.pid == getpid()) return kInvalidContext;  // the original refuses memory of the process itself
  const std::string path = "/proc/" + std::to_string(content.pid) + "/fd/" + std::to_string(content.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  void* at = fd < 0 ? MAP_FAILED : mmap(nullptr, content.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (fd >= 0) close(fd);
  if (at == MAP_FAILED) return kInvalidValue;
  std::lock_guard lock(driver().mu);
  *pointer = reinterpret_cast<uint64_t>(at);
  driver().memory[*pointer] = driver().mapped[*pointer] = content.bytes;
  return kSuccess;
}
FAKE_API int cuIpcCloseMemHandle(uint64_t pointer) {
  CALLED;
  NEEDS_CONTEXT;
  MUST_NOT_DISTURB;
  std::lock_guard lock(driver().mu);
  const auto at = driver().mapped.find(pointer);
  if (at == driver().mapped.end()) return kInvalidValue;
  munmap(host(pointer), at->second);
  driver().mapped.erase(at);
  driver().memory.erase(pointer);
  return kSuccess;
}
FAKE_API int cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
  CALLED;
  NEEDS_CONTEXT;
  MUST_NOT_DISTURB;
  ++driver().pinned;
  ++driver().pinned_now;
  *pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *pointer ? kSuccess : kOutOfMemory;
}
FAKE_API int cuMemFreeHost(void* pointer) {
  CALLED;
  MUST_NOT_DISTURB;
  --driver().pinned_now;
  std::free(pointer);
  return kSuccess;
}
FAKE_API int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  CALLED;
  NEEDS_CONTEXT;
  if (!driver().holds(to, bytes) || !driver().holds(from, bytes)) return kInvalidValue;
  ++driver().copies;
  return copy(host(to), host(from), bytes, stream);
}
FAKE_API int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  CALLED;
  NEEDS_CONTEXT;
  if (!driver().holds(from, bytes)) return kInvalidValue;
  return copy(to, host(from), bytes, stream);
}
FAKE_API int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  CALLED;
  NEEDS_CONTEXT;
  if (!driver().holds(to, bytes)) return kInvalidValue;
  return copy(host(to), from, bytes, stream);
}
FAKE_API int cuDeviceGetAttribute(int* value, int attribute, int device) {
  CALLED;
  MAY_FAIL;
  if (device < 0 || device >= number_from("HC_FAKE_DEVICES", 4)) return kInvalidDevice;
#ifdef HC_FAKE_HIP
  constexpr hc::CuAttributes attributes = hc::kHipAttributes;
#else
  constexpr hc::CuAttributes attributes;
#endif
  const int capability = static_cast<int>(number_from("HC_FAKE_CAPABILITY", 90));
  *value = attribute == hc::kCuCapabilityMajor ? capability / 10 : capability % 10;
  if (attribute == attributes.processors) *value = 132;
  if (attribute == attributes.memory_pools) *value = !number_from("HC_FAKE_WITHOUT_POOLS", 0);
  return kSuccess;
}
#ifdef HC_FAKE_HIP
FAKE_API int hipGetDevicePropertiesR0600(char* properties, int) {
  std::strcpy(properties + hc::kHipArchitectureAt, "gfx90a:sramecc+:xnack-");
  return kSuccess;
}
#define HC_ALIAS(name, cuda, hip, arguments) asm(".globl " #hip "\n" #hip " = " cuda);
HC_CUDA_SYMBOLS(HC_ALIAS)
#endif
FAKE_API int cuModuleLoadData(void** module, const void* image) {
  CALLED;
  NEEDS_CONTEXT;
  MUST_NOT_DISTURB;
  auto made = std::make_unique<Module>();
  if (!read_image(image, made.get())) return kInvalidImage;
  *module = made.release();
  ++driver().modules;
  return kSuccess;
}
FAKE_API int cuModuleUnload(void* module) {
  CALLED;
  MUST_NOT_DISTURB;
  if (!module) return kInvalidHandle;
  delete static_cast<Module*>(module);
  --driver().modules;
  return kSuccess;
}
// The functions stay: nobody ends them in the original either.
FAKE_API int cuModuleGetFunction(void** function, void* module, const char* name) {
  CALLED;
  NEEDS_CONTEXT;
  MUST_NOT_DISTURB;
  static std::mutex mu;
  static auto* functions = new std::map<std::string, Function>;
  const auto* m = static_cast<const Module*>(module);
  void* body = kernel_symbol(name);
  const auto* bytes = static_cast<const unsigned*>(kernel_symbol(std::string(name) + "_bytes"));
  if (!body || !bytes || (!m->compressed && m->image.find(name) == std::string::npos)) return kNotFound;
  ++driver().look_ups;
  std::lock_guard lock(mu);
  // Streams read what is there already.
  *function =
      &functions
           ->try_emplace(name, Function{name, reinterpret_cast<void (*)(const void*, const hc::Place&)>(body), *bytes})
           .first->second;
  return kSuccess;
}
FAKE_API int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned, void* stream, void** parameters, void**) {
  CALLED;
  NEEDS_CONTEXT;
  const auto* f = static_cast<const Function*>(function);
  if (!grid_x || !grid_y || grid_z != 1 || block_x != hc::kThreadsPerBlock || block_y != 1 || block_z != 1)
    return kInvalidValue;
  if (!holds_arguments(*f, parameters[0], grid_y, true)) return kInvalidValue;
  // As the original does, the arguments are copied now.
  const auto* from = static_cast<const unsigned char*>(parameters[0]);
  auto arguments = std::make_shared<std::vector<unsigned char>>(from, from + f->bytes);
  const unsigned long long threads = static_cast<unsigned long long>(grid_x) * block_x;
  ++driver().launches;
  driver().rows += static_cast<int>(grid_y);
  stream_of(stream)->push([f, arguments, threads, grid_y] {
    if (!holds_arguments(*f, arguments->data(), grid_y, false)) {  // an illegal access in the original
      ++driver().illegal;
      return;
    }
    for (unsigned row = 0; row < grid_y; ++row)
      for (unsigned long long thread = 0; thread < threads; ++thread)
        f->body(arguments->data(), hc::Place{thread, threads, row});
  });
  return kSuccess;
}
// The real NVRTC asks a driver that is loaded for a table of its own, and takes it that every driver can be asked.
FAKE_API int cuGetExportTable(const void** table, const void*) {
  CALLED;
  *table = nullptr;
  return kNotFound;
}
FAKE_API int cuThreadExchangeStreamCaptureMode(int* mode) {
  CALLED;
  std::swap(*mode, capture_mode);
  return kSuccess;
}
FAKE_API int cuStreamIsCapturing(void* stream, int* status) {
  CALLED;
  NEEDS_CONTEXT;
  *status = stream_of(stream)->capture() != nullptr;
  return kSuccess;
}
FAKE_API int cuStreamBeginCapture_v2(void* stream, int) {
  CALLED;
  NEEDS_CONTEXT;
  if (!stream || stream_of(stream)->capture()) return kCaptureUnsupported;
  auto capture = std::make_shared<Capture>(stream_of(stream), current.back()->device);
  std::lock_guard lock(driver().mu);
  ++driver().captures[current.back()->device];
  driver().captured[capture.get()] = {static_cast<Stream*>(stream)};
  static_cast<Stream*>(stream)->capture_into(std::move(capture));
  return kSuccess;
}
FAKE_API int cuStreamEndCapture(void* stream, void** graph) {
  CALLED;
  NEEDS_CONTEXT;
  const auto capture = stream_of(stream)->capture();
  if (!capture) return kCaptureUnmatched;
  {
    std::lock_guard lock(driver().mu);
    --driver().captures[current.back()->device];
    for (Stream* s : driver().captured[capture.get()]) s->capture_into(nullptr);
    driver().captured.erase(capture.get());
  }
  *graph = nullptr;
  if (!capture->is_valid) return kCaptureInvalidated;
  if (!capture->all_joined()) return kCaptureUnjoined;
  *graph = new std::shared_ptr<Nodes>(capture->nodes);
  return kSuccess;
}
FAKE_API int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  CALLED;
  *executable = new std::shared_ptr<Nodes>(*static_cast<std::shared_ptr<Nodes>*>(graph));
  return kSuccess;
}
FAKE_API int cuGraphLaunch(void* executable, void* stream) {
  CALLED;
  NEEDS_CONTEXT;
  stream_of(stream)->push([nodes = *static_cast<std::shared_ptr<Nodes>*>(executable)] {
    for (const auto& job : nodes->jobs) job();
  });
  return kSuccess;
}
FAKE_API int cuGraphDestroy(void* graph) {
  CALLED;
  delete static_cast<std::shared_ptr<Nodes>*>(graph);
  return kSuccess;
}
FAKE_API int cuGraphExecDestroy(void* executable) {
  CALLED;
  delete static_cast<std::shared_ptr<Nodes>*>(executable);
  return kSuccess;
}
