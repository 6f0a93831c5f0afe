// Encodes a list of cache ids (and sequence numbers) in the smallest of four forms; a step that repeats takes a few
// bytes. PURE.
#pragma once

#include <vector>

#include "agreement/negotiation.h"
#include "agreement/varint.h"
#include "base/wire.h"

namespace hc {

void put_cache_ids(Writer* out, const std::vector<CachedRequest>& list);
// Reads at most kMaxPlanEntries when the list is coded as runs, so that a few bytes cannot expand without bound. A
// malformed list makes the reader fail.
void get_cache_ids(Reader* in, std::vector<CachedRequest>* list);

}  // namespace hc
