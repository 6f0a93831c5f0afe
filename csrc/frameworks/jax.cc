// The handlers that XLA calls for horoclone's operations in a JAX program: libhoroclone_jax.so.
// A call is submitted to the engine and answered with a future, which the engine's completion fulfils: no thread of XLA
// ever waits here. Python registers the handlers (horoclone/jax/native.py) and tells where the runtime is.
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <thread>

#include "frameworks/jax_call.h"

namespace {

using namespace hc::jax;
namespace xla = hc::xla;

// The runtime and the process sets of its present life. Shared by submits, exclusive for attach: when attach(nullptr)
// has returned, no submit is on its way into the old runtime.
struct Link {
  std::shared_mutex mu;  // guards the rest
  hc_runtime* runtime = nullptr;
  std::map<std::string, int32_t, std::less<>> process_sets;  // "0,2" -> id
};
Link& link() {
  static auto* made = new Link;  // never destroyed: XLA's threads outlive main
  return *made;
}

// A place in a program from which the handler is called. Two places of one program may carry one name (a function with
// a collective that the program calls twice) and XLA runs them in any order: the number tells them apart. XLA makes the
// places of a program in the same order on every rank, because every rank compiles the same program.
struct CallSite {
  int64_t program;
  std::string name;
  int number;
};
struct CallSites {
  struct Count {
    int made = 0, alive = 0;
  };
  std::mutex mu;  // guards counts
  std::map<std::pair<int64_t, std::string>, Count> counts;

  CallSite* make(const Attributes& a) {
    std::lock_guard lock(mu);
    Count& count = counts[{a.program, std::string(a.name)}];
    ++count.alive;
    return new CallSite{a.program, std::string(a.name), count.made++};
  }
  void destroy(CallSite* site) {
    std::unique_ptr<CallSite> owned(site);
    std::lock_guard lock(mu);
    auto at = counts.find({site->program, site->name});
    if (at != counts.end() && --at->second.alive == 0) counts.erase(at);
  }
};
CallSites& call_sites() {
  static auto* made = new CallSites;
  return *made;
}

void destroy_call_site(void* site) { call_sites().destroy(static_cast<CallSite*>(site)); }
xla::TypeId call_site_type{0};
const xla::TypeInfo call_site_info{sizeof(xla::TypeInfo), nullptr, destroy_call_site};

// A call that the engine has: deleted by the completion.
struct Pending {
  const xla::Api* api;
  xla::Future* future;
  hc_runtime* runtime;
  Tensors tensors;
  std::string name;
};

std::string text_of(hc_code code, const char* text) { return std::string(name_of(code)) + ": " + text; }

xla::Error* refuse(const xla::Api* api, hc_code code, const std::string& text) {
  return make_error(api, code_of(code), text_of(code, text.c_str()));
}

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
    if (bytes == p.tensors.bytes[i]) {
      if (bytes) std::memcpy(p.tensors.copies_to[i], hc_block_data(memory), bytes);
      hc_block_destroy(memory);
      continue;
    }
    hc_block_destroy(memory);
    return "'" + p.name + "': tensor " + std::to_string(i) + " came out with " +
           std::to_string(result.first_dimension) + " rows, and the program was compiled for " +
           std::to_string(p.tensors.first_rows[i]) +
           ". Under jit every rank gives the same number of rows, and a program serves the number of ranks that it was "
           "traced with (jax.clear_caches() after it has changed); the eager call takes any numbers.";
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
  hc_release(p->runtime, handle);
  finish(*p, p->future, code, text);
}

// Answers XLA's question at registration: for which version of its interface the handler was made.
bool is_metadata_query(xla::CallFrame* frame) {
  if (!frame->extension_start || frame->extension_start->type != xla::kMetadataExtension) return false;
  xla::Metadata* to = reinterpret_cast<xla::MetadataExtension*>(frame->extension_start)->metadata;
  to->api_version = {sizeof(xla::ApiVersion), nullptr, xla::kApiMajor, xla::kApiMinor};
  to->traits = 0;
  return true;
}

// Operation kSelfTest: what a real call needs of XLA, without a runtime. Copies arguments to results from another
// thread.
constexpr int32_t kSelfTest = -1;

xla::Error* self_test(xla::CallFrame* frame, const Attributes& attributes, std::unique_ptr<Pending> p) {
  xla::FutureCreateArgs made{offsetof(xla::FutureCreateArgs, future), nullptr, nullptr};
  if (xla::Error* error = p->api->future_create(&made)) return error;
  frame->future = made.future;
  const bool fails = attributes.root != 0;
  std::thread([fails, future = made.future, p = std::shared_ptr<Pending>(std::move(p))] {
    for (size_t i = 0; i < p->tensors.list.size(); ++i)
      std::memcpy(p->tensors.list[i].out, p->tensors.list[i].in, p->tensors.bytes[i]);
    finish(*p, future, fails ? HC_INTERNAL : HC_OK, "this failure is the self-test's");
  }).detach();
  return nullptr;
}

