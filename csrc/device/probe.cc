#include "device/probe.h"

#include "device/cuda_api.h"
#include "device/nccl_api.h"

namespace hc {

namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

std::string absent(const Status& why) { return text_of("{\"found\":false,\"reason\":", quoted(why.text()), "}"); }

std::string describe(const CudaApi& cuda) {
  int count = 0;
  if (Status counted = cuda.check(cuda.cuDeviceGetCount(&count), "cuDeviceGetCount"); !counted.is_ok())
    return absent(counted);
  std::string devices;
  for (int i = 0; i < count; ++i) {
    CuDevice device = 0;
    char name[256] = "?";
    if (cuda.cuDeviceGet(&device, i) == kCuSuccess) (void)cuda.cuDeviceGetName(name, sizeof(name), device);
    devices += (i ? "," : "") + quoted(name);
  }
  return text_of("{\"found\":true,\"file\":", quoted(cuda.file), ",\"version\":\"", cuda.version / 1000, ".",
                 cuda.version % 1000 / 10, "\",\"devices\":[", devices, "]}");
}

std::string describe(const NcclApi& nccl) {
  const auto word = [](bool has) { return has ? "true" : "false"; };
  return text_of("{\"found\":true,\"file\":", quoted(nccl.file), ",\"where\":", quoted(nccl.found), ",\"version\":\"",
                 nccl_version_text(nccl.version), "\",\"code\":", nccl.version,
                 ",\"features\":{\"mem_alloc\":", word(nccl.ncclMemAlloc),
                 ",\"buffers\":", word(nccl.registration() != NcclApi::Registration::kNone),
                 ",\"windows\":", word(nccl.registration() == NcclApi::Registration::kWindows),
                 ",\"shrink\":", word(nccl.ncclCommShrink), "}}");
}

// What would be tried; whether it runs on a device is seen when there is one.
std::string describe_kernels(const KernelOptions& options, int cuda_version) {
  if (options.off) return absent(error(Code::kUnsupported, "HOROCLONE_GPU_KERNELS is off"));
  if (!built_in_kernels().code.empty()) return "{\"found\":true,\"where\":\"built in\",\"version\":\"\",\"file\":\"\"}";
  auto nvrtc = NvrtcApi::load(options.nvrtc_library, options.nvrtc_folders, cuda_version);
  if (!nvrtc.is_ok()) return absent(nvrtc.status());
  const NvrtcApi& api = *nvrtc.value();
  return text_of("{\"found\":true,\"where\":", quoted(api.found), ",\"version\":\"", api.major, ".", api.minor,
                 "\",\"file\":", quoted(api.file), "}");
}

}  // namespace

std::string device_report_json(const DeviceLibraries& libraries) {
  auto cuda = CudaApi::load(libraries.cuda);
  const int version = cuda.is_ok() ? cuda.value()->version : 0;
  auto nccl = NcclApi::load(libraries.nccl, libraries.nccl_folders, version);
  return text_of("{\"cuda\":", cuda.is_ok() ? describe(*cuda.value()) : absent(cuda.status()),
                 ",\"nccl\":", nccl.is_ok() ? describe(*nccl.value()) : absent(nccl.status()),
                 ",\"kernels\":", describe_kernels(libraries.kernels, version), "}");
}

}  // namespace hc
