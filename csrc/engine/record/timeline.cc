#include "engine/record/timeline.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>

namespace hc {

namespace {
constexpr size_t kQueueEvents = 1u << 16;              // 12 MB at most; about a second of a busy engine
constexpr std::chrono::milliseconds kWriteEvery{100};  // what a kill -9 may lose
constexpr std::chrono::milliseconds kHearEvery{200};
}  // namespace

Status Timeline::start(const std::string& path, Trace::Origin origin, bool mark_cycles,
                       std::function<void(const std::string&)> say) {
  stop();
  MutexLock running(running_mu_);
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0)
    return error(Code::kInvalidArgument, "the timeline cannot be written to '", path, "': ", std::strerror(errno));
  file_ = file;
  path_ = path;
  origin_ = origin;
  say_ = std::move(say);
  {
    MutexLock lock(mu_);
    queue_.clear();
    dropped_ = 0;
    stopping_ = false;
    writes_ = true;
  }
  if (Status made = thread_.start("hc-timeline", [this] { write_until_stopped(); }); !made.is_ok()) {
    ::close(std::exchange(file_, -1));
    MutexLock lock(mu_);
    writes_ = false;
    return made;
  }
  mark_cycles_.store(mark_cycles, std::memory_order_relaxed);
  MutexLock lock(mu_);
  on_.store(writes_ || listens_, std::memory_order_release);  // the first write may have failed already
  return Status::ok();
}

void Timeline::stop() {
  MutexLock running(running_mu_);
  if (!thread_.running()) return;
  {
    MutexLock lock(mu_);
    writes_ = false;
    on_.store(listens_, std::memory_order_release);
    stopping_ = true;
    changed_.notify_one();
  }
  thread_.join();
  ::close(std::exchange(file_, -1));
}

void Timeline::listen(int rank) {
  MutexLock lock(mu_);
  listens_ = true;
  listener_rank_ = rank;
  heard_.clear();
  missed_ = 0;
  on_.store(true, std::memory_order_release);
}

void Timeline::stop_listening() {
  MutexLock lock(mu_);
  listens_ = false;
  on_.store(writes_, std::memory_order_release);
  has_heard_.notify_all();
}

std::string Timeline::heard() {
  std::vector<TraceEvent> taken;
  uint64_t missed = 0;
  {
    MutexLock lock(mu_);
    has_heard_.wait(mu_, [&] {
      mu_.assume_held();
      return !listens_ || !heard_.empty();
    });
    has_heard_.wait_for(mu_, kHearEvery, [&] {
      mu_.assume_held();
      return !listens_ || heard_.size() >= kQueueEvents / 2;
    });
    taken.swap(heard_);
    missed = std::exchange(missed_, 0);
  }
  std::string text;
  for (const TraceEvent& event : taken) text += event_line(event);
  if (missed) text += text_of("[\"dropped\",", missed, "]\n");
  return text;
}

void Timeline::forget() {
  on_.store(false, std::memory_order_relaxed);
  thread_.forget();
}

TraceKey Timeline::key_of(const Operation& op) {
  return {op.signature().op, op.process_set, op.request.name, op.request.sequence};
}

void Timeline::phase(const std::vector<Operation*>& operations, const char* algorithm) {
  const TimePoint now = Clock::now();
  for (const Operation* op : operations)
    if (op) push({TraceEvent::Kind::kPhase, key_of(*op), -1, algorithm, true, {}, now});
}

void Timeline::done(const Operation& op, const Status& status) {
  const Signature& s = op.signature();
  std::string args;
  if (!s.tensors.empty()) {
    args = text_of("\"dtype\":\"", name_of(s.tensors[0].dtype), "\",\"shape\":\"[");
    for (size_t i = 0; i < s.tensors[0].shape.size(); ++i) args += text_of(i ? ", " : "", s.tensors[0].shape[i]);
    args += "]\"";
    if (s.tensors.size() > 1) args += text_of(",\"tensors\":", s.tensors.size());
  }
  if (!status.is_ok()) args += text_of(args.empty() ? "" : ",", "\"error\":", json_text(status.text()));
  push({TraceEvent::Kind::kDone, key_of(op), -1, "", false, std::move(args), Clock::now()});
}

void Timeline::push(TraceEvent event) {
  MutexLock lock(mu_);
  const bool is_others = event.kind == TraceEvent::Kind::kAnnounced && event.rank != listener_rank_;
  if (listens_ && !is_others && event.kind != TraceEvent::Kind::kCycle && event.kind != TraceEvent::Kind::kAgreed) {
    if (heard_.size() < kQueueEvents)
      heard_.push_back(event);
    else
      ++missed_;
    if (heard_.size() == 1 || heard_.size() == kQueueEvents / 2) has_heard_.notify_one();
  }
  if (!writes_) return;
  if (queue_.size() >= kQueueEvents) {
    ++dropped_;
    return;
  }
  queue_.push_back(std::move(event));
  if (queue_.size() == 1 || queue_.size() == kQueueEvents / 2) changed_.notify_one();
}

void Timeline::write_until_stopped() {
  Trace trace(origin_);
  std::vector<TraceEvent> taken;
  std::string text;
  trace.open(&text);
  bool good = write(text), ending = false;
  while (!ending) {
    taken.clear();
    uint64_t dropped = 0;
    {
      MutexLock lock(mu_);
      changed_.wait(mu_, [&] {  // an idle engine costs nothing
        mu_.assume_held();
        return stopping_ || !queue_.empty();
      });
      changed_.wait_for(mu_, kWriteEvery, [&] {
        mu_.assume_held();
        return stopping_ || queue_.size() >= kQueueEvents / 2;
      });
      taken.swap(queue_);
      dropped = dropped_;
      ending = stopping_;
    }
    text.clear();
    for (const TraceEvent& event : taken) trace.add(event, &text);
    if (ending) trace.close(Clock::now(), dropped, &text);
    if (good && !text.empty()) good = write(text);
  }
}

// A full or broken disk ends the timeline, not the training.
bool Timeline::write(const std::string& text) {
  const char* from = text.data();
  size_t rest = text.size();
  while (rest > 0) {
    const ssize_t n = ::write(file_, from, rest);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      {
        MutexLock lock(mu_);
        writes_ = false;
        on_.store(listens_, std::memory_order_relaxed);
      }
      say_(text_of("the timeline ends here: writing to '", path_, "' failed: ", std::strerror(errno)));
      return false;
    }
    from += n;
    rest -= static_cast<size_t>(n);
  }
  return true;
}

}  // namespace hc
