// A library that moves messages between ranks, matched by tag: MPI or libfabric. A message channel drives it.
//
// Thread: the thread that makes progress. Owner: the mesh.
#pragma once

#include <cstddef>

#include "base/status.h"

namespace hc {

// What has begun, for its library's use: a handle of at most 8 bytes. All zero: nothing.
struct alignas(8) MessageRequest {
  std::byte handle[8] = {};
  bool operator==(const MessageRequest&) const = default;
};

class MessageLibrary {
 public:
  virtual ~MessageLibrary() = default;
  virtual const char* name() const = 0;  // "MPI", for errors
  // Messages of one tag between two ranks are matched in the order of posting. 0 <= tag < 32768.
  virtual Status send(const void* data, size_t bytes, int rank, int tag, MessageRequest* request) = 0;
  virtual Status receive(void* data, size_t bytes, int rank, int tag, MessageRequest* request) = 0;
  // *done: the library uses its memory no more, also if the status says that it came to nothing.
  virtual Status test(MessageRequest* request, bool* done) = 0;
  // Moves what can be moved, where test() does not do that.
  virtual void progress() {}
  // Withdraw a request and wait, at most limit_s, until the library has released its memory. False: it has not.
  virtual bool cancel_receive(MessageRequest* request, double limit_s) = 0;
  virtual bool cancel_send(MessageRequest* request, double limit_s) = 0;
};

}  // namespace hc
