#include "device/probe.h"

#include "base/quoted.h"
#include "device/cuda_api.h"
#include "device/nccl_api.h"

namespace hc {

namespace {

std::string absent(const Status& why) { return text_of("{\"found\":false,\"reason\":", json_string(why.text()), "}"); }

std::string describe(const CudaApi& cuda) {
  int count = 0;
  if (Status counted = cuda.check(cuda.cuDeviceGetCount(&count), "cuDeviceGetCount"); !counted.is_ok())
    return absent(counted);
  std::string devices;
  for (int i = 0; i < count; ++i) {
    CuDevice device = 0;
    char name[256] = "?";
    if (cuda.cuDeviceGet(&device, i) == kCuSuccess) (void)cuda.cuDeviceGetName(name, sizeof(name), device);
    devices += (i ? "," : "") + json_string(name);
  }
  return text_of("{\"found\":true,\"platform\":\"", cuda.platform.name(), "\",\"file\":", json_string(cuda.file),
                 ",\"version\":\"", cuda.platform.version_text(), "\",\"devices\":[", devices, "]}");
}

std::string describe(const NcclApi& nccl) {
  const auto word = [](bool has) { return has ? "true" : "false"; };
  return text_of("{\"found\":true,\"file\":", json_string(nccl.file), ",\"where\":", json_string(nccl.found),
                 ",\"version\":\"", nccl_version_text(nccl.version), "\",\"code\":", nccl.version,
                 ",\"features\":{\"mem_alloc\":", word(nccl.ncclMemAlloc),
                 ",\"buffers\":", word(nccl.registration() != NcclApi::Registration::kNone),
                 ",\"windows\":", word(nccl.registration() == NcclApi::Registration::kWindows),
                 ",\"shrink\":", word(nccl.ncclCommShrink), "}}");
}

// The first device's, or what every GPU of today has where there is none.
std::string architecture_to_try(const CudaApi* cuda) {
  CuDevice device = 0;
  if (!cuda || cuda->cuDeviceGet(&device, 0) != kCuSuccess) return "sm_80";
  auto told = cuda->architecture(device);
  return told.is_ok() ? told.take() : "sm_80";
}

// They are compiled, as the first tensor would have it done; what has been made is kept for it. Whether they run on a
// device is seen when there is one.
std::string describe_kernels(const KernelOptions& options, const CudaApi* cuda) {
  const GpuPlatform platform = cuda ? cuda->platform : GpuPlatform{};
  if (options.off) return absent(error(Code::kUnsupported, "HOROCLONE_GPU_KERNELS is off"));
  if (!built_in_kernels().code.empty() && !platform.is_hip)
    return "{\"found\":true,\"where\":\"built in\",\"version\":\"\",\"file\":\"\"}";
  auto nvrtc = NvrtcApi::load(options.nvrtc_library, options.nvrtc_folders, platform);
  if (!nvrtc.is_ok()) return absent(nvrtc.status());
  const NvrtcApi& api = *nvrtc.value();
  auto compiled = compiled_kernels(options, architecture_to_try(cuda), platform);
  if (!compiled.is_ok()) return absent(compiled.status());
  return text_of("{\"found\":true,\"where\":", json_string(api.found), ",\"version\":\"", api.major, ".", api.minor,
                 "\",\"file\":", json_string(api.file), ",\"compiled\":", json_string(compiled.value().origin), "}");
}

}  // namespace

std::string device_report_json(const DeviceLibraries& libraries) {
  auto cuda = CudaApi::load(libraries.cuda);
  const GpuPlatform platform = cuda.is_ok() ? cuda.value()->platform : GpuPlatform{};
  auto nccl = NcclApi::load(libraries.nccl, libraries.nccl_folders, platform);
  return text_of("{\"cuda\":", cuda.is_ok() ? describe(*cuda.value()) : absent(cuda.status()),
                 ",\"nccl\":", nccl.is_ok() ? describe(*nccl.value()) : absent(nccl.status()),
                 ",\"kernels\":", describe_kernels(libraries.kernels, cuda.is_ok() ? cuda.value().get() : nullptr),
                 "}");
}

}  // namespace hc
