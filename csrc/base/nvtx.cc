#include "base/nvtx.h"

#include <cstddef>
#include <cstdlib>
#include <mutex>

#include "base/library.h"
#include "base/status.h"

namespace hc::nvtx {

namespace {

// Facts of NVTX's headers (nvtxTypes.h, nvToolsExt.h); a test compares them with the headers that NVIDIA ships.
constexpr uint32_t kCallbacks = 1;  // NVTX_ETID_CALLBACKS, the table with which a tool asks for the tables of functions
constexpr uint32_t kVersionInfo = 3;
constexpr int kModuleCore = 1, kModuleCore2 = 5;
constexpr int kFunctionsOfModule = 16;  // of both
constexpr int kDomainRangeStartEx = 2, kDomainRangeEnd = 3, kDomainRangePushEx = 4, kDomainRangePop = 5,
              kDomainCreateA = 12;  // in the module core 2
constexpr uint16_t kVersion = 3;
constexpr int32_t kAscii = 1;

struct Attributes {  // nvtxEventAttributes_t
  uint16_t version = kVersion;
  uint16_t size = sizeof(Attributes);
  uint32_t category = 0;
  int32_t color_type = 0;
  uint32_t color = 0;
  int32_t payload_type = 0;
  int32_t reserved = 0;
  uint64_t payload = 0;
  int32_t message_type = kAscii;
  const char* message = nullptr;
};
static_assert(sizeof(Attributes) == 48 && offsetof(Attributes, message) == 40);

using Function = void (*)();
struct CallbackTable {  // NvtxExportTableCallbacks
  size_t struct_size;
  int (*get_module_table)(int module, Function*** table, unsigned* size);
};
struct VersionTable {  // NvtxExportTableVersionInfo
  size_t struct_size;
  uint32_t version;
  uint32_t reserved;
  void (*set_version)(uint32_t version);
};

// What a tool writes its functions into. The tables have the places of all functions of a module; those that we do not
// call lead to one place that nobody reads.
struct Functions {
  void* (*create_domain)(const char* name) = nullptr;
  uint64_t (*start)(void* domain, const Attributes*) = nullptr;
  void (*end)(void* domain, uint64_t range) = nullptr;
  int (*push)(void* domain, const Attributes*) = nullptr;
  int (*pop)(void* domain) = nullptr;
} functions;
Function unread = nullptr;
Function* core[kFunctionsOfModule + 1];  // a null at the end, as NVTX's own tables have
Function* core2[kFunctionsOfModule + 1];
void* domain = nullptr;

void fill_tables() {
  for (int i = 1; i < kFunctionsOfModule; ++i) core[i] = core2[i] = &unread;
  core2[kDomainRangeStartEx] = reinterpret_cast<Function*>(&functions.start);
  core2[kDomainRangeEnd] = reinterpret_cast<Function*>(&functions.end);
  core2[kDomainRangePushEx] = reinterpret_cast<Function*>(&functions.push);
  core2[kDomainRangePop] = reinterpret_cast<Function*>(&functions.pop);
  core2[kDomainCreateA] = reinterpret_cast<Function*>(&functions.create_domain);
}

int get_module_table(int module, Function*** table, unsigned* size) {
  if (module != kModuleCore && module != kModuleCore2) return 0;  // clocks, CUDA, OpenCL: we call none of them
  *table = module == kModuleCore ? core : core2;
  if (size) *size = kFunctionsOfModule;
  return 1;
}

const CallbackTable callbacks{sizeof(CallbackTable), get_module_table};
const VersionTable version_info{sizeof(VersionTable), kVersion, 0, [](uint32_t) {}};

const void* export_table(uint32_t id) {
  if (id == kCallbacks) return &callbacks;
  return id == kVersionInfo ? &version_info : nullptr;
}

Attributes attributes_of(const std::string& text) {
  Attributes made;
  made.message = text.c_str();
  return made;
}

std::string look_for_tool() {
  const char* path = std::getenv("NVTX_INJECTION64_PATH");
  if (!path || !*path) return "";
  auto library = Library::open(path);
  if (!library.is_ok())
    return text_of("NVTX_INJECTION64_PATH names a tool that cannot be loaded: ", library.status().text());
  using Initialize = int (*)(const void* (*)(uint32_t));
  auto* initialize = reinterpret_cast<Initialize>(library.value()->symbol("InitializeInjectionNvtx2"));
  fill_tables();
  if (!initialize || !initialize(export_table))
    return text_of(path, ", which NVTX_INJECTION64_PATH names, takes no ranges");
  const Functions& f = functions;
  if (!f.create_domain || !f.start || !f.end || !f.push || !f.pop) return "";  // it listens for other things
  domain = f.create_domain("horoclone");
  detail::is_on.store(true, std::memory_order_release);
  return "";
}

}  // namespace

std::string attach() {
  static std::once_flag looked;
  std::string wrong;
  std::call_once(looked, [&] { wrong = look_for_tool(); });
  return wrong;
}

namespace detail {

void push(const std::string& text) {
  const Attributes attributes = attributes_of(text);
  (void)functions.push(domain, &attributes);
}
void pop() { (void)functions.pop(domain); }
uint64_t start(const std::string& text) {
  const Attributes attributes = attributes_of(text);
  return functions.start(domain, &attributes);
}
void end(uint64_t range) { functions.end(domain, range); }

}  // namespace detail

}  // namespace hc::nvtx
