// Our declarations of HIP, which are those of CUDA's driver under other names, against AMD's hip_runtime_api.h.
#define __HIP_PLATFORM_AMD__
#include <hip/hip_runtime_api.h>

#include <cstddef>

#include "device/cuda_api.h"
#include "same.h"

// The header has templates of these names, too.
hipError_t (&alloc)(void**, size_t) = ::hipMalloc;
hipError_t (&host_alloc)(void**, size_t, unsigned) = ::hipHostMalloc;
hipError_t (&pool_alloc)(void**, size_t, hipMemPool_t, hipStream_t) = ::hipMallocFromPoolAsync;
#define hipMalloc alloc
#define hipHostMalloc host_alloc
#define hipMallocFromPoolAsync pool_alloc

namespace {

// An address in device memory is a pointer in HIP, which is passed as the number is.
template <class Theirs, class Ours>
using AsInHip = std::conditional_t<std::is_same_v<Theirs, void*> && std::is_same_v<Ours, hc::CuPointer>, void*, Ours>;
template <class Theirs, class Ours>
struct SameInHip;
template <class R, class... A, class S, class... B>
struct SameInHip<R (*)(A...), S (*)(B...)> : abi::SameCall<R (*)(A...), S (*)(AsInHip<A, B>...)> {};

}  // namespace

int main() {
  using namespace hc;
#define COMPARE(name, cuda, hip, arguments) \
  abi::expect(SameInHip<decltype(&::hip), CuResult(*) arguments>::value, "the call of " #hip);
  HC_CUDA_SYMBOLS(COMPARE)
#undef COMPARE
  ABI_VALUE(hipSuccess, kCuSuccess);
  ABI_VALUE(hipErrorOutOfMemory, kCuOutOfMemory);
  ABI_VALUE(hipErrorNotInitialized, kCuNotInitialized);
  ABI_VALUE(hipErrorNotReady, kCuNotReady);
  ABI_VALUE(hipErrorECCNotCorrectable, 214);
  ABI_VALUE(hipErrorIllegalAddress, 700);
  ABI_VALUE(hipErrorLaunchTimeOut, 702);
  ABI_VALUE(hipErrorAssert, 710);
  ABI_VALUE(hipErrorLaunchFailure, 719);
  ABI_VALUE(hipStreamNonBlocking, kCuStreamNonBlocking);
  ABI_VALUE(hipEventDisableTiming, kCuEventDisableTiming);
  ABI_VALUE(hipStreamCaptureModeRelaxed, kCuCaptureRelaxed);
  ABI_VALUE(hipStreamCaptureStatusNone, 0);
  ABI_VALUE(hipHostMallocPortable, 1);
  ABI_VALUE(hipIpcMemLazyEnablePeerAccess, 1);
  ABI_VALUE(sizeof(hipUUID), sizeof(CuUuid));
  ABI_VALUE(sizeof(hipMemPoolProps), sizeof(CuMemPoolProps));
  ABI_VALUE(offsetof(hipMemPoolProps, location.id), offsetof(CuMemPoolProps, device));
  ABI_VALUE(hipMemAllocationTypePinned, CuMemPoolProps{}.allocation);
  ABI_VALUE(hipMemHandleTypeNone, CuMemPoolProps{}.handles);
  ABI_VALUE(hipMemLocationTypeDevice, CuMemPoolProps{}.location);
  ABI_VALUE(hipMemPoolReuseAllowInternalDependencies, kCuPoolReuseInternalDependencies);
  ABI_VALUE(hipMemPoolAttrReleaseThreshold, kCuPoolReleaseThreshold);
  ABI_VALUE(hipDeviceAttributeMultiprocessorCount, kHipAttributes.processors);
  ABI_VALUE(hipDeviceAttributeMemoryPoolsSupported, kHipAttributes.memory_pools);
  ABI_VALUE(offsetof(hipDeviceProp_tR0600, gcnArchName), kHipArchitectureAt);
  ABI_VALUE(sizeof(hipDeviceProp_tR0600::gcnArchName), kHipArchitectureBytes);
  abi::expect(sizeof(hipDeviceProp_tR0600) <= kHipPropertiesBytes, "the properties are larger than ours");
  ABI_VALUE(sizeof(hipDevice_t), sizeof(CuDevice));
  return abi::report("HIP", HIP_VERSION);
}
