// See stall_hint.h.
#include "agreement/stall_hint.h"

#include <algorithm>

namespace hc {
namespace {

constexpr size_t kCompared = 4096;  // names looked at for one hint

const char* reason(const Entry& e, const Entry& other) {
  if (e.unnamed != other.unnamed) return nullptr;
  if (e.unnamed) {
    if (e.op == other.op) return nullptr;  // the same calls, only earlier or later
    return "unnamed operations are matched by their order: does every rank make the same calls?";
  }
  if (e.op != other.op) return e.named == other.named ? "one name is used for two operations" : nullptr;
  if (!differ_by_counter(e.named->first, other.named->first)) return nullptr;
  return "the names differ only by a counter: did every rank make the same number of calls?";
}

}  // namespace

std::string stall_hint(const Ledger& ledger, const std::vector<uint32_t>& waiting, uint32_t entry,
                       const WorldRanks& world_rank) {
  const Entry& e = ledger.at(entry);
  for (size_t i = 0; i < std::min(waiting.size(), kCompared); i++) {
    if (waiting[i] == entry) continue;
    const Entry& other = ledger.at(waiting[i]);
    const char* why = reason(e, other);
    if (why == nullptr) continue;
    // The other one must be waited for by a rank that is missing here, and wait for one that is present here.
    int missing_here = other.marks.first_not_in(e.marks);
    if (missing_here < 0 || e.marks.first_not_in(other.marks) < 0) continue;
    return text_of("rank ", world_rank(missing_here), " waits in ", key_of(ledger.subject(other)), " instead; ", why);
  }
  return {};
}

}  // namespace hc
