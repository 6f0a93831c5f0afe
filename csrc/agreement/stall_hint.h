// Guesses why an operation waits: it looks for a missing rank that waits in a similar operation. PURE.
#pragma once

#include <string>
#include <vector>

#include "agreement/ledger.h"

namespace hc {

// `waiting`: every waiting entry; `entry`: the one to explain. Empty when nothing similar is found.
std::string stall_hint(const Ledger& ledger, const std::vector<uint32_t>& waiting, uint32_t entry,
                       const WorldRanks& world_rank);

}  // namespace hc
