/* What only tools, tests and compressors need of the core: the timeline, reports, the simulator, block quantisation.
 * The conventions are those of horoclone.h. Returned texts are JSON unless a comment says otherwise, and valid until
 * the next call of a function of this header on the same thread. */
#pragma once

#include "horoclone.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Chrome trace of what the engine does; rank 0 writes, or every rank (HOROCLONE_TIMELINE_ALL_RANKS). INVALID_ARGUMENT
 * unless HOROVOD_TIMELINE was set. */
HC_EXPORT hc_status* hc_timeline_start(hc_runtime* rt, const char* path, int32_t mark_cycles);
HC_EXPORT hc_status* hc_timeline_stop(hc_runtime* rt);
/* Adds a finished span to the row "recovery"; from_s is a moment of CLOCK_MONOTONIC. args: members of a JSON object. */
HC_EXPORT void hc_timeline_span(hc_runtime* rt, const char* name, double from_s, double seconds, const char* args);
/* The same events for a listener in this process, from now on until hc_shutdown: hc_timeline_heard waits for some, and
 * returns a JSON array a line, [kind, operation, process set, name, sequence, phase, {arguments}, ns of
 * CLOCK_MONOTONIC, microseconds], of this rank's operations, steps and recoveries; ["dropped", number]; "" after the
 * end. Thread: one. */
HC_EXPORT hc_status* hc_timeline_listen(hc_runtime* rt);
HC_EXPORT const char* hc_timeline_heard(hc_runtime* rt);
/* Call before hc_connect. Stall reports then show a stack: `signal`, sent to the thread with kernel id `thread`, must
 * make it write its stack into a pipe; `fd` is the pipe's non-blocking reading end, which stays the caller's. */
HC_EXPORT void hc_watch_stack(hc_runtime* rt, int32_t signal, int32_t fd, int32_t thread, const char* libraries);

HC_EXPORT const char* hc_counters(hc_runtime* rt);                          /* what it has done so far */
HC_EXPORT const char* hc_flight_record(hc_runtime* rt, const char* reason); /* the last 1,000 operations */
HC_EXPORT const char* hc_describe(hc_runtime* rt); /* state for humans, no JSON: pending tensors, plan, peers */
/* Call before hc_connect. This rank's measurements lie in the file behind fd from then on, at `offset`, where it has
 * HC_RANK_METRICS_BYTES; it stays the caller's. hc_rank_metrics: a copy of them, no JSON.
 * horoclone/live/rank_metrics.py knows the layout. */
#define HC_RANK_METRICS_BYTES 4096
HC_EXPORT hc_status* hc_rank_metrics_share(hc_runtime* rt, int32_t fd, uint64_t offset, const char* program);
HC_EXPORT const char* hc_rank_metrics(hc_runtime* rt);
/* Lines of the log, of all runtimes of the process, go to hc_log_lines() instead of stderr from hc_log_take(1) on until
 * hc_log_take(0). It waits for lines: [[level, rank or -1, Unix ns, text]]; [] after the end. */
HC_EXPORT void hc_log_take(int32_t takes);
HC_EXPORT const char* hc_log_lines(void);
HC_EXPORT void hc_log_warning(int32_t rank, const char* text); /* a line of the caller's among them */
HC_EXPORT const char* hc_knobs(void); /* the table of settings: [{name, type, default, help, horovod}] */
HC_EXPORT const char* hc_build_info(void);
/* Which algorithm runs for each operation, by size and layout; settings as for hc_runtime_create. */
HC_EXPORT const char* hc_selection_report(const char* const* names, const char* const* values, int32_t n);
/* Which CUDA driver and which NCCL can be used here, or why not; settings as for hc_runtime_create. Makes no context.
 */
HC_EXPORT const char* hc_device_report(const char* const* names, const char* const* values, int32_t n);

/* Block quantisation: `shard` elements (a multiple of `block`) as shard / block float32 scales, then shard 8-bit
 * integers. The first `count` elements are given, the rest of the shard is zeros. quantize: residual is NULL, or count
 * numbers that are added to `in` and then hold the rounding errors. dequantize: writes count elements, or adds them. */
typedef struct hc_blocks {
  int32_t version;
  int64_t block, shard, count;
} hc_blocks;
HC_EXPORT hc_status* hc_quantize(const hc_blocks* blocks, const float* in, float* residual, void* message);
HC_EXPORT hc_status* hc_dequantize(const hc_blocks* blocks, const void* message, float* out, int32_t add);

/* Hashes of stretches of memory, which ranks compare: hashes[i] of bytes[i] bytes at data[i]. */
HC_EXPORT void hc_hash_memory(const void* const* data, const int64_t* bytes, int32_t n, uint64_t* hashes);

/* Where a process with these CPUs runs: place[3] = socket, NUMA node, L3 cache, each -1 where that is unknown or there
 * are several. folder: in the form of /sys/devices/system, which NULL stands for. */
HC_EXPORT void hc_locality(const char* folder, const int32_t* cpus, int32_t n, int32_t* place);
/* What an allreduce of `bytes` bytes of float32 moves between sockets when `ranks` ranks share memory, places[3 * r] as
 * from hc_locality: {"levels": [[group of each rank] ...], the finest first, "sockets": [of each rank],
 * "flat": [[bytes from, to] ...], "levelled": ...}. */
HC_EXPORT const char* hc_levels_report(const int32_t* places, int32_t ranks, int64_t bytes);

/* Simulates the agreement of one step at any number of ranks, in this process, on a virtual clock: with the real
 * objects, and messages that cost what the struct says. *json is valid until the next call on the same thread. */
typedef struct hc_simulation {
  int32_t version;
  int32_t ranks, ranks_per_node, fanout; /* fan-out 0: every rank talks to rank 0 */
  int32_t tensors, steps;                /* announced in a step; steps that are counted */
  int32_t processing;                    /* 1: what the objects compute takes time, 0: only messages do */
  double local[3], network[3];           /* within a node and between nodes, us: send, latency, receive */
} hc_simulation;
HC_EXPORT hc_status* hc_simulate(const hc_simulation* simulation, const char** json);

#ifdef __cplusplus
}
#endif
