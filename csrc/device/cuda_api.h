// What is used of NVIDIA's driver API (libcuda.so.1) and, under the same names, of AMD's HIP (libamdhip64.so): types
// and the list of functions, declared here so that no header of either is needed; facts from their public references.
// Loaded at run time, never linked. Thread: any. Calling cuInit makes no context: contexts are the frameworks'
// business.
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

// What is below has the same value in HIP, as have the structures the same layout, but for the attributes of a device.
inline constexpr CuResult kCuSuccess = 0;
inline constexpr CuResult kCuOutOfMemory = 2;
inline constexpr CuResult kCuNotInitialized = 3;  // also in a child of a process that has used CUDA
inline constexpr CuResult kCuNotReady = 600;
inline constexpr unsigned kCuStreamNonBlocking = 1;
inline constexpr unsigned kCuEventDisableTiming = 2;
inline constexpr int kCuCaptureRelaxed = 2;  // of a thread: its calls may come while another thread captures a graph
// Attributes of a device.
inline constexpr int kCuCapabilityMajor = 75, kCuCapabilityMinor = 76;
struct CuAttributes {
  int processors = 16, memory_pools = 115;
};
inline constexpr CuAttributes kHipAttributes{.processors = 63, .memory_pools = 88};
// In hipDeviceProp_tR0600, of which nothing else is read: gcnArchName. It fits into so many bytes.
inline constexpr size_t kHipPropertiesBytes = 4096, kHipArchitectureAt = 1160, kHipArchitectureBytes = 256;
// Attributes of a pool: an int, a uint64_t.
inline constexpr int kCuPoolReuseInternalDependencies = 3, kCuPoolReleaseThreshold = 4;

