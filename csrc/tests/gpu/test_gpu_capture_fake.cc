// Steps that are captured into CUDA graphs, on fakes of CUDA and NCCL: no GPU takes part. The fake records what a
// stream is given and wants every stream that took part to be waited for; a replay runs it again.
#include <doctest/doctest.h>

#include <barrier>

#include "tests/gpu/gpu_gradients.h"

namespace hc {

namespace {

// A step: the buckets in one order, then everything is waited for.
void* captured_step(FrameworkOnGpu& gpu, Gradients& gradients, int buckets = kBuckets) {
  gpu.begin_capture();
  for (int b = 0; b < buckets; ++b) CHECK_OK(gradients.try_submit(b));
  for (int b = 0; b < buckets; ++b) CHECK_OK(gradients.await(b));
  return gpu.end_capture();
}

}  // namespace

TEST_CASE("fake of CUDA and NCCL: a captured step gives the sums of new values at each replay") {
  FakeEnvironment slow(Variables{{"HC_FAKE_DELAY_US", "50"}});
  for (const bool one_machine : {true, false}) {
    World world(2, gpu_settings());
    if (!one_machine) world.on_nodes({"a", "b"});
    CHECK_OK(world.each([](Engine& engine, int rank) {
      FrameworkOnGpu gpu(rank);
      Gradients gradients(engine, gpu);
      for (int b = 0; b < kBuckets; ++b) gradients.submit(b, 1.0f);
      for (int b = 0; b < kBuckets; ++b) gradients.expect(b, 2.0f);
      void* graph = captured_step(gpu, gradients);
      for (int b = 0; b < kBuckets; ++b) gradients.holds(b, 2.0f);  // nothing has run
      float* other = gpu.tensor(std::vector<float>(10, 1.0f));
      for (int replay = 0; replay < 10; ++replay) {
        for (int b = 0; b < kBuckets; ++b) gradients.fill(b, static_cast<float>(replay + b + rank));
        gpu.replay(graph);
        for (int b = 0; b < kBuckets; ++b) gradients.holds(b, static_cast<float>(2 * (replay + b) + 1));
        CHECK_OK(reduce_now(engine, gpu, "between", other, 10));
      }
      for (int b = 0; b < kBuckets; ++b) gradients.submit(b, 1.0f);  // and without a graph, as before
      for (int b = 0; b < kBuckets; ++b) gradients.expect(b, 2.0f);
      gpu.synchronize();
      gpu.drop(graph);
      all_are_here(engine, "end");
    }));
  }
  for (int i = 0; i < 5000 && fake_communicators(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(fake_communicators() == 0);
  for (int i = 0; i < 5000 && fake_count("events"); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(fake_count("streams") == 0);
}

TEST_CASE("fake of CUDA and NCCL: other ranks' and threads' work goes on while a step is captured") {
  World world(2, gpu_settings());
  CHECK_OK(world.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    Gradients gradients(engine, gpu);
    float* data = gpu.tensor(std::vector<float>(40, 1.0f));
    int64_t handle = 0;
    CHECK_OK(submit_gpu(engine, gpu, Op::kAllreduce, "under way", data, data, {40}, DType::kF32, &handle,
                        [](Submission& s) { s.reduce = Reduce::kSum; }));
    void* graph = captured_step(gpu, gradients);  // meanwhile hc-engine launches that one, on its own stream
    CHECK_OK(enqueued(engine, gpu, handle));
    engine.release(handle);
    CHECK_LOCKED(gpu.read(data, 40)[39] == 2.0f);
    for (int b = 0; b < kBuckets; ++b) gradients.fill(b, 3.0f);
    gpu.replay(graph);
    for (int b = 0; b < kBuckets; ++b) gradients.holds(b, 6.0f);
    gpu.drop(graph);
    all_are_here(engine, "end");
  }));
}

TEST_CASE("fake of CUDA and NCCL: what cannot be captured says why, and the runtime goes on") {
  for (const char* backend : {"nccl", "host"}) {
    CAPTURE(backend);
    World world(2, gpu_settings({{"HOROCLONE_GPU_OPERATIONS", backend}}));
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      FrameworkOnGpu gpu(rank);
      Gradients gradients(engine, gpu);
      float* data = gpu.tensor(std::vector<float>(4, 1.0f));
      gpu.begin_capture();
      const Status named = reduce_now(engine, gpu, "loss", data, 4);
      const Status bucket = std::string(backend) == "host" ? gradients.try_submit(0) : Status::ok();
      gpu.drop(gpu.end_capture());
      CHECK_LOCKED(named.code() == Code::kUnsupported);
      for (const char* part : {"'loss'", "captured into a CUDA graph", "two whole steps"})
        CHECK_LOCKED(named.text().find(part) != std::string::npos);
      CHECK_LOCKED(bucket.is_ok() == (std::string(backend) == "nccl"));
      CHECK_LOCKED((bucket.is_ok() || bucket.text().find("HOROCLONE_GPU_OPERATIONS is host") != std::string::npos));
      gradients.submit(0, 1.0f);
      gradients.expect(0, 2.0f);
      CHECK_OK(reduce_now(engine, gpu, "loss", data, 4));
      CHECK_LOCKED(gpu.read(data, 4)[0] == 2.0f);
      all_are_here(engine, "end");
    }));
  }
  World early(1, gpu_settings());
  CHECK_OK(early.each([](Engine& engine, int rank) {
    FrameworkOnGpu gpu(rank);
    BucketSet set;
    set.place.is_host = false;
    set.buckets.push_back({"b", static_cast<std::byte*>(gpu.memory(40)), {10}, DType::kF32});
    int id = -1;
    CHECK_OK(engine.declare(0, set, &id));
    gpu.begin_capture();
    int64_t handle = 0;
    const Status refused = engine.submit_declared(0, id, 0, gpu.stream, &handle);
    gpu.drop(gpu.end_capture());
    CHECK_LOCKED(refused.code() == Code::kUnsupported);
    CHECK_LOCKED(refused.text().find("two whole steps") != std::string::npos);
  }));
}

