// Writes down which functions of libhoroclone.so rank 0 enters in steps of declared buckets whose plan is persistent:
// two processes on one machine, which use the C API alone. Before a step it puts a breakpoint at the beginning of every
// function of the optimised library, as a uprobe does; the first thread that comes by notes the function and takes the
// breakpoint away. functions_of_a_step.py hands in the functions' addresses and names what is printed.
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "horoclone.h"
#include "horoclone_tools.h"

namespace {

// Of x86-64: what a breakpoint is, and how long.
constexpr uint8_t kBreakpoint = 0xcc;

struct Function {
  uint64_t offset;  // in the library
  uint8_t* code;
  uint8_t first;  // the byte that the breakpoint replaces
  std::atomic<bool> entered{false};
};
std::vector<Function> functions;  // by address

Function* at(uint8_t* code) {
  const auto found = std::lower_bound(functions.begin(), functions.end(), code,
                                      [](const Function& f, uint8_t* c) { return f.code < c; });
  return found != functions.end() && found->code == code ? &*found : nullptr;
}

void on_breakpoint(int, siginfo_t*, void* context) {
  greg_t& next = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
  auto* code = reinterpret_cast<uint8_t*>(next - 1);
  Function* function = at(code);
  if (!function) abort();
  function->entered = true;
  *code = function->first;
  next -= 1;
}

// Reads one hexadecimal offset per line from standard input.
void find_functions() {
  Dl_info library{};
  if (dladdr(reinterpret_cast<void*>(&hc_wait), &library) == 0) abort();
  auto* base = static_cast<uint8_t*>(library.dli_fbase);
  std::vector<uint64_t> offsets;
  for (uint64_t offset; std::scanf("%" SCNx64, &offset) == 1;) offsets.push_back(offset);
  std::sort(offsets.begin(), offsets.end());
  offsets.erase(std::unique(offsets.begin(), offsets.end()), offsets.end());
  if (offsets.empty()) {
    std::fprintf(stderr, "no functions on standard input\n");
    std::exit(1);
  }
  functions = std::vector<Function>(offsets.size());
  for (size_t i = 0; i < offsets.size(); ++i) {
    functions[i].offset = offsets[i];
    functions[i].code = base + offsets[i];
    functions[i].first = *functions[i].code;
  }
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(functions.front().code) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(functions.back().code) + 1;
  if (mprotect(reinterpret_cast<void*>(begin), end - begin, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) {
    std::perror("mprotect");
    std::exit(1);
  }
  struct sigaction action{};
  action.sa_sigaction = on_breakpoint;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigaction(SIGTRAP, &action, nullptr);
}

void start_recording() {
  for (Function& f : functions) {
    f.entered = false;
    *f.code = kBreakpoint;
  }
}

void stop_recording() {
  for (Function& f : functions) *f.code = f.first;
}

}  // namespace

// The core's threads block every signal; a breakpoint of a thread that blocks SIGTRAP would end the process.
extern "C" int pthread_sigmask(int how, const sigset_t* set, sigset_t* old) noexcept {
  static const auto real =
      reinterpret_cast<int (*)(int, const sigset_t*, sigset_t*)>(dlsym(RTLD_NEXT, "pthread_sigmask"));
  if (!set || how == SIG_UNBLOCK) return real(how, set, old);
  sigset_t without_trap = *set;
  sigdelset(&without_trap, SIGTRAP);
  return real(how, &without_trap, old);
}

namespace {

constexpr int kRanks = 2, kBuckets = 4, kWarmUp = 20;
constexpr int64_t kElements = 1 << 12;

#define CHECK(call) check(call, #call)
void check(hc_status* status, const char* what) {
  if (!status) return;
  std::fprintf(stderr, "%s: %s\n", what, hc_status_text(status));
  std::exit(1);
}

// Carries a rank's endpoint to the other one, later a byte that means "go on".
struct Pipe {
  Pipe() {
    if (pipe(ends) != 0) std::abort();
  }
  void put(const std::string& bytes) {
    if (write(ends[1], bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) std::abort();
  }
  std::string take(size_t most) {
    std::string bytes(most, '\0');
    const ssize_t got = read(ends[0], bytes.data(), most);
    if (got <= 0) std::exit(1);
    bytes.resize(static_cast<size_t>(got));
    return bytes;
  }
  int ends[2];
};

struct Step {
  hc_runtime* rt;
  int32_t id;
  hc_handle handles[kBuckets] = {};

