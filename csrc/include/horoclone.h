/* The C API of the core, and the only way in. Conventions:
 *  1. Objects are opaque pointers; hc_*_create makes, hc_*_destroy unmakes, NULL is accepted by destroy.
 *  2. A call that can fail returns hc_status*: NULL is success; otherwise free it with hc_status_destroy.
 *  3. Structs that a caller fills begin with `version` = HC_VERSION so that they can grow.
 *  4. Pointers and counts travel together; strings are NUL-terminated UTF-8; no ownership passes unless said.
 *  5. Every call may come from any thread. hc_wait blocks the calling thread, which makes progress meanwhile; so do
 *     hc_connect, hc_shutdown and the collective calls. The others do not wait for other ranks, but for the short spin
 *     of hc_call.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "horoclone_dtypes.h"

#ifdef __cplusplus
extern "C" {
#endif

#define HC_VERSION 4
#define HC_EXPORT __attribute__((visibility("default")))

typedef struct hc_runtime hc_runtime;
typedef struct hc_status hc_status;
typedef int64_t hc_handle; /* > 0; 0 is no handle */

typedef enum hc_code {
  HC_OK = 0,
  HC_NOT_INITIALIZED = 1,
  HC_INVALID_ARGUMENT = 2,
  HC_MISMATCH = 3,
  HC_PEER_LOST = 4,
  HC_TIMEOUT = 5,
  HC_ABORTED = 6,
  HC_UNSUPPORTED = 7,
  HC_INTERNAL = 8
} hc_code;

/* HC_BOOL, HC_UINT8 and so on, as they stand in horoclone_dtypes.h; HC_DTYPES: how many there are. */
#define HC_ENUMERATOR(name, ...) HC_##name,
typedef enum hc_dtype { HC_REDUCED_DTYPES(HC_ENUMERATOR) HC_MOVED_DTYPES(HC_ENUMERATOR) HC_DTYPES } hc_dtype;
#undef HC_ENUMERATOR

/* clang-format off */
/* AND, OR, XOR: of the bits of integers, of the truth of bools; floats have none. HC_REDUCTIONS: how many there are. */
typedef enum hc_reduce {
  HC_AVERAGE, HC_SUM, HC_ADASUM, HC_MIN, HC_MAX, HC_PRODUCT, HC_AND, HC_OR, HC_XOR, HC_REDUCTIONS
} hc_reduce;
typedef enum hc_op {
  HC_ALLREDUCE, HC_ALLGATHER, HC_BROADCAST, HC_ALLTOALL, HC_REDUCESCATTER, HC_JOIN, HC_BARRIER,
  HC_REDUCE, HC_GATHER, HC_SCATTER, HC_SEND, HC_RECEIVE
} hc_op;
/* clang-format on */
typedef enum hc_device { HC_HOST = 0, HC_CUDA = 1 } hc_device;

HC_EXPORT hc_code hc_status_code(const hc_status* status);
HC_EXPORT const char* hc_status_text(const hc_status* status);
HC_EXPORT int32_t hc_status_culprit(const hc_status* status); /* world rank, -1 when unknown */
HC_EXPORT void hc_status_destroy(hc_status* status);

/* One tensor of a request. `out` NULL: the core owns the result, whose size may be unknown before the agreement; see
 * hc_result. allgather into `out`: it must hold this rank's rows times the number of ranks. If any rank gives another
 * number of rows, `out` is unchanged and the core owns the result. alltoall into `out`: it must hold the rows of
 * hc_request.awaited; the same where others come. reduce and gather have a result on the root only. scatter: only the
 * root passes a tensor. receive: pass a tensor to receive into (`out`), or none; without one, HC_CUDA asks for a result
 * on that GPU, and a message from host memory still arrives in host memory. */
typedef struct hc_tensor {
  const void* in;
  void* out;
  const int64_t* shape; /* rank entries */
  int32_t rank;
  int32_t dtype; /* hc_dtype */
} hc_tensor;

/* Called once from thread hc-notify, with no lock held; may submit again. status is NULL on success and lives for the
 * call. */
