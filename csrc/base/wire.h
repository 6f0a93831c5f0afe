// Little-endian frames: a writer that appends and a reader that never runs past the end. Every frame of ours is
// made and read with these two; after a failed read the reader stays failed and returns zeros, so that a parser
// may read a whole record and check `ok()` once.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace hc {

class Writer {
 public:
  template <class T>
    requires(std::is_arithmetic_v<T> || std::is_enum_v<T>)
  void put(T value) {
    size_t at = bytes_.size();
    bytes_.resize(at + sizeof(T));
    std::memcpy(bytes_.data() + at, &value, sizeof(T));
  }
  void put_raw(const void* data, size_t bytes) {
    const auto* p = static_cast<const uint8_t*>(data);
    bytes_.insert(bytes_.end(), p, p + bytes);
  }
  void put_text(std::string_view text) {  // u32 length, then the bytes
    put(static_cast<uint32_t>(text.size()));
    put_raw(text.data(), text.size());
  }
  std::span<const uint8_t> bytes() const { return bytes_; }
  size_t size() const { return bytes_.size(); }
  void clear() { bytes_.clear(); }

 private:
  std::vector<uint8_t> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : rest_(bytes) {}
  template <class T>
    requires(std::is_arithmetic_v<T> || std::is_enum_v<T>)
  T get() {
    T value{};
    if (!take(&value, sizeof(T))) return T{};
    return value;
  }
  std::string get_text(size_t limit = 1 << 20) {
    uint32_t bytes = get<uint32_t>();
    if (bytes > limit || bytes > rest_.size()) {
      ok_ = false;
      return {};
    }
    std::string text(reinterpret_cast<const char*>(rest_.data()), bytes);
    rest_ = rest_.subspan(bytes);
    return text;
  }
  bool take(void* to, size_t bytes) {
    if (!ok_ || bytes > rest_.size()) return ok_ = false;
    std::memcpy(to, rest_.data(), bytes);
    rest_ = rest_.subspan(bytes);
    return true;
  }
  bool ok() const { return ok_; }
  void fail() { ok_ = false; }
  size_t remaining() const { return rest_.size(); }

 private:
  std::span<const uint8_t> rest_;
  bool ok_ = true;
};

}  // namespace hc
