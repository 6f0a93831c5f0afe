// Calls of the core's C interface, of MPI and of memcpy, timed in C++: what remains when no Python is in the way.
// One runtime per process, float32, sums in place. Each buffer's owner writes it anew before a call, a barrier of MPI
// follows, and every result is compared as a whole. Compiled by core_ranks.py, which calls it through ctypes; functions
// return 0, or 1 with the reason in core_error(). Thread: the rank's only one.
#include <dlfcn.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "horoclone.h"

namespace {

constexpr int kSlots = 3;         // buffers that are used in turn
constexpr size_t kPeriod = 1021;  // of the numbers; a prime, so that no chunk's border falls on it
constexpr size_t kLine = 16;      // floats of a cache line

using MpiReduce = int (*)(const void*, void*, int, intptr_t, intptr_t, intptr_t);
using MpiBarrier = int (*)(intptr_t);

enum Contestant { kOwn, kBucket, kMpi, kMemcpy };

struct Mpi {
  MpiReduce reduce = nullptr;
  MpiBarrier barrier = nullptr;
  intptr_t communicator = 0, type = 0, sum = 0, in_place = 0;
} mpi;

hc_runtime* runtime = nullptr;
int rank = 0, size = 0;
uint64_t iteration = 0;
char reason[1024];
std::vector<float> pattern;
std::vector<float*> slots;         // [kSlots], private
std::vector<float*> bucket_slots;  // [kSlots], in memory that the ranks share
std::vector<hc_block*> blocks;
size_t capacity = 0;  // floats of a slot

bool failed(const char* what) {
  std::snprintf(reason, sizeof reason, "rank %d: %s", rank, what);
  return true;
}
bool failed(hc_status* status) {
  if (!status) return false;
  failed(hc_status_text(status));
  hc_status_destroy(status);
  return true;
}

float offset_of(int of) { return static_cast<float>(1 + (7 * static_cast<uint64_t>(of) + iteration) % 4093); }

void write(float* to, size_t count) {
  const float offset = offset_of(rank), scale = static_cast<float>(rank + 1);
  for (size_t i = 0; i < count; ++i) to[i] = pattern[i] * scale + offset;
}

// Whole numbers below 2^24: sums are exact in any order.
bool is_right(const float* values, size_t count, size_t stride, bool reduced) {
  float offset = 0, scale = 0;
  for (int r = reduced ? 0 : rank; r < (reduced ? size : rank + 1); ++r) {
    offset += offset_of(r);
    scale += static_cast<float>(r + 1);
  }
  size_t wrong = 0;
  for (size_t i = 0; i < count; i += stride) wrong += values[i] != pattern[i] * scale + offset;
  if (wrong) failed((std::to_string(wrong) + " of " + std::to_string(count / stride) + " numbers are wrong").c_str());
  return !wrong;
}

bool wait_for(hc_handle handle) {
  int32_t done = 0;
  const bool bad = failed(hc_wait(runtime, handle, -1, &done));
  hc_release(runtime, handle);
  return !bad;
}

bool reduce_own(float* values, size_t count, const char* name) {
  const int64_t shape[] = {static_cast<int64_t>(count)};
  const hc_tensor tensor{values, values, shape, 1, HC_FLOAT32};
  hc_request request{};
  request.version = HC_VERSION;
  request.op = HC_ALLREDUCE;
  request.reduce = HC_SUM;
  request.will_wait = 1;
  request.name = name;
  request.prescale = request.postscale = 1;
  hc_handle handle = 0;
  return !failed(hc_call(runtime, &request, &tensor, 1, &handle)) && (handle == 0 || wait_for(handle));
}

// One bucket for each slot, as an optimizer declares them: agreed once, then persistent.
bool declare(size_t count, int32_t* id) {
  const int64_t shape[] = {static_cast<int64_t>(count)};
  std::vector<std::string> names;
  std::vector<const char*> labels;
  std::vector<hc_tensor> tensors;
  for (float* values : bucket_slots) {
    names.push_back("bucket." + std::to_string(count) + "." + std::to_string(names.size()));
    tensors.push_back({values, values, shape, 1, HC_FLOAT32});
  }
  for (const std::string& name : names) labels.push_back(name.c_str());
  hc_request common{};
  common.version = HC_VERSION;
  common.op = HC_ALLREDUCE;
  common.reduce = HC_SUM;
  common.prescale = common.postscale = 1;
  return !failed(hc_declare(runtime, &common, labels.data(), tensors.data(), kSlots, id));
}

bool reduce_bucket(int32_t id, int slot) {
  hc_handle handle = 0;
  return !failed(hc_submit_declared(runtime, 0, id, slot, nullptr, 0, &handle)) && wait_for(handle);
}

bool reduce_mpi(float* values, size_t count) {
  const int code = mpi.reduce(reinterpret_cast<void*>(mpi.in_place), values, static_cast<int>(count), mpi.type, mpi.sum,
                              mpi.communicator);
  return !code || !failed("MPI_Allreduce failed");
}

double microseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

float* private_memory(size_t bytes, bool huge) {
  void* area = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (area == MAP_FAILED) return nullptr;
  madvise(area, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  return static_cast<float*>(area);
}

}  // namespace

extern "C" {

const char* core_error() { return reason; }

// What the others need to reach this process; *bytes is the room on entry.
int core_open(uint8_t* endpoint, size_t* bytes) {
  if (failed(hc_runtime_create(nullptr, nullptr, 0, &runtime))) return 1;
  size_t length = 0;
  const uint8_t* mine = hc_endpoint(runtime, &length);
  if (length > *bytes) return failed("the endpoint is longer than the room for it");
  std::memcpy(endpoint, mine, length);
  *bytes = length;
  return 0;
}

int core_connect(int own, int ranks, const uint8_t* const* endpoints, const size_t* lengths, const uint8_t* secret,
                 size_t secret_bytes) {
  rank = own;
  size = ranks;
  hc_members members{};
  members.version = HC_VERSION;
  members.rank = own;
  members.size = ranks;
  members.endpoints = endpoints;
  members.endpoint_bytes = lengths;
  members.secret = secret;
  members.secret_bytes = secret_bytes;
  members.job = "core";
  members.generation = 1;
  members.timeout_s = 60;
  return failed(hc_connect(runtime, &members));
}

// library: one that has MPI's functions or depends on it; handles as the library's own.
int core_mpi(const char* library, intptr_t communicator, intptr_t type, intptr_t sum, intptr_t in_place) {
  void* loaded = dlopen(library, RTLD_NOW);
  if (!loaded) return failed(dlerror());
  mpi.reduce = reinterpret_cast<MpiReduce>(dlsym(loaded, "MPI_Allreduce"));
  mpi.barrier = reinterpret_cast<MpiBarrier>(dlsym(loaded, "MPI_Barrier"));
  mpi.communicator = communicator;
  mpi.type = type;
  mpi.sum = sum;
  mpi.in_place = in_place;
  return mpi.reduce && mpi.barrier ? 0 : failed("no MPI_Allreduce in that library");
}

// Buffers for up to `count` floats, written once so that their pages are there.
int core_allocate(size_t count, int huge, int with_buckets) {
  capacity = count;
  for (size_t i = 0; i < count; ++i) pattern.push_back(static_cast<float>(i % kPeriod));
  for (int slot = 0; slot < kSlots; ++slot) {
    slots.push_back(private_memory(4 * count, huge));
    if (!slots.back()) return failed("no memory");
    write(slots.back(), count);
    if (!with_buckets) continue;
    blocks.push_back(nullptr);
    if (failed(hc_block_create(runtime, 4 * count, &blocks.back()))) return 1;
    bucket_slots.push_back(static_cast<float*>(hc_block_data(blocks.back())));
    write(bucket_slots.back(), count);
  }
  return 0;
}

// warm + calls calls; us: [calls], of this rank.
int core_calls(int contestant, size_t count, int warm, int calls, double* us) {
  if (count > capacity) return failed("more elements than were allocated");
  int32_t id = 0;
  if (contestant == kBucket && !declare(count, &id)) return 1;
  std::string names[kSlots];
  for (int slot = 0; slot < kSlots; ++slot) names[slot] = "own." + std::to_string(count) + "." + std::to_string(slot);
  for (int call = 0; call < warm + calls; ++call) {
    const int slot = call % kSlots;
    float* values = (contestant == kBucket ? bucket_slots : slots)[slot];
    float* result = contestant == kMemcpy ? slots[(slot + 1) % kSlots] : values;
    ++iteration;
    write(values, count);
    mpi.barrier(mpi.communicator);
    const auto start = std::chrono::steady_clock::now();
    bool well = true;
    if (contestant == kOwn) well = reduce_own(values, count, names[slot].c_str());
    if (contestant == kBucket) well = reduce_bucket(id, slot);
    if (contestant == kMpi) well = reduce_mpi(values, count);
    if (contestant == kMemcpy) std::memcpy(result, values, 4 * count);
    const double took = microseconds_since(start);
    if (!well || !is_right(result, count, 1, contestant != kMemcpy)) return 1;
    if (call >= warm) us[call - warm] = took;
  }
  return contestant == kBucket && failed(hc_undeclare(runtime, 0, id));
}

// `calls` calls of one number each, back to back, each with a cache line of its own; *us: of all together.
int core_loop(int contestant, int calls, double* us) {
  const size_t count = static_cast<size_t>(calls) * kLine;
  if (count > capacity) return failed("more elements than were allocated");
  for (int turn = 0; turn < 2; ++turn) {  // the first warms up
    ++iteration;
    write(slots[0], count);
    mpi.barrier(mpi.communicator);
    const auto start = std::chrono::steady_clock::now();
    for (size_t at = 0; at < count; at += kLine) {
      if (contestant == kOwn ? !reduce_own(slots[0] + at, 1, "loop") : !reduce_mpi(slots[0] + at, 1)) return 1;
    }
    *us = microseconds_since(start);
    if (!is_right(slots[0], count, kLine, true)) return 1;
  }
  return 0;
}

int core_close() {
  const bool bad = failed(hc_shutdown(runtime, 30));
  for (hc_block* block : blocks) hc_block_destroy(block);
  hc_runtime_destroy(runtime);
  return bad;
}

}  // extern "C"