typedef void (*hc_done)(void* context, hc_handle handle, const hc_status* status);

typedef struct hc_request {
  int32_t version; /* HC_VERSION */
  int32_t op;      /* hc_op */
  int32_t reduce;  /* hc_reduce */
  int32_t root;    /* world rank, also within a process set (broadcast, reduce, gather, scatter; the peer of send and
                      receive) */
  int32_t process_set; /* 0 = everybody */
  int32_t device; /* hc_device: where all tensors of the request lie (join: where identity elements for them may lie) */
  int32_t device_index; /* as CUDA numbers devices in this process; the same in every request */
  int32_t will_wait;    /* not 0: the caller waits for it at once, do not wake the engine thread */
  const char* name;     /* NULL = unnamed: matched by order among the unnamed of this op and process set. " (iteration "
                           and what follows: of a loop, whose iterations count as one name where steps are counted */
  double prescale, postscale;
  const int64_t* splits; /* alltoall, scatter's root: rows for each rank of the set; NULL = equal */
  int32_t split_count;
  const int64_t* awaited; /* alltoall into `out`: rows that it has room for from each rank of the set; NULL = equal
                             parts of as many rows as `in` has */
  int32_t awaited_count;
  void* stream;      /* HC_CUDA: the CUstream that produces the input (NULL: the default stream), */
  void* ready_event; /* or a CUevent already recorded behind it, which lives until the operation is done */
  hc_done done;      /* may be NULL */
  void* done_context;
  int64_t tag;      /* send, receive: matched in order among those of one process set, source and tag; >= 0 */
  int32_t priority; /* allreduce: of what is ready the highest runs first; 0 unless told */
  int32_t left_out; /* allreduce: steps in which this rank has not made it since it made it last; ranks that announce
                       different numbers do not mean one step, and get HC_MISMATCH */
} hc_request;

/* Settings are name/value pairs: the HOROCLONE_* / HOROVOD_* variables of docs/environment.md. */
HC_EXPORT hc_status* hc_runtime_create(const char* const* names, const char* const* values, int32_t n,
                                       hc_runtime** out);
HC_EXPORT void hc_runtime_destroy(hc_runtime* rt);
/* Opaque bytes that every other rank needs (see hc_connect). */
HC_EXPORT const uint8_t* hc_endpoint(const hc_runtime* rt, size_t* bytes);
/* An MPI that the ranks share, a second backend for data between nodes. Handles are the library's own, as intptr_t. */
typedef struct hc_mpi {
  const char* library;   /* loaded in this process; it has MPI's functions, or depends on the library that has */
  intptr_t communicator; /* the ranks in their order, used by nobody else, errors returned; MPI_THREAD_MULTIPLE */
  intptr_t byte_type;    /* MPI_BYTE */
  int32_t forced;        /* not 0: use it; 0: use it when it is faster */
} hc_mpi;
typedef struct hc_members {
  int32_t version;
  int32_t rank, size;
  const uint8_t* const* endpoints; /* [size] */
  const size_t* endpoint_bytes;    /* [size] */
  const uint8_t* secret;
  size_t secret_bytes; /* >= 16 */
  const char* job;
  uint64_t generation;
  double timeout_s;
  int32_t (*cancelled)(void*); /* polled every 50 ms; not 0 = give up; may be NULL */
  void* cancelled_context;
  const hc_mpi* mpi; /* NULL: none; else on every rank */
} hc_members;
HC_EXPORT hc_status* hc_connect(hc_runtime* rt, const hc_members* members);

/* clang-format off */
typedef enum hc_fact {
  HC_RANK, HC_SIZE, HC_LOCAL_RANK, HC_LOCAL_SIZE, HC_CROSS_RANK, HC_CROSS_SIZE, HC_IS_HOMOGENEOUS
} hc_fact;
/* clang-format on */
HC_EXPORT int32_t hc_get(const hc_runtime* rt, hc_fact fact);

/* Checks the arguments, queues the operation, returns. One handle for all n tensors. Memory stays the caller's and must
 * live until the handle is done. */
