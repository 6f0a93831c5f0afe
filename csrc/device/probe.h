// What there is to use of GPUs on this host, or why not: for `horoclonerun --check-build` and `horoclone doctor`.
#pragma once

#include <string>

#include "device/kernel_image.h"

namespace hc {

struct DeviceLibraries {  // settings; empty: search
  std::string cuda;
  std::string nccl;
  std::string nccl_folders;
  KernelOptions kernels;
};

// {"cuda": {"found", "platform", "file", "version", "devices": [name...]}, "nccl": {"found", "file", "where",
// "version", "features": {...}}, "kernels": {"found", "where", "version", "file"}}; what is not found has {"found":
// false, "reason"}. Makes no context on any device.
std::string device_report_json(const DeviceLibraries& libraries);

}  // namespace hc
