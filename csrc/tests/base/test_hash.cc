// Values that must never change: ranks of one job compare them.
#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

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

TEST_CASE("the hash of memory is the same in every process, and one flipped bit anywhere changes it") {
  for (const size_t bytes : {size_t{1}, size_t{7}, size_t{16}, size_t{63}, size_t{64}, size_t{65}, size_t{200}}) {
    std::vector<unsigned char> memory(bytes + 1, 0);  // zeros, as of a state that was just made
    std::set<uint64_t> seen{hash_of_bytes(memory.data() + 1, bytes)};
    for (size_t bit = 0; bit < 8 * bytes; ++bit) {
      memory[1 + bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
      seen.insert(hash_of_bytes(memory.data() + 1, bytes));
      memory[1 + bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
    }
    CHECK(seen.size() == 8 * bytes + 1);
  }
  std::set<uint64_t> lengths;
  const std::vector<unsigned char> zeros(300, 0);
  for (size_t bytes = 0; bytes < 300; ++bytes) lengths.insert(hash_of_bytes(zeros.data(), bytes));
  CHECK(lengths.size() == 300);
  CHECK(hash_of_bytes(nullptr, 0) == hash_of_bytes("", 0));
  CHECK(hash_of_bytes("layer1.weight", 13) == 0x8ab4eafbb30d452u);
  std::vector<unsigned char> memory(1000);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<unsigned char>(i * 7);
  for (const size_t step : {1, 3, 63, 64, 65, 400, 1000}) {
    MemoryHash in_parts;
    for (size_t at = 0; at < memory.size(); at += step) {
      in_parts.add(memory.data() + at, std::min(step, memory.size() - at));
    }
    CHECK(in_parts.finish() == hash_of_bytes(memory.data(), memory.size()));
  }
}

TEST_CASE("half a hash of memory tells one flipped bit anywhere, as the sum of a segment must") {
  std::vector<float> numbers(20'000);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(2 * i + 1);
  auto* const memory = reinterpret_cast<unsigned char*>(numbers.data());
  const size_t bytes = numbers.size() * sizeof(float);
  const uint32_t whole = halved(hash_of_bytes(memory, bytes));
  size_t same = 0;
  for (size_t bit = 0; bit < 8 * bytes; bit += 61) {
    memory[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
    same += halved(hash_of_bytes(memory, bytes)) == whole;
    memory[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
  }
  CHECK(same == 0);
}

TEST_CASE("the hash of memory is the same with every instruction set, and tells where blocks changed places") {
  std::vector<std::byte> memory(64 * 20 + 1);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i * i >> 3);
  MemoryHash::Lanes plain;
  MemoryHash::loops().back()(&plain, memory.data() + 1, 20);
  for (const MemoryHash::TakeIn loop : MemoryHash::loops()) {
    MemoryHash::Lanes lanes;
    loop(&lanes, memory.data() + 1, 20);
    CHECK(std::equal(std::begin(plain.sum), std::end(plain.sum), std::begin(lanes.sum)));
    CHECK(std::equal(std::begin(plain.key), std::end(plain.key), std::begin(lanes.key)));
  }
  const uint64_t before = hash_of_bytes(memory.data(), 128);
  std::swap_ranges(memory.begin(), memory.begin() + 64, memory.begin() + 64);
  CHECK(hash_of_bytes(memory.data(), 128) != before);
}
