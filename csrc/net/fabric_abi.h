// What the core uses of libfabric's binary interface, version 1.9 and newer, so that nothing of it is needed to
// compile: most of its calls go through tables of functions inside of its objects. Structures that the library makes
// itself may be longer there. csrc/tests/net/test_fabric.cc compares all with libfabric's own headers, where they are.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace hc::ofi {

using Unused = void (*)();

inline constexpr uint32_t kVersion = 1u << 16 | 9;                                       // FI_VERSION(1, 9)
inline constexpr uint64_t kTagged = 1u << 3, kReceive = 1u << 10, kTransmit = 1u << 11;  // FI_TAGGED, FI_RECV ...
inline constexpr uint64_t kContext = uint64_t{1} << 59, kContext2 = uint64_t{1} << 52;   // FI_CONTEXT, FI_CONTEXT2
inline constexpr uint64_t kSendAfterSend = 1u << 8;                                      // FI_ORDER_SAS
inline constexpr uint64_t kAnyAddress = ~uint64_t{0};                                    // FI_ADDR_UNSPEC
inline constexpr int kReliableDatagram = 3;                                              // FI_EP_RDM
inline constexpr int kThreadOfDomain = 3;                                                // FI_THREAD_DOMAIN
inline constexpr int kManualProgress = 2;                                                // FI_PROGRESS_MANUAL
inline constexpr int kManagedResources = 2;                                              // FI_RM_ENABLED
inline constexpr int kContextFormat = 1;                                                 // FI_CQ_FORMAT_CONTEXT
inline constexpr int kEnable = 6;                                                        // FI_ENABLE
inline constexpr uint32_t kInternet = 2, kInternet6 = 3;                                 // FI_SOCKADDR_IN, _IN6
inline constexpr int kErrorAvailable = 259;                                              // FI_EAVAIL

struct Fid;
struct Provider;
struct Domain;
struct Addresses;
struct Completions;
struct Endpoint;
struct FidOps {
  size_t size;
  int (*close)(Fid*);
  int (*bind)(Fid*, Fid*, uint64_t flags);
  int (*control)(Fid*, int command, void*);
};
struct Fid {
  size_t kind;
  void* context;
  FidOps* ops;
};

struct TransmitAttributes {
  uint64_t caps, mode, op_flags, msg_order;
};
struct ReceiveAttributes {
  uint64_t caps, mode, op_flags, msg_order;
};
struct EndpointAttributes {
  int type;
  uint32_t protocol, protocol_version;
  size_t max_msg_size, msg_prefix_size, max_order_raw_size, max_order_war_size, max_order_waw_size;
  uint64_t mem_tag_format;
};
struct DomainAttributes {
  Fid* domain;
  char* name;
  int threading, control_progress, data_progress, resource_mgmt, av_type, mr_mode;
};
struct FabricAttributes {
  Fid* fabric;
  char *name, *prov_name;
};
struct Info {
  Info* next;
  uint64_t caps, mode;
  uint32_t addr_format;
  size_t src_addrlen, dest_addrlen;
  void *src_addr, *dest_addr;
  Fid* handle;
  TransmitAttributes* tx_attr;
  ReceiveAttributes* rx_attr;
  EndpointAttributes* ep_attr;
  DomainAttributes* domain_attr;
  FabricAttributes* fabric_attr;
};

struct FabricOps {
  size_t size;
  int (*domain)(Provider*, Info*, Domain**, void* context);
};
struct Provider {
  Fid fid;
  FabricOps* ops;
};

struct AddressesAttributes {
  int type, rx_ctx_bits;
  size_t count, ep_per_node;
  const char* name;
  void* map_addr;
  uint64_t flags;
};
struct AddressesOps {
  size_t size;
  int (*insert)(Addresses*, const void* address, size_t count, uint64_t* found, uint64_t flags, void* context);
};
struct Addresses {
  Fid fid;
  AddressesOps* ops;
};

struct CompletionsAttributes {
  size_t size;
  uint64_t flags;
  int format, wait_obj, signaling_vector, wait_cond;
  void* wait_set;
};
struct Completion {
  void* context;
};
struct FailedCompletion {
  void* context;
  uint64_t flags;
  size_t len;
  void* buf;
  uint64_t data, tag;
  size_t olen;
  int err, prov_errno;
  void* err_data;
  size_t err_data_size;
};
struct CompletionsOps {
  size_t size;
  ssize_t (*read)(Completions*, void* entries, size_t count);
  Unused readfrom;
  ssize_t (*readerr)(Completions*, FailedCompletion*, uint64_t flags);
};
struct Completions {
  Fid fid;
  CompletionsOps* ops;
};

struct EndpointOps {
  size_t size;
  ssize_t (*cancel)(Fid*, void* context);
};
struct NamesOps {
  size_t size;
  Unused setname;
  int (*getname)(Fid*, void* address, size_t* bytes);
};
struct TaggedOps {
  size_t size;
  ssize_t (*receive)(Endpoint*, void* data, size_t bytes, void* descriptor, uint64_t from, uint64_t tag,
                     uint64_t ignored_bits, void* context);
  Unused recvv, recvmsg;
  ssize_t (*send)(Endpoint*, const void* data, size_t bytes, void* descriptor, uint64_t to, uint64_t tag,
                  void* context);
};
struct Endpoint {
  Fid fid;
  EndpointOps* ops;
  NamesOps* names;
  void *messages, *rma;
  TaggedOps* tagged;
};

struct DomainOps {
  size_t size;
  int (*av_open)(Domain*, AddressesAttributes*, Addresses**, void* context);
  int (*cq_open)(Domain*, CompletionsAttributes*, Completions**, void* context);
  int (*endpoint)(Domain*, Info*, Endpoint**, void* context);
};
struct Domain {
  Fid fid;
  DomainOps* ops;
};

// X(type of the result, name, arguments): what is looked up by name.
// clang-format off
#define HC_FABRIC_SYMBOLS(X)                                                                                       \
  X(int, fi_getinfo, (uint32_t version, const char* node, const char* service, uint64_t flags, const Info* hints, \
                      Info** found))                                                                               \
  X(void, fi_freeinfo, (Info*))                                                                                    \
  X(Info*, fi_dupinfo, (const Info*))                                                                              \
  X(int, fi_fabric, (FabricAttributes*, Provider**, void* context))                                                \
  X(const char*, fi_strerror, (int error))
// clang-format on

struct Functions {
#define HC_FIELD(type, name, arguments) type(*name) arguments = nullptr;
  HC_FABRIC_SYMBOLS(HC_FIELD)
#undef HC_FIELD
};

}  // namespace hc::ofi
