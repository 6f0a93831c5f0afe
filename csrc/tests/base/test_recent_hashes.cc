#include <doctest/doctest.h>

#include "base/recent_hashes.h"

using namespace hc;

TEST_CASE("recent hashes: what came among the last ones is known, what came once and long ago is not") {
  RecentHashes came(100);
  CHECK_FALSE(came.again(7));
  CHECK(came.again(7));
  CHECK_FALSE(came.again(0));
  CHECK(came.again(0));
  for (uint64_t i = 1000; i < 1099; ++i) CHECK_FALSE(came.again(i * 64));
  CHECK(came.again(1000 * 64));  // all of them in one chain of a small table
  for (uint64_t i = 0; i < 1000; ++i) (void)came.again((uint64_t{1} << 40) + i);
  CHECK_FALSE(came.again(7));
  CHECK(came.again(7));
}

TEST_CASE("recent hashes: as many as are kept may come in turn, over and over") {
  RecentHashes came(5000);
  for (int round = 0; round < 4; ++round)
    for (uint64_t i = 1; i <= 5000; ++i) CHECK(came.again(i * 0x9e3779b97f4a7c15u) == (round > 0));
}
