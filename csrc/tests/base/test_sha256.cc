// SHA-256 and HMAC against the published vectors.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "base/sha256.h"

namespace {

using namespace hc;

std::string hex(std::span<const uint8_t> bytes) {
  std::string out;
  for (uint8_t b : bytes) {
    out += "0123456789abcdef"[b >> 4];
    out += "0123456789abcdef"[b & 15];
  }
  return out;
}

std::string sha(std::string_view text) { return hex(sha256(bytes_of(text))); }
std::string mac(std::string_view key, std::string_view text) {
  return hex(hmac_sha256(bytes_of(key), {bytes_of(text)}));
}

}  // namespace

TEST_CASE("sha256 gives the digests of FIPS 180-4") {
  CHECK(sha("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(sha("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(sha("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(sha("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrs"
            "mnopqrs"
            "tnopqrstu") == "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  CHECK(sha(std::string(1000000, 'a')) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("sha256 does not depend on how the data is cut") {
  std::string text;
  for (int i = 0; i < 1000; ++i) text += static_cast<char>(i * 7);
  for (size_t bytes : {0, 1, 55, 56, 57, 63, 64, 65, 119, 120, 127, 128, 129, 1000}) {
    const std::string_view part = std::string_view(text).substr(0, bytes);
    const Digest whole = sha256(bytes_of(part));
    for (size_t step : {1, 3, 63, 64, 65}) {
      Sha256 hash;
      for (size_t at = 0; at < bytes; at += step) hash.update(bytes_of(part.substr(at, step)));
      CHECK(hash.finish() == whole);
    }
  }
}

TEST_CASE("hmac_sha256 gives the codes of RFC 4231") {
  CHECK(mac(std::string(20, '\x0b'), "Hi There") == "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(mac("Jefe", "what do ya want for nothing?") ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(mac(std::string(20, '\xaa'), std::string(50, '\xdd')) ==
        "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string key;
  for (char c = 1; c <= 25; ++c) key += c;
  CHECK(mac(key, std::string(50, '\xcd')) == "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK(mac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First") ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK(mac(std::string(131, '\xaa'),
            "This is a test using a larger than block-size key and a larger than block-size data. The key "
            "needs to be "
            "hashed before being used by the HMAC algorithm.") ==
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST_CASE("hmac_sha256 of parts is that of their concatenation") {
  CHECK(hmac_sha256(bytes_of("key"), {bytes_of("ab"), bytes_of(""), bytes_of("c")}) ==
        hmac_sha256(bytes_of("key"), {bytes_of("abc")}));
}

TEST_CASE("comparison in constant time is a comparison") {
  const Digest a = sha256(bytes_of("a"));
  for (size_t i = 0; i < a.size(); ++i) {
    Digest b = a;
    b[i] ^= 0x10;
    CHECK_FALSE(equal_in_constant_time(a, b));
  }
  CHECK(equal_in_constant_time(a, sha256(bytes_of("a"))));
  CHECK_FALSE(equal_in_constant_time(a, std::span(a).first(31)));
  CHECK(equal_in_constant_time({}, {}));
}

TEST_CASE("random bytes fill the whole of a large buffer and differ from call to call") {
  std::vector<uint8_t> a(100000), b(100000);
  CHECK(random_bytes(a).is_ok());
  CHECK(random_bytes(b).is_ok());
  CHECK(a != b);
  CHECK(std::vector<uint8_t>(a.end() - 32, a.end()) != std::vector<uint8_t>(32));
  CHECK(random_bytes({}).is_ok());
}
