// Lets XLA:CPU run its programs through horoclone's handlers for GPUs, on the fake of CUDA's driver: each argument is
// copied to the fake's device memory, the handler is called with a frame in which memory, stream and device are the
// fake's, and the results are copied back. So everything of a program but XLA's own kernels is as on a GPU.
// Built and loaded by tests/jax/test_gpu_fake.py. Thread: any of XLA's.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "frameworks/xla_ffi.h"

namespace xla = hc::xla;
using Handler = xla::Error* (*)(xla::CallFrame*);

namespace {

void* stream = nullptr;
void* context = nullptr;
int32_t device = 0;
Handler instantiate_of_product, execute_of_product;
void* (*type_of_product)();
const void* (*info_of_product)();

#define DRIVER(X)                                                 \
  X(cuDevicePrimaryCtxRetain, (void**, int))                      \
  X(cuCtxPushCurrent_v2, (void*))                                 \
  X(cuCtxPopCurrent_v2, (void**))                                 \
  X(cuStreamCreateWithPriority, (void**, unsigned, int))          \
  X(cuStreamSynchronize, (void*))                                 \
  X(cuMemAlloc_v2, (uint64_t*, size_t))                           \
  X(cuMemFree_v2, (uint64_t))                                     \
  X(cuMemcpyHtoDAsync_v2, (uint64_t, const void*, size_t, void*)) \
  X(cuMemcpyDtoHAsync_v2, (void*, uint64_t, size_t, void*))
#define DECLARE(name, arguments) int(*name) arguments = nullptr;
DRIVER(DECLARE)

void must(int result, const char* what) {
  if (result == 0) return;
  std::fprintf(stderr, "xla_on_fake: %s gave %d\n", what, result);
  std::abort();
}

size_t bytes_of(const xla::Buffer& buffer) {
  size_t bytes = 8;
  switch (buffer.dtype) {
    case xla::DataType::kPred:
    case xla::DataType::kS8:
    case xla::DataType::kU8:
    case xla::DataType::kF8E5M2:
    case xla::DataType::kF8E4M3FN:
    case xla::DataType::kF8E4M3B11FNUZ:
    case xla::DataType::kF8E5M2FNUZ:
    case xla::DataType::kF8E4M3FNUZ:
    case xla::DataType::kF8E4M3:
    case xla::DataType::kF8E3M4:
    case xla::DataType::kF8E8M0FNU:
      bytes = 1;
      break;
    case xla::DataType::kS16:
    case xla::DataType::kU16:
    case xla::DataType::kF16:
    case xla::DataType::kBF16:
      bytes = 2;
      break;
    case xla::DataType::kS32:
    case xla::DataType::kU32:
    case xla::DataType::kF32:
      bytes = 4;
      break;
    case xla::DataType::kS64:
    case xla::DataType::kU64:
    case xla::DataType::kF64:
    case xla::DataType::kC64:
      break;
    case xla::DataType::kC128:
      bytes = 16;
      break;
  }
  for (int64_t i = 0; i < buffer.rank; ++i) bytes *= static_cast<size_t>(buffer.dims[i]);
  return bytes;
}

// The buffers of a frame, in memory of the fake.
struct OnDevice {
  std::vector<xla::Buffer> buffers;
  std::vector<void*> values;
  std::vector<void*> host;

  explicit OnDevice(const xla::Arguments& from) : buffers(from.size), values(from.size), host(from.size) {
    for (int64_t i = 0; i < from.size; ++i) {
      buffers[i] = *static_cast<const xla::Buffer*>(from.values[i]);
      host[i] = buffers[i].data;
      uint64_t at = 0;
      const size_t bytes = bytes_of(buffers[i]);
      if (bytes) must(cuMemAlloc_v2(&at, bytes), "cuMemAlloc");
      buffers[i].data = reinterpret_cast<void*>(at);
      values[i] = &buffers[i];
    }
  }
  ~OnDevice() {
    for (xla::Buffer& b : buffers)
      if (b.data) must(cuMemFree_v2(reinterpret_cast<uint64_t>(b.data)), "cuMemFree");
  }
  void fill() {
    for (size_t i = 0; i < buffers.size(); ++i)
      if (const size_t bytes = bytes_of(buffers[i]))
        must(cuMemcpyHtoDAsync_v2(reinterpret_cast<uint64_t>(buffers[i].data), host[i], bytes, stream), "HtoD");
  }
  void fetch() {
    for (size_t i = 0; i < buffers.size(); ++i)
      if (const size_t bytes = bytes_of(buffers[i]))
        must(cuMemcpyDtoHAsync_v2(host[i], reinterpret_cast<uint64_t>(buffers[i].data), bytes, stream), "DtoH");
  }
};

xla::Error* give_stream(xla::StreamGetArgs* args) {
  args->stream = stream;
  return nullptr;
}
xla::Error* give_device(xla::DeviceOrdinalGetArgs* args) {
  args->device_ordinal = device;
  return nullptr;
}

xla::Error* run(xla::CallFrame* frame) {
  xla::Api api{};
  std::memcpy(static_cast<void*>(&api), frame->api, std::min(sizeof api, frame->api->struct_size));
  api.struct_size = sizeof api;
  api.stream_get = give_stream;
  api.device_ordinal_get = give_device;
  OnDevice arguments(frame->arguments), results(frame->results);
  arguments.fill();
  results.fill();  // one may have to lie where an argument does
  xla::CallFrame inner = *frame;
  inner.api = &api;
  inner.arguments.values = arguments.values.data();
  inner.results.values = results.values.data();
  xla::Error* error = execute_of_product(&inner);
  if (!error) results.fetch();
  must(cuStreamSynchronize(stream), "cuStreamSynchronize");
  return error;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// cuda: the fake's library; product: libhoroclone_jax.so; both loaded.
EXPORT void xla_on_fake_start(void* cuda, void* product, int on_device) {
#define FIND(name, arguments) name = reinterpret_cast<int(*) arguments>(dlsym(cuda, #name));
  DRIVER(FIND)
  instantiate_of_product = reinterpret_cast<Handler>(dlsym(product, "hc_jax_cuda_instantiate"));
  execute_of_product = reinterpret_cast<Handler>(dlsym(product, "hc_jax_cuda_execute"));
  type_of_product = reinterpret_cast<void* (*)()>(dlsym(product, "hc_jax_cuda_call_site_type"));
  info_of_product = reinterpret_cast<const void* (*)()>(dlsym(product, "hc_jax_cuda_call_site_info"));
  device = on_device;
  must(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  must(cuCtxPushCurrent_v2(context), "cuCtxPushCurrent");
  must(cuStreamCreateWithPriority(&stream, 1, 0), "cuStreamCreateWithPriority");
  void* popped = nullptr;
  must(cuCtxPopCurrent_v2(&popped), "cuCtxPopCurrent");
}

EXPORT xla::Error* xla_on_fake_instantiate(xla::CallFrame* frame) { return instantiate_of_product(frame); }

EXPORT xla::Error* xla_on_fake_execute(xla::CallFrame* frame) {
  if (frame->extension_start && frame->extension_start->type == xla::kMetadataExtension)
    return execute_of_product(frame);
  must(cuCtxPushCurrent_v2(context), "cuCtxPushCurrent");
  xla::Error* error = run(frame);
  void* popped = nullptr;
  must(cuCtxPopCurrent_v2(&popped), "cuCtxPopCurrent");
  return error;
}

EXPORT void* xla_on_fake_call_site_type(void) { return type_of_product(); }
EXPORT const void* xla_on_fake_call_site_info(void) { return info_of_product(); }
