// Our declarations of NVRTC against NVIDIA's nvrtc.h.
#include <nvrtc.h>

#include "device/nvrtc_api.h"
#include "same.h"

int main() {
  using namespace hc;
#define COMPARE(name, type, arguments) \
  abi::expect(abi::SameCall<decltype(&::name), type(*) arguments>::value, "the call of " #name);
  HC_NVRTC_SYMBOLS(COMPARE)
  ABI_VALUE(NVRTC_SUCCESS, 0);
  ABI_VALUE(sizeof(nvrtcProgram), sizeof(NvrtcProgram));
  return abi::report("NVRTC", 0);
}
