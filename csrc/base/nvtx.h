// Ranges for NVIDIA's tools (Nsight Systems, Nsight Compute), by the protocol of NVTX 3: whoever starts this process
// under a tool names the tool's library in NVTX_INJECTION64_PATH. Where nobody does, a range costs one load of a flag.
// Our ranges are those of the domain "horoclone". Thread: any.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

namespace hc::nvtx {

// Looks for a tool, once in a process, before the first range. What is wrong with one that was named; empty: nothing.
std::string attach();

namespace detail {
inline std::atomic<bool> is_on{false};
void push(const std::string& text);
void pop();
uint64_t start(const std::string& text);
void end(uint64_t range);
}  // namespace detail

inline bool is_on() { return detail::is_on.load(std::memory_order_relaxed); }

// The calling thread's time within a scope. make_text is called where a tool listens, and only there.
class Range {
 public:
  template <class MakeText>
  explicit Range(MakeText&& make_text) : open_(is_on()) {
    if (open_) detail::push(make_text());
  }
  ~Range() {
    if (open_) detail::pop();
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  const bool open_;
};

// A time that may begin on one thread and end on another, at the latest with this object.
class Span {
 public:
  Span() = default;
  ~Span() { end(); }
  Span(Span&& other) noexcept : range_(std::exchange(other.range_, 0)) {}
  Span& operator=(Span&& other) noexcept {
    std::swap(range_, other.range_);
    return *this;
  }

  template <class MakeText>
  void start(MakeText&& make_text) {
    if (is_on() && !range_) range_ = detail::start(make_text());
  }
  void end() {
    if (range_) detail::end(std::exchange(range_, 0));
  }

 private:
  uint64_t range_ = 0;  // 0: none
};

}  // namespace hc::nvtx
