// The library that tf.load_op_library loads: when it is loaded, it finds TensorFlow's C API in the process and
// registers ops and kernels. What went wrong is kept for Python to ask for; nothing is registered then, and nothing
// crashes.
#include "horoclone.h"
#include "tensorflow_ops.h"
#include "tensorflow_runtime.h"

namespace {

std::string& problem() {
  static auto* text = new std::string;
  return *text;
}

[[gnu::constructor]] void on_load() {
  using namespace hc::tensorflow;
  problem() = load_api();
  if (problem().empty()) problem() = register_ops();
  if (problem().empty()) problem() = register_kernels();
}

}  // namespace

extern "C" {

// NULL when ops and kernels are registered, else why not.
HC_EXPORT const char* hc_tensorflow_problem() { return problem().empty() ? nullptr : problem().c_str(); }

// After init with the address of the hc_runtime; before shutdown with 0. Returns when no kernel uses the former one.
HC_EXPORT void hc_tensorflow_set_runtime(uint64_t address) {
  hc::tensorflow::runtime_pointer().set(reinterpret_cast<hc_runtime*>(static_cast<uintptr_t>(address)));
}
}
