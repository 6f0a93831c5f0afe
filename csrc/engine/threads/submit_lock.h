// The submit lock: one mutex for everything that submitting an operation reads and writes, of which Intake holds a part
// and SetIntake and Recorder the others. Those cannot name Intake's mutex, so what it guards names `submit_lock`.
#pragma once

#include "base/mutex.h"

namespace hc {

struct HC_CAPABILITY("submit lock") SubmitLockName {};
inline SubmitLockName submit_lock;  // for the annotations only

class HC_SCOPED_CAPABILITY SubmitLock {
 public:
  explicit SubmitLock(Mutex& mutex) HC_ACQUIRE(submit_lock) : lock_(mutex) {}
  ~SubmitLock() HC_RELEASE() {}
  SubmitLock(const SubmitLock&) = delete;
  SubmitLock& operator=(const SubmitLock&) = delete;
  void unlock() HC_RELEASE() { unlock_mutex(); }

 private:
  void unlock_mutex() HC_NO_THREAD_SAFETY_ANALYSIS { lock_.unlock(); }
  MutexLock lock_;
};

}  // namespace hc
