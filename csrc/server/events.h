// What a server has to ask its program, which alone knows the register: questions of workers, and copies that were
// lost. The program takes one at a time and answers it.
//
// Thread: any. Owner: the server.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>

#include "base/mutex.h"
#include "base/status.h"

namespace hc {

// In the order of horoclone_server.h.
enum class EventKind : int32_t { kAsked, kBackupLost, kPrimaryLost };

struct Event {
  uint64_t number = 0;  // kAsked: answer it
  EventKind kind = EventKind::kAsked;
  uint32_t partition = 0;
  std::string text;  // kAsked: the question; else the reason
};

// Wakes one thread that sleeps with a limit.
class Alarm {
 public:
  void ring() {
    MutexLock lock(mutex_);
    rung_ = true;
    changed_.notify_all();
  }
  void wait(double timeout_s) {
    MutexLock lock(mutex_);
    changed_.wait_for(mutex_, std::chrono::duration<double>(timeout_s), [&] {
      mutex_.assume_held();
      return rung_;
    });
    rung_ = false;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool rung_ HC_GUARDED_BY(mutex_) = false;
};

class Events {
 public:
  void add(EventKind kind, uint32_t partition, std::string text);
  // Waits for an answer: look() is called every wait_s and may end it with an error.
  Status ask(std::string question, double wait_s, const std::function<Status()>& look, std::string* answer);
  // False: none within timeout_s, or stopped.
  bool next(double timeout_s, Event* event);
  void answer(uint64_t number, const Status& status, std::string text);
  void stop();

 private:
  struct Answer {
    Status status;
    std::string text;
  };
  Mutex mutex_;
  CondVar changed_;
  std::deque<Event> waiting_ HC_GUARDED_BY(mutex_);
  std::map<uint64_t, Answer> answers_ HC_GUARDED_BY(mutex_);
  std::map<uint64_t, bool> asked_ HC_GUARDED_BY(mutex_);  // nobody waits for the answer to others any more
  uint64_t last_ HC_GUARDED_BY(mutex_) = 0;
  bool stopped_ HC_GUARDED_BY(mutex_) = false;
};

}  // namespace hc
