// Counts what all channels of a mesh have moved.
#pragma once

#include <atomic>
#include <cstdint>

namespace hc {

// Written by the thread that makes progress, read by any.
class Counter {
 public:
  void add(uint64_t n) { value_.store(value_.load(std::memory_order_relaxed) + n, std::memory_order_relaxed); }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

struct Traffic {
  Counter frames_sent, frames_received, segments_sent, segments_received, bytes_sent, bytes_received, syscalls, wakes;
  Counter frames_taken;     // of those received, by the engine
  Counter failed_channels;  // some may be told of as losses
  Counter lingering;        // channels with a transfer that is written and waits for its acknowledgement
  Counter remade;           // connections that were lost and made again
};

}  // namespace hc
