#include "device/nvrtc_api.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>

namespace hc {

namespace {

constexpr const char* kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};  // newest first
constexpr int kNewestMajor = 13;

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

Search find(const std::string& path, const std::string& folders, int cuda_version) {
  Search search;
  if (!path.empty()) {
    if (!search.open(path, "HOROCLONE_NVRTC_LIBRARY")) search.tried += " (HOROCLONE_NVRTC_LIBRARY names this file)";
    return search;
  }
  int major = kNewestMajor;
  for (const char* name : kNames) {
    if (cuda_version && major-- > cuda_version / 1000) continue;
    if ((search.library = Library::loaded(name))) {
      search.found = "already loaded in this process";
      return search;
    }
    if (look_in(folders, name, &search) || search.open(name, "system library path")) return search;
  }
  return search;
}

std::string how_to_get_nvrtc(int cuda_version) {
  return cuda_version >= 13000 ? "pip install nvidia-cuda-nvrtc" : "pip install nvidia-cuda-nvrtc-cu12";
}

Status resolve(NvrtcApi* api) {
#define HC_NEED(name, type, arguments)                                          \
  api->name = reinterpret_cast<type(*) arguments>(api->library->symbol(#name)); \
  if (!api->name) return error(Code::kUnsupported, api->file, " (", api->found, ") has no ", #name);
  HC_NVRTC_SYMBOLS(HC_NEED)
#undef HC_NEED
  int count = 0;
  if (api->nvrtcVersion(&api->major, &api->minor) != 0 || api->nvrtcGetNumSupportedArchs(&count) != 0 || count <= 0)
    return error(Code::kUnsupported, api->file, " (", api->found, ") does not tell its version: it is no NVRTC");
  api->capabilities.resize(static_cast<size_t>(count));
  if (api->nvrtcGetSupportedArchs(api->capabilities.data()) != 0)
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

Result<std::string> compiled(const NvrtcApi& api, NvrtcProgram program, int capability, bool machine_code) {
  const std::string target = text_of("--gpu-architecture=", machine_code ? "sm_" : "compute_", capability);
  // As the host: no fused multiply-add. The headers' constexpr functions are evaluated by the compiler, which NVRTC
  // allows in code for devices only.
  const char* options[] = {target.c_str(), "--std=c++17", "--fmad=false", "--device-as-default-execution-space"};
  if (const NvrtcResult bad = api.nvrtcCompileProgram(program, static_cast<int>(std::size(options)), options))
    return error(Code::kUnsupported, "NVRTC ", api.major, ".", api.minor, " (", api.file, ") with ", target, ": ",
                 api.nvrtcGetErrorString(bad), log_of(api, program));
  size_t bytes = 0;
  NvrtcResult got = machine_code ? api.nvrtcGetCUBINSize(program, &bytes) : api.nvrtcGetPTXSize(program, &bytes);
  std::string image(bytes, '\0');
  if (got == 0) got = machine_code ? api.nvrtcGetCUBIN(program, image.data()) : api.nvrtcGetPTX(program, image.data());
  if (got != 0 || image.empty())
    return error(Code::kUnsupported, "NVRTC gives no code for ", target, ": ", api.nvrtcGetErrorString(got));
  return image;
}

}  // namespace

Result<std::shared_ptr<const NvrtcApi>> NvrtcApi::load(const std::string& path, const std::string& folders,
                                                       int cuda_version) {
  auto api = std::make_shared<NvrtcApi>();
  Search search = find(path, folders, cuda_version);
  if (!search.library)
    return error(Code::kUnsupported, "NVRTC was not found: ", search.tried, "; ", how_to_get_nvrtc(cuda_version));
  api->library = std::move(search.library);
  api->found = std::move(search.found);
  api->file = api->library->file();
  if (Status usable = resolve(api.get()); !usable.is_ok())
    return error(Code::kUnsupported, usable.text(), "; ", how_to_get_nvrtc(cuda_version), " --upgrade");
  api->builtins = builtins_beside(*api);
  return std::shared_ptr<const NvrtcApi>(std::move(api));
}

Result<std::string> NvrtcApi::compile(const Source& source, int capability) const {
  const auto above = std::upper_bound(capabilities.begin(), capabilities.end(), capability);
  if (above == capabilities.begin())
    return error(Code::kUnsupported, "NVRTC ", major, ".", minor, " (", file,
                 ") compiles for GPUs from compute capability ", capabilities.front(), " on, and this one has ",
                 capability);
  const int target = *(above - 1);
  NvrtcProgram program = nullptr;
  if (const NvrtcResult bad =
          nvrtcCreateProgram(&program, source.text, "kernels.cu", static_cast<int>(source.headers.size()),
                             source.headers.data(), source.header_names.data()))
    return error(Code::kUnsupported, "nvrtcCreateProgram: ", nvrtcGetErrorString(bad));
  auto image = compiled(*this, program, target, target == capability);
  (void)nvrtcDestroyProgram(&program);
  return image;
}

}  // namespace hc
