#include "net/fabric.h"

#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/library.h"

namespace hc {
namespace {

constexpr size_t kCompletions = 64;  // taken at once
constexpr int kTagBits = 16;         // of the channel's own tags

// The process's own ones hold after libfabric has come: some providers (Debian's 1.17) install handlers for SIGINT,
// SIGTERM, SIGSEGV and others as they are loaded, which end the process with exit code 1.
class SignalHandlers {
 public:
  SignalHandlers() {
    for (int number = 1; number < kSignals; ++number) ::sigaction(number, nullptr, &kept_[number]);
  }
  ~SignalHandlers() {
    for (int number = 1; number < kSignals; ++number) ::sigaction(number, &kept_[number], nullptr);
  }
  SignalHandlers(const SignalHandlers&) = delete;
  SignalHandlers& operator=(const SignalHandlers&) = delete;

 private:
  static constexpr int kSignals = 32;  // the others are nobody's
  struct sigaction kept_[kSignals]{};
};

Address address_of(const ofi::Info& info) {
  const bool is_internet = info.addr_format == ofi::kInternet || info.addr_format == ofi::kInternet6;
  if (!is_internet || !info.src_addr) return {};
  return Address(static_cast<const sockaddr*>(info.src_addr), static_cast<socklen_t>(info.src_addrlen));
}

// Where the provider has several: the one of the address that comes first in `preferred`.
ofi::Info* best_of(ofi::Info* first, std::span<const Address> preferred) {
  for (const Address& wanted : preferred) {
    for (ofi::Info* one = first; one; one = one->next)
      if (const Address own = address_of(*one); std::ranges::equal(own.host_bytes(), wanted.host_bytes())) return one;
  }
  return first;
}

uint64_t tag_from(const SipKey& key) { return SipHash(key).finish() << kTagBits; }

template <class Object>
Object* address_in(const MessageRequest& request) {
  Object* one;
  std::memcpy(&one, request.handle, sizeof(one));
  return one;
}

}  // namespace

Result<std::shared_ptr<Fabric>> Fabric::open(const std::string& provider, std::span<const Address> preferred) {
  const SignalHandlers kept;
  auto library = Library::open(kLibrary);
  if (!library.is_ok()) return library.status();
  ofi::Functions found;
#define HC_RESOLVE(type, name, arguments)                                           \
  found.name = reinterpret_cast<type(*) arguments>(library.value()->symbol(#name)); \
  if (!found.name) return error(Code::kUnsupported, kLibrary, " has no ", #name);
  using namespace ofi;
  HC_FABRIC_SYMBOLS(HC_RESOLVE)
#undef HC_RESOLVE
  std::shared_ptr<Fabric> fabric(new Fabric(found));
  Info* hints = found.fi_dupinfo(nullptr);
  if (!hints) return error(Code::kUnsupported, "fi_dupinfo gives no memory");
  hints->caps = kTagged;
  hints->mode = kContext | kContext2;
  hints->ep_attr->type = kReliableDatagram;
  hints->tx_attr->msg_order = hints->rx_attr->msg_order = kSendAfterSend;
  hints->domain_attr->threading = kThreadOfDomain;
  hints->domain_attr->control_progress = hints->domain_attr->data_progress = kManualProgress;
  hints->domain_attr->resource_mgmt = kManagedResources;
  hints->fabric_attr->prov_name = ::strdup(provider.c_str());  // fi_freeinfo frees it
  Info* all = nullptr;
  const int result = found.fi_getinfo(kVersion, nullptr, nullptr, 0, hints, &all);
  found.fi_freeinfo(hints);
  if (result != 0 || !all)
    return error(Code::kUnsupported, "its libfabric has no provider ", provider,
                 " for reliable tagged messages: ", found.fi_strerror(-result));
  const Status opened = fabric->open_endpoint(best_of(all, preferred));
  found.fi_freeinfo(all);
  if (!opened.is_ok()) return opened;
  return fabric;
}

Status Fabric::check(ssize_t result, const char* call) const {
  if (result >= 0) return Status::ok();
  return error(Code::kUnsupported, call, ": ", ofi_.fi_strerror(static_cast<int>(-result)));
}

Status Fabric::open_endpoint(ofi::Info* info) {
  HC_TRY(check(ofi_.fi_fabric(info->fabric_attr, &provider_, nullptr), "fi_fabric"));
  HC_TRY(check(provider_->ops->domain(provider_, info, &domain_, nullptr), "fi_domain"));
  ofi::AddressesAttributes about_addresses{};
  about_addresses.type = info->domain_attr->av_type;
  HC_TRY(check(domain_->ops->av_open(domain_, &about_addresses, &addresses_, nullptr), "fi_av_open"));
  ofi::CompletionsAttributes about_completions{};
  about_completions.format = ofi::kContextFormat;
  HC_TRY(check(domain_->ops->cq_open(domain_, &about_completions, &completions_, nullptr), "fi_cq_open"));
  HC_TRY(check(domain_->ops->endpoint(domain_, info, &endpoint_, nullptr), "fi_endpoint"));
  ofi::Fid* fid = &endpoint_->fid;
  HC_TRY(check(fid->ops->bind(fid, &addresses_->fid, 0), "fi_ep_bind"));
  HC_TRY(check(fid->ops->bind(fid, &completions_->fid, ofi::kTransmit | ofi::kReceive), "fi_ep_bind"));
  HC_TRY(check(fid->ops->control(fid, ofi::kEnable, nullptr), "fi_enable"));
  char name[kMaxAddressBytes];
  size_t bytes = sizeof(name);
  HC_TRY(check(endpoint_->names->getname(fid, name, &bytes), "fi_getname"));
  address_.assign(name, bytes);
  protocol_ = text_of(info->fabric_attr->prov_name, ", protocol ", info->ep_attr->protocol, " version ",
                      info->ep_attr->protocol_version, ", addresses of kind ", info->addr_format);
  return Status::ok();
}

Status Fabric::add(int rank, const std::string& address, const FrameKeys& keys) {
  if (peers_.size() <= static_cast<size_t>(rank)) peers_.resize(static_cast<size_t>(rank) + 1);
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (addresses_->ops->insert(addresses_, address.data(), 1, &peer.address, 0, nullptr) != 1)
    return error(Code::kUnsupported, "fi_av_insert does not take the ", address.size(), " bytes of its address");
  peer.send_tag = tag_from(keys.out);
  peer.receive_tag = tag_from(keys.in);
  return Status::ok();
}

void Fabric::close() {
  close(&endpoint_);
  close(&completions_);
  close(&addresses_);
  close(&domain_);
  close(&provider_);
  for (Peer& peer : peers_)
    for (auto& waiting : peer.waiting) waiting.clear();
  waiting_ = 0;
  if (broken_.is_ok()) broken_ = error(Code::kAborted, "its endpoint was closed");
}

void Fabric::abandon() {
  endpoint_ = nullptr;
  completions_ = nullptr;
  addresses_ = nullptr;
  domain_ = nullptr;
  provider_ = nullptr;
}

Status Fabric::send(const void* data, size_t bytes, int rank, int tag, MessageRequest* request) {
  const uint64_t whole = peers_[static_cast<size_t>(rank)].send_tag | static_cast<uint64_t>(tag);
  return begin({{}, {}, false, true, rank, const_cast<void*>(data), bytes, whole}, request);
}

Status Fabric::receive(void* data, size_t bytes, int rank, int tag, MessageRequest* request) {
  const uint64_t whole = peers_[static_cast<size_t>(rank)].receive_tag | static_cast<uint64_t>(tag);
  return begin({{}, {}, false, false, rank, data, bytes, whole}, request);
}

Status Fabric::begin(Operation one, MessageRequest* request) {
  *request = {};
  if (!endpoint_) return broken_;
  if (spare_.empty()) spare_.push_back(&operations_.emplace_back());
  Operation* own = spare_.back();
  spare_.pop_back();
  *own = std::move(one);
  std::memcpy(request->handle, &own, sizeof(own));
  std::deque<Operation*>& waiting = peers_[static_cast<size_t>(own->rank)].waiting[own->is_send];
  if (!waiting.empty() || !post(own)) {
    waiting.push_back(own);
    ++waiting_;
  }
  return Status::ok();
}

// False: there is no room now.
bool Fabric::post(Operation* one) {
  const ofi::TaggedOps& call = *endpoint_->tagged;
  const uint64_t address = peers_[static_cast<size_t>(one->rank)].address;
  const ssize_t result =
      one->is_send
          ? call.send(endpoint_, one->data, one->bytes, nullptr, address, one->tag, one->context)
          : call.receive(endpoint_, one->data, one->bytes, nullptr, ofi::kAnyAddress, one->tag, 0, one->context);
  if (result == -EAGAIN) return false;
  if (result < 0) end(one, error(Code::kPeerLost, ofi_.fi_strerror(static_cast<int>(-result))));
  return true;
}

void Fabric::end(Operation* one, Status outcome) {
  one->outcome = std::move(outcome);
  one->done = true;
}

void Fabric::take_completions() {
  ofi::Completion entries[kCompletions];
  for (;;) {
    const ssize_t count = completions_->ops->read(completions_, entries, kCompletions);
    for (ssize_t i = 0; i < count; ++i) end(static_cast<Operation*>(entries[i].context), Status::ok());
    if (count == -ofi::kErrorAvailable) {
      ofi::FailedCompletion failed{};
      if (completions_->ops->readerr(completions_, &failed, 0) < 0) return;
      if (failed.context)
        end(static_cast<Operation*>(failed.context), error(Code::kPeerLost, ofi_.fi_strerror(failed.err)));
      continue;
    }
    if (count < 0 && count != -EAGAIN && broken_.is_ok())
      broken_ = error(Code::kInternal, "fi_cq_read: ", ofi_.fi_strerror(static_cast<int>(-count)));
    if (count < static_cast<ssize_t>(kCompletions)) return;
  }
}

void Fabric::progress() {
  if (!endpoint_) return;
  take_completions();
  for (size_t rank = 0; waiting_ > 0 && rank < peers_.size(); ++rank) {
    for (std::deque<Operation*>& waiting : peers_[rank].waiting) {
      while (!waiting.empty() && post(waiting.front())) {
        waiting.pop_front();
        --waiting_;
      }
    }
  }
}

void Fabric::release(MessageRequest* request) {
  spare_.push_back(address_in<Operation>(*request));
  *request = {};
}

Status Fabric::test(MessageRequest* request, bool* done) {
  Operation* one = address_in<Operation>(*request);
  *done = !one || one->done || !endpoint_;
  if (!one) return Status::ok();
  if (!*done) return broken_;
  const Status outcome = one->done ? std::move(one->outcome) : broken_;
  release(request);
  return outcome;
}

bool Fabric::cancel_receive(MessageRequest* request, double limit_s) {
  Operation* one = address_in<Operation>(*request);
  if (!one) return true;
  if (std::erase(peers_[static_cast<size_t>(one->rank)].waiting[one->is_send], one) > 0) {
    --waiting_;
  } else if (endpoint_ && !one->done) {
    (void)endpoint_->ops->cancel(&endpoint_->fid, one->context);
    const Deadline deadline = Deadline::in(limit_s);
    for (take_completions(); !one->done && broken_.is_ok() && !deadline.passed(); take_completions()) ::sched_yield();
    if (!one->done) close();
  }
  release(request);
  return true;
}

}  // namespace hc
