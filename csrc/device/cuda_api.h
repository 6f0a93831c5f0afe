// What is used of NVIDIA's driver API (libcuda.so.1): types and the list of functions, declared here so that no CUDA
// header is needed; facts from NVIDIA's public reference of the driver API. Loaded at run time, never linked.
// Thread: any. Calling cuInit makes no context: contexts are the frameworks' business.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/library.h"
#include "base/status.h"

namespace hc {

using CuResult = int;
using CuDevice = int;
using CuPointer = uint64_t;  // an address in device memory
inline CuPointer cu_pointer(const void* at) { return reinterpret_cast<CuPointer>(at); }
using CuContext = struct CuContextTag*;
using CuStream = struct CuStreamTag*;  // null: the legacy default stream of the current context
using CuEvent = struct CuEventTag*;
using CuModule = struct CuModuleTag*;
using CuFunction = struct CuFunctionTag*;
using CuMemPool = struct CuMemPoolTag*;
struct CuUuid {
  unsigned char bytes[16];
};

struct CuIpcHandle {  // passed by value
  char bytes[64];
};

struct CuMemPoolProps {
  int allocation = 1;  // CU_MEM_ALLOCATION_TYPE_PINNED: the only one
  int handles = 0;     // no other process maps its memory
  int location = 1;    // CU_MEM_LOCATION_TYPE_DEVICE, and which one
  int device = 0;
  void* security = nullptr;  // Windows
  char reserved[64] = {};
};

inline constexpr CuResult kCuSuccess = 0;
inline constexpr CuResult kCuOutOfMemory = 2;
inline constexpr CuResult kCuNotInitialized = 3;  // also in a child of a process that has used CUDA
inline constexpr CuResult kCuNotReady = 600;
inline constexpr unsigned kCuStreamNonBlocking = 1;
inline constexpr unsigned kCuEventDisableTiming = 2;
inline constexpr int kCuCaptureRelaxed = 2;  // of a thread: its calls may come while another thread captures a graph
// Attributes of a device.
inline constexpr int kCuProcessors = 16, kCuCapabilityMajor = 75, kCuCapabilityMinor = 76, kCuMemoryPools = 115;
// Attributes of a pool: an int, a uint64_t.
inline constexpr int kCuPoolReuseInternalDependencies = 3, kCuPoolReleaseThreshold = 4;

// X(name here, name in the library, arguments). Every one of them is needed; all are there since CUDA 11.4.
// clang-format off
#define HC_CUDA_SYMBOLS(X)                                                                                     \
  X(cuInit, "cuInit", (unsigned))                                                                              \
  X(cuDriverGetVersion, "cuDriverGetVersion", (int*))                                                          \
  X(cuGetErrorString, "cuGetErrorString", (CuResult, const char**))                                            \
  X(cuDeviceGetCount, "cuDeviceGetCount", (int*))                                                              \
  X(cuDeviceGet, "cuDeviceGet", (CuDevice*, int))                                                              \
  X(cuDeviceGetName, "cuDeviceGetName", (char*, int, CuDevice))                                                \
  X(cuDeviceGetUuid, "cuDeviceGetUuid", (CuUuid*, CuDevice))                                                   \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int*, int, CuDevice))                                       \
  X(cuDevicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState", (CuDevice, unsigned*, int*))                     \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CuContext*, CuDevice))                              \
  X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (CuDevice))                                     \
  X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CuContext))                                                      \
  X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CuContext*))                                                       \
  X(cuCtxGetCurrent, "cuCtxGetCurrent", (CuContext*))                                                          \
  X(cuCtxSetCurrent, "cuCtxSetCurrent", (CuContext))                                                           \
  X(cuCtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", (int*, int*))                                  \
  X(cuStreamCreateWithPriority, "cuStreamCreateWithPriority", (CuStream*, unsigned, int))                      \
  X(cuStreamDestroy, "cuStreamDestroy_v2", (CuStream))                                                         \
  X(cuStreamQuery, "cuStreamQuery", (CuStream))                                                                \
  X(cuStreamWaitEvent, "cuStreamWaitEvent", (CuStream, CuEvent, unsigned))                                     \
  X(cuStreamIsCapturing, "cuStreamIsCapturing", (CuStream, int*))                                              \
  X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (int*))                            \
  X(cuEventCreate, "cuEventCreate", (CuEvent*, unsigned))                                                      \
  X(cuEventDestroy, "cuEventDestroy_v2", (CuEvent))                                                            \
  X(cuEventRecord, "cuEventRecord", (CuEvent, CuStream))                                                       \
  X(cuEventQuery, "cuEventQuery", (CuEvent))                                                                   \
  X(cuMemAlloc, "cuMemAlloc_v2", (CuPointer*, size_t))                                                         \
  X(cuMemFree, "cuMemFree_v2", (CuPointer))                                                                    \
  X(cuMemPoolCreate, "cuMemPoolCreate", (CuMemPool*, const CuMemPoolProps*))                                   \
  X(cuMemPoolDestroy, "cuMemPoolDestroy", (CuMemPool))                                                         \
  X(cuMemPoolSetAttribute, "cuMemPoolSetAttribute", (CuMemPool, int, void*))                                   \
  X(cuMemPoolTrimTo, "cuMemPoolTrimTo", (CuMemPool, size_t))                                                   \
  X(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", (CuPointer*, size_t, CuMemPool, CuStream))             \
  X(cuMemFreeAsync, "cuMemFreeAsync", (CuPointer, CuStream))                                                   \
  X(cuMemHostAlloc, "cuMemHostAlloc", (void**, size_t, unsigned))                                              \
  X(cuMemFreeHost, "cuMemFreeHost", (void*))                                                                   \
  X(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", (CuPointer, CuPointer, size_t, CuStream))                       \
  X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void*, CuPointer, size_t, CuStream))                           \
  X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (CuPointer, const void*, size_t, CuStream))                     \
  X(cuModuleLoadData, "cuModuleLoadData", (CuModule*, const void*))                                            \
  X(cuModuleUnload, "cuModuleUnload", (CuModule))                                                              \
  X(cuModuleGetFunction, "cuModuleGetFunction", (CuFunction*, CuModule, const char*))                          \
  X(cuLaunchKernel, "cuLaunchKernel",                                                                          \
    (CuFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CuStream, void**, void**))  \
  X(cuIpcGetMemHandle, "cuIpcGetMemHandle", (CuIpcHandle*, CuPointer))                                         \
  X(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2", (CuPointer*, CuIpcHandle, unsigned))                          \
  X(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", (CuPointer))
// clang-format on

struct CudaApi {
#define HC_FIELD(name, exported, arguments) CuResult(*name) arguments = nullptr;
  HC_CUDA_SYMBOLS(HC_FIELD)
#undef HC_FIELD
  std::shared_ptr<Library> library;
  std::string file;
  int version = 0;  // of CUDA, as the driver says: 12040 is 12.4

  // `path`: a file to load instead of the driver's own name. Unsupported says which file or symbol was missing, and
  // what to do about it. Initialises the driver.
  static Result<std::shared_ptr<const CudaApi>> load(const std::string& path);
  // Ok, or "cuMemAlloc: out of memory (CUDA error 2)" as kInternal, with what to do where that is known.
  Status check(CuResult result, const char* call) const;
};

}  // namespace hc