xla::Error* check_frame(const xla::CallFrame* frame) {
  const xla::Api* api = frame->api;
  if (frame->struct_size < offsetof(xla::CallFrame, future) || api->struct_size < offsetof(xla::Api, run_id_get))
    return refuse(api, HC_UNSUPPORTED, "jaxlib's FFI interface is older than the one that horoclone was built for");
  return nullptr;
}

xla::Error* start(xla::CallFrame* frame, const Attributes& attributes, std::unique_ptr<Pending> p) {
  std::shared_lock lock(link().mu);
  if (!link().runtime)
    return refuse(p->api, HC_NOT_INITIALIZED,
                  "'" + p->name + "': Horovod has not been initialized (or was shut down); use hvd.init().");
  if (p->name.find('\0') != std::string::npos)
    return refuse(p->api, HC_INVALID_ARGUMENT, "a name cannot have a NUL character in it: '" + p->name + "'");
  hc_request request{};
  request.version = HC_VERSION;
  request.op = attributes.op;
  request.reduce = attributes.reduce;
  request.root = attributes.root;
  request.prescale = attributes.prescale;
  request.postscale = attributes.postscale;
  request.name = p->name.c_str();
  if (!attributes.members.empty()) {
    auto at = link().process_sets.find(attributes.members);
    if (at == link().process_sets.end())
      return refuse(p->api, HC_INVALID_ARGUMENT,
                    "'" + p->name + "': the process set [" + std::string(attributes.members) +
                        "] of this program is not registered; pass it to hvd.init(process_sets=[...]) or to "
                        "horoclone.jax.add_process_set().");
    request.process_set = at->second;
  }
  xla::FutureCreateArgs made{offsetof(xla::FutureCreateArgs, future), nullptr, nullptr};
  if (xla::Error* error = p->api->future_create(&made)) return error;
  p->future = made.future;
  p->runtime = link().runtime;
  request.done = complete;
  request.done_context = p.get();
  Pending* const kept = p.release();  // the completion may run, and delete it, before hc_submit returns
  hc_handle handle = 0;
  hc_status* status = hc_submit(link().runtime, &request, kept->tensors.list.data(),
                                static_cast<int32_t>(kept->tensors.list.size()), &handle);
  frame->future = made.future;
  if (!status) return nullptr;
  p.reset(kept);
  xla::FutureErrorArgs failed{sizeof failed, nullptr, p->future,
                              refuse(p->api, hc_status_code(status), hc_status_text(status))};
  hc_status_destroy(status);
  return p->api->future_set_error(&failed);
}

}  // namespace

extern "C" {

// Stage "instantiate": once for each place in a program.
HC_EXPORT xla::Error* hc_jax_instantiate(xla::CallFrame* frame) {
  if (is_metadata_query(frame)) {
    reinterpret_cast<xla::MetadataExtension*>(frame->extension_start)->metadata->state_type_id = call_site_type;
    return nullptr;
  }
  if (xla::Error* error = check_frame(frame)) return error;
  Attributes attributes;
  if (std::string wrong = read(frame->attributes, &attributes); !wrong.empty())
    return refuse(frame->api, HC_INTERNAL, wrong);
  xla::StateSetArgs args{
      sizeof args, nullptr, frame->context, xla::Stage::kInstantiate, &call_site_type, call_sites().make(attributes)};
  return frame->api->state_set(&args);
}

// Stage "execute".
HC_EXPORT xla::Error* hc_jax_execute(xla::CallFrame* frame) {
  if (is_metadata_query(frame)) return nullptr;
  if (xla::Error* error = check_frame(frame)) return error;
  const xla::Api* api = frame->api;
  try {
    auto p = std::make_unique<Pending>();
    p->api = api;
    Attributes attributes;
    std::string wrong = read(frame->attributes, &attributes);
    if (wrong.empty()) wrong = read(*frame, attributes, &p->tensors);
    if (!wrong.empty()) return refuse(api, HC_INTERNAL, wrong);
    xla::StateGetArgs state{sizeof state, nullptr, frame->context, xla::Stage::kInstantiate, &call_site_type, nullptr};
    if (xla::Error* error = api->state_get(&state)) return error;
    const int number = static_cast<const CallSite*>(state.state)->number;
    p->name = std::string(attributes.name) + (number ? "#" + std::to_string(number) : "");
    return attributes.op == kSelfTest ? self_test(frame, attributes, std::move(p))
                                      : start(frame, attributes, std::move(p));
  } catch (const std::exception& e) {  // out of memory
    return refuse(api, HC_INTERNAL, e.what());
  }
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
