// Limits what goes into one control frame: a name may take 64 KiB, a frame takes kMaxControlBytes (net/channel.h). What
// does not fit waits for the next frame. PURE values.
#pragma once

#include <vector>

#include "agreement/negotiation.h"

namespace hc {

// Half a frame: one more name or request, added before the size is checked again, fits into the other half.
inline constexpr size_t kFrameBudget = 8u << 20;

// The bytes it takes in a frame, or slightly more.
size_t encoded_bytes(const Signature& signature);
size_t encoded_bytes(const RequestList& request_list);

// The same announcements in the same order, as request lists of at most `most` bytes each (more only if it holds a
// single request). Usually one.
std::vector<RequestList> parts_of(RequestList request_list, size_t most);

}  // namespace hc
