// hc-notify: runs completion callbacks with no lock held, so that they may allocate and submit again. Started by the
// first callback; stop() runs what is queued and joins.
//
// Thread: push from the thread that makes progress, callbacks on hc-notify.
#pragma once

#include <deque>
#include <functional>

#include "base/mutex.h"
#include "base/thread.h"

namespace hc {

class Notifier {
 public:
  ~Notifier() { stop(); }
  void push(std::function<void()> call) {
    MutexLock lock(mu_);
    if (!thread_.running() && !thread_.start("hc-notify", [this] { run(); }).is_ok()) return call();  // out of threads
    queue_.push_back(std::move(call));
    changed_.notify_one();
  }
  // In a forked child, where it is the only thread and another may have held the lock.
  void forget() HC_NO_THREAD_SAFETY_ANALYSIS { thread_.forget(); }
  void stop() {
    NamedThread ending;
    {
      MutexLock lock(mu_);
      stopping_ = true;
      ending = std::move(thread_);
      changed_.notify_one();
    }
    ending.join();
    MutexLock lock(mu_);
    stopping_ = false;
  }

 private:
  void run() {
    MutexLock lock(mu_);
    while (true) {
      changed_.wait(mu_, [&] {
        mu_.assume_held();
        return stopping_ || !queue_.empty();
      });
      if (queue_.empty()) return;
      auto call = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      call();
      lock.lock();
    }
  }
  Mutex mu_;
  CondVar changed_;
  std::deque<std::function<void()>> queue_ HC_GUARDED_BY(mu_);
  NamedThread thread_ HC_GUARDED_BY(mu_);
  bool stopping_ HC_GUARDED_BY(mu_) = false;
};

}  // namespace hc
