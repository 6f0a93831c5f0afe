#include "device/nccl_api.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <span>

#include "base/hash.h"

namespace hc {

namespace {

constexpr const char* kNcclNames[] = {"libnccl.so.2"};
// torch's packages for ROCm bring the one without a number.
constexpr const char* kRcclNames[] = {"librccl.so", "librccl.so.1"};

std::string how_to_get_nccl(const GpuPlatform& platform, bool newer) {
  if (platform.is_hip) return newer ? "update ROCm" : "RCCL comes with ROCm and with torch for it";
  return text_of("pip install nvidia-nccl-cu", platform.version >= 13000 ? 13 : 12, newer ? " --upgrade" : "");
}

// Where NCCL is: the setting, the process, pip's folders, the system. `tried` collects why not.
std::shared_ptr<Library> find(const std::string& path, const std::string& folders, bool is_hip, std::string* found,
                              std::string* tried) {
  if (!path.empty()) {
    *found = "HOROCLONE_NCCL_LIBRARY";
    auto opened = Library::open(path);
    if (!opened.is_ok()) *tried = opened.status().text() + " (HOROCLONE_NCCL_LIBRARY names this file)";
    return opened.is_ok() ? opened.take() : nullptr;
  }
  const auto names = is_hip ? std::span<const char* const>(kRcclNames) : std::span<const char* const>(kNcclNames);
  *found = "already loaded in this process";
  for (const char* name : names)
    if (auto library = Library::loaded(name)) return library;
  *found = "pip package";
  for (size_t at = 0; at < folders.size();) {
    const size_t end = std::min(folders.find(':', at), folders.size());
    const std::string file = folders.substr(at, end - at) + "/" + names.front();
    at = end + 1;
    if (::access(file.c_str(), R_OK) != 0) continue;
    auto opened = Library::open(file);
    if (opened.is_ok()) return opened.take();
    *tried += opened.status().text() + "; ";
  }
  *found = "system library path";
  for (const char* name : names) {
    auto opened = Library::open(name);
    if (opened.is_ok()) return opened.take();
    *tried += (name == names.front() ? "" : "; ") + opened.status().text();
  }
  return nullptr;
}

Status resolve(NcclApi* api) {
#define HC_RESOLVE(name, type, arguments) api->name = reinterpret_cast<type(*) arguments>(api->library->symbol(#name));
#define HC_NEED(name, type, arguments) \
  HC_RESOLVE(name, type, arguments)    \
  if (!api->name) return error(Code::kUnsupported, api->file, " (", api->found, ") has no ", #name);
  HC_RESOLVE(ncclGetVersion, NcclResult, (int*))
  if (!api->ncclGetVersion || api->ncclGetVersion(&api->version) != kNcclSuccess)
    return error(Code::kUnsupported, api->file, " (", api->found, ") does not tell its version: it is no NCCL");
  if (api->version < kNcclOldest)
    return error(Code::kUnsupported, "NCCL ", nccl_version_text(api->version), " in ", api->file, " (", api->found,
                 ") is too old: ", nccl_version_text(kNcclOldest), " or newer is needed");
  HC_NCCL_SYMBOLS(HC_NEED)
  HC_NCCL_NEWER_SYMBOLS(HC_RESOLVE)
#undef HC_NEED
#undef HC_RESOLVE
  return Status::ok();
}

}  // namespace

std::string nccl_version_text(int version) {
  // Until 2.8 the code was 1000 * major + 100 * minor + patch.
  const int unit = version < 10000 ? 1000 : 10000;
  return text_of(version / unit, ".", version % unit / 100, ".", version % 100);
}

NcclPlace NcclPlace::of(const CuUuid& uuid, int version) {
  NcclPlace place{uuid};
  if (const char* host = std::getenv("NCCL_HOSTID"); host && *host) place.host = hash_of_text(host);
  const char* shares = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  place.shares = shares && *shares == '1' && version >= kNcclShares;
  return place;
}

bool is_same_gpu(const NcclPlace& a, const NcclPlace& b) { return std::memcmp(&a.uuid, &b.uuid, sizeof(CuUuid)) == 0; }

bool nccl_refuses(const NcclPlace& a, const NcclPlace& b) {
  return is_same_gpu(a, b) && a.host == b.host && !(a.shares && b.shares);
}

Result<std::shared_ptr<const NcclApi>> NcclApi::load(const std::string& path, const std::string& folders,
                                                     const GpuPlatform& platform) {
  auto api = std::make_shared<NcclApi>();
  std::string tried;
  api->is_rccl = platform.is_hip;
  api->library = find(path, folders, platform.is_hip, &api->found, &tried);
  if (!api->library)
    return error(Code::kUnsupported, platform.is_hip ? "RCCL" : "NCCL", " was not found: ", tried, "; ",
                 path.empty() ? how_to_get_nccl(platform, false) : "unset it to have it looked for elsewhere");
  api->file = api->library->file();
  if (Status usable = resolve(api.get()); !usable.is_ok())
    return error(Code::kUnsupported, usable.text(), "; ", how_to_get_nccl(platform, true));
  return std::shared_ptr<const NcclApi>(std::move(api));
}

NcclApi::Registration NcclApi::registration() const {
  if (!ncclMemAlloc || !ncclMemFree || is_rccl) return Registration::kNone;
  if (version >= kNcclHasWindows && ncclCommWindowRegister && ncclCommWindowDeregister) return Registration::kWindows;
  return registers_buffers() ? Registration::kBuffers : Registration::kNone;
}

bool NcclApi::registers_buffers() const {
  return version >= kNcclRegisters && ncclCommRegister && ncclCommDeregister && !is_rccl;
}

Status NcclApi::check(NcclResult result, const char* call, NcclHandle comm) const {
  if (result == kNcclSuccess || result == kNcclInProgress) return Status::ok();
  const char* detail = ncclGetLastError(comm);
  return error(Code::kInternal, call, ": ", ncclGetErrorString(result), detail && *detail ? " (" : "",
               detail ? detail : "", detail && *detail ? ")" : "");
}

Result<bool> NcclApi::is_pending(NcclHandle comm) const {
  NcclResult state = kNcclSuccess;
  HC_TRY(check(ncclCommGetAsyncError(comm, &state), "ncclCommGetAsyncError", comm));
  HC_TRY(check(state, "NCCL", comm));
  return state == kNcclInProgress;
}

}  // namespace hc
