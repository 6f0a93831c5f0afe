#include "collective/gpu/nccl_comm.h"
#include "base/mutex.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>

#include "base/thread.h"

namespace hc {

namespace {

constexpr double kCallEndsS = 2;   // until a call that NCCL was told to abort has returned
constexpr double kAbortEndsS = 3;  // until NCCL has aborted, and with it that call
// Until a call returns by itself: older versions give memory back that it may still look at.
constexpr double kCallReturnsS = 0.2;

// The group is ended in any case: the calls of this thread would stay open.
Status in_group(const NcclApi& nccl, NcclHandle comm, const std::vector<NcclCall>& calls) {
  HC_TRY(nccl.check(nccl.ncclGroupStart(), "ncclGroupStart", comm));
  Status called;
  for (const NcclCall& call : calls)
    if (called.is_ok()) called = call(nccl, comm);
  Status ended = nccl.check(nccl.ncclGroupEnd(), "ncclGroupEnd", comm);
  return called.is_ok() ? ended : called;
}

// NCCL does not copy it, and a communicator that hangs in its abort outlives its owner. There are few.
const char* kept_for_ever(const std::string& name) {
  static Mutex mu;
  static auto* names = new std::set<std::string>;
  MutexLock lock(mu);
  return names->insert(name).first->c_str();
}

void nap() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

}  // namespace

// One call at a time. What a call works with lives as long as this object, which the thread owns too: a call that never
// returns, because NCCL does not heed the abort, keeps it.
class NcclComm::Caller : public std::enable_shared_from_this<Caller> {
 public:
  Caller(std::shared_ptr<const NcclApi> nccl, std::shared_ptr<Gpu> gpu)
      : nccl_(std::move(nccl)), gpu_(std::move(gpu)) {}

  Status start() {
    return thread_.start("hc-nccl", [self = shared_from_this()] { self->work(); });
  }
  void post(std::function<Status()> job) {
    MutexLock lock(mu_);
    job_ = std::move(job);
    busy_ = true;
    changed_.notify_all();
  }
  bool is_busy() {
    MutexLock lock(mu_);
    return busy_;
  }
  Status outcome() {
    MutexLock lock(mu_);
    return outcome_;
  }
  bool until_idle(double limit_s) {
    MutexLock lock(mu_);
    return changed_.wait_for(mu_, std::chrono::duration<double>(limit_s), [&] {
      mu_.assume_held();
      return !busy_;
    });
  }
  // The thread ends when its call has returned; who does not, is left alone.
  void end() {
    {
      MutexLock lock(mu_);
      ending_ = true;
      changed_.notify_all();
    }
    until_idle(kCallEndsS) ? thread_.join() : thread_.forget();
  }

  const std::shared_ptr<const NcclApi> nccl_;
  const std::shared_ptr<Gpu> gpu_;
  std::atomic<NcclHandle> comm{nullptr};  // set before NCCL has brought it up, so that it can be aborted

 private:
  void work() {
    Gpu::own_this_thread();
    const Gpu::Current current(*gpu_);
    MutexLock lock(mu_);
    while (true) {
      changed_.wait(mu_, [&] {
        mu_.assume_held();
        return job_ || ending_;
      });
      if (!job_) return;
      const auto job = std::exchange(job_, nullptr);
      lock.unlock();
      Status done = job();
      lock.lock();
      outcome_ = std::move(done);
      busy_ = false;
      changed_.notify_all();
    }
  }

  NamedThread thread_;
  Mutex mu_;
  CondVar changed_;
  std::function<Status()> job_ HC_GUARDED_BY(mu_);
  bool busy_ HC_GUARDED_BY(mu_) = false, ending_ HC_GUARDED_BY(mu_) = false;
  Status outcome_ HC_GUARDED_BY(mu_);
};

class NcclComm::Ending {
 public:
  void is_over() {
    MutexLock lock(mu_);
    over_ = true;
    changed_.notify_all();
  }
  bool has_come(double limit_s) {
    MutexLock lock(mu_);
    return changed_.wait_for(mu_, std::chrono::duration<double>(limit_s), [&] {
      mu_.assume_held();
      return over_;
    });
  }

  NamedThread thread;  // the progress thread's to start, join and detach

