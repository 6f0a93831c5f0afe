// Messages through the real libfabric, where it is installed: the channel over it, and meshes whose data takes it.
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <algorithm>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "net/fabric.h"
#include "net/message_channel.h"
#include "net/tcp_channel.h"
#include "tests/net/net_world.h"

#if __has_include(<rdma/fabric.h>)
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>

// Its structures are as net/fabric_abi.h has them.
#define HC_AT(ours, our_field, theirs, their_field)                                    \
  static_assert(offsetof(hc::ofi::ours, our_field) == offsetof(theirs, their_field) && \
                sizeof(hc::ofi::ours::our_field) == sizeof(theirs::their_field))
#define HC_SAME_AT(ours, theirs, field) HC_AT(ours, field, theirs, field)
HC_AT(Fid, ops, fid, ops);
HC_SAME_AT(FidOps, fi_ops, close);
HC_SAME_AT(FidOps, fi_ops, bind);
HC_SAME_AT(FidOps, fi_ops, control);
HC_SAME_AT(TransmitAttributes, fi_tx_attr, msg_order);
HC_SAME_AT(ReceiveAttributes, fi_rx_attr, msg_order);
HC_SAME_AT(EndpointAttributes, fi_ep_attr, type);
HC_SAME_AT(EndpointAttributes, fi_ep_attr, protocol);
HC_SAME_AT(EndpointAttributes, fi_ep_attr, protocol_version);
HC_SAME_AT(DomainAttributes, fi_domain_attr, threading);
HC_SAME_AT(DomainAttributes, fi_domain_attr, control_progress);
HC_SAME_AT(DomainAttributes, fi_domain_attr, data_progress);
HC_SAME_AT(DomainAttributes, fi_domain_attr, resource_mgmt);
HC_SAME_AT(DomainAttributes, fi_domain_attr, av_type);
HC_SAME_AT(DomainAttributes, fi_domain_attr, mr_mode);
HC_SAME_AT(FabricAttributes, fi_fabric_attr, prov_name);
HC_SAME_AT(Info, fi_info, next);
HC_SAME_AT(Info, fi_info, caps);
HC_SAME_AT(Info, fi_info, mode);
HC_SAME_AT(Info, fi_info, addr_format);
HC_SAME_AT(Info, fi_info, src_addrlen);
HC_SAME_AT(Info, fi_info, src_addr);
HC_SAME_AT(Info, fi_info, tx_attr);
HC_SAME_AT(Info, fi_info, rx_attr);
HC_SAME_AT(Info, fi_info, ep_attr);
HC_SAME_AT(Info, fi_info, domain_attr);
HC_SAME_AT(Info, fi_info, fabric_attr);
HC_AT(Provider, ops, fid_fabric, ops);
HC_SAME_AT(FabricOps, fi_ops_fabric, domain);
HC_AT(Domain, ops, fid_domain, ops);
HC_SAME_AT(DomainOps, fi_ops_domain, av_open);
HC_SAME_AT(DomainOps, fi_ops_domain, cq_open);
HC_SAME_AT(DomainOps, fi_ops_domain, endpoint);
HC_AT(Addresses, ops, fid_av, ops);
HC_SAME_AT(AddressesOps, fi_ops_av, insert);
HC_SAME_AT(AddressesAttributes, fi_av_attr, type);
HC_SAME_AT(AddressesAttributes, fi_av_attr, flags);
HC_AT(Completions, ops, fid_cq, ops);
HC_SAME_AT(CompletionsOps, fi_ops_cq, read);
HC_SAME_AT(CompletionsOps, fi_ops_cq, readerr);
HC_SAME_AT(CompletionsAttributes, fi_cq_attr, format);
HC_SAME_AT(CompletionsAttributes, fi_cq_attr, wait_obj);
HC_AT(Completion, context, fi_cq_entry, op_context);
HC_AT(FailedCompletion, context, fi_cq_err_entry, op_context);
HC_SAME_AT(FailedCompletion, fi_cq_err_entry, err);
HC_AT(Endpoint, ops, fid_ep, ops);
HC_AT(Endpoint, names, fid_ep, cm);
HC_SAME_AT(Endpoint, fid_ep, tagged);
HC_SAME_AT(EndpointOps, fi_ops_ep, cancel);
HC_SAME_AT(NamesOps, fi_ops_cm, getname);
HC_AT(TaggedOps, receive, fi_ops_tagged, recv);
HC_SAME_AT(TaggedOps, fi_ops_tagged, send);
static_assert(sizeof(hc::ofi::Completion) == sizeof(fi_cq_entry) && sizeof(fi_context2) == 8 * sizeof(void*) &&
              sizeof(hc::ofi::FailedCompletion) == sizeof(fi_cq_err_entry) &&
              sizeof(hc::ofi::AddressesAttributes) == sizeof(fi_av_attr) &&
              sizeof(hc::ofi::CompletionsAttributes) == sizeof(fi_cq_attr));
