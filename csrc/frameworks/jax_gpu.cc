// The handlers for JAX programs on NVIDIA's GPUs. XLA hands over the stream that the program runs in: the operation is
// submitted with it and XLA's thread waits until the engine has enqueued it, which takes as long as the other ranks
// take to come here; then the stream waits for the result, and the thread goes on. So it is with XLA's own collectives.
// The host waits for no work of the GPU. Nothing of this may be recorded into a CUDA graph: the handler says so.
#include <condition_variable>
#include <mutex>
#include <new>

#include "frameworks/jax_link.h"

namespace hc::jax::gpu {
namespace {

xla::TypeId call_site_type{0};
const xla::TypeInfo call_site_info{sizeof(xla::TypeInfo), nullptr, destroy_call_site};

// A call that the engine has. Lives on the stack of XLA's thread, which waits for `over`.
struct Enqueuing : Reading {
  hc_runtime* runtime = nullptr;
  void* stream = nullptr;
  std::mutex mu;  // guards the rest
  std::condition_variable changed;
  bool over = false;
  hc_code code = HC_OK;
  std::string text;
};

hc_code take(hc_status* status, std::string* text) {
  const hc_code code = hc_status_code(status);
  if (status) *text = hc_status_text(status);
  hc_status_destroy(status);
  return code;
}

// The stream comes behind the result; what the core owns is copied into XLA's memory, in the stream.
hc_code follow(const Enqueuing& call, hc_handle handle, std::string* text) {
  if (const hc_code code = take(hc_stream_wait(call.runtime, handle, call.stream), text)) return code;
  const Tensors& tensors = call.tensors;
  for (size_t i = 0; i < tensors.copies_to.size(); ++i) {
    const auto at = static_cast<int32_t>(i);
    hc_result result{};
    hc_block* none = nullptr;
    if (const hc_code code = take(hc_take_result(call.runtime, handle, at, &result, &none), text)) return code;
    hc_block_destroy(none);
    if (tensors.first_rows[i] >= 0 && result.first_dimension != tensors.first_rows[i]) {
      *text = other_rows(call.name, i, result.first_dimension, tensors.first_rows[i]);
      return HC_INVALID_ARGUMENT;
    }
    if (!tensors.bytes[i]) continue;
    hc_status* copied = hc_copy_result(call.runtime, handle, at, tensors.copies_to[i], tensors.bytes[i], call.stream);
    if (const hc_code code = take(copied, text)) return code;
  }
  return HC_OK;
}

// Thread: hc-notify, while the runtime lives: a waiter that does this itself could find it gone.
void complete(void* context, hc_handle handle, const hc_status* status) {
  auto& call = *static_cast<Enqueuing*>(context);
  std::string text = status ? hc_status_text(status) : "";
  const hc_code code = status ? hc_status_code(status) : follow(call, handle, &text);
  hc_release(call.runtime, handle);
  std::lock_guard lock(call.mu);  // held to the end: the waiter's stack must outlive the notice
  call.code = code;
  call.text = std::move(text);
  call.over = true;
  call.changed.notify_one();
}

struct CallCount {
  CallCount() { link().begun.fetch_add(1); }
  ~CallCount() { link().ended.fetch_add(1); }
};

// The program's stream, and which of CUDA's devices of this process it runs on.
xla::Error* find_place(xla::CallFrame* frame, Enqueuing* call, int32_t* device) {
  const xla::Api* api = frame->api;
  if (api->struct_size < offsetof(xla::Api, device_ordinal_get) + sizeof api->device_ordinal_get)
    return refuse(api, HC_UNSUPPORTED, "jaxlib's FFI interface does not tell on which GPU a program runs: upgrade jax");
  xla::StreamGetArgs stream{sizeof stream, nullptr, frame->context, nullptr};
  if (xla::Error* error = api->stream_get(&stream)) return error;
  xla::DeviceOrdinalGetArgs ordinal{xla::kDeviceOrdinalGetArgsSize, nullptr, frame->context, -1};
  if (xla::Error* error = api->device_ordinal_get(&ordinal)) return error;
  call->stream = stream.stream;
  *device = ordinal.device_ordinal;
  return nullptr;
}

xla::Error* submit(const xla::Api* api, Enqueuing* call, int32_t device) {
  std::shared_lock lock(link().mu);
  call->visits = visits().take(call->step_key);
  hc_request request;
  if (xla::Error* error = make_request(api, *call, &request)) {
    settle(*call, HC_INTERNAL);
    return error;
  }
  request.device = HC_CUDA;
  request.device_index = device;
  request.stream = call->stream;
  request.done = complete;
  request.done_context = call;
  call->runtime = link().runtime;
  hc_handle handle = 0;
  hc_status* status = hc_submit(link().runtime, &request, call->tensors.list.data(),
                                static_cast<int32_t>(call->tensors.list.size()), &handle);
  std::string text;
  const hc_code code = take(status, &text);
  if (code == HC_OK) return nullptr;
  settle(*call, code);
  return refuse(api, code, text);
}

}  // namespace

extern "C" {

// Stage "instantiate": once for each place in a program.
HC_EXPORT xla::Error* hc_jax_cuda_instantiate(xla::CallFrame* frame) { return instantiate(frame, &call_site_type); }

// Stage "execute".
HC_EXPORT xla::Error* hc_jax_cuda_execute(xla::CallFrame* frame) {
  if (is_metadata_query(frame)) return nullptr;
  const xla::Api* api = frame->api;
  try {
    Enqueuing call;
    if (xla::Error* error = read(frame, &call_site_type, &call)) return error;
    if (call.attributes.op == kSelfTest) return refuse(api, HC_UNSUPPORTED, "the self-test is for programs on the CPU");
    if (is_visit(call)) return nullptr;
    int32_t device = -1;
    if (xla::Error* error = find_place(frame, &call, &device)) return error;
    const CallCount counted;
    if (xla::Error* error = submit(api, &call, device)) return error;
    std::unique_lock lock(call.mu);
    call.changed.wait(lock, [&] { return call.over; });
    call.text += settle(call, call.code);
    return call.code == HC_OK ? nullptr : refuse(api, call.code, call.text);
  } catch (const std::exception& e) {  // out of memory
    return refuse(api, HC_INTERNAL, e.what());
  }
}

// As of the handlers for the CPU: XLA for GPUs has a registry of its own.
HC_EXPORT void* hc_jax_cuda_call_site_type(void) { return &call_site_type; }
HC_EXPORT const void* hc_jax_cuda_call_site_info(void) { return &call_site_info; }

}  // extern "C"

}  // namespace hc::jax::gpu
