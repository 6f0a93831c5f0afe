#include "server/events.h"

#include <algorithm>
#include <chrono>

#include "base/clock.h"

namespace hc {

void Events::add(EventKind kind, uint32_t partition, std::string text) {
  MutexLock lock(mutex_);
  waiting_.push_back({0, kind, partition, std::move(text)});
  changed_.notify_all();
}

Status Events::ask(std::string question, double wait_s, const std::function<Status()>& look, std::string* answer) {
  MutexLock lock(mutex_);
  const uint64_t number = ++last_;
  waiting_.push_back({number, EventKind::kAsked, 0, std::move(question)});
  asked_[number] = true;
  changed_.notify_all();
  Status status;
  Deadline next_look = Deadline::in(wait_s);
  while (status.is_ok() && !answers_.contains(number)) {
    changed_.wait_for(mutex_, std::chrono::duration<double>(std::max(0.0, next_look.remaining_s())));
    if (!next_look.passed()) continue;
    next_look = Deadline::in(wait_s);
    lock.unlock();
    status = look();
    lock.lock();
  }
  asked_.erase(number);
  auto at = answers_.find(number);
  if (at == answers_.end()) return status;
  Answer given = std::move(at->second);
  answers_.erase(at);
  *answer = std::move(given.text);
  return given.status;
}

bool Events::next(double timeout_s, Event* event) {
  MutexLock lock(mutex_);
  changed_.wait_for(mutex_, std::chrono::duration<double>(timeout_s), [&] {
    mutex_.assume_held();
    return !waiting_.empty() || stopped_;
  });
  if (waiting_.empty() || stopped_) return false;
  *event = std::move(waiting_.front());
  waiting_.pop_front();
  return true;
}

void Events::answer(uint64_t number, const Status& status, std::string text) {
  MutexLock lock(mutex_);
  if (!asked_.contains(number)) return;
  answers_[number] = {status, std::move(text)};
  changed_.notify_all();
}

void Events::stop() {
  MutexLock lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

}  // namespace hc