static_assert(hc::ofi::kTagged == FI_TAGGED && hc::ofi::kReceive == FI_RECV && hc::ofi::kTransmit == FI_TRANSMIT &&
              hc::ofi::kContext == FI_CONTEXT && hc::ofi::kContext2 == FI_CONTEXT2 &&
              hc::ofi::kSendAfterSend == FI_ORDER_SAS && hc::ofi::kAnyAddress == FI_ADDR_UNSPEC &&
              hc::ofi::kReliableDatagram == FI_EP_RDM && hc::ofi::kThreadOfDomain == FI_THREAD_DOMAIN &&
              hc::ofi::kManualProgress == FI_PROGRESS_MANUAL && hc::ofi::kManagedResources == FI_RM_ENABLED &&
              hc::ofi::kContextFormat == FI_CQ_FORMAT_CONTEXT && hc::ofi::kEnable == FI_ENABLE &&
              hc::ofi::kInternet == FI_SOCKADDR_IN && hc::ofi::kInternet6 == FI_SOCKADDR_IN6 &&
              hc::ofi::kErrorAvailable == FI_EAVAIL && hc::ofi::kVersion == FI_VERSION(1, 9));
#undef HC_SAME_AT
#undef HC_AT
#endif

using namespace hc;
using namespace hc::net_tests;

namespace {

const std::vector<Address> kFabricLoopback{Address::parse("127.0.0.1", 0).take()};

// What is there of these; says why another is not. Ends of shm in one process must live equally long: they share the
// memory that the first takes away.
std::vector<std::string> fabric_providers(std::initializer_list<const char*> wanted) {
  std::vector<std::string> all;
  for (const char* name : wanted) {
    auto fabric = Fabric::open(name, kFabricLoopback);
    if (fabric.is_ok())
      all.push_back(name);
    else
      MESSAGE("skipped: ", fabric.status().text());
  }
  return all;
}

FrameKeys fabric_keys(int side, uint64_t secret) {
  const SipKey keys[2] = {{secret, 1}, {secret, 2}};
  return {keys[side], keys[1 - side]};
}

struct FabricPair {
  explicit FabricPair(const std::string& provider, uint64_t secret_of_1 = 7) {
    int control[2], data[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, control) == 0);
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, data) == 0);
    for (int side = 0; side < 2; ++side) fabric[side] = Fabric::open(provider, kFabricLoopback).take();
    for (int side = 0; side < 2; ++side) {
      tcp[side] = std::make_unique<TcpChannel>(1 - side, side == 0 ? "rank 1 (b)" : "rank 0 (a)", &traffic[side],
                                               TcpChannel::Sockets{Fd(control[side]), Fd(data[side]), -1, 0});
      const uint64_t secret = side == 1 ? secret_of_1 : 7;
      REQUIRE(fabric[side]->add(1 - side, fabric[1 - side]->address(), fabric_keys(side, secret)).is_ok());
      channel[side] = std::make_unique<MessageChannel>(1 - side, tcp[side].get(), fabric[side], &traffic[side], 5);
      REQUIRE(channel[side]->use(true).is_ok());
    }
  }
  ~FabricPair() {
    for (auto& one : channel) one->close();
    for (auto& one : fabric) one->close();
  }
  bool until(const std::function<bool()>& condition, double limit_s = 60) {
    for (Deadline deadline = Deadline::in(limit_s); !condition() && !deadline.passed();) {
      bool moved = false;
      for (int side = 0; side < 2; ++side) status[side] = channel[side]->progress(&moved);
    }
    return condition();
  }
  Traffic traffic[2];
  std::shared_ptr<Fabric> fabric[2];
  std::unique_ptr<TcpChannel> tcp[2];
  std::unique_ptr<MessageChannel> channel[2];
  Status status[2];
};

struct FabricPart {
  FabricPart(uint32_t batch, uint64_t offset, size_t bytes, int seed) : data(bytes) {
    for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(seed == 0 ? 0 : i * 7 + seed);
    transfer.tag = Tag{3, 0, batch, offset};
    transfer.data = data.data();
    transfer.bytes = bytes;
  }
  std::vector<std::byte> data;
  Transfer transfer;
};

MeshOptions fabric_options(const std::string& fabric) {
  MeshOptions options = small_options(false);
  options.fabric = fabric;
  return options;
}

}  // namespace

