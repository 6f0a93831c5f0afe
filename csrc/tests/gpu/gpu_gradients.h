// An optimizer's side of a GPU, on the fakes: buckets that are declared, filled by the framework's stream.
#pragma once

#include <algorithm>

#include "tests/gpu/gpu_fake.h"
#include "tests/locked_checks.h"

namespace hc {

inline constexpr int kBuckets = 4;

inline Status reduce_now(Engine& engine, FrameworkOnGpu& gpu, const std::string& name, void* data, int64_t count,
                         DType dtype, Reduce how, double postscale = 1) {
  int64_t handle = 0;
  HC_TRY(submit_gpu(engine, gpu, Op::kAllreduce, name, data, data, {count}, dtype, &handle, [&](Submission& s) {
    s.reduce = how;
    s.postscale = postscale;
  }));
  Status outcome = enqueued(engine, gpu, handle);
  engine.release(handle);
  return outcome;
}
inline Status reduce_now(Engine& engine, FrameworkOnGpu& gpu, const std::string& name, float* data, int64_t count,
                         int process_set = 0, bool will_wait = false) {
  int64_t handle = 0;
  HC_TRY(submit_gpu(engine, gpu, Op::kAllreduce, name, data, data, {count}, DType::kF32, &handle, [&](Submission& s) {
    s.reduce = Reduce::kSum;
    s.process_set = process_set;
    s.will_wait = will_wait;
  }));
  Status outcome = enqueued(engine, gpu, handle);
  engine.release(handle);
  return outcome;
}

// Gradients of one rank: buckets that are declared.
class Gradients {
 public:
  // average: in memory that NCCL knows.
  Gradients(Engine& engine, FrameworkOnGpu& gpu, int process_set = 0, bool average = false)
      : engine_(engine), gpu_(gpu), process_set_(process_set) {
    float* first = gpu.tensor(std::vector<float>(3, 1.0f));
    CHECK_OK(reduce_now(engine, gpu, "a learning step", first, 3, process_set));  // it brings NCCL up
    BucketSet set;
    set.place.is_host = false;
    set.place.index = gpu.device;
    for (int b = 0; b < kBuckets; ++b) {
      const int64_t n = 3000 * b + 5;
      if (average) {
        known_.push_back(engine.allocate_elsewhere(gpu.device, static_cast<size_t>(n) * sizeof(float)).take());
        data_.push_back(reinterpret_cast<float*>(known_.back()->data()));
      } else {
        data_.push_back(gpu.tensor(std::vector<float>(static_cast<size_t>(n))));
      }
      set.buckets.push_back({text_of("bucket", b), reinterpret_cast<std::byte*>(data_.back()), {n}, DType::kF32});
    }
    sizes_ = set.buckets;
    set.reduce = average ? Reduce::kAverage : Reduce::kSum;
    CHECK_OK(engine.declare(process_set, set, &id_));
  }

  void fill(int b, float value) { gpu_.write(data_[static_cast<size_t>(b)], std::vector<float>(count(b), value)); }
  Status try_submit(int b) { return engine_.submit_declared(process_set_, id_, b, gpu_.stream, &handles_[b]); }
  void submit(int b, float value) {
    fill(b, value);
    CHECK_OK(try_submit(b));
  }
  Status await(int b) {
    Status outcome = enqueued(engine_, gpu_, handles_[b]);
    engine_.release(handles_[b]);
    return outcome;
  }
  void expect(int b, float value) {
    CHECK_OK(await(b));
    holds(b, value);
  }
  // As when its optimizer is collected.
  void undeclare() { CHECK_OK(engine_.undeclare(process_set_, id_)); }
  void holds(int b, float value) {
    const auto got = gpu_.read(data_[static_cast<size_t>(b)], count(b));
    CHECK_LOCKED(static_cast<size_t>(std::count(got.begin(), got.end(), value)) == count(b));
  }

 private:
  size_t count(int b) const { return static_cast<size_t>(sizes_[static_cast<size_t>(b)].shape[0]); }

  Engine& engine_;
  FrameworkOnGpu& gpu_;
  const int process_set_;
  int id_ = -1;
  std::vector<std::shared_ptr<Memory>> known_;
  std::vector<float*> data_;
  std::vector<BucketSet::Bucket> sizes_;
  int64_t handles_[kBuckets] = {};
};

inline void all_are_here(Engine& engine, const char* name) {
  const std::vector<int32_t> one = {1};
  std::vector<int32_t> sum(1);
  CHECK_OK(perform(engine, Op::kAllreduce, name, one, &sum, {1}));
}

}  // namespace hc
