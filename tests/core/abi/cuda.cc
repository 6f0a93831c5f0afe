// Our declarations of CUDA's driver against NVIDIA's cuda.h: calls, names in the library, numbers, layouts.
#include <cuda.h>

#include <string>

#include "device/cuda_api.h"
#include "same.h"

namespace {

// What the header calls by a newer name, which has the same arguments: ours is there as well.
bool is_known(const std::string& ours, const std::string& header) {
  return ours == "cuDeviceGetUuid" && header == "cuDeviceGetUuid_v2";
}

}  // namespace

int main() {
  using namespace hc;
#define COMPARE(name, exported, hip, arguments)                                                       \
  abi::expect(abi::SameCall<decltype(&name), CuResult(*) arguments>::value, "the call of " exported); \
  abi::expect(std::string(ABI_TEXT(name)) == exported || is_known(exported, ABI_TEXT(name)),          \
              "the header's name for " exported ": " ABI_TEXT(name));
  HC_CUDA_SYMBOLS(COMPARE)
#undef COMPARE
  ABI_VALUE(CUDA_SUCCESS, kCuSuccess);
  ABI_VALUE(CUDA_ERROR_OUT_OF_MEMORY, kCuOutOfMemory);
  ABI_VALUE(CUDA_ERROR_NOT_INITIALIZED, kCuNotInitialized);
  ABI_VALUE(CUDA_ERROR_NOT_READY, kCuNotReady);
  ABI_VALUE(CUDA_ERROR_ECC_UNCORRECTABLE, 214);
  ABI_VALUE(CUDA_ERROR_ILLEGAL_ADDRESS, 700);
  ABI_VALUE(CUDA_ERROR_LAUNCH_FAILED, 719);
  ABI_VALUE(CU_STREAM_NON_BLOCKING, kCuStreamNonBlocking);
  ABI_VALUE(CU_EVENT_DISABLE_TIMING, kCuEventDisableTiming);
  ABI_VALUE(CU_STREAM_CAPTURE_MODE_RELAXED, kCuCaptureRelaxed);
  ABI_VALUE(CU_STREAM_CAPTURE_STATUS_NONE, 0);
  ABI_VALUE(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, CuAttributes{}.processors);
  ABI_VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, kCuCapabilityMajor);
  ABI_VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, kCuCapabilityMinor);
  ABI_VALUE(CU_MEMHOSTALLOC_PORTABLE, 1);
  ABI_VALUE(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, 1);
  ABI_VALUE(sizeof(CUipcMemHandle), sizeof(CuIpcHandle));
  ABI_VALUE(alignof(CUipcMemHandle), alignof(CuIpcHandle));
  ABI_VALUE(sizeof(CUuuid), sizeof(CuUuid));
  ABI_VALUE(sizeof(CUmemPoolProps), sizeof(CuMemPoolProps));
  ABI_VALUE(offsetof(CUmemPoolProps, location.id), offsetof(CuMemPoolProps, device));
  ABI_VALUE(CU_MEM_ALLOCATION_TYPE_PINNED, CuMemPoolProps{}.allocation);
  ABI_VALUE(CU_MEM_HANDLE_TYPE_NONE, CuMemPoolProps{}.handles);
  ABI_VALUE(CU_MEM_LOCATION_TYPE_DEVICE, CuMemPoolProps{}.location);
  ABI_VALUE(CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, kCuPoolReleaseThreshold);
  ABI_VALUE(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, CuAttributes{}.memory_pools);
  ABI_VALUE(sizeof(CUdeviceptr), sizeof(CuPointer));
  ABI_VALUE(sizeof(CUdevice), sizeof(CuDevice));
  ABI_VALUE(sizeof(CUresult), sizeof(CuResult));
  return abi::report("CUDA", CUDA_VERSION);
}
