// A FAKE of NVRTC, built as libnvrtc.so.13 for the tests only: it compiles nothing, but as the real one it wants
// its builtins (nvrtc_builtins_fake.cc) for that. What it gives as machine
// code is a text with the names of the kernels that it finds in the source, which is all that the driver's fake looks
// at. (The real one compiles the same source in tests/core/test_gpu_kernels.py, without a GPU.)
//   HC_FAKE_NVRTC_FAIL=f:n:r  the n-th call (from 1) of function f returns r
//   HC_FAKE_NVRTC_US=n        time that a compilation takes
// -DHC_FAKE_WITHOUT_PTX leaves a symbol out; with -DHC_FAKE_HIP it is a fake of AMD's hipRTC, built as libhiprtc.so.
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "device/nvrtc_api.h"

#define FAKE_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kCompilation = 6, kBuiltins = 7;

struct Program {
  std::string source, code, log;
};

std::atomic<int> compilations{0};

bool fails(const char* function, int* result) {
  static std::mutex mu;
  static auto* calls = new std::map<std::string, int>;
  const char* wish = std::getenv("HC_FAKE_NVRTC_FAIL");
  if (!wish) return false;
  const std::string text = wish;
  const size_t first = text.find(':'), second = text.find(':', first + 1);
  if (second == std::string::npos || text.substr(0, first) != function) return false;
  std::lock_guard lock(mu);
  if (++(*calls)[function] != std::atoi(text.c_str() + first + 1)) return false;
  *result = std::atoi(text.c_str() + second + 1);
  return true;
}

// One ".entry" for each kernel that the macros of the source define.
std::string entries_of(const std::string& source) {
  std::string code = "// from a fake\n";
  for (const std::string macro : {"\nHC_KERNEL(", "\nHC_PACKS("})
    for (size_t at = source.find(macro); at != std::string::npos; at = source.find(macro, at + 1)) {
      const size_t from = at + macro.size();
      const std::string name = source.substr(from, source.find(',', from) - from);
      if (macro == "\nHC_KERNEL(")
        code += ".entry " + name + "\n";
      else
        code += ".entry hc_pack_" + name + "\n.entry hc_unpack_" + name + "\n";
    }
  return code;
}

}  // namespace

#define MAY_FAIL \
  if (int wished = 0; fails(__func__, &wished)) return wished

FAKE_API int hc_fake_compilations() { return compilations.load(); }

FAKE_API int nvrtcVersion(int* major, int* minor) {
  MAY_FAIL;
  *major = 13;
  *minor = 0;
  return 0;
}
FAKE_API const char* nvrtcGetErrorString(int result) {
  if (result == kBuiltins) return "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE";
  return result == kCompilation ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_INTERNAL_ERROR";
}
FAKE_API int nvrtcGetNumSupportedArchs(int* count) {
  *count = 4;
  return 0;
}
FAKE_API int nvrtcGetSupportedArchs(int* archs) {
  constexpr int known[] = {80, 90, 100, 120};
  std::memcpy(archs, known, sizeof known);
  return 0;
}
FAKE_API int nvrtcCreateProgram(void** program, const char* source, const char*, int headers, const char* const* header,
                                const char* const* names) {
  MAY_FAIL;
  if (headers != 2 || !header[0] || !header[1] || !std::strstr(source, names[0])) return 3;
  auto* made = new Program;
  made->source = source;
  *program = made;
  return 0;
}
FAKE_API int nvrtcDestroyProgram(void** program) {
  delete static_cast<Program*>(*program);
  *program = nullptr;
  return 0;
}
FAKE_API int nvrtcCompileProgram(void* program, int count, const char* const* options) {
  auto* p = static_cast<Program*>(program);
  p->log = "kernels.cu(1): error: on demand";
  MAY_FAIL;
#ifndef HC_FAKE_HIP
  if (!dlopen("libnvrtc-builtins.so.13.0", RTLD_NOW | RTLD_LOCAL)) {
    p->log = "nvrtc: error: failed to open libnvrtc-builtins.so.13.0.";
    return kBuiltins;
  }
#endif
  if (const char* us = std::getenv("HC_FAKE_NVRTC_US")) ::usleep(static_cast<unsigned>(std::atoi(us)));
  p->code = entries_of(p->source);
  for (int i = 0; i < count; ++i) p->code += std::string("// ") + options[i] + "\n";
  ++compilations;
  return 0;
}
FAKE_API int nvrtcGetProgramLogSize(void* program, size_t* bytes) {
  *bytes = static_cast<Program*>(program)->log.size() + 1;
  return 0;
}
FAKE_API int nvrtcGetProgramLog(void* program, char* log) {
  std::strcpy(log, static_cast<Program*>(program)->log.c_str());
  return 0;
}
FAKE_API int nvrtcGetCUBINSize(void* program, size_t* bytes) {
  *bytes = static_cast<Program*>(program)->code.size() + 1;
  return 0;
}
FAKE_API int nvrtcGetCUBIN(void* program, char* code) {
  MAY_FAIL;
  std::strcpy(code, static_cast<Program*>(program)->code.c_str());
  return 0;
}
FAKE_API int nvrtcGetPTXSize(void* program, size_t* bytes) { return nvrtcGetCUBINSize(program, bytes); }
#ifndef HC_FAKE_WITHOUT_PTX
FAKE_API int nvrtcGetPTX(void* program, char* code) { return nvrtcGetCUBIN(program, code); }
#endif
#ifdef HC_FAKE_HIP
#define HC_ALIAS(name, hip, type, arguments) asm(".globl " #hip "\n" #hip " = " #name);
HC_NVRTC_SYMBOLS(HC_ALIAS)
#endif
