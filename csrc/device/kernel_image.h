// The kernels as something that a driver can load: the fat binary that was built into this library, where nvcc was at
// hand then, or what NVRTC makes of the source that is always built in. What NVRTC has made is kept, for this process
// and in the user's cache folder. Thread: any; making one takes seconds, so not the one that makes progress.
#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"
#include "device/nvrtc_api.h"

namespace hc {

struct KernelOptions {  // settings
  bool off = false;
  std::string nvrtc_library, nvrtc_folders;
  std::string cache;  // folder; empty: the user's; "off": none
};

struct KernelImage {
  std::string code;    // a cubin, PTX or a fat binary
  std::string origin;  // "NVRTC 13.0 for sm_90", ...
};

// Of NVIDIA's GPUs. Empty code: this library was built without nvcc.
KernelImage built_in_kernels();
// The source, for whoever compiles it.
NvrtcApi::Source kernel_source();
// architecture: as CudaApi says it.
Result<KernelImage> compiled_kernels(const KernelOptions& options, const std::string& architecture,
                                     const GpuPlatform& platform);

}  // namespace hc
