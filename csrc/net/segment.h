// What precedes every data segment on its way, and finds bytes that changed there. The networks' own sums miss what a
// device changes behind them: TCP's has 16 bits, and a network card or a switch may compute it anew.
//
// The sums are the tree's 64-bit hash, folded to 32: as fast as memory is read, and one changed segment of 4 billion
// would pass. They are no signature: who wants to change bytes can compute them.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/hash.h"
#include "net/channel.h"

namespace hc {

inline uint32_t sum_of(const void* data, size_t bytes) { return halved(hash_of_bytes(data, bytes)); }

struct SegmentHeader {
  Tag tag;
  uint32_t bytes = 0;
  uint32_t sum = 0;    // of the payload; 0 in shared memory, where nothing is between the ranks
  uint64_t guard = 0;  // over what stands before it: says that the stream has not lost its place, too

  SegmentHeader() = default;
  SegmentHeader(const Tag& its_tag, size_t its_bytes, uint32_t its_sum = 0)
      : tag(its_tag), bytes(static_cast<uint32_t>(its_bytes)), sum(its_sum) {
    guard = guard_of();
  }
  uint64_t guard_of() const {
    uint64_t words[3], hash = 0x47455348;
    static_assert(sizeof words == sizeof tag + sizeof bytes + sizeof sum);
    std::memcpy(words, static_cast<const void*>(this), sizeof words);
    for (const uint64_t word : words) mix(&hash, word);
    return hash;
  }
};
static_assert(sizeof(SegmentHeader) == 32 && sizeof(Tag) == 16);

}  // namespace hc
