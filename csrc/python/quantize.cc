// Block quantisation from Python, on addresses. The GIL is released: another bucket's hook may run meanwhile.
#include "quantize.h"

#include <cstdint>

#include "horoclone_tools.h"
#include "raising.h"
#include "without_gil.h"

namespace py = pybind11;

namespace hc_python {

// Addresses of float32 numbers and of bytes; the caller keeps their memory, and has checked its size.
void add_quantize(py::module_& m) {
  using namespace py::literals;
  m.def(
      "quantize",
      [](int64_t block, int64_t shard, int64_t count, uintptr_t in, uintptr_t residual, uintptr_t message) {
        const hc_blocks blocks{HC_VERSION, block, shard, count};
        hc_status* status;
        {
          WithoutGil released;
          status = hc_quantize(&blocks, reinterpret_cast<const float*>(in), reinterpret_cast<float*>(residual),
                               reinterpret_cast<void*>(message));
        }
        raise_if(status);
      },
      "block"_a, "shard"_a, "count"_a, "data_in"_a, "residual"_a, "message"_a);
  m.def(
      "dequantize",
      [](int64_t block, int64_t shard, int64_t count, uintptr_t message, uintptr_t out, bool add) {
        const hc_blocks blocks{HC_VERSION, block, shard, count};
        hc_status* status;
        {
          WithoutGil released;
          status = hc_dequantize(&blocks, reinterpret_cast<const void*>(message), reinterpret_cast<float*>(out), add);
        }
        raise_if(status);
      },
      "block"_a, "shard"_a, "count"_a, "message"_a, "data_out"_a, "add"_a = false);
}

}  // namespace hc_python
