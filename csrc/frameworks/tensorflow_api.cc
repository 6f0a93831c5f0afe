// Finding TensorFlow's C API in the process, and the self-test of the one assumption about its inside.
#include "tensorflow_api.h"

#include <dlfcn.h>

#include <atomic>
#include <cstring>

namespace hc::tensorflow {

Api api;

namespace {

constexpr const char* kLibrary = "libtensorflow_framework.so.2";

// Whether the code at this address belongs to a loaded library.
bool is_code(const void* address) {
  Dl_info info;
  return address && dladdr(address, &info) && info.dli_fname;
}

// TensorFlow runs its callbacks as it was compiled to; ours must look the same to it.
std::string test_done_callback(void* library) {
  if (!dlsym(library, "_ZSt25__throw_bad_function_callv"))
    return "TensorFlow was not built with libstdc++, so its completion callbacks cannot be kept";
  static_assert(sizeof(Done) == 4 * sizeof(void*));
  int calls = 0;
  const std::string kept(64, 'x');  // too large for std::function's own space: it lies on the heap
  Done done = [&calls, kept] { calls += kept.size() == 64; };
  Done copy;
  if (!copy_done(reinterpret_cast<TF_AsyncOpKernelDoneCallback*>(&done), &copy))
    return "std::function does not have the expected form";
  done = nullptr;
  api.RunAsyncOpKernelDoneCallback(reinterpret_cast<TF_AsyncOpKernelDoneCallback*>(&copy));
  return calls == 1 ? "" : "TensorFlow did not run a completion callback that was copied";
}

}  // namespace

bool copy_done(TF_AsyncOpKernelDoneCallback* done, Done* out) {
  const void* words[4];  // libstdc++: two words of the callable, its manager, its invoker
  std::memcpy(words, static_cast<const void*>(done), sizeof(words));
  static std::atomic<const void*> known[2] = {nullptr, nullptr};  // dladdr is slow, and callers are few
  for (int i = 0; i < 2; ++i) {
    if (words[2 + i] == known[i].load(std::memory_order_relaxed)) continue;
    if (!is_code(words[2 + i])) return false;
    known[i].store(words[2 + i], std::memory_order_relaxed);
  }
  *out = *reinterpret_cast<Done*>(done);
  return true;
}

std::string load_api() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD);
  if (!library) return std::string(kLibrary) + " is not loaded; import tensorflow first";
  std::string missing;
#define HC_TENSORFLOW_FIND(result, name, parameters)                            \
  api.name = reinterpret_cast<decltype(api.name)>(dlsym(library, "TF_" #name)); \
  if (!api.name) missing += missing.empty() ? "TF_" #name : ", TF_" #name;
  HC_TENSORFLOW_FUNCTIONS(HC_TENSORFLOW_FIND)
#undef HC_TENSORFLOW_FIND
  if (!missing.empty()) return std::string(kLibrary) + " does not have " + missing;
  return test_done_callback(library);
}

}  // namespace hc::tensorflow
