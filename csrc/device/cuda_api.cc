#include "device/cuda_api.h"

#include <algorithm>
#include <iterator>

namespace hc {

namespace {

constexpr const char* kDriverAdvice =
    "it comes with NVIDIA's driver: install the driver on this host, or start the container with --gpus all";

// After these the process gets nothing else from CUDA.
constexpr CuResult kForGood[] = {214, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721};

const char* advice_for(CuResult result) {
  if (result == kCuNotInitialized)
    return ": was this process forked after CUDA had been used? Start it with spawn, or use CUDA in the child alone";
  if (std::find(std::begin(kForGood), std::end(kForGood), result) != std::end(kForGood))
    return ": CUDA refuses everything in this process from now on, which has to be started anew; "
           "CUDA_LAUNCH_BLOCKING=1 shows the kernel that did it";
  return "";
}

Status resolve(CudaApi* api) {
#define HC_RESOLVE(name, exported, arguments)                                          \
  api->name = reinterpret_cast<CuResult(*) arguments>(api->library->symbol(exported)); \
  if (!api->name)                                                                      \
    return error(Code::kUnsupported, api->file, " has no ", exported,                  \
                 ": the driver is too old; CUDA 11.4 or newer is needed (update the driver of this host)");
  HC_CUDA_SYMBOLS(HC_RESOLVE)
#undef HC_RESOLVE
  return Status::ok();
}

}  // namespace

Result<std::shared_ptr<const CudaApi>> CudaApi::load(const std::string& path) {
  auto api = std::make_shared<CudaApi>();
  const std::string name = path.empty() ? "libcuda.so.1" : path;
  api->library = path.empty() ? Library::loaded(name) : nullptr;
  if (!api->library) {
    auto opened = Library::open(name);
    if (!opened.is_ok())
      return error(Code::kUnsupported, opened.status().text(), "; ",
                   path.empty() ? kDriverAdvice : "HOROCLONE_CUDA_LIBRARY names this file: unset it, or name another");
    api->library = opened.take();
  }
  api->file = api->library->file();
  HC_TRY(resolve(api.get()));
  if (Status up = api->check(api->cuInit(0), "cuInit"); !up.is_ok())
    return error(Code::kUnsupported, up.text(), " from ", api->file,
                 "; does nvidia-smi show a GPU here? In a container: --gpus all");
  if (Status told = api->check(api->cuDriverGetVersion(&api->version), "cuDriverGetVersion"); !told.is_ok())
    return error(Code::kUnsupported, told.text(), " from ", api->file);
  return std::shared_ptr<const CudaApi>(std::move(api));
}

Status CudaApi::check(CuResult result, const char* call) const {
  if (result == kCuSuccess) return Status::ok();
  const char* text = nullptr;
  if (!cuGetErrorString || cuGetErrorString(result, &text) != kCuSuccess || !text) text = "unknown error";
  return error(Code::kInternal, call, ": ", text, " (CUDA error ", result, ")", advice_for(result));
}

}  // namespace hc
