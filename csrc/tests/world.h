// N engines in N threads of one process, sharing one mapping of every arena, so that ThreadSanitizer sees the truth.
#pragma once

#include <barrier>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/thread.h"
#include "engine/engine.h"

namespace hc {

using Settings = std::vector<std::pair<std::string, std::string>>;

class World {
 public:
  using Body = std::function<void(Engine&, int rank)>;

  explicit World(int size, Settings settings = {}) : size_(size) {
    settings_ = {{"HOROCLONE_ARENA_BYTES", std::to_string(1ull << 30)}, {"HOROCLONE_SELECTION", "fixed"}};
    settings_.insert(settings_.end(), settings.begin(), settings.end());
  }

  // Makes rank r count as a rank of machine `node[r]`.
  World& on_nodes(std::vector<std::string> node) {
    node_ = std::move(node);
    return *this;
  }

  // Binds the thread of rank r, and what it starts, to CPU cpu[r].
  World& on_cpus(std::vector<int> cpu) {
    cpu_ = std::move(cpu);
    return *this;
  }

  // Runs body on every rank; returns the first status that was not ok (set-up and shutdown included).
  Status each(const Body& body, uint64_t generation = 1) {
    std::vector<std::string> endpoints(size_);
    std::vector<Status> outcomes(size_);
    std::barrier<> barrier(size_);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size_; ++rank)
      threads.emplace_back([&, rank] { outcomes[rank] = run(rank, generation, endpoints, barrier, body); });
    for (auto& t : threads) t.join();
    for (auto& s : outcomes)
      if (!s.is_ok()) return s;
    return Status::ok();
  }

 private:
  Status run(int rank, uint64_t generation, std::vector<std::string>& endpoints, std::barrier<>& barrier,
             const Body& body) {
    auto settings = settings_;
    const Status bound = cpu_.empty() ? Status::ok() : set_allowed_cpus({&cpu_[rank], 1});
    if (!node_.empty()) settings.emplace_back("HOROCLONE_NODE", node_[rank]);
    auto config = Config::read(settings);
    Status made = config.status();
    std::unique_ptr<Engine> engine;
    if (made.is_ok()) {
      auto created = Engine::create(config.take());
      made = created.status();
      if (made.is_ok()) engine = created.take();
    }
    if (engine) endpoints[rank] = engine->endpoint();
    barrier.arrive_and_wait();
    HC_TRY(bound);
    HC_TRY(made);
    MeshMembers members;
    members.rank = rank;
    members.endpoints = endpoints;
    members.secret = "a secret of the tests";
    members.job = "tests";
    members.generation = generation;
    members.timeout_s = 30;
    HC_TRY(engine->connect(members), "rank ", rank);
    body(*engine, rank);
    return engine->shutdown(10);
  }
  const int size_;
  Settings settings_;
  std::vector<std::string> node_;
  std::vector<int> cpu_;
};

// One blocking allreduce-like call on a vector.
template <class T>
struct TypeOf;
template <>
struct TypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct TypeOf<double> {
  static constexpr DType value = DType::kF64;
};
template <>
struct TypeOf<int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct TypeOf<int64_t> {
  static constexpr DType value = DType::kI64;
};

template <class T>
Status submit(Engine& engine, Op op, const std::string& name, const std::vector<T>& in, std::vector<T>* out,
              std::vector<int64_t> shape, int64_t* handle, const std::function<void(Submission&)>& adjust = {}) {
  Submission s;
  s.op = op;
  s.name = name;
  const Submission::Tensor tensor{in.data(), out ? out->data() : nullptr, shape, TypeOf<T>::value};
  if (op != Op::kBarrier && op != Op::kJoin) s.tensors = {&tensor, 1};
  if (adjust) adjust(s);
  return s.will_wait ? engine.call(s, handle) : engine.submit(s, handle);
}

// Generous: sanitizers on a busy machine are slow. After a timeout the engine is aborted, so that the operation is over
// before the test's vectors go.
inline Status finish(Engine& engine, int64_t handle, double timeout_s = 120) {
  if (handle == 0) return Status::ok();  // of Engine::call: it is over
  bool done = false;
  Status status = engine.wait(handle, timeout_s, &done);
  if (done) return status;
  const std::string state = engine.describe();
  engine.abort("a test gave up waiting");
  (void)engine.wait(handle, 10, &done).is_ok();
  return error(Code::kTimeout, "the test's operation did not end in ", timeout_s, " s\n", state);
}

// One operation from its submission to its end.
inline Status perform(Engine& engine, const Submission& s) {
  int64_t handle = 0;
  HC_TRY(s.will_wait ? engine.call(s, &handle) : engine.submit(s, &handle));
  Status status = finish(engine, handle);
  engine.release(handle);
  return status;
}
template <class T = float>
Status perform(Engine& engine, Op op, const std::string& name = "", const std::vector<T>& in = {},
               std::vector<T>* out = nullptr, std::vector<int64_t> shape = {},
               const std::function<void(Submission&)>& adjust = {}) {
  int64_t handle = 0;
  HC_TRY(submit(engine, op, name, in, out, std::move(shape), &handle, adjust));
  Status status = finish(engine, handle);
  engine.release(handle);
  return status;
}

// A number of the engine's counters; 0: none of that name.
inline int64_t counter(const Engine& engine, const std::string& name) {
  const std::string json = engine.counters_json(), key = "\"" + name + "\":";
  const size_t at = json.find(key);
  return at == std::string::npos ? 0 : std::stoll(json.substr(at + key.size()));
}

// Whether the engine comes to make no step for a while. Its timers leave it that much, also while it waits.
inline bool comes_to_rest(const Engine& engine) {
  for (const Deadline deadline = Deadline::in(5); !deadline.passed();) {
    const int64_t before = counter(engine, "steps");
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    if (counter(engine, "steps") == before) return true;
  }
  return false;
}

}  // namespace hc
