// The handlers that XLA calls for horoclone's operations in a JAX program on the CPU: libhoroclone_jax.so.
// A call is submitted to the engine and answered with a future, which the engine's completion fulfils: no thread of XLA
// ever waits here. Python registers the handlers (horoclone/jax/native.py) and tells where the runtime is.
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "frameworks/jax_link.h"

namespace {

using namespace hc::jax;
namespace xla = hc::xla;

xla::TypeId call_site_type{0};
const xla::TypeInfo call_site_info{sizeof(xla::TypeInfo), nullptr, destroy_call_site};

// A call that the engine has: deleted by the completion.
struct Pending : Reading {
  const xla::Api* api;
  xla::Future* future;
  hc_runtime* runtime;
};

// Core-owned results go into XLA's memory. Empty when all is well.
std::string copy_results(const Pending& p, hc_handle handle) {
  for (size_t i = 0; i < p.tensors.copies_to.size(); ++i) {
    hc_result result{};
    hc_block* memory = nullptr;
    if (hc_status* status = hc_take_result(p.runtime, handle, static_cast<int32_t>(i), &result, &memory)) {
      std::string text = hc_status_text(status);
      hc_status_destroy(status);
      return text;
    }
    const size_t bytes = memory ? hc_block_bytes(memory) : 0;
    const bool fits = bytes == p.tensors.bytes[i];
    if (fits && bytes) std::memcpy(p.tensors.copies_to[i], hc_block_data(memory), bytes);
    hc_block_destroy(memory);
    if (!fits) return other_rows(p.name, i, result.first_dimension, p.tensors.first_rows[i]);
  }
  return "";
}

void finish(const Pending& p, xla::Future* future, hc_code code, const std::string& text) {
  xla::Error* failed = nullptr;
  if (code == HC_OK) {
    xla::FutureArgs args{sizeof args, nullptr, future};
    failed = p.api->future_set_available(&args);
  } else {
    xla::FutureErrorArgs args{sizeof args, nullptr, future, refuse(p.api, code, text)};
    failed = p.api->future_set_error(&args);
  }
  if (failed) {  // it knows the future no more: there is nobody to tell
    xla::ErrorDestroyArgs args{sizeof args, nullptr, failed};
    p.api->error_destroy(&args);
  }
}

// Thread: hc-notify. What it wakes in XLA may submit again.
void complete(void* context, hc_handle handle, const hc_status* status) {
  std::unique_ptr<Pending> p(static_cast<Pending*>(context));
  hc_code code = hc_status_code(status);
  std::string text = status ? hc_status_text(status) : copy_results(*p, handle);
  if (!status && !text.empty()) code = HC_INVALID_ARGUMENT;
  text += settle(*p, code);
  hc_release(p->runtime, handle);
  finish(*p, p->future, code, text);
  link().ended.fetch_add(1);
}

// Operation kSelfTest (jax_call.h): what a real call needs of XLA, without a runtime. Copies arguments to results from
// another thread.
xla::Error* self_test(xla::CallFrame* frame, std::unique_ptr<Pending> p) {
  xla::FutureCreateArgs made{offsetof(xla::FutureCreateArgs, future), nullptr, nullptr};
  if (xla::Error* error = p->api->future_create(&made)) return error;
  frame->future = made.future;
  const bool fails = p->attributes.root != 0;
  std::thread([fails, future = made.future, p = std::shared_ptr<Pending>(std::move(p))] {
    for (size_t i = 0; i < p->tensors.list.size(); ++i)
      std::memcpy(p->tensors.list[i].out, p->tensors.list[i].in, p->tensors.bytes[i]);
    finish(*p, future, fails ? HC_INTERNAL : HC_OK, "this failure is the self-test's");
  }).detach();
  return nullptr;
}

xla::Error* start(xla::CallFrame* frame, std::unique_ptr<Pending> p) {
  std::shared_lock lock(link().mu);
  p->visits = visits().take(p->step_key);
  hc_request request;
  xla::Error* error = make_request(p->api, *p, &request);
  xla::FutureCreateArgs made{offsetof(xla::FutureCreateArgs, future), nullptr, nullptr};
  if (!error) error = p->api->future_create(&made);
  if (error) {
    settle(*p, HC_INTERNAL);
    return error;
  }
  p->future = made.future;
  p->runtime = link().runtime;
  link().begun.fetch_add(1);
  request.done = complete;
  request.done_context = p.get();
  Pending* const kept = p.release();  // the completion may run, and delete it, before hc_submit returns
  hc_handle handle = 0;
  hc_status* status = hc_submit(link().runtime, &request, kept->tensors.list.data(),
                                static_cast<int32_t>(kept->tensors.list.size()), &handle);
  frame->future = made.future;
  if (!status) return nullptr;
  link().ended.fetch_add(1);
  p.reset(kept);
  settle(*p, hc_status_code(status));
  xla::FutureErrorArgs failed{sizeof failed, nullptr, p->future,
                              refuse(p->api, hc_status_code(status), hc_status_text(status))};
  hc_status_destroy(status);
  return p->api->future_set_error(&failed);
}

}  // namespace

extern "C" {

// Stage "instantiate": once for each place in a program.
HC_EXPORT xla::Error* hc_jax_instantiate(xla::CallFrame* frame) { return instantiate(frame, &call_site_type); }

// Stage "execute".
HC_EXPORT xla::Error* hc_jax_execute(xla::CallFrame* frame) {
  if (is_metadata_query(frame)) return nullptr;
  try {
    auto p = std::make_unique<Pending>();
    p->api = frame->api;
    if (xla::Error* error = read(frame, &call_site_type, p.get())) return error;
    if (p->attributes.op == kSelfTest) return self_test(frame, std::move(p));
    if (!is_visit(*p)) return start(frame, std::move(p));
    const Tensors& arm = p->tensors;
    if (arm.list[0].out != arm.list[0].in) std::memcpy(arm.list[0].out, arm.list[0].in, arm.bytes[0]);
    return nullptr;
  } catch (const std::exception& e) {  // out of memory
    return refuse(frame->api, HC_INTERNAL, e.what());
  }
}

// Of the comparison of values: no call of the engine's, and none that waits.
HC_EXPORT xla::Error* hc_jax_hash(xla::CallFrame* frame) {
  if (is_metadata_query(frame)) return nullptr;
  const std::string wrong = hash_arguments(*frame);
  return wrong.empty() ? nullptr : refuse(frame->api, HC_INTERNAL, wrong);
}

// The type of what "instantiate" makes, for XLA's registry.
HC_EXPORT void* hc_jax_call_site_type(void) { return &call_site_type; }
HC_EXPORT const void* hc_jax_call_site_info(void) { return &call_site_info; }

// After every init with the runtime, before every shutdown with nullptr. The process sets of the last life are
// forgotten.
HC_EXPORT void hc_jax_attach(hc_runtime* runtime) {
  std::unique_lock lock(link().mu);
  link().runtime = runtime;
  link().process_sets.clear();
  visits().forget();
}
// How many call sites programs have, how many calls have come from them and how many of these have ended, in the life
// of this process.
HC_EXPORT void hc_jax_count(int64_t* sites, int64_t* begun, int64_t* ended) {
  *sites = link().sites;
  *ended = link().ended;  // before `begun`: a call that ends meanwhile counts as under way
  *begun = link().begun;
}
// id < 0: the set exists no more.
HC_EXPORT void hc_jax_process_set(const char* members, int32_t id) {
  std::unique_lock lock(link().mu);
  if (id < 0)
    link().process_sets.erase(members);
  else
    link().process_sets[members] = id;
}

}  // extern "C"