HC_EXPORT hc_status* hc_submit(hc_runtime* rt, const hc_request* request, const hc_tensor* tensors, int32_t n,
                               hc_handle* out);
/* hc_submit for a caller that waits immediately (will_wait): the fast path for small calls that repeat. *out is 0 when
 * the operation has already succeeded and there is nothing to take or to release; else call hc_wait. */
HC_EXPORT hc_status* hc_call(hc_runtime* rt, const hc_request* request, const hc_tensor* tensors, int32_t n,
                             hc_handle* out);
/* hc_submit for a caller that goes on with something else first: a small operation makes its first steps on the calling
 * thread, which spares the engine thread a wake-up if the caller then waits. *out as from hc_call. */
HC_EXPORT hc_status* hc_start(hc_runtime* rt, const hc_request* request, const hc_tensor* tensors, int32_t n,
                              hc_handle* out);
/* Declared buckets: an optimizer's gradients, the same names, shapes and order on every rank, in place (in == out),
 * memory fixed until hc_undeclare. Collective over the process set. Where all its ranks share memory and the buckets
 * lie in hc_blocks, their plan is persistent: a submitted bucket starts without any message. Between machines, in
 * the process set of all ranks, too, unless many of them are small. On GPUs: where all ranks of the world share memory,
 * the set has rank 0 in it, and NCCL has been used in it. `common` gives reduce, scales, process set and device. */
HC_EXPORT hc_status* hc_declare(hc_runtime* rt, const hc_request* common, const char* const* names,
                                const hc_tensor* tensors, int32_t n, int32_t* id);
/* stream: what fills a bucket on a GPU; host memory: NULL. priority: as in a request; persistent buckets have none. */
HC_EXPORT hc_status* hc_submit_declared(hc_runtime* rt, int32_t process_set, int32_t id, int32_t bucket, void* stream,
                                        int32_t priority, hc_handle* out);
HC_EXPORT hc_status* hc_undeclare(hc_runtime* rt, int32_t process_set, int32_t id);

HC_EXPORT int32_t hc_poll(hc_runtime* rt, hc_handle handle); /* 1 done (or unknown), 0 not */
/* Makes progress until the handle is done or timeout_s passes (< 0: no limit; *done says which). The status is the
 * operation's. */
HC_EXPORT hc_status* hc_wait(hc_runtime* rt, hc_handle handle, double timeout_s, int32_t* done);
/* Makes progress on the calling thread for as long as something moves, about half a millisecond at most. 1 done (or
 * unknown), 0 not. */
HC_EXPORT int32_t hc_advance(hc_runtime* rt, hc_handle handle);
/* 1: the operation has succeeded, and its handle is released. 0: it has not, or is unknown: call hc_wait. Never
 * blocks. */
HC_EXPORT int32_t hc_finish(hc_runtime* rt, hc_handle handle);
/* 1: the operation has succeeded, and the core owns no result of it. Never blocks. */
HC_EXPORT int32_t hc_has_no_result(hc_runtime* rt, hc_handle handle);
/* Memory that the core owns: a result, or shared memory made by hc_block_create. Outlives the runtime until it is
 * destroyed. */
typedef struct hc_block hc_block;
HC_EXPORT void* hc_block_data(hc_block* block);
HC_EXPORT size_t hc_block_bytes(hc_block* block);
HC_EXPORT void hc_block_destroy(hc_block* block);
/* Hands over the core-owned result of tensor i of a finished operation; *memory is the caller's (NULL when there is
 * none: barrier, join). rows_from (alltoall: rows received from each rank) stays valid until hc_release. */
typedef struct hc_result {
  int64_t first_dimension;
  const int64_t* rows_from;
  int32_t rows_from_count;
  int32_t join_rank; /* join: world rank that joined last, else -1 */
  /* scatter, receive: what came; else dtype is -1. shape stays valid until hc_release. */
  int32_t dtype;
  const int64_t* shape;
  int32_t shape_rank;
  int32_t source;       /* receive: world rank of the sender, else -1 */
  int32_t device;       /* hc_device: where the core-owned result lies (HC_CUDA: take it with hc_copy_result) */
  int32_t device_index; /* HC_CUDA: as CUDA numbers devices in this process; else -1 */
} hc_result;
HC_EXPORT hc_status* hc_take_result(hc_runtime* rt, hc_handle handle, int32_t i, hc_result* out, hc_block** memory);
/* Tensors on a GPU (hc_request.device = HC_CUDA): their operation is done when it has been enqueued. This makes
 * `stream` wait for the result; the host does not wait. */
