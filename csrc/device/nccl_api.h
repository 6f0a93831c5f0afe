// What is used of NCCL (libnccl.so.2), or of RCCL (librccl.so.1), which has the same functions: types and the list of
// functions, declared here so that no header is needed; facts from NCCL's public reference. Loaded at run time: the
// copy that the framework has loaded first, then pip's packages, then the system's. Thread: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "base/dtype.h"
#include "base/library.h"
#include "base/status.h"
#include "device/cuda_api.h"

namespace hc {

using NcclResult = int;
using NcclHandle = struct NcclHandleTag*;
struct NcclId {
  char bytes[128];
};
// The head of ncclConfig_t, as far as NCCL 2.14 defined it, or with a name for the communicator as 2.27 did. `size` and
// `version` say so, and newer ones then take their own defaults for what follows.
struct NcclConfig {
  static constexpr int kUndefined = std::numeric_limits<int>::min();
  size_t size = 24;
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
  int cga_cluster_size = kUndefined, min_blocks = kUndefined, max_blocks = kUndefined;
  const char* network = nullptr;
  int split_share = kUndefined, traffic_class = kUndefined;
  const char* name = nullptr;  // lives as long as the communicator
  void set_name(const char* of_communicator) {
    size = sizeof(NcclConfig);
    version = 22700;
    name = of_communicator;
  }
};
static_assert(sizeof(NcclConfig) == 56);

inline constexpr NcclResult kNcclSuccess = 0;
inline constexpr NcclResult kNcclInProgress = 7;
enum NcclType { kNcclI8, kNcclU8, kNcclI32, kNcclU32, kNcclI64, kNcclU64, kNcclF16, kNcclF32, kNcclF64, kNcclBF16 };
enum NcclOp { kNcclSum, kNcclProduct, kNcclMax, kNcclMin, kNcclAverage };
inline constexpr int kNcclScalarOnHost = 1;  // ncclScalarHostImmediate: the scalar is read during the call

// Non-blocking communicators and ncclCommFinalize came with 2.14; ncclAvg, bfloat16 and ncclRedOpCreatePreMulSum
// before.
inline constexpr int kNcclOldest = 21400;
inline constexpr int kNcclRegisters = 21900, kNcclHasWindows = 22700, kNcclShares = 23003;  // versions
// Before, a group that was under way lived in the memory of the thread that had called it.
inline constexpr int kNcclNonBlocking = 22700;
inline constexpr int kNcclSymmetric = 1;  // of a window: all ranks pass the same offsets in it

// X(name, return type, arguments). Every one of them is needed and there in kNcclOldest.
// clang-format off
#define HC_NCCL_SYMBOLS(X)                                                                                     \
  X(ncclGetVersion, NcclResult, (int*))                                                                        \
  X(ncclGetErrorString, const char*, (NcclResult))                                                             \
  X(ncclGetLastError, const char*, (NcclHandle))                                                               \
  X(ncclGetUniqueId, NcclResult, (NcclId*))                                                                    \
  X(ncclCommInitRankConfig, NcclResult, (NcclHandle*, int, NcclId, int, NcclConfig*))                          \
  X(ncclCommGetAsyncError, NcclResult, (NcclHandle, NcclResult*))                                              \
  X(ncclCommFinalize, NcclResult, (NcclHandle))                                                                \
  X(ncclCommDestroy, NcclResult, (NcclHandle))                                                                 \
  X(ncclCommAbort, NcclResult, (NcclHandle))                                                                   \
  X(ncclGroupStart, NcclResult, ())                                                                            \
  X(ncclGroupEnd, NcclResult, ())                                                                              \
  X(ncclAllReduce, NcclResult, (const void*, void*, size_t, int, int, NcclHandle, CuStream))                   \
  X(ncclReduce, NcclResult, (const void*, void*, size_t, int, int, int, NcclHandle, CuStream))                 \
  X(ncclBroadcast, NcclResult, (const void*, void*, size_t, int, int, NcclHandle, CuStream))                   \
  X(ncclAllGather, NcclResult, (const void*, void*, size_t, int, NcclHandle, CuStream))                        \
  X(ncclReduceScatter, NcclResult, (const void*, void*, size_t, int, int, NcclHandle, CuStream))               \
  X(ncclSend, NcclResult, (const void*, size_t, int, int, NcclHandle, CuStream))                               \
  X(ncclRecv, NcclResult, (void*, size_t, int, int, NcclHandle, CuStream))                                     \
  X(ncclRedOpCreatePreMulSum, NcclResult, (int*, const void*, int, int, NcclHandle))                           \
  X(ncclRedOpDestroy, NcclResult, (int, NcclHandle))
// Newer ones: null where this NCCL lacks them.
#define HC_NCCL_NEWER_SYMBOLS(X)                                                                               \
  X(ncclMemAlloc, NcclResult, (void**, size_t))                                                                \
  X(ncclMemFree, NcclResult, (void*))                                                                          \
  X(ncclCommRegister, NcclResult, (NcclHandle, void*, size_t, void**))                                         \
  X(ncclCommDeregister, NcclResult, (NcclHandle, void*))                                                       \
  X(ncclCommWindowRegister, NcclResult, (NcclHandle, void*, size_t, void**, int))                              \
  X(ncclCommWindowDeregister, NcclResult, (NcclHandle, void*))                                                 \
  X(ncclCommShrink, NcclResult, (NcclHandle, int*, int, NcclHandle*, NcclConfig*, int))
// clang-format on

struct NcclApi {
#define HC_FIELD(name, type, arguments) type(*name) arguments = nullptr;
  HC_NCCL_SYMBOLS(HC_FIELD)
  HC_NCCL_NEWER_SYMBOLS(HC_FIELD)
#undef HC_FIELD
  std::shared_ptr<Library> library;
  std::string file;
  std::string found;  // where: "already loaded in this process", "pip package", ...
  int version = 0;    // 22809 is 2.28.9
  bool is_rccl = false;

  // `path`: a file to load instead of searching. `folders`: pip's package folders, colon-separated. Unsupported says
  // what was missing or too old and what to do. `platform` chooses between NCCL and RCCL, and the advice.
  static Result<std::shared_ptr<const NcclApi>> load(const std::string& path, const std::string& folders,
                                                     const GpuPlatform& platform);
  // How NCCL can be told of memory in advance, which must be its own (ncclMemAlloc): a window, the same on all ranks;
  // else each rank's buffer by itself. Not RCCL: whether its calls of these names do that was never tried.
  enum class Registration { kNone, kBuffers, kWindows };
  Registration registration() const;
  bool registers_buffers() const;
  // Ok, or NCCL's own words as kInternal. `comm` may be null.
  Status check(NcclResult result, const char* call, NcclHandle comm) const;
  // Whether what was called on `comm` is still on its way; the error that NCCL met meanwhile.
  Result<bool> is_pending(NcclHandle comm) const;
};

std::string nccl_version_text(int version);  // "2.28.9"

// What NCCL tells the GPUs of two ranks apart by. It refuses two ranks on one GPU of one host.
struct NcclPlace {
  CuUuid uuid{};
  uint64_t host = 0;    // hash of NCCL_HOSTID, which NCCL takes for the machine's name; 0: unset
  uint64_t shares = 0;  // NCCL_MULTI_RANK_GPU_ENABLE tells it to accept them, from 2.30.3 on
  static NcclPlace of(const CuUuid& uuid, int version);
};
bool is_same_gpu(const NcclPlace& a, const NcclPlace& b);  // of ranks on one machine
bool nccl_refuses(const NcclPlace& a, const NcclPlace& b);

}  // namespace hc
