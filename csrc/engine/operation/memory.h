// Memory that the core hands out: results of unknown size, and shared blocks. Ownership is shared; it may outlive the
// engine.
#pragma once

#include <cstdlib>
#include <functional>
#include <memory>

#include "net/arena.h"

namespace hc {

class Memory {
 public:
  // Private and uninitialised, 64-byte aligned; null when memory is short.
  static std::shared_ptr<Memory> make_private(size_t bytes) {
    const size_t rounded = (bytes + 63) / 64 * 64;
    auto* data = static_cast<std::byte*>(std::aligned_alloc(64, rounded ? rounded : 64));
    return data ? std::shared_ptr<Memory>(new Memory(data, bytes, nullptr)) : nullptr;
  }
  static Result<std::shared_ptr<Memory>> make_shared(std::shared_ptr<Arena> arena, size_t bytes) {
    auto block = arena->allocate(bytes);
    if (!block.is_ok()) return block.status();
    return std::shared_ptr<Memory>(new Memory(block.value(), bytes, std::move(arena)));
  }
  // Memory that `free` releases; it may be no memory of the host.
  static std::shared_ptr<Memory> make_foreign(std::byte* data, size_t bytes, std::function<void()> free) {
    std::shared_ptr<Memory> made(new Memory(data, bytes, nullptr));
    made->free_ = std::move(free);
    return made;
  }
  ~Memory() {
    if (free_)
      free_();
    else if (arena_)
      arena_->free(data_);
    else
      std::free(data_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  Memory(std::byte* data, size_t bytes, std::shared_ptr<Arena> arena)
      : data_(data), bytes_(bytes), arena_(std::move(arena)) {}
  std::byte* data_;
  size_t bytes_;
  std::shared_ptr<Arena> arena_;  // null: private, or
  std::function<void()> free_;    // foreign
};

}  // namespace hc
