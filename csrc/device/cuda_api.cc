#include "device/cuda_api.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <span>

namespace hc {

namespace {

constexpr const char* kDriverAdvice =
    "it comes with NVIDIA's driver: install the driver on this host, or start the container with --gpus all";
constexpr const char* kCudaNames[] = {"libcuda.so.1"};
// torch's packages for ROCm bring the one without a number.
constexpr const char* kHipNames[] = {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"};

// After these the process gets nothing else from CUDA.
constexpr CuResult kForGood[] = {214, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721};

std::string advice_for(CuResult result, const GpuPlatform& platform) {
  const char* name = platform.name();
  if (result == kCuNotInitialized)
    return text_of(": was this process forked after ", name, " had been used? Start it with spawn, or use ", name,
                   " in the child alone");
  if (std::find(std::begin(kForGood), std::end(kForGood), result) != std::end(kForGood))
    return text_of(": ", name, " refuses everything in this process from now on, which has to be started anew; ",
                   platform.is_hip ? "AMD_SERIALIZE_KERNEL=3" : "CUDA_LAUNCH_BLOCKING=1",
                   " shows the kernel that did it");
  return "";
}

// "cuMemAlloc" as the library calls it.
const char* known_as(const char* call, const GpuPlatform& platform) {
  if (!platform.is_hip) return call;
#define HC_KNOWN(name, cuda, hip, arguments) \
  if (std::strcmp(call, #name) == 0) return #hip;
  HC_CUDA_SYMBOLS(HC_KNOWN)
#undef HC_KNOWN
  return call;
}

Status resolve(CudaApi* api) {
  const bool is_hip = api->platform.is_hip;
  const char* const old = is_hip ? ": ROCm 6.0 or newer is needed"
                                 : ": the driver is too old; CUDA 11.4 or newer is needed (update the driver of this "
                                   "host)";
#define HC_RESOLVE(name, arguments, exported)                                          \
  api->name = reinterpret_cast<CuResult(*) arguments>(api->library->symbol(exported)); \
  if (!api->name) return error(Code::kUnsupported, api->file, " has no ", exported, old);
#define HC_EITHER(name, cuda, hip, arguments) HC_RESOLVE(name, arguments, (is_hip ? #hip : cuda))
  HC_CUDA_SYMBOLS(HC_EITHER)
#undef HC_EITHER
  if (is_hip) {
    HC_RESOLVE(hipGetDeviceProperties, (void*, CuDevice), "hipGetDevicePropertiesR0600")
  }
#undef HC_RESOLVE
  return Status::ok();
}

// One that is loaded already comes before any that would have to be.
std::shared_ptr<Library> find_driver(std::string* tried) {
  for (const auto names : {std::span<const char* const>(kCudaNames), std::span<const char* const>(kHipNames)})
    for (const char* name : names)
      if (auto library = Library::loaded(name)) return library;
  for (const auto names : {std::span<const char* const>(kCudaNames), std::span<const char* const>(kHipNames)})
    for (const char* name : names) {
      auto opened = Library::open(name);
      if (opened.is_ok()) return opened.take();
      if (tried->empty()) *tried = opened.status().text();
    }
  return nullptr;
}

}  // namespace

std::string GpuPlatform::version_text() const {
  return is_hip ? text_of(version / 10000000, ".", version / 100000 % 100)
                : text_of(version / 1000, ".", version % 1000 / 10);
}

Result<std::shared_ptr<const CudaApi>> CudaApi::load(const std::string& path) {
  auto api = std::make_shared<CudaApi>();
  if (path.empty()) {
    std::string tried;
    api->library = find_driver(&tried);
    if (!api->library) return error(Code::kUnsupported, tried, "; ", kDriverAdvice);
  } else {
    auto opened = Library::open(path);
    if (!opened.is_ok())
      return error(Code::kUnsupported, opened.status().text(),
                   "; HOROCLONE_CUDA_LIBRARY names this file: unset it, or name another");
    api->library = opened.take();
  }
  api->file = api->library->file();
  api->platform.is_hip = api->library->symbol("hipInit") != nullptr;
  if (api->platform.is_hip) api->attributes = kHipAttributes;
  HC_TRY(resolve(api.get()));
  if (Status up = api->check(api->cuInit(0), "cuInit"); !up.is_ok())
    return error(Code::kUnsupported, up.text(), " from ", api->file,
                 api->platform.is_hip
                     ? "; does rocminfo show a GPU here? In a container: --device=/dev/kfd --device=/dev/dri"
                     : "; does nvidia-smi show a GPU here? In a container: --gpus all");
  if (Status told = api->check(api->cuDriverGetVersion(&api->platform.version), "cuDriverGetVersion"); !told.is_ok())
    return error(Code::kUnsupported, told.text(), " from ", api->file);
  return std::shared_ptr<const CudaApi>(std::move(api));
}

Status CudaApi::check(CuResult result, const char* call) const {
  if (result == kCuSuccess) return Status::ok();
  const char* text = nullptr;
  if (!cuGetErrorString || cuGetErrorString(result, &text) != kCuSuccess || !text) text = "unknown error";
  return error(Code::kInternal, known_as(call, platform), ": ", text, " (", platform.name(), " error ", result, ")",
               advice_for(result, platform));
}

Result<std::string> CudaApi::architecture(CuDevice device) const {
  if (platform.is_hip) {
    alignas(16) char properties[kHipPropertiesBytes] = {};
    HC_TRY(check(hipGetDeviceProperties(properties, device), "hipGetDeviceProperties"));
    const char* const at = properties + kHipArchitectureAt;
    return std::string(at, ::strnlen(at, kHipArchitectureBytes));
  }
  int major = 0, minor = 0;
  HC_TRY(check(cuDeviceGetAttribute(&major, kCuCapabilityMajor, device), "cuDeviceGetAttribute"));
  HC_TRY(check(cuDeviceGetAttribute(&minor, kCuCapabilityMinor, device), "cuDeviceGetAttribute"));
  return text_of("sm_", major * 10 + minor);
}

}  // namespace hc
