#include "net/endpoint.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "base/build.h"
#include "base/wire.h"

namespace hc {
namespace {

constexpr uint32_t kEndpointMagic = 0x51454348;  // "HCEQ"
constexpr size_t kMaxText = 128;

}  // namespace

std::string this_host_name() {
  char name[65] = {};
  return gethostname(name, sizeof(name) - 1) == 0 && name[0] ? name : "unknown host";
}

HostIdentity HostIdentity::of_this_process(const std::string& label) {
  HostIdentity self;
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  if (!(boot >> self.boot_id)) self.boot_id = this_host_name();
  self.boot_id.resize(std::min(self.boot_id.size(), kMaxText));
  struct stat about{};
  if (stat("/proc/self/ns/net", &about) == 0) self.network_namespace = about.st_ino;
  self.uid = geteuid();
  self.label = label.substr(0, kMaxText);
  return self;
}

std::vector<Address> dialable(const HostIdentity& own, const Endpoint& other) {
  std::vector<Address> all;
  for (const Address& a : other.addresses)
    if (!a.is_loopback() || own.same_network(other.identity)) all.push_back(a);
  return all;
}

void Endpoint::set_fabric_problem(const std::string& text) { fabric_problem = text.substr(0, kMaxText); }

std::string Endpoint::encode() const {
  Writer out;
  out.put(kEndpointMagic);
  out.put_text(build_name());
  out.put_text(identity.boot_id);
  out.put(identity.network_namespace);
  out.put(identity.uid);
  out.put_text(identity.label);
  out.put_text(host_name);
  out.put(pid);
  for (int what : {locality.socket, locality.numa_node, locality.l3}) out.put(static_cast<int32_t>(what));
  out.put(arena_bytes);
  out.put(room_bytes);
  for (const std::string& text : {unix_name, fabric_protocol, fabric_address, fabric_problem}) out.put_text(text);
  out.put(static_cast<uint8_t>(addresses.size()));
  for (const Address& a : addresses) {
    out.put(static_cast<uint8_t>(a.host_bytes().size()));
    out.put(a.port());
    out.put_raw(a.host_bytes().data(), a.host_bytes().size());
  }
  out.put(static_cast<uint8_t>(settings.size()));
  for (const auto& [name, value] : settings) {
    out.put_text(name);
    out.put_text(value);
  }
  return {reinterpret_cast<const char*>(out.bytes().data()), out.size()};
}

Result<Endpoint> Endpoint::decode(const std::string& bytes) {
  if (bytes.size() > kMaxEndpointBytes) return error(Code::kInvalidArgument, "an endpoint of ", bytes.size(), " bytes");
  Reader in({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
  const uint32_t magic = in.get<uint32_t>();
  if (!in.ok() || magic != kEndpointMagic) {
    return error(Code::kInvalidArgument, "these ", bytes.size(), " bytes are no endpoint of horoclone ", build_name(),
                 "; is the same horoclone installed on every host?");
  }
  if (const std::string build = in.get_text(kMaxText); build != build_name())
    return error(Code::kUnsupported, other_build(build));
  Endpoint one;
  one.identity.boot_id = in.get_text(kMaxText);
  one.identity.network_namespace = in.get<uint64_t>();
  one.identity.uid = in.get<uint32_t>();
  one.identity.label = in.get_text(kMaxText);
  one.host_name = in.get_text(kMaxText);
  one.pid = in.get<int32_t>();
  for (int* what : {&one.locality.socket, &one.locality.numa_node, &one.locality.l3}) *what = in.get<int32_t>();
  one.arena_bytes = in.get<uint64_t>();
  one.room_bytes = in.get<uint64_t>();
  for (std::string* text : {&one.unix_name, &one.fabric_protocol, &one.fabric_address, &one.fabric_problem})
    *text = in.get_text(kMaxText);
  const size_t count = in.get<uint8_t>();
  if (count > kMaxAddresses) in.fail();
  for (size_t i = 0; i < count && in.ok(); ++i) {
    uint8_t host[16] = {};
    const size_t host_bytes = in.get<uint8_t>();
    const uint16_t port = in.get<uint16_t>();
    if (host_bytes != 4 && host_bytes != 16) in.fail();
    if (!in.take(host, std::min(host_bytes, sizeof(host)))) break;
    auto address = Address::from_bytes({host, host_bytes}, port);
    if (!address.is_ok()) return address.status();
    one.addresses.push_back(address.take());
  }
  const size_t settings = in.get<uint8_t>();
  if (settings > kMaxSettings) in.fail();
  for (size_t i = 0; i < settings && in.ok(); ++i) {
    std::string name = in.get_text(kMaxText);
    one.settings.emplace_back(std::move(name), in.get_text(kMaxText));
  }
  if (!in.ok() || in.remaining() != 0)
    return error(Code::kInvalidArgument, "a damaged endpoint of ", bytes.size(), " bytes");
  return one;
}

}  // namespace hc