  void submit() {
    for (int b = 0; b < kBuckets; ++b) CHECK(hc_submit_declared(rt, 0, id, b, nullptr, 0, &handles[b]));
  }
  void finish() {
    for (hc_handle handle : handles) {
      int32_t done = 0;
      CHECK(hc_wait(rt, handle, 60, &done));
      if (!done) std::exit(1);
      hc_release(rt, handle);
    }
  }
};

uint64_t counter(hc_runtime* rt, const char* name) {
  const std::string json = hc_counters(rt), key = std::string("\"") + name + "\":";
  const size_t at = json.find(key);
  return at == std::string::npos ? 0 : std::strtoull(json.c_str() + at + key.size(), nullptr, 10);
}

void body(int rank, Pipe* to_peer, Pipe* from_peer, int steps) {
  const char* names[] = {"HOROCLONE_SELECTION"};
  const char* values[] = {"fixed"};
  hc_runtime* rt = nullptr;
  CHECK(hc_runtime_create(names, values, 1, &rt));
  size_t bytes = 0;
  const uint8_t* mine = hc_endpoint(rt, &bytes);
  std::string endpoint[kRanks];
  endpoint[rank].assign(reinterpret_cast<const char*>(mine), bytes);
  to_peer->put(endpoint[rank]);
  endpoint[1 - rank] = from_peer->take(4096);
  const uint8_t* endpoints[kRanks];
  size_t endpoint_bytes[kRanks];
  for (int r = 0; r < kRanks; ++r) {
    endpoints[r] = reinterpret_cast<const uint8_t*>(endpoint[r].data());
    endpoint_bytes[r] = endpoint[r].size();
  }
  hc_members members{};
  members.version = HC_VERSION;
  members.rank = rank;
  members.size = kRanks;
  members.endpoints = endpoints;
  members.endpoint_bytes = endpoint_bytes;
  members.secret = reinterpret_cast<const uint8_t*>("a secret of this program");
  members.secret_bytes = 24;
  members.job = "functions of a step";
  members.generation = 1;
  members.timeout_s = 60;
  CHECK(hc_connect(rt, &members));

  hc_block* block = nullptr;
  CHECK(hc_block_create(rt, kBuckets * kElements * sizeof(float), &block));
  auto* data = static_cast<float*>(hc_block_data(block));
  hc_request common{};
  common.version = HC_VERSION;
  common.op = HC_ALLREDUCE;
  common.reduce = HC_AVERAGE;
  common.prescale = common.postscale = 1;
  std::vector<std::string> texts;
  std::vector<const char*> bucket_names;
  std::vector<hc_tensor> tensors;
  for (int b = 0; b < kBuckets; ++b) texts.push_back("bucket " + std::to_string(b));
  for (int b = 0; b < kBuckets; ++b) {
    bucket_names.push_back(texts[static_cast<size_t>(b)].c_str());
    tensors.push_back({data + b * kElements, data + b * kElements, &kElements, 1, HC_FLOAT32});
  }
  Step step{rt, -1};
  CHECK(hc_declare(rt, &common, bucket_names.data(), tensors.data(), kBuckets, &step.id));
  for (int i = 0; i < kWarmUp; ++i) {
    step.submit();
    step.finish();
  }
  const uint64_t persistent = counter(rt, "persistent");
  for (int i = 0; i < steps; ++i) {
    // Rank 1 has submitted its buckets and waits for them when rank 0 begins.
    if (rank == 0) {
      from_peer->take(1);
      usleep(2000);
      start_recording();
      step.submit();
      step.finish();
      stop_recording();
      std::printf("step\n");
      for (const Function& f : functions)
        if (f.entered) std::printf("%" PRIx64 "\n", f.offset);
      to_peer->put("g");
    } else {
      step.submit();
      to_peer->put("g");
      step.finish();
      from_peer->take(1);
    }
  }
  if (counter(rt, "persistent") != persistent + static_cast<uint64_t>(steps) * kBuckets) {
    std::fprintf(stderr, "the plan of the buckets was not persistent: %s\n", hc_counters(rt));
    std::exit(1);
  }
  hc_block_destroy(block);
  CHECK(hc_shutdown(rt, 10));
  hc_runtime_destroy(rt);
}

}  // namespace

// Takes the number of steps. Prints "step" before each, then the offset of each function that it entered.
int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 1;
  Pipe up, down;
  const pid_t child = fork();
  if (child < 0) std::abort();
  if (child == 0) {
    body(1, &up, &down, steps);
    return 0;
  }
  find_functions();
  body(0, &down, &up, steps);
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 && std::fflush(stdout) == 0 ? 0 : 1;
}
