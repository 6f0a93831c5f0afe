// What is used of NVRTC (libnvrtc.so), NVIDIA's compiler at run time, or of AMD's hipRTC (libhiprtc.so): declared here
// so that no header is needed; facts from their public references. Loaded at run time: the copy that the process has
// loaded first, then pip's packages, then the system's. Thread: any.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/library.h"
#include "base/status.h"
#include "device/cuda_api.h"

namespace hc {

using NvrtcResult = int;
using NvrtcProgram = struct NvrtcProgramTag*;

// X(name, name in hipRTC, return type, arguments). Every one of them is needed; all are there since CUDA 11.2.
// clang-format off
#define HC_NVRTC_SYMBOLS(X)                                                                                     \
  X(nvrtcVersion, hiprtcVersion, NvrtcResult, (int*, int*))                                                     \
  X(nvrtcGetErrorString, hiprtcGetErrorString, const char*, (NvrtcResult))                                      \
  X(nvrtcCreateProgram, hiprtcCreateProgram, NvrtcResult,                                                       \
    (NvrtcProgram*, const char*, const char*, int, const char* const*, const char* const*))                     \
  X(nvrtcDestroyProgram, hiprtcDestroyProgram, NvrtcResult, (NvrtcProgram*))                                    \
  X(nvrtcCompileProgram, hiprtcCompileProgram, NvrtcResult, (NvrtcProgram, int, const char* const*))            \
  X(nvrtcGetProgramLogSize, hiprtcGetProgramLogSize, NvrtcResult, (NvrtcProgram, size_t*))                      \
  X(nvrtcGetProgramLog, hiprtcGetProgramLog, NvrtcResult, (NvrtcProgram, char*))                                \
  X(nvrtcGetCUBINSize, hiprtcGetCodeSize, NvrtcResult, (NvrtcProgram, size_t*))                                 \
  X(nvrtcGetCUBIN, hiprtcGetCode, NvrtcResult, (NvrtcProgram, char*))
// X(name, return type, arguments). Not in hipRTC, which has no language between source and machine code.
#define HC_NVRTC_OWN_SYMBOLS(X)                                                                                 \
  X(nvrtcGetNumSupportedArchs, NvrtcResult, (int*))                                                             \
  X(nvrtcGetSupportedArchs, NvrtcResult, (int*))                                                                \
  X(nvrtcGetPTXSize, NvrtcResult, (NvrtcProgram, size_t*))                                                      \
  X(nvrtcGetPTX, NvrtcResult, (NvrtcProgram, char*))
// clang-format on

struct NvrtcApi {
#define HC_FIELD(name, type, arguments) type(*name) arguments = nullptr;
#define HC_SHARED_FIELD(name, hip, type, arguments) HC_FIELD(name, type, arguments)
  HC_NVRTC_SYMBOLS(HC_SHARED_FIELD)
  HC_NVRTC_OWN_SYMBOLS(HC_FIELD)
#undef HC_SHARED_FIELD
#undef HC_FIELD
  std::shared_ptr<Library> library;
  std::shared_ptr<Library> builtins;  // that it opens by name when it compiles; null: it finds them itself, or nobody
  std::string file;
  std::string found;              // where: "already loaded in this process", "pip package", ...
  bool is_hip = false;            // it is hipRTC
  int major = 0, minor = 0;       // of CUDA, or of HIP
  std::vector<int> capabilities;  // that NVRTC compiles for, ascending: 90 is 9.0
  const char* name() const { return is_hip ? "hipRTC" : "NVRTC"; }

  // `path`: a file to load instead of searching. `folders`: pip's package folders, colon-separated. platform: the
  // driver's; an NVRTC of a newer major version is passed over, as that driver could not load what it makes.
  // Unsupported says what was missing and the command that brings it.
  static Result<std::shared_ptr<const NvrtcApi>> load(const std::string& path, const std::string& folders,
                                                      const GpuPlatform& platform);
  // The source, with the headers that it includes under these names, as machine code for `architecture`; or, where
  // this NVRTC does not know that one, as PTX of the newest older one, which the driver translates.
  struct Source {
    const char* text;
    std::vector<const char*> headers;
    std::vector<const char*> header_names;
  };
  Result<std::string> compile(const Source& source, const std::string& architecture) const;
};

}  // namespace hc
