// Bytes of a list of cache ids (and sequence numbers), in the smallest of four forms; a steady step is a few bytes.
// PURE.
#pragma once

#include <vector>

#include "agreement/negotiation.h"
#include "agreement/varint.h"
#include "base/wire.h"

namespace hc {

void put_cache_ids(Writer* out, const std::vector<CachedRequest>& list);
// At most kMaxPlanEntries from a frame that repeats itself; a broken list makes the reader fail.
void get_cache_ids(Reader* in, std::vector<CachedRequest>* list);

}  // namespace hc