TEST_CASE("fabric: segments of every size arrive, whoever comes first") {
  for (const std::string& provider : fabric_providers({"tcp", "shm"})) {
    CAPTURE(provider);
    for (bool sends_first : {false, true}) {
      FabricPair pair(provider);
      std::list<FabricPart> sent, received;
      const size_t sizes[] = {0, 1, 2048, 2049, 70000, 4u << 20, 5, 300000};
      for (uint32_t batch : {7u, 9u}) {
        uint64_t offset = 0;
        for (size_t bytes : sizes) {
          sent.emplace_back(batch, offset, bytes, static_cast<int>(batch + offset + 1));
          received.emplace_back(batch, offset++, bytes, 0);
        }
      }
      const auto send_all = [&] {
        for (FabricPart& s : sent) pair.channel[0]->post_send(&s.transfer);
      };
      if (sends_first) {
        send_all();
        pair.until([n = 0]() mutable { return ++n > 200; });
      }
      for (FabricPart& r : received) pair.channel[1]->post_receive(&r.transfer);
      if (!sends_first) send_all();
      REQUIRE(pair.until([&] {
        const auto done = [](const FabricPart& s) { return s.transfer.done; };
        return std::all_of(sent.begin(), sent.end(), done) && std::all_of(received.begin(), received.end(), done) &&
               pair.channel[0]->flushed();
      }));
      CHECK(std::equal(sent.begin(), sent.end(), received.begin(),
                       [](const FabricPart& a, const FabricPart& b) { return a.data == b.data; }));
      CHECK(pair.status[0].is_ok());
      CHECK(pair.status[1].is_ok());
    }
  }
}

TEST_CASE("fabric: what is withdrawn is not written to, and the channel says that it cannot go on") {
  for (const std::string& provider : fabric_providers({"tcp"})) {
    CAPTURE(provider);
    FabricPair pair(provider);
    FabricPart sent(2, 0, 3u << 20, 5);
    pair.channel[0]->post_send(&sent.transfer);
    pair.until([n = 0]() mutable { return ++n > 200; });
    CHECK(!sent.transfer.done);
    pair.channel[0]->forget(&sent.transfer);
    CHECK(!pair.until([] { return false; }, 0.1));
    CHECK(pair.status[0].code() == Code::kAborted);
    FabricPart more(3, 0, 100, 5);
    pair.channel[0]->post_send(&more.transfer);
    CHECK(!more.transfer.done);
  }
}

TEST_CASE("fabric: who does not know the two ranks' keys is not heard") {
  for (const std::string& provider : fabric_providers({"tcp"})) {
    CAPTURE(provider);
    FabricPair pair(provider, 8);
    FabricPart sent(1, 0, 100, 5), received(1, 0, 100, 0);
    pair.channel[1]->post_receive(&received.transfer);
    pair.channel[0]->post_send(&sent.transfer);
    CHECK(!pair.until([&] { return received.transfer.done; }, 0.2));
    CHECK(pair.status[1].is_ok());
  }
}

TEST_CASE("fabric: a mesh moves its data through it, and a rank that ends without a goodbye is lost") {
  for (const std::string& provider : fabric_providers({"tcp"})) {
    CAPTURE(provider);
    MeshWorld world(std::vector(3, fabric_options(provider)));
    world.must_connect();
    std::vector<Status> ends(3);
    world.each([&](Mesh& mesh, int rank) {
      REQUIRE(mesh.has_fabric());
      std::list<FabricPart> out, in;
      for (int peer = 0; peer < 3; ++peer) {
        if (peer == rank) continue;
        out.emplace_back(1, 0, 500000, rank + 1);
        in.emplace_back(1, 0, 500000, 0);
        mesh.channel(peer).post_receive(&in.back().transfer);
        mesh.channel(peer).post_send(&out.back().transfer);
      }
      const auto all_done = [&] {
        const auto done = [](const FabricPart& p) { return p.transfer.done; };
        return std::all_of(in.begin(), in.end(), done) && std::all_of(out.begin(), out.end(), done);
      };
      for (Deadline deadline = Deadline::in(60); !all_done();) {
        REQUIRE_FALSE(deadline.passed());
        bool moved = false;
        for (int peer = 0; peer < 3; ++peer)
          if (peer != rank) REQUIRE(mesh.channel(peer).progress(&moved).is_ok());
      }
      auto from = in.begin();
      for (int peer = 0; peer < 3; ++peer)
        if (peer != rank) CHECK((from++)->data == FabricPart(1, 0, 500000, peer + 1).data);
      if (rank == 2) return mesh.close();
      FabricPart never(2, 0, 500000, 0);
      mesh.channel(2).post_receive(&never.transfer);
      std::vector<Loss> losses;
      for (Deadline deadline = Deadline::in(60); losses.empty() && ends[rank].is_ok() && !deadline.passed();) {
        bool moved = false;
        ends[rank] = mesh.channel(2).progress(&moved);
        REQUIRE(mesh.poll(1, &moved, &losses).is_ok());
      }
      CHECK((!losses.empty() || ends[rank].code() == Code::kPeerLost));
      mesh.channel(2).forget(&never.transfer);
      mesh.close();
    });
  }
}

TEST_CASE("fabric: when one rank has no such provider, all say which rank, and what to do") {
  MeshWorld world({fabric_options("tcp"), fabric_options("pigeon")});
  for (const Status& status : world.connect()) {
    CHECK(status.code() == Code::kUnsupported);
    CHECK(status.text().find(": rank ") != std::string::npos);
    CHECK(status.text().find("cannot use libfabric: ") != std::string::npos);
    CHECK(status.text().find("unset HOROCLONE_FABRIC") != std::string::npos);
  }
}