// X(name here, name in CUDA, name in HIP, arguments). Every one of them is needed; all are there since CUDA 11.4 and
// ROCm 6.0. HIP has contexts only so far that a thread's current one is its current device.
// clang-format off
#define HC_CUDA_SYMBOLS(X)                                                                                        \
  X(cuInit, "cuInit", hipInit, (unsigned))                                                                        \
  X(cuDriverGetVersion, "cuDriverGetVersion", hipRuntimeGetVersion, (int*))                                       \
  X(cuGetErrorString, "cuGetErrorString", hipDrvGetErrorString, (CuResult, const char**))                         \
  X(cuDeviceGetCount, "cuDeviceGetCount", hipGetDeviceCount, (int*))                                              \
  X(cuDeviceGet, "cuDeviceGet", hipDeviceGet, (CuDevice*, int))                                                   \
  X(cuDeviceGetName, "cuDeviceGetName", hipDeviceGetName, (char*, int, CuDevice))                                 \
  X(cuDeviceGetUuid, "cuDeviceGetUuid", hipDeviceGetUuid, (CuUuid*, CuDevice))                                    \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", hipDeviceGetAttribute, (int*, int, CuDevice))                   \
  X(cuDevicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState", hipDevicePrimaryCtxGetState,                        \
    (CuDevice, unsigned*, int*))                                                                                  \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", hipDevicePrimaryCtxRetain, (CuContext*, CuDevice))      \
  X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", hipDevicePrimaryCtxRelease, (CuDevice))            \
  X(cuCtxGetCurrent, "cuCtxGetCurrent", hipCtxGetCurrent, (CuContext*))                                           \
  X(cuCtxSetCurrent, "cuCtxSetCurrent", hipCtxSetCurrent, (CuContext))                                            \
  X(cuCtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", hipDeviceGetStreamPriorityRange,                  \
    (int*, int*))                                                                                                 \
  X(cuStreamCreateWithPriority, "cuStreamCreateWithPriority", hipStreamCreateWithPriority,                        \
    (CuStream*, unsigned, int))                                                                                   \
  X(cuStreamDestroy, "cuStreamDestroy_v2", hipStreamDestroy, (CuStream))                                          \
  X(cuStreamQuery, "cuStreamQuery", hipStreamQuery, (CuStream))                                                   \
  X(cuStreamWaitEvent, "cuStreamWaitEvent", hipStreamWaitEvent, (CuStream, CuEvent, unsigned))                    \
  X(cuStreamIsCapturing, "cuStreamIsCapturing", hipStreamIsCapturing, (CuStream, int*))                           \
  X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", hipThreadExchangeStreamCaptureMode,   \
    (int*))                                                                                                       \
  X(cuEventCreate, "cuEventCreate", hipEventCreateWithFlags, (CuEvent*, unsigned))                                \
  X(cuEventDestroy, "cuEventDestroy_v2", hipEventDestroy, (CuEvent))                                              \
  X(cuEventRecord, "cuEventRecord", hipEventRecord, (CuEvent, CuStream))                                          \
  X(cuEventQuery, "cuEventQuery", hipEventQuery, (CuEvent))                                                       \
  X(cuMemAlloc, "cuMemAlloc_v2", hipMalloc, (CuPointer*, size_t))                                                 \
  X(cuMemFree, "cuMemFree_v2", hipFree, (CuPointer))                                                              \
  X(cuMemPoolCreate, "cuMemPoolCreate", hipMemPoolCreate, (CuMemPool*, const CuMemPoolProps*))                    \
  X(cuMemPoolDestroy, "cuMemPoolDestroy", hipMemPoolDestroy, (CuMemPool))                                         \
  X(cuMemPoolSetAttribute, "cuMemPoolSetAttribute", hipMemPoolSetAttribute, (CuMemPool, int, void*))              \
  X(cuMemPoolTrimTo, "cuMemPoolTrimTo", hipMemPoolTrimTo, (CuMemPool, size_t))                                    \
  X(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", hipMallocFromPoolAsync,                                   \
    (CuPointer*, size_t, CuMemPool, CuStream))                                                                    \
  X(cuMemFreeAsync, "cuMemFreeAsync", hipFreeAsync, (CuPointer, CuStream))                                        \
  X(cuMemHostAlloc, "cuMemHostAlloc", hipHostMalloc, (void**, size_t, unsigned))                                  \
  X(cuMemFreeHost, "cuMemFreeHost", hipHostFree, (void*))                                                         \
  X(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", hipMemcpyDtoDAsync, (CuPointer, CuPointer, size_t, CuStream))      \
  X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", hipMemcpyDtoHAsync, (void*, CuPointer, size_t, CuStream))          \
  X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", hipMemcpyHtoDAsync,                                                \
    (CuPointer, const void*, size_t, CuStream))                                                                   \
  X(cuModuleLoadData, "cuModuleLoadData", hipModuleLoadData, (CuModule*, const void*))                            \
  X(cuModuleUnload, "cuModuleUnload", hipModuleUnload, (CuModule))                                                \
  X(cuModuleGetFunction, "cuModuleGetFunction", hipModuleGetFunction, (CuFunction*, CuModule, const char*))       \
  X(cuLaunchKernel, "cuLaunchKernel", hipModuleLaunchKernel,                                                      \
    (CuFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CuStream, void**, void**)) \
  X(cuIpcGetMemHandle, "cuIpcGetMemHandle", hipIpcGetMemHandle, (CuIpcHandle*, CuPointer))                        \
  X(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2", hipIpcOpenMemHandle, (CuPointer*, CuIpcHandle, unsigned))        \
  X(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", hipIpcCloseMemHandle, (CuPointer))
// clang-format on

// Whose GPUs: NVIDIA's or AMD's. It decides which NCCL and which compiler are looked for.
struct GpuPlatform {
  bool is_hip = false;
  int version = 0;  // as the driver says: 12040 is CUDA 12.4, 60342131 HIP 6.3; 0: unknown
  const char* name() const { return is_hip ? "HIP" : "CUDA"; }
  std::string version_text() const;
};

struct CudaApi {
#define HC_FIELD(name, cuda, hip, arguments) CuResult(*name) arguments = nullptr;
  HC_CUDA_SYMBOLS(HC_FIELD)
#undef HC_FIELD
  CuResult (*hipGetDeviceProperties)(void* properties, CuDevice) = nullptr;  // null: CUDA
  std::shared_ptr<Library> library;
  std::string file;
  GpuPlatform platform;
  CuAttributes attributes;

  // `path`: a file to load, CUDA's or HIP's; empty: the one that the process has loaded, else what is there, CUDA's
  // first. Unsupported says which file or symbol was missing, and what to do about it. Initialises the driver.
  static Result<std::shared_ptr<const CudaApi>> load(const std::string& path);
  // Ok, or "cuMemAlloc: out of memory (CUDA error 2)" as kInternal, with what to do where that is known.
  Status check(CuResult result, const char* call) const;
  // What kernels are compiled for: "sm_90", "gfx942:sramecc+:xnack-".
  Result<std::string> architecture(CuDevice device) const;
};

}  // namespace hc
