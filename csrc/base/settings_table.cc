// Names, ranges and texts of all settings: the parser, settings_json() and docs/environment.md come from here.
// settings_table.h has the types and defaults.
#include <algorithm>

#include "base/setting_rows.h"

namespace hc {
namespace {

using Kind = SettingRule::Kind;
constexpr SettingRule flag() { return {Kind::kFlag, 0, 1, "", ""}; }
constexpr SettingRule word(const char* words) { return {Kind::kWord, 0, 0, words, ""}; }
constexpr SettingRule text() { return {Kind::kText, 0, 0, "", ""}; }
constexpr SettingRule bytes(double low, double high) { return {Kind::kBytes, low, high, "", "bytes"}; }
constexpr SettingRule count(double low, double high) { return {Kind::kCount, low, high, "", ""}; }
constexpr SettingRule number(double low, double high) { return {Kind::kNumber, low, high, "", ""}; }
constexpr SettingRule seconds(double low, double high) { return {Kind::kNumber, low, high, "", "s"}; }
constexpr SettingRule milliseconds(double low, double high) { return {Kind::kNumber, low, high, "", "ms"}; }
constexpr SettingRule microseconds(double low, double high) { return {Kind::kNumber, low, high, "", "us"}; }

// clang-format off
constexpr SettingRow kRows[] = {
    // fusion and negotiation
    {&Config::fusion_bytes, "FUSION_THRESHOLD", "FUSION_THRESHOLD", bytes(0, 1099511627776.0),
     "Largest number of bytes that one collective may fuse; 0 turns fusion off."},
    {&Config::disable_group_fusion, "DISABLE_GROUP_FUSION", "DISABLE_GROUP_FUSION", flag(),
     "1: a group shares its collective with no other operation; all of a group always run together."},
    {&Config::partition_bytes, "PARTITION_BYTES", "", bytes(0, 1099511627776.0),
     "Between machines, once operations have priorities: larger allreduces run in parts of this size, so that an "
     "urgent one waits for parts, not for the whole. Rank 0's counts. 0: never."},
    {&Config::batching_delay_ms, "CYCLE_TIME", "CYCLE_TIME", milliseconds(0, 60000),
     "Batching delay: what is ready is held back this long, so that more is fused with it. 0: it starts at once, fused "
     "with what became ready while the previous collective ran."},
    {&Config::cache_capacity, "CACHE_CAPACITY", "CACHE_CAPACITY", count(0, 1e6),
     "Agreements remembered per process set, so that a repeated tensor costs one bit; 0 turns the cache off."},
    {&Config::dynamic_process_sets, "DYNAMIC_PROCESS_SETS", "DYNAMIC_PROCESS_SETS", flag(),
     "Allow process sets to be added and removed after init."},
    // shared memory and algorithms
    {&Config::shared_memory, "SHARED_MEMORY", "", flag(),
     "Ranks of one machine use shared memory; 0: TCP between all ranks."},
    {&Config::arena_bytes, "ARENA_BYTES", "", bytes(1073741824.0, 17592186044416.0),
     "Address space reserved for the shared memory of one rank (memory itself is taken only as it is used)."},
    {&Config::topology, "TOPOLOGY", "", text(),
     "Folder that describes the machine's sockets, NUMA nodes and caches; empty: /sys/devices/system; off: all ranks of a "
     "machine count as near each other."},
    {&Config::segment_bytes, "SEGMENT_BYTES", "", bytes(16, 1073741824.0),
     "Bytes of one transfer between machines."},
    {&Config::flat_bytes, "FLAT_BYTES", "", bytes(0, kMaxFlatBytes),
     "In shared memory, up to this size an operation takes one barrier and every rank reads every input; larger ones "
     "move in blocks."},
    {&Config::bypass, "BYPASS", "", flag(),
     "In shared memory, small operations (of up to FLAT_BYTES, four times that between two ranks) that are called "
     "again and again, one at a time and alike on all ranks, are not agreed on anew each time; 0: always."},
    {&Config::persistent_buckets, "PERSISTENT_BUCKETS", "", flag(),
     "The buckets of PyTorch's optimizer start as soon as all ranks have filled them, without a message of the coordinator; "
     "0: they are agreed on in each step. One rank's 0 is enough."},
    {&Config::block_bytes, "BLOCK_BYTES", "", bytes(64, 67108864),
     "Bytes of one block when tensors outside shared memory pass through it."},
    {&Config::ring_threshold_bytes, "RING_THRESHOLD_BYTES", "", bytes(0, 1099511627776.0),
     "Between machines, allreduce uses recursive doubling below this size, and from it on a ring, or a circulant graph "
     "where a rank's share is short."},
    {&Config::hierarchical_allreduce, "HIERARCHICAL_ALLREDUCE", "HIERARCHICAL_ALLREDUCE", count(-1, 1),
     "Reduce within each machine first, then between machines: 1 always, 0 never, -1 decide by layout."},
    {&Config::cpu_operations, "CPU_OPERATIONS", "CPU_OPERATIONS", word("auto|host|gloo|mpi|ccl"),
     "How data goes between machines: mpi: through the MPI that mpi4py loads; auto: through it where the process uses "
     "MPI already and it is the faster one; host, gloo, ccl: over TCP."},
    {&Config::selection, "SELECTION", "", text(),
     "Where the sizes at which algorithms change come from, as far as they leave results alone: empty: from a short "
     "probe in init, remembered per host; fixed: the defaults of this table; flat_bytes=N: given."},
    {&Config::adasum, "ADASUM", "", word("ranks|nodes"),
     "What op=Adasum combines: ranks: every rank's tensor; nodes: the average of each machine's ranks, as Horovod "
     "does with tensors on GPUs. Rank 0's setting holds for all."},
    {&Config::simd, "SIMD", "", word("auto|scalar|avx2|avx512"),
     "Instruction set of the reductions; all of them give the same bits."},
    // devices
    {&Config::gpu_operations, "GPU_OPERATIONS", "", word("auto|nccl|peers|host"),
     "How tensors in GPU memory are reduced: auto: by NCCL; several ranks on one GPU by this library's own kernels; "
     "else through host memory. nccl, peers (those kernels, on one machine): an error where that is impossible. host: "
     "through host memory."},
    {&Config::gpu_peer_bytes, "GPU_PEER_BYTES", "", bytes(2097152.0, 17179869184.0),
     "GPU memory that each rank gives to each process set whose ranks reduce through it as peers; the least of all "
     "ranks' counts."},
    {&Config::gpu_register, "GPU_REGISTER", "", flag(),
     "Gradients on GPUs lie in memory that NCCL knows in advance, where NCCL (from 2.19 on) can do that."},
    {&Config::cuda_library, "CUDA_LIBRARY", "", text(),
     "File that is loaded as CUDA's driver library or HIP; empty: libcuda.so.1, else libamdhip64.so."},
    {&Config::nccl_library, "NCCL_LIBRARY", "", text(),
     "File that is loaded as NCCL; empty: the copy that the process has loaded, pip's, the system's."},
    {&Config::nccl_folders, "NCCL_FOLDERS", "", text(),
     "Colon-separated folders in which libnccl.so.2 is looked for before the system's; set by the Python package to "
     "those of pip's packages."},
    {&Config::gpu_kernels, "GPU_KERNELS", "", word("auto|off"),
     "Kernels of this library on GPUs: auto: those that were built in, else compiled by NVRTC at the first use; off: "
     "none, copies and host memory do their work."},
    {&Config::nvrtc_library, "NVRTC_LIBRARY", "", text(),
     "File that is loaded as NVRTC; empty: the copy that the process has loaded, pip's, the system's."},
    {&Config::nvrtc_folders, "NVRTC_FOLDERS", "", text(),
     "Colon-separated folders in which NVRTC is looked for before the system's; set by the Python package to those of "
     "pip's packages."},
    {&Config::kernel_cache, "KERNEL_CACHE", "", text(),
     "Folder for what NVRTC has compiled; empty: horoclone in $XDG_CACHE_HOME or ~/.cache; off: none."},
    // network
    {&Config::interfaces, "NETWORK_INTERFACES", "GLOO_IFACE", text(),
     "Comma-separated network interfaces that this rank may be reached on; empty: every one that is up."},
    {&Config::node, "NODE", "", text(),
     "Ranks with different labels count as ranks of different machines: no shared memory between them."},
    {&Config::fabric, "FABRIC", "", text(),
     "Provider of libfabric (verbs, efa, tcp ...) for data between machines; empty: none, TCP carries it."},
    {&Config::socket_buffer_bytes, "SOCKET_BUFFER_BYTES", "", bytes(0, 1073741824.0),
     "Send and receive buffer of each socket; 0 leaves it to the kernel."},
    {&Config::tcp_streams, "TCP_STREAMS", "", count(0, 63),
     "Connections for the data of two ranks on different machines; 0: one, and more where a round trip is long."},
    {&Config::control_fanout, "CONTROL_FANOUT", "", count(0, 1024),
     "Agreement over several machines goes through a tree of their first ranks, of which each has at most this many "
     "others below it; 0: every rank talks to rank 0 itself."},
    {&Config::keepalive_s, "KEEPALIVE_S", "GLOO_TIMEOUT_SECONDS", seconds(1, 32767),
     "Silence after which TCP probes a connection and gives it up as dead; a lost one is tried again for so long."},
    // deadlines
    {&Config::init_timeout_s, "START_TIMEOUT", "START_TIMEOUT", seconds(0.001, 1e7),
     "init fails when ranks are still missing after this time."},
    {&Config::init_report_s, "INIT_REPORT_S", "", seconds(0.001, 1e7),
     "init says which ranks are missing after this time."},
    {&Config::stall_check_disable, "STALL_CHECK_DISABLE", "STALL_CHECK_DISABLE", flag(),
     "No reports about tensors that some ranks have submitted and others have not."},
    {&Config::stall_check_s, "STALL_CHECK_TIME_SECONDS", "STALL_CHECK_TIME_SECONDS", seconds(0.001, 1e7),
     "Age of such a tensor at its first report."},
    {&Config::stall_shutdown_s, "STALL_SHUTDOWN_TIME_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS", seconds(0, 1e7),
     "Age of such a tensor at which the job is aborted; 0: never."},
    {&Config::deadlock_s, "DEADLOCK_TIME_SECONDS", "", seconds(0, 1e7),
     "After this time calls fail whose ranks wait for one another: each in a call that another one of them has not "
     "made. It is said within 5 s. A rank that computes is waited for; one that polls is given ten times as long. 0: never."},
    {&Config::stall_stacks, "STALL_STACKS", "", flag(),
     "Stall reports show the Python stack of late ranks, taken with a signal of its own."},
    {&Config::why, "WHY", "", flag(),
     "Each rank measures where its time goes between collectives; views and the end of the job say why ranks are late."},
    {&Config::liveness_probe_s, "LIVENESS_PROBE_S", "", seconds(0.001, 1e7),
     "A rank that has waited this long asks the late rank's engine for a sign of life."},
    {&Config::liveness_warn_s, "LIVENESS_WARN_S", "", seconds(0.001, 1e7),
     "Silence that is worth a warning; at most half of LIVENESS_ERROR_S if unset."},
    {&Config::liveness_error_s, "LIVENESS_ERROR_S", "GLOO_TIMEOUT_SECONDS", seconds(0.001, 1e7),
     "Silence after which a rank that others wait for counts as lost, unless somebody else hears it."},
    // waiting
    {&Config::spin_pauses, "SPIN_PAUSES", "", count(0, 1e9),
     "CPU pause instructions of a wait before it yields its core. Not set: none where there are more ranks than cores."},
    {&Config::yield_us, "YIELD_US", "", microseconds(0, 1e9),
     "Time for which a wait yields its core before it sleeps."},
    {&Config::thread_affinity, "THREAD_AFFINITY", "THREAD_AFFINITY", text(),
     "Comma-separated CPU numbers, one for each local rank, for the engine's thread; empty: as the main thread."},
    // what is told
    {&Config::log_level, "LOG_LEVEL", "LOG_LEVEL", word("trace|debug|info|warning|error|fatal"),
     "Least severe message that is written to stderr."},
    {&Config::log_hide_time, "LOG_HIDE_TIME", "LOG_HIDE_TIME", flag(),
     "No time in log lines."},
    {&Config::timeline, "TIMELINE", "TIMELINE", text(),
     "File in which rank 0 writes a Chrome trace from init on; DYNAMIC: only between start_timeline() and "
     "stop_timeline()."},
    {&Config::timeline_mark_cycles, "TIMELINE_MARK_CYCLES", "TIMELINE_MARK_CYCLES", flag(),
     "The timeline shows each coordinated step as well."},
    {&Config::timeline_operation_names, "TIMELINE_OPERATION_NAMES", "", flag(),
     "The timeline names tensors allreduce.NAME and allreduce.noname.17, as Horovod does for PyTorch: on by default "
     "where horoclone.torch was imported before init, else off."},
    {&Config::timeline_all_ranks, "TIMELINE_ALL_RANKS", "", flag(),
     "Every rank writes its own timeline (timeline.rank3.json); `horoclone timeline` merges them."},
    {&Config::recorder_dir, "RECORDER_DIR", "", text(),
     "Folder into which each rank writes its last 1,000 operations when something fails or stalls; `horoclone debug` "
     "compares them."},
    {&Config::autotune, "AUTOTUNE", "AUTOTUNE", flag(),
     "1: rank 0 measures while the job runs and looks for better values of the fusion threshold, the batching delay "
     "and the choice of algorithm. What is set by hand stays."},
    {&Config::autotune_log, "AUTOTUNE_LOG", "AUTOTUNE_LOG", text(),
     "File in which rank 0 writes each sample of autotune, as comma-separated values."},
    {&Config::autotune_warmup_samples, "AUTOTUNE_WARMUP_SAMPLES", "AUTOTUNE_WARMUP_SAMPLES", count(0, 1e6),
     "Samples that are thrown away before autotune begins."},
    {&Config::autotune_steps_per_sample, "AUTOTUNE_STEPS_PER_SAMPLE", "AUTOTUNE_STEPS_PER_SAMPLE", count(1, 1e6),
     "Training steps of which one sample is the median."},
    {&Config::autotune_max_samples, "AUTOTUNE_MAX_SAMPLES", "AUTOTUNE_BAYES_OPT_MAX_SAMPLES", count(1, 1e6),
     "Samples after which autotune settles for the best that it has found."},
    {&Config::autotune_noise, "AUTOTUNE_NOISE", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE", number(0, 1),
     "How much samples scatter: other settings must be better by 5 % times this to be preferred."},
};

constexpr LauncherSettingRow kLauncherRows[] = {
    {"SECRET", "", "text", "",
     "Job secret, at least 16 bytes, equal on all ranks; authenticates every connection."},
    {"SECRET_FILE", "", "text", "",
     "File that holds the job secret."},
    {"RANK_METRICS", "", "text", "",
     "Inherited descriptor and offset of the memory for this rank's measurements; set by the launcher."},
    {"SECRET_FD", "", "count", "",
     "Inherited descriptor from which the job secret is read; set by the launcher."},
    {"FUNCTION_FDS", "", "text", "",
     "Two inherited descriptors of a function started with run(); set by the launcher, taken out at start."},
    {"FUNCTION_FOLDER", "", "text", "",
     "Private folder of a function started with run(use_mpi=True); set by the launcher, taken out at start."},
    {"RENDEZVOUS", "", "text", "",
     "host:port, comma-separated, of the store in which ranks find each other; set by the launcher."},
    {"JOB", "", "text", "",
     "Name of the job, part of every handshake; set by the launcher."},
    {"RANK", "RANK", "count", "",
     "This process's rank; set by the launcher."},
    {"SIZE", "SIZE", "count", "",
     "Number of ranks; set by the launcher. Behind a service, of the first generation where the job is elastic."},
    {"LOCAL_RANK", "LOCAL_RANK", "count", "",
     "Rank among the processes of this machine; set by the launcher."},
    {"LOCAL_SIZE", "LOCAL_SIZE", "count", "",
     "Number of ranks on this machine; set by the launcher."},
    {"CROSS_RANK", "CROSS_RANK", "count", "",
     "Position of this machine; set by the launcher."},
    {"CROSS_SIZE", "CROSS_SIZE", "count", "",
     "Number of machines; set by the launcher."},
    {"HOSTNAME", "HOSTNAME", "text", "",
     "Name of this machine in the launcher's list of hosts."},
    {"ELASTIC", "ELASTIC", "flag", "0",
     "1: the job goes on when ranks are lost or come; set by the launcher."},
    {"ELASTIC_TIMEOUT", "ELASTIC_TIMEOUT", "seconds", "600",
     "How long an elastic job waits until enough processes are there; then it ends."},
    {"ELASTIC_QUORUM", "", "text", "",
     "majority or any: with --survive-launcher, or behind a service, who may go on where members are silent. Not set: "
     "any on one host, majority on several."},
    {"SURVIVE_LAUNCHER", "", "flag", "0",
     "1: this process goes on without its launcher; set by horoclonerun --survive-launcher."},
    {"SERVICE", "", "text", "",
     "DNS name behind which all processes of a job without a launcher are: a headless service of Kubernetes; RANK "
     "follows from JOB_COMPLETION_INDEX or the host's name."},
    {"PORT", "", "count", "",
     "Port on which the processes of a service listen; not set: it follows from JOB."},
    {"MIN_NP", "", "count", "1",
     "Smallest number of processes of an elastic job behind a service."},
    {"MAX_NP", "", "count", "",
     "Largest number of ranks of an elastic job behind a service."},
    {"MEMBER", "", "text", "",
     "Name of a process of an elastic job, 32 hex digits; set by the launcher."},
    {"NOTICE", "", "seconds", "30",
     "How long after SIGTERM a process of an elastic job may go on to its next commit; then it leaves."},
    {"FAILPOINTS", "", "text", "",
     "Faults that a test asks for, at named points: see docs/failpoints.md."},
    {"NOTICE_SIGNAL", "", "text", "",
     "Another signal that means what SIGTERM means to a process of an elastic job: USR1 or USR2. In a job of a fixed "
     "size it ends all ranks at their next commit, which is saved, with code 75."},
    {"SPARES", "", "flag", "0",
     "1: workers wait for a loss in this job, and run the reset callbacks when they replace a rank; set by horoclonerun."},
    {"REPLICA_INTERVAL", "", "seconds", "0",
     "Least time between two commits that newcomers and spares of an elastic job are given; that takes half of the time at most."},
    {"COMPARE", "", "text", "warn",
     "What a distributed optimizer does where the ranks have different weights, optimizer state or reduced gradients: "
     "warn (once), error (on every rank), repair (from a rank of the majority), off (it does not look)."},
    {"COMPARE_STEPS", "", "count", "100",
     "In how many steps all of these are compared once, a share at a time; 0: only at the beginning."},
    {"MPI_THREADS_DISABLE", "MPI_THREADS_DISABLE", "flag", "0",
     "1: where horoclone itself has to load mpi4py, it asks MPI for one thread only (MPI_THREAD_FUNNELED)."},
    {"NO_HOROVOD_ALIAS", "", "flag", "0",
     "1: `import horovod` does not find horoclone under that name; read when horovod is first imported."},
};
// clang-format on

#define HC_ONE(type, field, default_value) +1
static_assert(std::size(kRows) == 0 HC_SETTINGS(HC_ONE), "a row for each field of Config");
#undef HC_ONE
constexpr bool has_row(decltype(SettingRow::field) field) {
  return std::ranges::any_of(kRows, [&](const SettingRow& row) { return row.field == field; });
}
#define HC_HAS_ROW(type, field, default_value) static_assert(has_row(&Config::field), #field " has no row above");
HC_SETTINGS(HC_HAS_ROW)
#undef HC_HAS_ROW

}  // namespace

std::span<const SettingRow> setting_rows() { return kRows; }
std::span<const LauncherSettingRow> launcher_setting_rows() { return kLauncherRows; }

}  // namespace hc
