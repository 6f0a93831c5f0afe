// What a caller submits: one operation, or the buckets of an optimizer. Values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "engine/operation/memory.h"

namespace hc {

// Where tensors lie. Beyond is_host, only a backend reads it.
struct Placement {
  bool is_host = true;
  int index = 0;  // of the memory that is not the host's
};

// The arguments of submit. Pointers are read during the call only; the tensors' memory must live until the handle is
// done.
struct Submission {
  Op op = Op::kAllreduce;
  Reduce reduce = Reduce::kSum;
  int root = 0;  // world rank; of a message the other's, -1 = receive from any
  int process_set = 0;
  std::string_view name;  // empty: unnamed
  double prescale = 1, postscale = 1;
  struct Tensor {
    const void* in;
    void* out;  // null: the core owns the result
    std::span<const int64_t> shape;
    DType dtype;
  };
  std::span<const Tensor> tensors;
  std::span<const int64_t> splits;
  std::span<const int64_t> awaited;  // alltoall into `out`: its rows from each rank; empty: equal parts
  int64_t tag = 0;                   // messages
  int32_t priority = 0;              // higher runs before lower, once both are ready
  int32_t left_out = 0;              // steps without this allreduce since the last one
  bool will_wait = false;
  Placement place;              // of the tensors (join: of this rank's identity elements)
  void* stream = nullptr;       // not in host memory: it produces the input,
  void* ready_event = nullptr;  // or this event, recorded behind it; lives until the operation is done
  void (*done)(void*, int64_t, const Status&) = nullptr;
  void* done_context = nullptr;
};

size_t bytes_of(const Submission::Tensor& tensor);

// Which bucket of which declared set.
struct BucketId {
  int set = -1;  // -1: no bucket
  int index = -1;
};

// What changes between two submissions of a declared bucket.
struct DeclaredCall {
  DeclaredCall(void* stream, int32_t priority = 0) : stream(stream), priority(priority) {}
  void* stream;      // as Submission::stream
  int32_t priority;  // as Submission::priority; a persistent plan knows none
};

// Buckets that a binding declares (an optimizer's gradients): same names, sizes and order on every rank, memory fixed.
struct BucketSet {
  struct Bucket {
    std::string name;
    std::byte* data;
    std::vector<int64_t> shape;
    DType dtype;
    size_t bytes() const;
  };
  Reduce reduce = Reduce::kSum;
  double prescale = 1, postscale = 1;
  std::vector<Bucket> buckets;
  Placement place;
  std::vector<std::shared_ptr<Memory>> memory;  // [bucket] where all lie in memory of Backend::allocate

  // An allreduce of bucket `index`; it points into this set and to *tensor.
  Submission submission_of(int process_set, int index, const DeclaredCall& call, Submission::Tensor* tensor) const;
  // A number for what all ranks must declare alike. It is computed from a text, so it is the same on every machine.
  uint64_t fingerprint() const;
};

}  // namespace hc
