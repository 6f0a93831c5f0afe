// std::mutex and what belongs to it, with annotations that say which lock guards what. clang checks them (make lint:
// -Wthread-safety); for other compilers they are nothing, and the classes cost what std's do.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define HC_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define HC_THREAD_ATTRIBUTE(x)
#endif
// Of a field: only while this lock is held; of a pointer: what it points to.
#define HC_GUARDED_BY(x) HC_THREAD_ATTRIBUTE(guarded_by(x))
#define HC_PT_GUARDED_BY(x) HC_THREAD_ATTRIBUTE(pt_guarded_by(x))
// Of a function: the caller holds these locks; the function takes them, gives them back.
#define HC_REQUIRES(...) HC_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define HC_ACQUIRE(...) HC_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define HC_RELEASE(...) HC_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define HC_TRY_ACQUIRE(...) HC_THREAD_ATTRIBUTE(try_acquire_capability(__VA_ARGS__))
#define HC_RETURN_CAPABILITY(x) HC_THREAD_ATTRIBUTE(lock_returned(x))
#define HC_ASSERT_CAPABILITY(x) HC_THREAD_ATTRIBUTE(assert_capability(x))
// Of a class: it is a lock; it holds one while it lives.
#define HC_CAPABILITY(name) HC_THREAD_ATTRIBUTE(capability(name))
#define HC_SCOPED_CAPABILITY HC_THREAD_ATTRIBUTE(scoped_lockable)
// Of a function that the analysis does not understand; a comment says why it is right.
#define HC_NO_THREAD_SAFETY_ANALYSIS HC_THREAD_ATTRIBUTE(no_thread_safety_analysis)

namespace hc {

class HC_CAPABILITY("mutex") Mutex {
 public:
  void lock() HC_ACQUIRE() { mutex_.lock(); }
  void unlock() HC_RELEASE() { mutex_.unlock(); }
  // Tells the analysis what it cannot see: in a lambda that runs under the lock of the function around it.
  void assume_held() const HC_ASSERT_CAPABILITY(this) {}
  std::mutex& native() { return mutex_; }  // for CondVar

 private:
  std::mutex mutex_;
};

class HC_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) HC_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() HC_RELEASE() {
    if (held_) mutex_.unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  void unlock() HC_RELEASE() {
    mutex_.unlock();
    held_ = false;
  }
  void lock() HC_ACQUIRE() {
    mutex_.lock();
    held_ = true;
  }

 private:
  Mutex& mutex_;
  bool held_ = true;
};

// The waits give the lock back while they sleep. A condition that reads what the lock guards begins with
// mutex.assume_held(). _for: false when the time is up and the condition still does not hold.
class CondVar {
 public:
  void notify_one() { changed_.notify_one(); }
  void notify_all() { changed_.notify_all(); }
  template <class Condition>
  void wait(Mutex& mutex, Condition&& condition) HC_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.native(), std::adopt_lock);
    changed_.wait(lock, condition);
    lock.release();
  }
  template <class Condition>
  bool wait_for(Mutex& mutex, std::chrono::duration<double> limit, Condition&& condition) HC_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.native(), std::adopt_lock);
    const bool holds = changed_.wait_for(lock, limit, condition);
    lock.release();
    return holds;
  }
  // Without a condition: false when the time is up.
  bool wait_for(Mutex& mutex, std::chrono::duration<double> limit) HC_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.native(), std::adopt_lock);
    const bool woken = changed_.wait_for(lock, limit) == std::cv_status::no_timeout;
    lock.release();
    return woken;
  }

 private:
  std::condition_variable changed_;
};

}  // namespace hc
