// Our declarations of NVRTC against NVIDIA's nvrtc.h.
#include <nvrtc.h>

#include "device/nvrtc_api.h"
#include "same.h"

int main() {
  using namespace hc;
#define COMPARE(name, type, arguments) \
  abi::expect(abi::SameCall<decltype(&::name), type(*) arguments>::value, "the call of " #name);
#define COMPARE_SHARED(name, hip, type, arguments) COMPARE(name, type, arguments)
  HC_NVRTC_SYMBOLS(COMPARE_SHARED)
  HC_NVRTC_OWN_SYMBOLS(COMPARE)
  ABI_VALUE(NVRTC_SUCCESS, 0);
  ABI_VALUE(sizeof(nvrtcProgram), sizeof(NvrtcProgram));
  return abi::report("NVRTC", 0);
}
