// LEB128 varints (signed numbers zigzagged) for the agreement's frames. The reader checks every length.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/wire.h"

namespace hc {

inline uint64_t zigzag(int64_t v) { return (static_cast<uint64_t>(v) << 1) ^ static_cast<uint64_t>(v >> 63); }
inline int64_t unzigzag(uint64_t v) { return static_cast<int64_t>(v >> 1) ^ -static_cast<int64_t>(v & 1); }

inline size_t varint_bytes(uint64_t v) { return (static_cast<size_t>(std::bit_width(v | 1)) + 6) / 7; }

inline void put_varint(Writer* out, uint64_t v) {
  uint8_t bytes[10];
  size_t n = 0;
  while (v >= 0x80) {
    bytes[n++] = static_cast<uint8_t>(v | 0x80);
    v >>= 7;
  }
  bytes[n++] = static_cast<uint8_t>(v);
  out->put_raw(bytes, n);
}

inline uint64_t get_varint(Reader* in) {
  uint64_t v = 0;
  for (int shift = 0; shift < 70; shift += 7) {
    uint8_t byte = in->get<uint8_t>();
    if (shift == 63 && byte > 1) break;  // would not fit 64 bits
    v |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if ((byte & 0x80) == 0) return v;
  }
  in->fail();
  return 0;
}

// A count of records that take at least `each` bytes: never more than the frame can still hold.
inline size_t get_length(Reader* in, size_t each) {
  uint64_t n = get_varint(in);
  if (n > in->remaining() / each) in->fail();
  return in->ok() ? static_cast<size_t>(n) : 0;
}

}  // namespace hc