 private:
  Mutex mu_;
  CondVar changed_;
  bool over_ HC_GUARDED_BY(mu_) = false;
};

NcclComm::NcclComm(std::shared_ptr<const NcclApi> nccl, std::shared_ptr<Gpu> gpu)
    : nccl_(std::move(nccl)), gpu_(std::move(gpu)) {}

NcclComm::~NcclComm() {
  abort();
  if (!ending_) return;
  ending_->has_come(kAbortEndsS) ? ending_->thread.join() : ending_->thread.detach();
}

NcclHandle NcclComm::handle() const {
  if (!caller_) return comm_;
  return caller_->is_busy() ? nullptr : caller_->comm.load();
}

Status NcclComm::begin(int size, const NcclId& id, int rank, const std::string& name) {
  NcclConfig config;
  if (nccl_->version >= kNcclNonBlocking) {
    config.set_name(kept_for_ever(name));
    const Gpu::Current current(*gpu_);
    return nccl_->check(nccl_->ncclCommInitRankConfig(&comm_, size, id, rank, &config), "ncclCommInitRankConfig",
                        nullptr);
  }
  config.blocking = 1;
  caller_ = std::make_shared<Caller>(nccl_, gpu_);
  HC_TRY(caller_->start());
  caller_->post([caller = caller_.get(), size, id, rank, config]() mutable {
    NcclHandle* const made = reinterpret_cast<NcclHandle*>(&caller->comm);
    static_assert(sizeof caller->comm == sizeof *made && std::atomic<NcclHandle>::is_always_lock_free);
    return caller->nccl_->check(caller->nccl_->ncclCommInitRankConfig(made, size, id, rank, &config),
                                "ncclCommInitRankConfig", nullptr);
  });
  return Status::ok();
}

Status NcclComm::launch(std::vector<NcclCall> calls) {
  if (!caller_) {
    const Gpu::Current current(*gpu_);
    return in_group(*nccl_, comm_, calls);
  }
  caller_->post([caller = caller_.get(), calls = std::move(calls)] {
    return in_group(*caller->nccl_, caller->comm.load(), calls);
  });
  return Status::ok();
}

Status NcclComm::call(NcclCall call) {
  if (!caller_) {
    const Gpu::Current current(*gpu_);
    return call(*nccl_, comm_);
  }
  caller_->post([caller = caller_.get(), call = std::move(call)] { return call(*caller->nccl_, caller->comm.load()); });
  return Status::ok();
}

Result<bool> NcclComm::is_pending() {
  if (!caller_) {
    if (!comm_) return error(Code::kAborted, "the communicator has ended");
    return nccl_->is_pending(comm_);
  }
  if (caller_->is_busy()) return true;
  HC_TRY(caller_->outcome());
  if (!caller_->comm.load()) return error(Code::kAborted, "the communicator has ended");
  return nccl_->is_pending(caller_->comm.load());
}

// Of a communicator that comes up or is called NCCL may tell nothing on another thread.
Status NcclComm::check() {
  if (caller_ && caller_->is_busy()) return Status::ok();
  return caller_ || comm_ ? is_pending().status() : Status::ok();
}

Status NcclComm::until_over(double limit_s) {
  for (const Deadline deadline = Deadline::in(limit_s); !deadline.passed(); nap()) {
    auto pending = is_pending();
    HC_TRY(pending.status());
    if (!pending.value()) return Status::ok();
  }
  return error(Code::kTimeout, "NCCL has not done within ", limit_s, " s what it was called for");
}

bool NcclComm::finish(double limit_s) {
  if (caller_) {
    const NcclHandle comm = handle();
    if (!comm || !check().is_ok()) return false;
    caller_->post([caller = caller_.get(), comm] {
      HC_TRY(caller->nccl_->check(caller->nccl_->ncclCommFinalize(comm), "ncclCommFinalize", comm));
      caller->comm.store(nullptr);
      return caller->nccl_->check(caller->nccl_->ncclCommDestroy(comm), "ncclCommDestroy", nullptr);
    });
    return caller_->until_idle(limit_s) && caller_->outcome().is_ok();
  }
  if (!comm_) return true;
  const Gpu::Current current(*gpu_);
  if (!nccl_->check(nccl_->ncclCommFinalize(comm_), "ncclCommFinalize", comm_).is_ok()) return false;
  if (!until_over(limit_s).is_ok()) return false;
  (void)nccl_->ncclCommDestroy(std::exchange(comm_, nullptr));
  return true;
}

void NcclComm::abort(std::shared_ptr<void> kept) {
  if (!comm_ && !caller_) return;
  ending_ = std::make_shared<Ending>();
  auto end = [nccl = nccl_, gpu = gpu_, comm = std::exchange(comm_, nullptr), caller = std::move(caller_),
              ending = ending_, kept = std::move(kept)]() mutable {
    {
      const Gpu::Current current(*gpu);
      if (comm) (void)nccl->ncclCommAbort(comm);
      if (caller) {
        (void)caller->until_idle(kCallReturnsS);
        if (const NcclHandle blocking = caller->comm.exchange(nullptr)) (void)nccl->ncclCommAbort(blocking);
        caller->end();
        caller.reset();
      }
    }
    kept.reset();
    ending->is_over();
  };
  auto shared = std::make_shared<decltype(end)>(std::move(end));
  const Status started = ending_->thread.start("hc-nccl-end", [shared] {
    Gpu::own_this_thread();
    (*shared)();
  });
  if (started.is_ok()) return;
  (*shared)();
  ending_.reset();
}

void NcclComm::await_abort(const Deadline& limit) {
  if (ending_ && !ending_->has_come(std::max(0.0, limit.remaining_s()))) forget();
}

void NcclComm::forget() {
  if (ending_) ending_->thread.detach();
  ending_.reset();
}

}  // namespace hc
