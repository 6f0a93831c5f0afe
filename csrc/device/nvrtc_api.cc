#include "device/nvrtc_api.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <span>

namespace hc {

namespace {

constexpr const char* kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};  // newest first
constexpr int kNewestMajor = 13;
// torch's packages for ROCm bring the one without a number.
constexpr const char* kHiprtcNames[] = {"libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6"};

struct Search {
  std::string found, tried;
  std::shared_ptr<Library> library;
  bool open(const std::string& file, const char* where) {
    auto opened = Library::open(file);
    if (opened.is_ok()) {
      library = opened.take();
      found = where;
    } else {
      tried += (tried.empty() ? "" : "; ") + opened.status().text();
    }
    return opened.is_ok();
  }
};

bool look_in(const std::string& folders, const char* name, Search* search) {
  for (size_t at = 0; at < folders.size();) {
    const size_t end = std::min(folders.find(':', at), folders.size());
    const std::string file = folders.substr(at, end - at) + "/" + name;
    at = end + 1;
    if (::access(file.c_str(), R_OK) == 0 && search->open(file, "pip package")) return true;
  }
  return false;
}

Search find(const std::string& path, const std::string& folders, const GpuPlatform& platform) {
  Search search;
  if (!path.empty()) {
    if (!search.open(path, "HOROCLONE_NVRTC_LIBRARY")) search.tried += " (HOROCLONE_NVRTC_LIBRARY names this file)";
    return search;
  }
  const auto is_loaded = [&search](const char* name) {
    search.library = Library::loaded(name);
    if (search.library) search.found = "already loaded in this process";
    return search.library != nullptr;
  };
  if (platform.is_hip) {
    if (std::any_of(std::begin(kHiprtcNames), std::end(kHiprtcNames), is_loaded)) return search;
    for (const char* name : kHiprtcNames)
      if (search.open(name, "system library path")) break;
    return search;
  }
  int major = kNewestMajor;
  for (const char* name : kNames) {
    if (platform.version && major-- > platform.version / 1000) continue;
    if (is_loaded(name)) return search;
    if (look_in(folders, name, &search) || search.open(name, "system library path")) return search;
  }
  return search;
}

std::string how_to_get_nvrtc(const GpuPlatform& platform, bool newer) {
  if (platform.is_hip) return newer ? "update ROCm" : "hipRTC comes with ROCm and with torch for it";
  return text_of("pip install nvidia-cuda-nvrtc", platform.version >= 13000 ? "" : "-cu12", newer ? " --upgrade" : "");
}

Status resolve(NvrtcApi* api) {
#define HC_RESOLVE(name, exported, type, arguments)                                \
  api->name = reinterpret_cast<type(*) arguments>(api->library->symbol(exported)); \
  if (!api->name) return error(Code::kUnsupported, api->file, " (", api->found, ") has no ", exported);
#define HC_NEED(name, hip, type, arguments) HC_RESOLVE(name, (api->is_hip ? #hip : #name), type, arguments)
#define HC_NEED_OWN(name, type, arguments) HC_RESOLVE(name, #name, type, arguments)
  HC_NVRTC_SYMBOLS(HC_NEED)
  if (!api->is_hip) {
    HC_NVRTC_OWN_SYMBOLS(HC_NEED_OWN)
  }
#undef HC_NEED_OWN
#undef HC_NEED
#undef HC_RESOLVE
  int count = 0;
  if (api->nvrtcVersion(&api->major, &api->minor) != 0 ||
      (!api->is_hip && (api->nvrtcGetNumSupportedArchs(&count) != 0 || count <= 0)))
    return error(Code::kUnsupported, api->file, " (", api->found, ") does not tell its version: it is no ",
                 api->name());
  api->capabilities.resize(static_cast<size_t>(count));
  if (count && api->nvrtcGetSupportedArchs(api->capabilities.data()) != 0)
    return error(Code::kUnsupported, api->file, " (", api->found, ") does not tell what it compiles for");
  std::sort(api->capabilities.begin(), api->capabilities.end());
  return Status::ok();
}

// What NVRTC opens by its bare name when it compiles lies beside it. Not every package tells the loader so (the wheels
// of 13.0 do not), but a library that is loaded is found by its name.
std::shared_ptr<Library> builtins_beside(const NvrtcApi& api) {
  const size_t slash = api.file.rfind('/');
  if (slash == std::string::npos) return nullptr;
  auto opened =
      Library::open(text_of(api.file.substr(0, slash + 1), "libnvrtc-builtins.so.", api.major, ".", api.minor));
  return opened.is_ok() ? opened.take() : nullptr;
}

// The compiler's own words.
std::string log_of(const NvrtcApi& api, NvrtcProgram program) {
  size_t bytes = 0;
  if (api.nvrtcGetProgramLogSize(program, &bytes) != 0 || bytes < 2) return "";
  std::string log(bytes, '\0');
  if (api.nvrtcGetProgramLog(program, log.data()) != 0) return "";
  log.resize(bytes - 1);
  constexpr size_t kEnough = 2000;
  return ": " + log.substr(0, kEnough);
}

// The program, made for what `target` says.
Status compile_for(const NvrtcApi& api, NvrtcProgram program, const std::string& target) {
  // As the host: no fused multiply-add. The headers' constexpr functions are evaluated by the compiler, which NVRTC
  // allows in code for devices only.
  const char* for_cuda[] = {target.c_str(), "--std=c++17", "--fmad=false", "--device-as-default-execution-space"};
  const char* for_hip[] = {target.c_str(), "--std=c++17", "-ffp-contract=off"};
  const auto options = api.is_hip ? std::span<const char*>(for_hip) : std::span<const char*>(for_cuda);
  const NvrtcResult bad = api.nvrtcCompileProgram(program, static_cast<int>(options.size()), options.data());
  if (bad == 0) return Status::ok();
  return error(Code::kUnsupported, api.name(), " ", api.major, ".", api.minor, " (", api.file, ") with ", target, ": ",
               api.nvrtcGetErrorString(bad), log_of(api, program));
}

Result<std::string> compiled(const NvrtcApi& api, NvrtcProgram program, const std::string& target, bool machine_code) {
  HC_TRY(compile_for(api, program, target));
  size_t bytes = 0;
  NvrtcResult got = machine_code ? api.nvrtcGetCUBINSize(program, &bytes) : api.nvrtcGetPTXSize(program, &bytes);
  std::string image(bytes, '\0');
  if (got == 0) got = machine_code ? api.nvrtcGetCUBIN(program, image.data()) : api.nvrtcGetPTX(program, image.data());
  if (got != 0 || image.empty())
    return error(Code::kUnsupported, api.name(), " gives no code for ", target, ": ", api.nvrtcGetErrorString(got));
  return image;
}

struct Target {
  std::string option;
  bool machine_code = true;
};

Result<Target> target_of(const NvrtcApi& api, const std::string& architecture) {
  if (api.is_hip) return Target{"--offload-arch=" + architecture};
  const int capability = std::atoi(architecture.c_str() + std::strlen("sm_"));
  const auto above = std::upper_bound(api.capabilities.begin(), api.capabilities.end(), capability);
  if (above == api.capabilities.begin())
    return error(Code::kUnsupported, "NVRTC ", api.major, ".", api.minor, " (", api.file,
                 ") compiles for GPUs from compute capability ", api.capabilities.front(), " on, and this one has ",
                 capability);
  const bool is_known = *(above - 1) == capability;
  return Target{text_of("--gpu-architecture=", is_known ? "sm_" : "compute_", *(above - 1)), is_known};
}

}  // namespace

