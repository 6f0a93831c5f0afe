// What the engine asks of whoever works on tensors that do not lie in host memory. Backend is one for each engine,
// SetBackend one for each process set, MessageBackend is for sends and receives, and BatchBackend (batch_backend.h) for
// one batch. The rest of engine/ knows nothing else of them; engine/gpu implements them.
//
// A backend only enqueues: its operations are done when their work is, and streams wait for the results, not the host.
// So that all ranks enqueue in one order, rank 0 of the world gives each piece of work a launch ticket.
//
// Thread: the thread that makes progress, or one that holds the progress lock; "any" where it is said. Owner: the
// engine, or what each is for.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "agreement/frames.h"
#include "agreement/negotiation.h"
#include "base/clock.h"
#include "base/wire.h"
#include "collective/collective.h"
#include "engine/operation/members.h"
#include "engine/operation/memory.h"
#include "engine/operation/operation.h"
#include "engine/operation/submission.h"

namespace hc {

class BatchRunner;
class ControlLink;
class Intake;
class MemoryPressure;
class ProcessSet;
class SharedSegment;
class Tuner;
struct Context;
struct Iteration;

class SetBackend {
 public:
  virtual ~SetBackend() = default;
  bool is_used() const { return is_used_; }  // false: nothing of the set has been there
  // The set's next batch is the backend's: it starts when the set's launch ticket comes up.
  virtual void take_batch(BatchRunner& runner) = 0;
  virtual void batch_over() = 0;

  // For declared buckets.
  struct Capabilities {
    bool persistent = false;     // as far as this rank knows, they lie where a persistent plan can use them
    bool registers = false;      // the backend can be told of their memory
    bool knows_some = false;     // it knows buckets in advance; the same on every rank
    int64_t dropped = 0;         // of them, a bit for each that this rank needs no more
    int64_t numbers = 0;         // by which this rank knows them in a persistent plan, and how far that reaches
    bool between_nodes = false;  // the persistent plan, if there is one
  };
  // may_persist: all that is not the backend's allows it.
  virtual Status declare(const BucketSet& buckets, bool owned, bool may_persist, Capabilities* mine) = 0;
  // What all ranks then do together, step by step: with the progress lock held, which is let go in between.
  class Confirmation {
   public:
    virtual ~Confirmation() = default;
    virtual Result<bool> step() = 0;  // whether it is over
  };
  // Null: there is nothing to do.
  virtual std::shared_ptr<Confirmation> confirm(std::shared_ptr<const BucketSet> buckets, const Capabilities& all) = 0;
  virtual void undeclare(const BucketSet& buckets) = 0;
  // Puts a declared bucket into the graph into which its stream is captured.
  virtual Status capture(const Submission& s, BucketId bucket, int64_t* handle) = 0;

  // This rank has filled a bucket whose plan is persistent; `flag` is of its arrival.
  virtual void make_ready(Operation* op, size_t flag) = 0;
  virtual bool has_ready() const = 0;
  // This rank has no bucket under way, and the others know of every one that it may still have to begin.
  virtual bool may_leave() = 0;
  // Starts what is ready and has its launch ticket.
  virtual void step(Iteration* now) = 0;

  // Buckets that this rank has filled so long ago and not every rank has.
  struct Late {
    std::string what;
    double waited_s;
    std::vector<int> missing;  // group ranks
  };
  virtual std::vector<Late> late(TimePoint now, double patience_s) const = 0;
  // Something was launched that was not seen to end; how long ago the oldest of it was, 0: nothing is under way.
  virtual bool has_flights() const = 0;
  virtual double oldest_flight_s(TimePoint now) = 0;
  // What was launched at least so long ago, in words; empty: nothing was. longest_s: is raised to its age.
  virtual std::string under_way(TimePoint now, double older_than_s, double* longest_s) = 0;
  // What it has noticed by itself: an error of the backend becomes its failure, another one ends the engine. closed:
  // not ok when a member has left.
  virtual Status check(const Status& closed) = 0;
  virtual void note_failure() = 0;  // only that of the backend
  virtual void abort() = 0;         // begins it
  // Until nothing of the backend's works on tensors any more; what hangs is left behind at the limit.
  virtual void await_abort(const Deadline& limit) = 0;
  virtual void close() = 0;

 protected:
  bool is_used_ = false;
};

// What an announced message carries of its tensor's memory.
struct BackendMessage {
  virtual ~BackendMessage() = default;
};

// One end of a message under way. kFailed ends the engine.
class BackendTransfer : public Collective {
 public:
  const Status& outcome() const { return outcome_; }  // how its operation ends, once it is kDone