HC_EXPORT hc_status* hc_stream_wait(hc_runtime* rt, hc_handle handle, void* stream);
/* The same, then copies the core-owned result of tensor i to `to` on that stream and releases the core's memory. Call
 * hc_take_result before it to learn first_dimension and rows_from. */
HC_EXPORT hc_status* hc_copy_result(hc_runtime* rt, hc_handle handle, int32_t i, void* to, size_t bytes, void* stream);
HC_EXPORT void hc_release(hc_runtime* rt, hc_handle handle);
/* Can the caller free GPU memory for the core? IS_WANTED: 1 when some is needed; FREED: what could be was freed.
 * IS_LACKING: the caller itself has too little, and the core gives back what it keeps for later. */
typedef enum hc_memory_state {
  HC_MEMORY_CAN_FREE = 0,
  HC_MEMORY_IS_WANTED = 1,
  HC_MEMORY_FREED = 2,
  HC_MEMORY_IS_LACKING = 3
} hc_memory_state;
HC_EXPORT int32_t hc_memory_pressure(hc_runtime* rt, hc_memory_state what);

/* Collective: every member of the world calls it in the same order. */
HC_EXPORT hc_status* hc_process_set_add(hc_runtime* rt, const int32_t* ranks, int32_t n, int32_t* id);
HC_EXPORT hc_status* hc_process_set_remove(hc_runtime* rt, int32_t id);
/* The number of its members (0: there is no such set), and this rank's position among them (-1: it is no member). */
HC_EXPORT int32_t hc_process_set_size(hc_runtime* rt, int32_t id);
HC_EXPORT int32_t hc_process_set_rank(hc_runtime* rt, int32_t id);

/* Shared memory of this rank that every local rank sees; zeroed, 4 KiB aligned. */
HC_EXPORT hc_status* hc_block_create(hc_runtime* rt, size_t bytes, hc_block** out);
/* Uninitialised memory of a GPU that can be registered with NCCL, as happens to declared buckets that begin in such
 * blocks. UNSUPPORTED, with the reason, where this NCCL or the settings rule it out: use any other memory then. */
HC_EXPORT hc_status* hc_device_block_create(hc_runtime* rt, int32_t device_index, size_t bytes, hc_block** out);
HC_EXPORT int32_t hc_shares_memory(hc_runtime* rt); /* 1 when every rank of the world maps this rank's arena */

/* Tells every rank to fail what is pending with this text ("rank 1 raised ValueError: bad batch 17"). */
HC_EXPORT void hc_abort(hc_runtime* rt, const char* text);
/* hc_abort by a caller that cannot go on waiting for `handle`. text: what happened to the caller ("raised TimeoutError:
 * too slow"); the core puts this rank's name before it and the operation after it. */
HC_EXPORT void hc_break_off(hc_runtime* rt, hc_handle handle, const char* text);
/* Tells the other ranks that this one is about to shut down, and submits from now on only what it has begun. The other:
 * 1 when all of them have said so, too, or are gone: what waits for them then may wait in vain. */
HC_EXPORT void hc_say_ending(hc_runtime* rt);
HC_EXPORT int32_t hc_all_are_ending(hc_runtime* rt);
/* Finishes what this rank has submitted, says goodbye and stops the threads. What is left fails as Aborted: timeout_s
 * after every rank has begun to shut down, or three times that while others go on. With timeout_s = 0 at once. */
HC_EXPORT hc_status* hc_shutdown(hc_runtime* rt, double timeout_s);
HC_EXPORT void hc_after_fork_child(hc_runtime* rt);

#ifdef __cplusplus
}
#endif
