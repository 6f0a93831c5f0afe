// What is used of NVRTC (libnvrtc.so), NVIDIA's compiler at run time: declared here so that no header of it is needed;
// facts from NVIDIA's public reference. Loaded at run time: the copy that the process has loaded first, then pip's
// packages, then the system's. Thread: any.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/library.h"
#include "base/status.h"

namespace hc {

using NvrtcResult = int;
using NvrtcProgram = struct NvrtcProgramTag*;

// X(name, return type, arguments). Every one of them is needed; all are there since CUDA 11.2.
// clang-format off
#define HC_NVRTC_SYMBOLS(X)                                                                                     \
  X(nvrtcVersion, NvrtcResult, (int*, int*))                                                                    \
  X(nvrtcGetErrorString, const char*, (NvrtcResult))                                                            \
  X(nvrtcGetNumSupportedArchs, NvrtcResult, (int*))                                                             \
  X(nvrtcGetSupportedArchs, NvrtcResult, (int*))                                                                \
  X(nvrtcCreateProgram, NvrtcResult,                                                                            \
    (NvrtcProgram*, const char*, const char*, int, const char* const*, const char* const*))                     \
  X(nvrtcDestroyProgram, NvrtcResult, (NvrtcProgram*))                                                          \
  X(nvrtcCompileProgram, NvrtcResult, (NvrtcProgram, int, const char* const*))                                  \
  X(nvrtcGetProgramLogSize, NvrtcResult, (NvrtcProgram, size_t*))                                               \
  X(nvrtcGetProgramLog, NvrtcResult, (NvrtcProgram, char*))                                                     \
  X(nvrtcGetCUBINSize, NvrtcResult, (NvrtcProgram, size_t*))                                                    \
  X(nvrtcGetCUBIN, NvrtcResult, (NvrtcProgram, char*))                                                          \
  X(nvrtcGetPTXSize, NvrtcResult, (NvrtcProgram, size_t*))                                                      \
  X(nvrtcGetPTX, NvrtcResult, (NvrtcProgram, char*))
// clang-format on

struct NvrtcApi {
#define HC_FIELD(name, type, arguments) type(*name) arguments = nullptr;
  HC_NVRTC_SYMBOLS(HC_FIELD)
#undef HC_FIELD
  std::shared_ptr<Library> library;
  std::shared_ptr<Library> builtins;  // that it opens by name when it compiles; null: it finds them itself, or nobody
  std::string file;
  std::string found;              // where: "already loaded in this process", "pip package", ...
  int major = 0, minor = 0;       // of CUDA
  std::vector<int> capabilities;  // that it compiles for, ascending: 90 is 9.0

  // `path`: a file to load instead of searching. `folders`: pip's package folders, colon-separated. cuda_version: the
  // driver's (0: unknown); an NVRTC of a newer major version is passed over, as that driver could not load what it
  // makes. Unsupported says what was missing and the command that brings it.
  static Result<std::shared_ptr<const NvrtcApi>> load(const std::string& path, const std::string& folders,
                                                      int cuda_version);
  // The source, with the headers that it includes under these names, as machine code for compute capability
  // `capability`; or, where this NVRTC does not know that one, as PTX of the newest older one, which the driver
  // translates.
  struct Source {
    const char* text;
    std::vector<const char*> headers;
    std::vector<const char*> header_names;
  };
  Result<std::string> compile(const Source& source, int capability) const;
};

}  // namespace hc
