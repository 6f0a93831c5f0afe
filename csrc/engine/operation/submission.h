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
#include "device/gpu.h"
#include "engine/operation/memory.h"

namespace hc {

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
  int64_t tag = 0;       // messages
  int32_t priority = 0;  // higher runs before lower, once both are ready
  int32_t left_out = 0;  // steps without this allreduce since the last one
  bool will_wait = false;
  // Tensors in the memory of a GPU (join: the GPU on which this rank's identity elements lie).
  bool on_device = false;
  int device_index = 0;
  CuStream stream = nullptr;      // it produces the input,
  CuEvent ready_event = nullptr;  // or this event, recorded behind it; lives until the operation is done
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
  DeclaredCall(CuStream stream, int32_t priority = 0) : stream(stream), priority(priority) {}
  CuStream stream;   // it fills a bucket on a GPU
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
  bool on_device = false;  // in the memory of GPU `device_index`
  int device_index = 0;
  std::vector<std::shared_ptr<Memory>> memory;  // [bucket] where all lie in memory of Engine::allocate_on_device

  // An allreduce of bucket `index`; it points into this set and to *tensor.
  Submission submission_of(int process_set, int index, const DeclaredCall& call, Submission::Tensor* tensor) const;
  // A number for what all ranks must declare alike. It is computed from a text, so it is the same on every machine.
  uint64_t fingerprint() const;
};

}  // namespace hc
