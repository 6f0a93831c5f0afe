// Which members of a process set keep the others waiting: for each, how often it was the last to be ready and how long
// the others had waited by then. Counts never reset, so that a monitor can take differences.
//
// Thread: the thread that makes progress writes, any thread reads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"

namespace hc {

class StragglerStatistics {
 public:
  explicit StragglerStatistics(int size) : members_(new Member[static_cast<size_t>(size)]), size_(size) {}

  void last_was(int group_rank, double others_waited_s) {
    Member& m = members_[static_cast<size_t>(group_rank)];
    m.times.store(m.times.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    const auto ns = static_cast<uint64_t>(others_waited_s * 1e9);
    m.nanoseconds.store(m.nanoseconds.load(std::memory_order_relaxed) + ns, std::memory_order_relaxed);
  }
  struct Late {
    int group_rank;
    uint64_t times, nanoseconds;
  };
  // Those that the others have waited for longest, the longest first.
  std::vector<Late> latest(size_t at_most) const {
    std::vector<Late> late;
    for (int g = 0; g < size_; ++g) {
      const Member& m = members_[static_cast<size_t>(g)];
      if (const uint64_t times = m.times.load(std::memory_order_relaxed))
        late.push_back({g, times, m.nanoseconds.load(std::memory_order_relaxed)});
    }
    std::stable_sort(late.begin(), late.end(),
                     [](const Late& a, const Late& b) { return a.nanoseconds > b.nanoseconds; });
    late.resize(std::min(late.size(), at_most));
    return late;
  }
  // [{"rank":3,"times":12,"seconds":0.5}, ...] of those that ever were the last.
  std::string json(const std::vector<int>& world_rank) const {
    std::string out = "[";
    for (int g = 0; g < size_; ++g) {
      const Member& m = members_[static_cast<size_t>(g)];
      const uint64_t times = m.times.load(std::memory_order_relaxed);
      if (!times) continue;
      out += text_of(out.size() > 1 ? "," : "", "{\"rank\":", world_rank[static_cast<size_t>(g)], ",\"times\":", times,
                     ",\"seconds\":", static_cast<double>(m.nanoseconds.load(std::memory_order_relaxed)) * 1e-9, "}");
    }
    return out + "]";
  }

 private:
  struct Member {
    std::atomic<uint64_t> times{0}, nanoseconds{0};
  };
  const std::unique_ptr<Member[]> members_;
  const int size_;
};

}  // namespace hc