TEST_CASE("fake of CUDA and NCCL: ranks that captured different steps get an error, not a hang") {
  World world(2, gpu_settings());
  void* graphs[2];
  std::unique_ptr<FrameworkOnGpu> gpus[2];
  const Status outcome = world.each([&](Engine& engine, int rank) {
    gpus[rank] = std::make_unique<FrameworkOnGpu>(rank);
    FrameworkOnGpu& gpu = *gpus[rank];
    Gradients gradients(engine, gpu);
    gpu.begin_capture();
    CHECK_OK(gradients.try_submit(rank));  // rank 0 bucket 0, rank 1 bucket 1
    CHECK_OK(gradients.await(rank));
    graphs[rank] = gpu.end_capture();
    gpu.replay(graphs[rank]);
    int64_t handle = 0;
    const std::vector<int32_t> one = {1};
    std::vector<int32_t> sum(1);
    Status failed;
    for (int i = 0; i < 3000 && failed.is_ok(); ++i) {
      failed = submit(engine, Op::kAllreduce, text_of("look", i), one, &sum, {1}, &handle);
      if (failed.is_ok()) failed = finish(engine, handle);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK_LOCKED(failed.text().find("different collectives in horoclone process set 0") != std::string::npos);
    gpu.synchronize();  // the stream goes on
  });
  (void)outcome;  // a failed job shuts down as it can
  for (int rank = 0; rank < 2; ++rank) gpus[rank]->drop(graphs[rank]);
}

TEST_CASE("fake of CUDA and NCCL: a graph that outlives the runtime does not keep it from ending") {
  World world(2, gpu_settings());
  void* graphs[2];
  std::unique_ptr<FrameworkOnGpu> gpus[2];
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    gpus[rank] = std::make_unique<FrameworkOnGpu>(rank);
    Gradients gradients(engine, *gpus[rank]);
    graphs[rank] = captured_step(*gpus[rank], gradients);
    all_are_here(engine, "end");
  }));
  for (int rank = 0; rank < 2; ++rank) gpus[rank]->drop(graphs[rank]);
  for (int i = 0; i < 5000 && fake_communicators(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(fake_communicators() == 0);
}

}  // namespace hc
