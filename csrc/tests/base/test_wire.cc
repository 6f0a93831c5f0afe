// Frames: what is written is read back, and no reader runs past the end.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "base/dtype.h"
#include "base/wire.h"

using namespace hc;

TEST_CASE("a reader gives back what a writer put") {
  Writer out;
  out.put(uint8_t{7});
  out.put(std::numeric_limits<int64_t>::min());
  out.put(-0.0);
  out.put(DType::kBF16);
  out.put_text("layer3.weight");
  out.put_text("");
  out.put_raw("xyz", 3);
  CHECK(out.size() == 1 + 8 + 8 + 1 + 4 + 13 + 4 + 3);

  Reader in(out.bytes());
  CHECK(in.get<uint8_t>() == 7);
  CHECK(in.get<int64_t>() == std::numeric_limits<int64_t>::min());
  const double zero = in.get<double>();
  CHECK((zero == 0 && std::signbit(zero)));
  CHECK(in.get<DType>() == DType::kBF16);
  CHECK(in.get_text() == "layer3.weight");
  CHECK(in.get_text() == "");
  char raw[3];
  CHECK(in.take(raw, 3));
  CHECK(std::string(raw, 3) == "xyz");
  CHECK(in.ok());
  CHECK(in.remaining() == 0);
}

TEST_CASE("numbers are little-endian on the wire") {
  Writer out;
  out.put(uint32_t{0x01020304});
  const uint8_t expected[] = {4, 3, 2, 1};
  CHECK(std::equal(out.bytes().begin(), out.bytes().end(), expected, expected + 4));
}

TEST_CASE("a reader that came to the end stays failed and gives zeros") {
  Writer out;
  out.put(uint32_t{5});
  Reader in(out.bytes());
  CHECK(in.get<uint64_t>() == 0);
  CHECK_FALSE(in.ok());
  CHECK(in.get<uint32_t>() == 0);  // these four bytes are there, and still not given
  CHECK(in.get_text().empty());
  CHECK_FALSE(in.ok());
}

TEST_CASE("a text longer than the frame or the limit is refused") {
  Writer lie;
  lie.put(uint32_t{0xffffffff});
  lie.put_raw("abc", 3);
  Reader in(lie.bytes());
  CHECK(in.get_text(std::numeric_limits<size_t>::max()).empty());
  CHECK_FALSE(in.ok());

  Writer out;
  out.put_text("abcdef");
  Reader limited(out.bytes());
  CHECK(limited.get_text(5).empty());
  CHECK_FALSE(limited.ok());
  Reader enough(out.bytes());
  CHECK(enough.get_text(6) == "abcdef");
  CHECK(enough.ok());
}

TEST_CASE("every prefix of a frame fails cleanly, never reads on") {
  Writer out;
  out.put(int32_t{-1});
  out.put_text("name");
  out.put(uint64_t{9});
  for (size_t bytes = 0; bytes < out.size(); ++bytes) {
    const std::vector<uint8_t> prefix(out.bytes().begin(), out.bytes().begin() + static_cast<long>(bytes));
    Reader in(prefix);
    in.get<int32_t>();
    in.get_text();
    in.get<uint64_t>();
    CHECK_FALSE(in.ok());
  }
}
