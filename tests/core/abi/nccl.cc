// Our declarations of NCCL against its nccl.h: calls, numbers, layouts. What may be absent is compared from the version on
// that has it.
#include <nccl.h>

#include <cstddef>

#include "device/nccl_api.h"
#include "same.h"

int main() {
  using namespace hc;
#define COMPARE(name, type, arguments) \
  abi::expect(abi::SameCall<decltype(&::name), type(*) arguments>::value, "the call of " #name);
  HC_NCCL_SYMBOLS(COMPARE)
#if NCCL_VERSION_CODE >= 21900
  COMPARE(ncclMemAlloc, NcclResult, (void**, size_t))
  COMPARE(ncclMemFree, NcclResult, (void*))
  COMPARE(ncclCommRegister, NcclResult, (NcclHandle, void*, size_t, void**))
  COMPARE(ncclCommDeregister, NcclResult, (NcclHandle, void*))
#endif
#if NCCL_VERSION_CODE >= 22700
  COMPARE(ncclCommWindowRegister, NcclResult, (NcclHandle, void*, size_t, void**, int))
  COMPARE(ncclCommWindowDeregister, NcclResult, (NcclHandle, void*))
  COMPARE(ncclCommShrink, NcclResult, (NcclHandle, int*, int, NcclHandle*, NcclConfig*, int))
  ABI_VALUE(NCCL_WIN_COLL_SYMMETRIC, kNcclSymmetric);
  ABI_VALUE(offsetof(ncclConfig_t, commName), offsetof(NcclConfig, name));
  ABI_VALUE(NCCL_CONFIG_UNDEF_INT, NcclConfig::kUndefined);
#endif
#undef COMPARE
  ABI_VALUE(offsetof(ncclConfig_t, size), offsetof(NcclConfig, size));
  ABI_VALUE(offsetof(ncclConfig_t, magic), offsetof(NcclConfig, magic));
  ABI_VALUE(offsetof(ncclConfig_t, version), offsetof(NcclConfig, version));
  ABI_VALUE(offsetof(ncclConfig_t, blocking), offsetof(NcclConfig, blocking));
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  ABI_VALUE(theirs.magic, NcclConfig{}.magic);
  ABI_VALUE(ncclSuccess, kNcclSuccess);
  ABI_VALUE(ncclInProgress, kNcclInProgress);
  ABI_VALUE(ncclInt8, kNcclI8);
  ABI_VALUE(ncclUint8, kNcclU8);
  ABI_VALUE(ncclInt32, kNcclI32);
  ABI_VALUE(ncclUint32, kNcclU32);
  ABI_VALUE(ncclInt64, kNcclI64);
  ABI_VALUE(ncclUint64, kNcclU64);
  ABI_VALUE(ncclFloat16, kNcclF16);
  ABI_VALUE(ncclFloat32, kNcclF32);
  ABI_VALUE(ncclFloat64, kNcclF64);
  ABI_VALUE(ncclBfloat16, kNcclBF16);
  ABI_VALUE(ncclSum, kNcclSum);
  ABI_VALUE(ncclProd, kNcclProduct);
  ABI_VALUE(ncclMax, kNcclMax);
  ABI_VALUE(ncclMin, kNcclMin);
  ABI_VALUE(ncclAvg, kNcclAverage);
  ABI_VALUE(ncclScalarHostImmediate, kNcclScalarOnHost);
  ABI_VALUE(sizeof(ncclUniqueId), sizeof(NcclId));
  ABI_VALUE(alignof(ncclUniqueId), alignof(NcclId));
  return abi::report("NCCL", NCCL_VERSION_CODE);
}
