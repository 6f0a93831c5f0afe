// How the fake of CUDA's driver records what streams are given while they are captured into a graph: in the order in
// which it was given, which respects all dependencies. A replay runs it in that order. Like the original it wants every
// stream that has joined a capture to be waited for at its end.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace hc_fake {

using Seen = std::map<const void*, size_t>;  // how much of each stream comes before some place

struct Nodes {
  std::vector<std::function<void()>> jobs;
};

class Capture {
 public:
  Capture(const void* origin, int on) : device(on), nodes(std::make_shared<Nodes>()), origin_(origin) { seen_[origin]; }

  void add(const void* stream, std::function<void()> job) {
    std::lock_guard lock(mu_);
    ++seen_[stream][stream];
    nodes->jobs.push_back(std::move(job));
  }
  Seen seen_by(const void* stream) {
    std::lock_guard lock(mu_);
    return seen_[stream];
  }
  void wait(const void* stream, const Seen& place) {
    std::lock_guard lock(mu_);
    for (const auto& [other, count] : place) {
      size_t& mine = seen_[stream][other];
      mine = std::max(mine, count);
    }
  }
  bool all_joined() {
    std::lock_guard lock(mu_);
    for (auto& [stream, seen] : seen_)
      if (seen_[origin_][stream] < seen[stream]) return false;
    return true;
  }

  const int device;
  std::atomic<bool> is_valid{true};  // false: something disturbed it, and its end is an error
  const std::shared_ptr<Nodes> nodes;

 private:
  std::mutex mu_;
  const void* origin_;
  std::map<const void*, Seen> seen_;
};

}  // namespace hc_fake
