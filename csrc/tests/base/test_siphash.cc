// SipHash against the vectors of its authors.
#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "base/siphash.h"

using namespace hc;

TEST_CASE("siphash gives the codes of its paper and of the reference implementation") {
  const SipKey key{0x0706050403020100u, 0x0f0e0d0c0b0a0908u};
  std::vector<uint8_t> message(15);
  for (size_t i = 0; i < message.size(); ++i) message[i] = static_cast<uint8_t>(i);
  const std::span<const uint8_t> all(message);
  CHECK(SipHash(key).finish(all.first(0)) == 0x726fdb47dd0e0e31u);
  CHECK(SipHash(key).finish(all.first(1)) == 0x74f839c593dc67fdu);
  CHECK(SipHash(key).finish(all.first(8)) == 0x93f5f5799a932462u);
  CHECK(SipHash(key).finish(all) == 0xa129ca6149be45e5u);
  SipHash in_parts(key);
  in_parts.add(0x0706050403020100u);
  CHECK(in_parts.finish(all.subspan(8)) == 0xa129ca6149be45e5u);
}
