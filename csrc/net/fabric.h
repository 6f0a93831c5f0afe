// Messages through libfabric, over the provider that HOROCLONE_FABRIC names (tcp, verbs, efa, shm ...): one
// endpoint of this process for reliable tagged messages to all others. The library is loaded at run time. It knows
// nothing of who may send: a tag begins with 48 bits that only the two ranks of one life know, and what has another one
// is never matched. That keeps strays out, and nobody who reads the network.
//
// Thread: open() on the caller's, then the one that makes progress. Owner: the mesh.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "net/fabric_abi.h"
#include "net/frame_signer.h"
#include "net/message_library.h"
#include "net/socket.h"

namespace hc {

class Fabric final : public MessageLibrary {
 public:
  static constexpr char kLibrary[] = "libfabric.so.1";
  static constexpr size_t kMaxAddressBytes = 128;

  // `preferred`: addresses of this host, the first that the provider has is used. Unsupported, with the reason.
  static Result<std::shared_ptr<Fabric>> open(const std::string& provider, std::span<const Address> preferred);
  ~Fabric() override { close(); }

  const std::string& address() const { return address_; }    // for add() of the others
  const std::string& protocol() const { return protocol_; }  // equal on ranks that understand each other
  Status add(int rank, const std::string& address, const FrameKeys& keys);
  // Afterwards libfabric uses none of our memory, and every request has come to nothing.
  void close();
  // In a forked child: all is left to the parent.
  void abandon();

  const char* name() const override { return "libfabric"; }
  Status send(const void* data, size_t bytes, int rank, int tag, MessageRequest* request) override;
  Status receive(void* data, size_t bytes, int rank, int tag, MessageRequest* request) override;
  Status test(MessageRequest* request, bool* done) override;
  void progress() override;
  // What libfabric does not let go of within limit_s costs the endpoint, and with it every request.
  bool cancel_receive(MessageRequest* request, double limit_s) override;
  bool cancel_send(MessageRequest* request, double limit_s) override { return cancel_receive(request, limit_s); }

 private:
  struct Operation {
    void* context[8];  // fi_context2, the library's; first, as its address is what the library returns
    Status outcome;
    bool done;
    bool is_send;
    int rank;
    void* data;
    size_t bytes;
    uint64_t tag;
  };
  struct Peer {
    uint64_t address = ofi::kAnyAddress;
    uint64_t send_tag = 0, receive_tag = 0;  // the lower 16 bits are free
    std::deque<Operation*> waiting[2];       // receives and sends for which the library has had no room yet
  };

  explicit Fabric(const ofi::Functions& functions) : ofi_(functions) {}
  Status open_endpoint(ofi::Info* info);
  Status check(ssize_t result, const char* call) const;
  Status begin(Operation one, MessageRequest* request);
  bool post(Operation* one);
  void take_completions();
  void end(Operation* one, Status outcome);
  void release(MessageRequest* request);
  template <class Object>
  static void close(Object** one) {
    if (*one) (void)(*one)->fid.ops->close(&(*one)->fid);
    *one = nullptr;
  }

  const ofi::Functions ofi_;
  ofi::Provider* provider_ = nullptr;
  ofi::Domain* domain_ = nullptr;
  ofi::Addresses* addresses_ = nullptr;
  ofi::Completions* completions_ = nullptr;
  ofi::Endpoint* endpoint_ = nullptr;  // null: closed
  std::string address_, protocol_;
  Status broken_;
  std::vector<Peer> peers_;           // by rank
  size_t waiting_ = 0;                // of all peers
  std::deque<Operation> operations_;  // their addresses are kept
  std::vector<Operation*> spare_;
};

}  // namespace hc
