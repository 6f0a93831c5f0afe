// Every setting of the runtime in ONE table, with its default, its range and its text: Config, the parser, knobs_json()
// and docs/environment.md all come from it, and whoever needs a default takes it from `defaults`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/log.h"

namespace hc {

inline constexpr size_t kKiB = size_t{1} << 10, kMiB = size_t{1} << 20, kGiB = size_t{1} << 30;
inline constexpr size_t kMostFlatBytes = 32 * kKiB;  // a rank's flat buffer in shared memory (SharedSegment)

// What a value may look like. Numbers lie in [low, high]; a word is one of `words` ("a|b|c"), case does not
// matter.
struct KnobRule {
  enum class Kind : uint8_t { kFlag, kWord, kText, kBytes, kCount, kNumber };
  Kind kind = Kind::kText;
  double low = 0, high = 0;
  const char* words = "";
  const char* unit = "";

  static constexpr KnobRule flag() { return {Kind::kFlag, 0, 1, "", ""}; }
  static constexpr KnobRule word(const char* words) { return {Kind::kWord, 0, 0, words, ""}; }
  static constexpr KnobRule text() { return {Kind::kText, 0, 0, "", ""}; }
  static constexpr KnobRule bytes(double low, double high) { return {Kind::kBytes, low, high, "", "bytes"}; }
  static constexpr KnobRule count(double low, double high) { return {Kind::kCount, low, high, "", ""}; }
  static constexpr KnobRule number(double low, double high) { return {Kind::kNumber, low, high, "", ""}; }
  static constexpr KnobRule seconds(double low, double high) { return {Kind::kNumber, low, high, "", "s"}; }
  static constexpr KnobRule milliseconds(double low, double high) { return {Kind::kNumber, low, high, "", "ms"}; }
  static constexpr KnobRule microseconds(double low, double high) { return {Kind::kNumber, low, high, "", "us"}; }
};

// clang-format off
// X(type, field, default, HOROCLONE_ name, HOROVOD_ name or "", rule, help)
#define HC_KNOBS(X)                                                                                          \
  /* fusion and negotiation */                                                                              \
  X(size_t, fusion_bytes, 128 * kMiB, "FUSION_THRESHOLD", "FUSION_THRESHOLD",                               \
    KnobRule::bytes(0, 1099511627776.0),                                                                    \
    "Largest number of bytes that one collective may fuse; 0 turns fusion off.")                            \
  X(bool, disable_group_fusion, false, "DISABLE_GROUP_FUSION", "DISABLE_GROUP_FUSION", KnobRule::flag(),    \
    "1: a group shares its collective with no other operation; all of a group always run together.")        \
  X(size_t, partition_bytes, kMiB, "PARTITION_BYTES", "", KnobRule::bytes(0, 1099511627776.0),          \
    "Between machines, once operations have priorities: larger allreduces run in parts of this size, so "    \
    "that an urgent one waits for parts, not for the whole. Rank 0's counts. 0: never.")                     \
  X(double, gathering_window_ms, 0, "CYCLE_TIME", "CYCLE_TIME", KnobRule::milliseconds(0, 60000),           \
    "Gathering window: what is ready is held back this long, so that more is fused with it. 0: it starts "  \
    "at once, fused with what gathered while the previous collective ran.")                                 \
  X(int64_t, cache_capacity, 8192, "CACHE_CAPACITY", "CACHE_CAPACITY", KnobRule::count(0, 1e6),             \
    "Agreements remembered per process set, so that a repeated tensor costs one bit; 0 turns the cache "    \
    "off.")                                                                                                 \
  X(bool, dynamic_process_sets, false, "DYNAMIC_PROCESS_SETS", "DYNAMIC_PROCESS_SETS", KnobRule::flag(),    \
    "Allow process sets to be added and removed after init.")                                               \
  /* shared memory and algorithms */                                                                        \
  X(bool, shared_memory, true, "SHARED_MEMORY", "", KnobRule::flag(),                                       \
    "Ranks of one machine use shared memory; 0: TCP between all ranks.")                                    \
  X(size_t, arena_bytes, 64 * kGiB, "ARENA_BYTES", "", KnobRule::bytes(1073741824.0, 17592186044416.0),     \
    "Address space reserved for the shared memory of one rank (memory itself is taken only as it is "       \
    "used).")                                                                                               \
  X(size_t, segment_bytes, 256 * kKiB, "SEGMENT_BYTES", "", KnobRule::bytes(16, 1073741824.0),              \
    "Bytes of one transfer between machines.")                                                              \
  X(size_t, flat_bytes, 16 * kKiB, "FLAT_BYTES", "", KnobRule::bytes(0, kMostFlatBytes),                             \
    "In shared memory, up to this size an operation takes one barrier and every rank reads every input; "   \
    "larger ones move in blocks.")                                                         \
  X(bool, bypass, true, "BYPASS", "", KnobRule::flag(),                                                   \
    "In shared memory, small operations (of up to FLAT_BYTES, four times that between two ranks) that are "    \
    "called again and again, one at a time and alike on all ranks, are not agreed on anew each time; 0: "       \
    "always.")                                                                                                 \
  X(size_t, block_bytes, 256 * kKiB, "BLOCK_BYTES", "", KnobRule::bytes(64, 67108864),                      \
    "Bytes of one block when tensors outside shared memory pass through it.")                               \
  X(size_t, ring_threshold_bytes, 64 * kKiB, "RING_THRESHOLD_BYTES", "",                                    \
    KnobRule::bytes(0, 1099511627776.0),                                                                    \
    "Between machines, allreduce uses a ring from this size on and recursive doubling below.")                                                                 \
  X(int, hierarchical_allreduce, -1, "HIERARCHICAL_ALLREDUCE", "HIERARCHICAL_ALLREDUCE",                    \
    KnobRule::count(-1, 1),                                                                                 \
    "Reduce within each machine first, then between machines: 1 always, 0 never, -1 decide by layout.")     \
  X(std::string, cpu_operations, "auto", "CPU_OPERATIONS", "CPU_OPERATIONS",                                \
    KnobRule::word("auto|host|gloo|mpi|ccl"),                                                               \
    "How data goes between machines: mpi: through the MPI that mpi4py loads; auto: through it where the "     \
    "process uses MPI already and it is the faster one; host, gloo, ccl: over TCP.")                          \
  X(std::string, selection, "", "SELECTION", "", KnobRule::text(),                                          \
    "Where the sizes at which algorithms change come from, as far as they leave results alone: empty: from a " \
    "short probe in init, remembered per host; fixed: the defaults of this table; flat_bytes=N: given.")     \
  X(std::string, adasum, "ranks", "ADASUM", "", KnobRule::word("ranks|nodes"),                              \
    "What op=Adasum combines: ranks: every rank's tensor; nodes: the average of each machine's ranks, as "  \
    "Horovod does with tensors on GPUs. Rank 0's setting holds for all.")                                   \
  X(std::string, simd, "auto", "SIMD", "", KnobRule::word("auto|scalar|avx2|avx512"),                       \
    "Instruction set of the reductions; all of them give the same bits.")                                   \
  /* devices */                                                                                             \
  X(std::string, gpu_operations, "auto", "GPU_OPERATIONS", "", KnobRule::word("auto|nccl|peers|host"),      \
    "How tensors in GPU memory are reduced: auto: by NCCL; several ranks on one GPU by this library's own " \
    "kernels; else through host memory. nccl, peers (those kernels, on one machine): an error where that "  \
    "is impossible. host: through host memory.")                                                            \
  X(size_t, gpu_peer_bytes, 32 * kMiB, "GPU_PEER_BYTES", "", KnobRule::bytes(2097152.0, 17179869184.0),     \
    "GPU memory that each rank gives to each process set whose ranks reduce through it as peers; the "      \
    "least of all ranks' counts.")                                                                          \
  X(bool, gpu_register, true, "GPU_REGISTER", "", KnobRule::flag(),                                         \
    "Gradients on GPUs lie in memory that NCCL knows in advance, where NCCL (from 2.19 on) can do that.")   \
  X(std::string, cuda_library, "", "CUDA_LIBRARY", "", KnobRule::text(),                                    \
    "File that is loaded as CUDA's driver library; empty: libcuda.so.1.")                                   \
  X(std::string, nccl_library, "", "NCCL_LIBRARY", "", KnobRule::text(),                                    \
    "File that is loaded as NCCL; empty: the copy that the process has loaded, pip's, the system's.")       \
  X(std::string, nccl_folders, "", "NCCL_FOLDERS", "", KnobRule::text(),                                    \
    "Colon-separated folders in which libnccl.so.2 is looked for before the system's; set by the Python "   \
    "package to those of pip's packages.")                                                                  \
  X(std::string, gpu_kernels, "auto", "GPU_KERNELS", "", KnobRule::word("auto|off"),                        \
    "Kernels of this library on GPUs: auto: those that were built in, else compiled by NVRTC at the first " \
    "use; off: none, copies and host memory do their work.")                                                \
  X(std::string, nvrtc_library, "", "NVRTC_LIBRARY", "", KnobRule::text(),                                  \
    "File that is loaded as NVRTC; empty: the copy that the process has loaded, pip's, the system's.")      \
  X(std::string, nvrtc_folders, "", "NVRTC_FOLDERS", "", KnobRule::text(),                                  \
    "Colon-separated folders in which NVRTC is looked for before the system's; set by the Python package "  \
    "to those of pip's packages.")                                                                          \
  X(std::string, kernel_cache, "", "KERNEL_CACHE", "", KnobRule::text(),                                    \
    "Folder for what NVRTC has compiled; empty: horoclone in $XDG_CACHE_HOME or ~/.cache; off: none.")      \
  /* network */                                                                                             \
  X(std::string, interfaces, "", "NETWORK_INTERFACES", "GLOO_IFACE", KnobRule::text(),                      \
    "Comma-separated network interfaces that this rank may be reached on; empty: every one that is up.")    \
  X(std::string, node, "", "NODE", "", KnobRule::text(),                                                    \
    "Ranks with different labels count as ranks of different machines: no shared memory between them.")     \
  X(size_t, socket_buffer_bytes, 0, "SOCKET_BUFFER_BYTES", "", KnobRule::bytes(0, 1073741824.0),            \
    "Send and receive buffer of each socket; 0 leaves it to the kernel.")                                   \
  X(int, control_fanout, 8, "CONTROL_FANOUT", "", KnobRule::count(0, 1024),                                 \
    "Agreement over several machines goes through a tree of their first ranks, of which each has at most "  \
    "this many others below it; 0: every rank talks to rank 0 itself.")                                     \
  X(double, keepalive_s, 30, "KEEPALIVE_S", "GLOO_TIMEOUT_SECONDS", KnobRule::seconds(1, 32767),            \
    "Silence after which TCP probes a connection and gives it up as dead.")                                 \
  /* deadlines */                                                                                           \
  X(double, init_timeout_s, 300, "START_TIMEOUT", "START_TIMEOUT", KnobRule::seconds(0.001, 1e7),           \
    "init fails when ranks are still missing after this time.")                                             \
  X(double, init_report_s, 10, "INIT_REPORT_S", "", KnobRule::seconds(0.001, 1e7),                          \
    "init says which ranks are missing after this time.")                                                   \
  X(bool, stall_check_disable, false, "STALL_CHECK_DISABLE", "STALL_CHECK_DISABLE", KnobRule::flag(),       \
    "No reports about tensors that some ranks have submitted and others have not.")                         \
  X(double, stall_check_s, 60, "STALL_CHECK_TIME_SECONDS", "STALL_CHECK_TIME_SECONDS",                      \
    KnobRule::seconds(0.001, 1e7),                                                                          \
    "Age of such a tensor at its first report.")                                                            \
  X(double, stall_shutdown_s, 0, "STALL_SHUTDOWN_TIME_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS",              \
    KnobRule::seconds(0, 1e7), "Age of such a tensor at which the job is aborted; 0: never.")               \
  X(double, deadlock_s, 60, "DEADLOCK_TIME_SECONDS", "", KnobRule::seconds(0, 1e7),                          \
    "After this time calls fail whose ranks wait for one another: each in a call that another one of them "  \
    "has not made. It is said within 5 s. A rank that computes is waited for. 0: never.")                    \
  X(bool, stall_stacks, true, "STALL_STACKS", "", KnobRule::flag(),                                         \
    "Stall reports show the Python stack of late ranks, taken with a signal of its own.")                   \
  X(double, liveness_probe_s, 1, "LIVENESS_PROBE_S", "", KnobRule::seconds(0.001, 1e7),                     \
    "A rank that has waited this long asks the late rank's engine for a sign of life.")                     \
  X(double, liveness_warn_s, 5, "LIVENESS_WARN_S", "", KnobRule::seconds(0.001, 1e7),                       \
    "Silence after a probe that is worth a warning; at most half of LIVENESS_ERROR_S if unset.")                                                       \
  X(double, liveness_error_s, 15, "LIVENESS_ERROR_S", "GLOO_TIMEOUT_SECONDS",                               \
    KnobRule::seconds(0.001, 1e7), "Silence after a probe at which the rank counts as lost.")               \
  /* waiting */                                                                                             \
  X(int, spin_pauses, 20, "SPIN_PAUSES", "", KnobRule::count(0, 1e9),                                       \
    "CPU pause instructions of a wait before it yields its core. Not set: none where there are more ranks than "   \
    "cores.")                                          \
  X(double, yield_us, 80, "YIELD_US", "", KnobRule::microseconds(0, 1e9),                                   \
    "Time for which a wait yields its core before it sleeps.")                                              \
  X(std::string, thread_affinity, "", "THREAD_AFFINITY", "THREAD_AFFINITY", KnobRule::text(),               \
    "Comma-separated CPU numbers, one for each local rank, for the engine's thread; empty: as the main "    \
    "thread.")                                                                                              \
  /* what is told */                                                                                        \
  X(LogLevel, log_level, LogLevel::kWarning, "LOG_LEVEL", "LOG_LEVEL",                                      \
    KnobRule::word("trace|debug|info|warning|error|fatal"),                                                 \
    "Least severe message that is written to stderr.")                                                      \
  X(bool, log_hide_time, false, "LOG_HIDE_TIME", "LOG_HIDE_TIME",                                           \
    KnobRule::flag(), "No time in log lines.")                                                              \
  X(std::string, timeline, "", "TIMELINE", "TIMELINE", KnobRule::text(),                                    \
    "File in which rank 0 writes a Chrome trace from init on; DYNAMIC: only between start_timeline() "      \
    "and stop_timeline().")                                                                                 \
  X(bool, timeline_mark_cycles, false, "TIMELINE_MARK_CYCLES", "TIMELINE_MARK_CYCLES", KnobRule::flag(),    \
    "The timeline shows each coordinated step as well.")                                                    \
  X(bool, timeline_operation_names, false, "TIMELINE_OPERATION_NAMES", "", KnobRule::flag(),                \
    "The timeline names tensors allreduce.NAME and allreduce.noname.17, as Horovod does for PyTorch: on by " \
    "default where horoclone.torch was imported before init, else off.")                                    \
  X(bool, timeline_all_ranks, false, "TIMELINE_ALL_RANKS", "", KnobRule::flag(),                            \
    "Every rank writes its own timeline (timeline.rank3.json); `horoclone timeline` merges them.")          \
  X(std::string, recorder_dir, "", "RECORDER_DIR", "", KnobRule::text(),                                    \
    "Folder into which each rank writes its last 1,000 operations when something fails or stalls; "         \
    "`horoclone debug` compares them.")                                                                     \
  X(bool, autotune, false, "AUTOTUNE", "AUTOTUNE", KnobRule::flag(),                                        \
    "1: rank 0 measures while the job runs and looks for better values of the fusion threshold, the "       \
    "gathering window and the choice of algorithm. What is set by hand stays.")                                                                           \
  X(std::string, autotune_log, "", "AUTOTUNE_LOG", "AUTOTUNE_LOG", KnobRule::text(),                        \
    "File in which rank 0 writes each sample of autotune, as comma-separated values.")                      \
  X(int, autotune_warmup_samples, 3, "AUTOTUNE_WARMUP_SAMPLES", "AUTOTUNE_WARMUP_SAMPLES",                  \
    KnobRule::count(0, 1e6), "Samples that are thrown away before autotune begins.")                        \
  X(int, autotune_steps_per_sample, 10, "AUTOTUNE_STEPS_PER_SAMPLE", "AUTOTUNE_STEPS_PER_SAMPLE",           \
    KnobRule::count(1, 1e6), "Training steps of which one sample is the median.")                           \
  X(int, autotune_max_samples, 20, "AUTOTUNE_MAX_SAMPLES", "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",                \
    KnobRule::count(1, 1e6), "Samples after which autotune settles for the best that it has found.")        \
  X(double, autotune_noise, 0.8, "AUTOTUNE_NOISE", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",                       \
    KnobRule::number(0, 1),                                                                                 \
    "How much samples scatter: other settings must be better by 5 % times this to be preferred.")

// Read by the launcher or by the Python package, never by the core: listed here so that they are documented once.
// X(HOROCLONE_ name, HOROVOD_ name or "", type, default, help)
#define HC_LAUNCHER_KNOBS(X)                                                                                 \
  X("SECRET", "", "text", "",                                                                               \
    "Job secret, at least 16 bytes, equal on all ranks; authenticates every connection.")                   \
  X("SECRET_FILE", "", "text", "", "File that holds the job secret.")                                       \
  X("PAGE", "", "text", "",                                                                                 \
    "Inherited descriptor and offset of the memory for this rank's measurements; set by the launcher.")      \
  X("SECRET_FD", "", "count", "",                                                                           \
    "Inherited descriptor from which the job secret is read; set by the launcher.")                         \
  X("FUNCTION_FDS", "", "text", "",                                                                         \
    "Two inherited descriptors of a function started with run(); set by the launcher, taken out at start.") \
  X("FUNCTION_FOLDER", "", "text", "",                                                                      \
    "Private folder of a function started with run(use_mpi=True); set by the launcher, taken out at start.") \
  X("RENDEZVOUS", "", "text", "",                                                                           \
    "host:port, comma-separated, of the store in which ranks find each other; set by the launcher.")        \
  X("JOB", "", "text", "", "Name of the job, part of every handshake; set by the launcher.")                \
  X("RANK", "RANK", "count", "", "This process's rank; set by the launcher.")                               \
  X("SIZE", "SIZE", "count", "",                                                                            \
    "Number of ranks; set by the launcher. Behind a service, of the first generation where the job is elastic.") \
  X("LOCAL_RANK", "LOCAL_RANK", "count", "",                                                                \
    "Rank among the processes of this machine; set by the launcher.")                                       \
  X("LOCAL_SIZE", "LOCAL_SIZE", "count", "", "Number of ranks on this machine; set by the launcher.")       \
  X("CROSS_RANK", "CROSS_RANK", "count", "", "Position of this machine; set by the launcher.")              \
  X("CROSS_SIZE", "CROSS_SIZE", "count", "", "Number of machines; set by the launcher.")                    \
  X("HOSTNAME", "HOSTNAME", "text", "", "Name of this machine in the launcher's list of hosts.")            \
  X("ELASTIC", "ELASTIC", "flag", "0", "1: the job goes on when ranks are lost or come; set by the launcher.") \
  X("ELASTIC_TIMEOUT", "ELASTIC_TIMEOUT", "seconds", "600",                                                 \
    "How long an elastic job waits until enough processes are there; then it ends.")                        \
  X("ELASTIC_QUORUM", "", "text", "",                                                                       \
    "majority or any: with --survive-launcher, or behind a service, who may go on where members are silent. " \
    "Not set: any on one host, majority on several.")                                                       \
  X("SURVIVE_LAUNCHER", "", "flag", "0",                                                                    \
    "1: this process goes on without its launcher; set by horoclonerun --survive-launcher.")                \
  X("SERVICE", "", "text", "",                                                                              \
    "DNS name behind which all processes of a job without a launcher are: a headless service of Kubernetes; " \
    "RANK follows from JOB_COMPLETION_INDEX or the host's name.")                                           \
  X("PORT", "", "count", "",                                                                                \
    "Port on which the processes of a service listen; not set: it follows from JOB.")                       \
  X("MIN_NP", "", "count", "1", "Smallest number of processes of an elastic job behind a service.")         \
  X("MAX_NP", "", "count", "", "Largest number of ranks of an elastic job behind a service.")               \
  X("MEMBER", "", "text", "", "Name of a process of an elastic job, 32 hex digits; set by the launcher.")   \
  X("NOTICE", "", "seconds", "30",                                                                          \
    "How long after SIGTERM a process of an elastic job may go on to its next commit; then it leaves.")     \
  X("FAILPOINTS", "", "text", "", "Faults that a test asks for, at named points: see docs/failpoints.md.")     \
  X("NOTICE_SIGNAL", "", "text", "",                                                                        \
    "Another signal that means what SIGTERM means to a process of an elastic job: USR1 or USR2. In a job of " \
    "a fixed size it ends all ranks at their next commit, which is saved, with code 75.")                   \
  X("REPLICA_INTERVAL", "", "seconds", "0",                                                                 \
    "Spares of an elastic job are given a commit at most so often; that takes half of the time at most.")   \
  X("MPI_THREADS_DISABLE", "MPI_THREADS_DISABLE", "flag", "0",                                              \
    "1: where horoclone itself has to load mpi4py, it asks MPI for one thread only (MPI_THREAD_FUNNELED).") \
  X("NO_HOROVOD_ALIAS", "", "flag", "0",                                                                    \
    "1: `import horovod` does not find horoclone under that name; read when horovod is first imported.")
// clang-format on

// The defaults alone, by the name of the field: for structures that hold a setting, so that no default is written
// twice.
namespace defaults {
#define HC_DEFAULT(type, field, default_value, ...) inline constexpr auto field = default_value;
HC_KNOBS(HC_DEFAULT)
#undef HC_DEFAULT
}  // namespace defaults

}  // namespace hc