 protected:
  Status outcome_;
};

class MessageBackend {
 public:
  virtual ~MessageBackend() = default;
  // What the sender announces, and what the receiver makes of it.
  virtual void announce(const Operation* op, Writer* frame) = 0;
  virtual std::unique_ptr<BackendMessage> read(Reader* in) const = 0;
  // Both ends lie in host memory, or both do not.
  virtual Status check_place(const Operation* op, int from, bool is_host) const = 0;
  // Memory for what has come, where `op` has none.
  virtual Status prepare(Operation* op, size_t bytes) = 0;
  struct Way {
    bool is_direct = false;  // no host memory moves it
    Status refusal;          // of the operation at both ends
  };
  virtual Way choose(const Operation* op, int from, const BackendMessage& message) = 0;
  // transfer: moves so many bytes of host memory to the peer, or from there. Failures of the backend are its own.
  using HostTransfer = std::function<std::unique_ptr<Collective>(std::byte* at, size_t bytes)>;
  virtual std::unique_ptr<BackendTransfer> make(Operation* op, std::pair<int, uint32_t> peer_and_id, bool is_direct,
                                                HostTransfer transfer) = 0;
  virtual Status take_link(int from, Reader* in) = 0;
  // To oneself. copies: at once, so that the send is done before anybody receives; else from the send itself, `source`.
  virtual Result<std::unique_ptr<BackendMessage>> to_self(Operation* op, bool copies) = 0;
  virtual Status copy_to_self(Operation* op, const BackendMessage& message, const Operation* source) = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::unique_ptr<SetBackend> make_set(ProcessSet& set) = 0;
  virtual MessageBackend& messages() = 0;

  // ---- any thread, down to json()

  // Some tensor was not in host memory.
  bool in_use() const { return in_use_.load(std::memory_order_relaxed); }
  // What `s` carries besides. Null: there is nothing to offer, what comes has to come to host memory. captured: of a
  // declared bucket, whether its stream goes into a graph, upon which nothing is prepared; null: that is an error.
  virtual Result<std::unique_ptr<BackendWork>> prepare(const Submission& s, bool* captured) = 0;
  // Of an operation that is done, or is not known any more (null): makes `stream` wait for its result, also copies
  // result i to `to`, behind that.
  virtual Status wait_on_stream(const Operation* op, int64_t handle, void* stream) const = 0;
  virtual Status copy_result(Operation* op, int64_t handle, size_t i, void* to, size_t bytes, void* stream) const = 0;
  // Memory that it can be told of; Unsupported, with the reason, where it cannot.
  virtual Result<std::shared_ptr<Memory>> allocate(int index, size_t bytes) = 0;
  // Whether all buckets begin with memory of allocate(), each with its own; they then own it.
  virtual bool find_memory(BucketSet* buckets) = 0;
  virtual MemoryPressure& memory_pressure() = 0;
  // What it keeps and nobody uses goes back to the device: the framework has too little.
  virtual void trim_memory() = 0;
  // {"0": {"backend", "reason", "no_kernels"}}: how each set's tensors are reduced there.
  virtual std::string json() const = 0;

  // ---- the thread that makes progress

  // A thread of the engine's own begins: that thread.
  virtual void enter_thread() = 0;
  // An error that may come from a peer's end, which will be noticed: the job ends a moment later, unless somebody's
  // departure ends it first.
  virtual void fail(const Status& status) = 0;
  bool has_failed() const { return !failure_.is_ok(); }
  // Not ok when the moment is over: why the job ends.
  virtual Status blame(TimePoint now) const = 0;
  // The reason of the end, with what the backend has to say about it.
  Status with_failure(const Status& reason) const {
    if (!has_failed() || reason.text().find(failure_.text()) != std::string::npos) return reason;
    return Status(reason.code(), text_of(reason.text(), " On this rank, ", failure_.text()), reason.culprit());
  }

  // Launch tickets. world: every rank has a place in it.
  virtual void attach(SharedSegment* world) = 0;
  // The world's coordinator, before the plan goes out; then with each plan of the global set on every rank, and with
  // plans of other sets on their coordinator.
  virtual void note_before(const Members& set, Plan* plan) = 0;
  virtual Status order(const Members& set, const Plan& plan) = 0;
  virtual Status take_frame(FrameKind kind, int from, Reader* in) = 0;
  virtual bool take_tickets() = 0;  // in shared memory; whether some came
  // What rank 0 has given and found no room for. pass_on: whether all of it has gone.
  size_t kept_back() const { return kept_back_->size(); }  // every call asks: not virtual
  virtual bool pass_on() = 0;
  virtual void stop_ahead() = 0;  // this rank shuts down
  virtual void drop_set(uint16_t process_set) = 0;

  // Messages under way: as of a SetBackend.
  virtual bool has_flights() const = 0;
  virtual double oldest_flight_s(TimePoint now) = 0;
  virtual std::string under_way(TimePoint now, double older_than_s, double* longest_s) = 0;
  virtual void mark_awaited(TimePoint now, double older_than_s, std::vector<bool>* waits) = 0;
  virtual void note_failure() = 0;
  virtual void abort() = 0;  // as of a SetBackend, and so is the next
  virtual void await_abort(const Deadline& limit) = 0;
  virtual void close() = 0;

 protected:
  std::atomic<bool> in_use_{false};
  const std::deque<uint64_t>* kept_back_ = nullptr;  // the tickets; set by whoever is made
  Status failure_;                                   // the thread that makes progress
};

// GPUs: engine/gpu.
std::unique_ptr<Backend> make_gpu_backend(Context& context, const Tuner& tuner, ControlLink& link,
                                          const Intake& intake);

}  // namespace hc
