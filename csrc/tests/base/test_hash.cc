// Values that must never change: ranks of one job compare them.
#include <doctest/doctest.h>

#include <set>
#include <string>

#include "base/hash.h"

using namespace hc;

TEST_CASE("the hash of a text is the same in every process, and differs where texts differ") {
  static_assert(hash_of_text("") == 0xf8bb92c91b3f5cc0u);
  CHECK(hash_of_text("layer1.weight") == hash_of_text(std::string("layer1.weight")));
  CHECK(hash_of_text("layer1.weight") == 0xcd7fab53281b969bu);
  std::set<uint64_t> seen;
  for (int i = 0; i < 20'000; ++i) seen.insert(hash_of_text("layer" + std::to_string(i) + ".weight") >> 2);
  CHECK(seen.size() == 20'000);
}
