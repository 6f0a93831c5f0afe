// See jax_link.h. Nothing here submits or waits.
#include "frameworks/jax_link.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

namespace hc::jax {
namespace {

struct CallSites {
  struct Count {
    int made = 0, alive = 0;
  };
  std::mutex mu;  // guards counts
  std::map<std::pair<int64_t, std::string>, Count> counts;

  CallSite* make(const Attributes& a) {
    if (a.op == kVisit) return new CallSite{a.program, std::string(a.name), -1};
    std::lock_guard lock(mu);
    Count& count = counts[{a.program, std::string(a.name)}];
    ++count.alive;
    return new CallSite{a.program, std::string(a.name), count.made++};
  }
  void destroy(CallSite* site) {
    std::unique_ptr<CallSite> owned(site);
    if (site->number < 0) return;
    std::lock_guard lock(mu);
    auto at = counts.find({site->program, site->name});
    if (at != counts.end() && --at->second.alive == 0) counts.erase(at);
  }
  bool is_only_one(const CallSite& site) {
    std::lock_guard lock(mu);
    auto at = counts.find({site.program, site.name});
    return at != counts.end() && at->second.made == 1;
  }
};
CallSites& call_sites() {
  static auto* made = new CallSites;
  return *made;
}

xla::Error* check_frame(const xla::CallFrame* frame) {
  const xla::Api* api = frame->api;
  if (frame->struct_size < offsetof(xla::CallFrame, future) || api->struct_size < offsetof(xla::Api, run_id_get))
    return refuse(api, HC_UNSUPPORTED, "jaxlib's FFI interface is older than the one that horoclone was built for");
  return nullptr;
}

}  // namespace

Link& link() {
  static auto* made = new Link;  // never destroyed: XLA's threads outlive main
  return *made;
}

CallSite* make_call_site(const Attributes& attributes) {
  if (attributes.op >= 0) link().sites.fetch_add(1);
  return call_sites().make(attributes);
}
void destroy_call_site(void* site) { call_sites().destroy(static_cast<CallSite*>(site)); }

xla::Error* refuse(const xla::Api* api, hc_code code, const std::string& text) {
  return make_error(api, code_of(code), std::string(name_of(code)) + ": " + text);
}

Visits& visits() {
  static auto* made = new Visits;
  return *made;
}

void Visits::come(const std::string& key) {
  std::lock_guard lock(mu_);
  ++counts_[key].since;
}

int32_t Visits::take(const std::string& key) {
  std::lock_guard lock(mu_);
  auto at = counts_.find(key);
  return at == counts_.end() ? 0 : std::exchange(at->second.since, 0);
}

std::string Visits::settle(const std::string& key, int32_t taken, bool succeeded) {
  std::lock_guard lock(mu_);
  auto at = counts_.find(key);
  if (at == counts_.end()) return "";
  Count& count = at->second;
  if (succeeded)
    count.together += taken;
  else
    count.since += taken;
  if (succeeded) return "";
  return " On this rank the last common step was number " + std::to_string(count.together) +
         ", and this one is number " + std::to_string(count.together + taken) + ".";
}

void Visits::forget() {
  std::lock_guard lock(mu_);
  counts_.clear();
}

bool is_metadata_query(xla::CallFrame* frame) {
  if (!frame->extension_start || frame->extension_start->type != xla::kMetadataExtension) return false;
  xla::Metadata* to = reinterpret_cast<xla::MetadataExtension*>(frame->extension_start)->metadata;
  to->api_version = {sizeof(xla::ApiVersion), nullptr, xla::kApiMajor, xla::kApiMinor};
  to->traits = 0;  // among them: what may become part of a CUDA graph. Ours may not: the host agrees on each call
  return true;
}

xla::Error* instantiate(xla::CallFrame* frame, xla::TypeId* type) {
  if (is_metadata_query(frame)) {
    reinterpret_cast<xla::MetadataExtension*>(frame->extension_start)->metadata->state_type_id = *type;
    return nullptr;
  }
  if (xla::Error* error = check_frame(frame)) return error;
  Attributes attributes;
  if (std::string wrong = read(frame->attributes, &attributes); !wrong.empty())
    return refuse(frame->api, HC_INTERNAL, wrong);
  xla::StateSetArgs args{
      sizeof args, nullptr, frame->context, xla::Stage::kInstantiate, type, make_call_site(attributes)};
  return frame->api->state_set(&args);
}

xla::Error* read(xla::CallFrame* frame, xla::TypeId* type, Reading* to) {
  if (xla::Error* error = check_frame(frame)) return error;
  std::string wrong = read(frame->attributes, &to->attributes);
  if (wrong.empty()) wrong = read(*frame, to->attributes, &to->tensors);
  if (!wrong.empty()) return refuse(frame->api, HC_INTERNAL, wrong);
  xla::StateGetArgs state{sizeof state, nullptr, frame->context, xla::Stage::kInstantiate, type, nullptr};
  if (xla::Error* error = frame->api->state_get(&state)) return error;
  const auto& site = *static_cast<const CallSite*>(state.state);
  to->name = std::string(to->attributes.name) + (site.number > 0 ? "#" + std::to_string(site.number) : "");
  if (to->attributes.op == HC_ALLREDUCE && !call_sites().is_only_one(site)) return nullptr;
  to->step_key = std::string(to->attributes.members) + ":" + to->name;
  return nullptr;
}

bool is_visit(const Reading& call) {
  if (call.attributes.op != kVisit) return false;
  visits().come(call.step_key);
  return true;
}

std::string settle(const Reading& call, hc_code code) {
  if (call.visits == 0) return "";
  const std::string text = visits().settle(call.step_key, call.visits, code == HC_OK);
  return code == HC_MISMATCH ? text : "";
}

xla::Error* make_request(const xla::Api* api, const Reading& from, hc_request* request) {
  const Attributes& attributes = from.attributes;
  const std::string& name = from.name;
  if (!link().runtime)
    return refuse(api, HC_NOT_INITIALIZED,
                  "'" + name + "': Horovod has not been initialized (or was shut down); use hvd.init().");
  if (name.find('\0') != std::string::npos)
    return refuse(api, HC_INVALID_ARGUMENT, "a name cannot have a NUL character in it: '" + name + "'");
  *request = {};
  request->version = HC_VERSION;
  request->op = attributes.op;
  request->reduce = attributes.reduce;
  request->root = attributes.root;
  request->prescale = attributes.prescale;
  request->postscale = attributes.postscale;
  request->left_out = std::max(0, from.visits - 1);
  request->name = name.empty() ? nullptr : name.c_str();
  if (attributes.members.empty()) return nullptr;
  auto at = link().process_sets.find(attributes.members);
  if (at == link().process_sets.end())
    return refuse(api, HC_INVALID_ARGUMENT,
                  "'" + name + "': the process set [" + std::string(attributes.members) +
                      "] of this program is not registered; pass it to hvd.init(process_sets=[...]) or to "
                      "horoclone.jax.add_process_set().");
  request->process_set = at->second;
  return nullptr;
}

}  // namespace hc::jax
