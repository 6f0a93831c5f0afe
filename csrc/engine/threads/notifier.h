// hc-notify: runs completion callbacks with no lock held, so that they may allocate and submit again. Started by the
// first callback; stop() runs what is queued and joins.
//
// Thread: push from the thread that makes progress, callbacks on hc-notify.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

#include "base/thread.h"

namespace hc {

class Notifier {
 public:
  ~Notifier() { stop(); }
  void push(std::function<void()> call) {
    std::lock_guard lock(mu_);
    if (!thread_.running() && !thread_.start("hc-notify", [this] { run(); }).is_ok()) return call();  // out of threads
    queue_.push_back(std::move(call));
    changed_.notify_one();
  }
  void forget() { thread_.forget(); }  // in a forked child
  void stop() {
    NamedThread ending;
    {
      std::lock_guard lock(mu_);
      stopping_ = true;
      ending = std::move(thread_);
      changed_.notify_one();
    }
    ending.join();
    std::lock_guard lock(mu_);
    stopping_ = false;
  }

 private:
  void run() {
    std::unique_lock lock(mu_);
    while (true) {
      changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      auto call = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      call();
      lock.lock();
    }
  }
  std::mutex mu_;  // guards all below
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  NamedThread thread_;
  bool stopping_ = false;
};

}  // namespace hc
