#include "net/frame_signer.h"

#include <cstring>

#include "base/sha256.h"
#include "base/wire.h"

namespace hc {
namespace {

constexpr std::string_view kFramesContext = "horoclone control frames";

SipKey key_from(const std::string& secret, const std::string& from, const std::string& to) {
  Writer ends;
  ends.put_text(from);
  ends.put_text(to);
  const Digest digest = hmac_sha256(bytes_of(secret), {bytes_of(kFramesContext), ends.bytes()});
  SipKey key;
  std::memcpy(&key, digest.data(), sizeof key);
  return key;
}

}  // namespace

FrameKeys frame_keys(const std::string& secret, const std::string& own, const std::string& peer) {
  return {key_from(secret, own, peer), key_from(secret, peer, own)};
}

}  // namespace hc
