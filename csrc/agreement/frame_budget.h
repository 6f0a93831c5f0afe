// How much goes into one control frame: names may take 64 KiB each, a frame takes kMaxControlBytes (net/channel.h).
// What does not fit waits for the next frame. PURE values.
#pragma once

#include <vector>

#include "agreement/negotiation.h"

namespace hc {

// Half a frame: what is added before the next look, one name or one request, is far less than the other half.
inline constexpr size_t kFrameBudget = 8u << 20;

// What it takes in a frame, or a little more.
size_t encoded_bytes(const Signature& signature);
size_t encoded_bytes(const RequestList& request_list);

// The same announcements in the same order, as request lists of at most `most` bytes each, or of one request. Mostly
// one.
std::vector<RequestList> parts_of(RequestList request_list, size_t most);

}  // namespace hc