Result<std::shared_ptr<const NvrtcApi>> NvrtcApi::load(const std::string& path, const std::string& folders,
                                                       const GpuPlatform& platform) {
  auto api = std::make_shared<NvrtcApi>();
  api->is_hip = platform.is_hip;
  Search search = find(path, folders, platform);
  if (!search.library)
    return error(Code::kUnsupported, api->name(), " was not found: ", search.tried, "; ",
                 how_to_get_nvrtc(platform, false));
  api->library = std::move(search.library);
  api->found = std::move(search.found);
  api->file = api->library->file();
  if (Status usable = resolve(api.get()); !usable.is_ok())
    return error(Code::kUnsupported, usable.text(), "; ", how_to_get_nvrtc(platform, true));
  if (!api->is_hip) api->builtins = builtins_beside(*api);
  return std::shared_ptr<const NvrtcApi>(std::move(api));
}

Result<std::string> NvrtcApi::compile(const Source& source, const std::string& architecture) const {
  auto target = target_of(*this, architecture);
  HC_TRY(target.status());
  NvrtcProgram program = nullptr;
  if (const NvrtcResult bad =
          nvrtcCreateProgram(&program, source.text, "kernels.cu", static_cast<int>(source.headers.size()),
                             source.headers.data(), source.header_names.data()))
    return error(Code::kUnsupported, "nvrtcCreateProgram: ", nvrtcGetErrorString(bad));
  auto image = compiled(*this, program, target.value().option, target.value().machine_code);
  (void)nvrtcDestroyProgram(&program);
  return image;
}

}  // namespace hc
