// Writes down which functions rank 0's main thread enters, and how often, in steps of declared buckets whose plan is
// persistent: two processes on one machine, which use the C API alone. CMake's HC_ENTRIES builds the core with a hook
// at the entry of every function; benchmarks/functions_of_a_step.py turns the addresses that are printed into names.
#include <sys/wait.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "horoclone.h"
#include "horoclone_tools.h"

#define HC_NOT_TRACED __attribute__((no_instrument_function))

namespace {

// The functions that the recorded thread entered, in the order of their first entry. A hook may call nothing, so they
// are found by their address in a table of this size.
constexpr size_t kMost = 4096;
struct Entered {
  void* function;
  uint64_t calls;
};
Entered entered[kMost];
size_t entered_count = 0;
uint32_t place_of[kMost];  // 1 + index in `entered`
thread_local bool recording = false;

HC_NOT_TRACED void note(void* function) {
  if (!recording) return;
  size_t at = reinterpret_cast<uintptr_t>(function) * 0x9e3779b97f4a7c15u >> 52;
  while (place_of[at] != 0 && entered[place_of[at] - 1].function != function) at = (at + 1) % kMost;
  if (place_of[at] == 0) {
    if (entered_count == kMost / 2) __builtin_trap();
    entered[entered_count] = {function, 0};
    place_of[at] = static_cast<uint32_t>(++entered_count);
  }
  ++entered[place_of[at] - 1].calls;
}

void start_recording() {
  entered_count = 0;
  std::memset(place_of, 0, sizeof place_of);
  recording = true;
}

}  // namespace

// g++ -finstrument-functions calls these.
extern "C" HC_NOT_TRACED void __cyg_profile_func_enter(void* function, void*) { note(function); }
extern "C" HC_NOT_TRACED void __cyg_profile_func_exit(void*, void*) {}

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
  const uint64_t frozen = counter(rt, "frozen");
  for (int i = 0; i < steps; ++i) {
    // Rank 1 has submitted its buckets and waits for them when rank 0 begins.
    if (rank == 0) {
      from_peer->take(1);
      usleep(2000);
      start_recording();
      step.submit();
      step.finish();
      recording = false;
      std::printf("step\n");
      for (size_t e = 0; e < entered_count; ++e) std::printf("%p %" PRIu64 "\n", entered[e].function, entered[e].calls);
      to_peer->put("g");
    } else {
      step.submit();
      to_peer->put("g");
      step.finish();
      from_peer->take(1);
    }
  }
  if (counter(rt, "frozen") != frozen + static_cast<uint64_t>(steps) * kBuckets) {
    std::fprintf(stderr, "the plan of the buckets was not persistent: %s\n", hc_counters(rt));
    std::exit(1);
  }
  hc_block_destroy(block);
  CHECK(hc_shutdown(rt, 10));
  hc_runtime_destroy(rt);
}

}  // namespace

// Takes the number of steps. Prints "step" before each, then one line for each function: address, calls.
int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 1;
  Pipe up, down;
  const pid_t child = fork();
  if (child < 0) std::abort();
  if (child == 0) {
    body(1, &up, &down, steps);
    return 0;
  }
  body(0, &down, &up, steps);
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 && std::fflush(stdout) == 0 ? 0 : 1;
}
