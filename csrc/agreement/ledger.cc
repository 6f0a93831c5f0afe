// See ledger.h. In the steady state an announcement is a look into two flat vectors and one bit.
#include "agreement/ledger.h"

#include <algorithm>
#include <bit>

#include "base/hash.h"

namespace hc {

uint32_t SequenceWindow::find(uint64_t sequence) const {
  if (count_ == 0 || sequence < low_ || sequence >= high_) return kNoEntry;
  return ring_[sequence & (ring_.size() - 1)];
}

bool SequenceWindow::add(uint64_t sequence, uint32_t entry) {
  if (sequence >> 63 != 0) return false;
  uint64_t low = count_ == 0 ? sequence : std::min(low_, sequence);
  uint64_t high = count_ == 0 ? sequence + 1 : std::max(high_, sequence + 1);
  if (high - low > kMaxSpread) return false;
  if (high - low > ring_.size()) {
    std::vector<uint32_t> larger(std::max<size_t>(64, std::bit_ceil(high - low)), kNoEntry);
    for (uint64_t s = low_; count_ != 0 && s < high_; s++) larger[s & (larger.size() - 1)] = cell(s);
    ring_ = std::move(larger);
  }
  low_ = low;
  high_ = high;
  cell(sequence) = entry;
  count_++;
  return true;
}

void SequenceWindow::remove(uint64_t sequence) {
  cell(sequence) = kNoEntry;
  if (--count_ == 0) return;
  while (cell(low_) == kNoEntry) low_++;
}

// What comes only once ("metric_17") must neither take memory for good nor push out what comes in every step, so a
// name, or an unnamed signature, gets a cache id only when it comes for the second time. Unnamed ones have at most a
// quarter of the capacity (at least one, from a capacity of two).
Ledger::Ledger(int size, size_t capacity)
    : size_(size),
      capacity_(std::min<size_t>(capacity, kMaxCacheIds)),
      unnamed_capacity_(capacity_ < 2 ? 0 : std::max<size_t>(1, capacity_ / 4)),
      came_(std::max<size_t>(1024, 4 * capacity_)),
      scratch_(static_cast<size_t>(size), nullptr) {}

uint32_t Ledger::new_entry(Op op) {
  uint32_t index = static_cast<uint32_t>(entries_.size());
  if (free_.empty()) {
    Entry& made = entries_.emplace_back();
    made.marks = RankSet(size_);
  } else {
    index = free_.back();
    free_.pop_back();
  }
  entries_[index].op = op;
  return index;
}

uint32_t Ledger::named_entry(const Request& request) {
  auto [at, made] = names_.try_emplace(request.name);
  if (made) at->second.entry.fill(kNoEntry);
  uint32_t& index = at->second.entry[static_cast<size_t>(request.signature.op)];
  if (index == kNoEntry) {
    index = new_entry(request.signature.op);
    at->second.count++;
    entries_[index].named = &*at;
  }
  return index;
}

Status Ledger::unnamed_entry(Op op, uint64_t sequence, uint32_t* entry) {
  SequenceWindow& window = windows_[static_cast<size_t>(op)];
  *entry = window.find(sequence);
  if (*entry != kNoEntry) return Status::ok();
  uint32_t made = new_entry(op);
  if (!window.add(sequence, made)) {
    free_.push_back(made);
    return error(Code::kInternal, name_of(op), ".noname.", sequence,
                 " is out of step with the other unnamed operations");
  }
  entries_[made].unnamed = true;
  entries_[made].sequence = sequence;
  *entry = made;
  return Status::ok();
}

Status Ledger::mark(int rank, uint32_t index) {
  Entry& e = entries_[index];
  if (!e.marks.add(rank)) return error(Code::kInternal, key_of(subject(e)), " was announced twice before it completed");
  if (e.announced++ == 0) {
    e.order = ++order_;
    e.state = Entry::State::kWaiting;
  }
  return Status::ok();
}

// An unnamed announcement with a cache id. As long as every rank uses one cache id there is nothing to store.
Status Ledger::use_cache_id(int rank, uint32_t cache_id, uint64_t sequence, uint32_t* entry) {
  HC_TRY(unnamed_entry(remembered_[cache_id].signature->op, sequence, entry));
  HC_TRY(mark(rank, *entry));
  Entry& e = entries_[*entry];
  if (e.announced == 1) {
    e.cache_id = cache_id;
  } else if (e.cache_id != cache_id) {
    spread(&e);
    e.by_rank[static_cast<size_t>(rank)] = remembered_[cache_id].signature;
    e.detailed = e.dirty = true;
  }
  return Status::ok();
}

Status Ledger::announce(int rank, const CachedRequest& request, uint32_t* entry) {
  if (request.cache_id >= remembered_.size())
    return error(Code::kInternal, "cache id ", request.cache_id, " was never given (there are ", remembered_.size(),
                 ")");
  uint32_t named = remembered_[request.cache_id].entry;
  if (named == kNoEntry) return use_cache_id(rank, request.cache_id, request.sequence, entry);
  if (entries_[named].said_by(rank) == nullptr)
    return error(Code::kInternal, "cache id ", request.cache_id, " (", key_of(subject(entries_[named])),
                 ") was used before its signature was announced");
  *entry = named;
  return mark(rank, named);
}

Status Ledger::announce(int rank, const Request& request, uint32_t* entry) {
  const Signature& s = request.signature;
  if (s.op == Op::kJoin) return error(Code::kInternal, "join was announced as a request, not as a request list's flag");
  if (is_message(s.op)) return error(Code::kInternal, name_of(s.op), " was announced; it needs no agreement");
  if (request.name.empty()) {
    uint32_t cache_id = by_content_.find(s);
    if (cache_id != kNoCacheId) {
      HC_TRY(use_cache_id(rank, cache_id, request.sequence, entry));
      entries_[*entry].teach = true;
      return Status::ok();
    }
    HC_TRY(unnamed_entry(s.op, request.sequence, entry));
    HC_TRY(mark(rank, *entry));
    entries_[*entry].detailed = true;
  } else {
    *entry = named_entry(request);
    HC_TRY(mark(rank, *entry));
  }
  store(&entries_[*entry], rank, s);
  return Status::ok();
}

Status Ledger::mark_all(uint32_t index) {
  Entry& e = entries_[index];
  if (e.announced != 0)
    return error(Code::kInternal, key_of(subject(e)), " was announced for all ranks, some of which had announced it");
  e.marks.add_everybody();
  e.announced = static_cast<uint32_t>(size_);
  e.order = ++order_;
  e.state = Entry::State::kWaiting;
  return Status::ok();
}

Status Ledger::use_cache_id_for_all(uint32_t cache_id, uint64_t sequence, uint32_t* entry) {
  HC_TRY(unnamed_entry(remembered_[cache_id].signature->op, sequence, entry));
  HC_TRY(mark_all(*entry));
  entries_[*entry].cache_id = cache_id;
  return Status::ok();
}

Status Ledger::announce_for_all(const CachedRequest& request, uint32_t* entry) {
  if (request.cache_id >= remembered_.size())
    return error(Code::kInternal, "cache id ", request.cache_id, " was never given (there are ", remembered_.size(),
                 ")");
  const uint32_t named = remembered_[request.cache_id].entry;
  if (named == kNoEntry) return use_cache_id_for_all(request.cache_id, request.sequence, entry);
  Entry& e = entries_[named];
  if (!merge(&e))
    for (int r = 0; r < size_; r++)
      if (e.said_by(r) == nullptr)
        return error(Code::kInternal, "cache id ", request.cache_id, " (", key_of(subject(e)),
                     ") was used before its signature was announced");
  *entry = named;
  return mark_all(named);
}

Status Ledger::announce_for_all(const Request& request, uint32_t* entry) {
  const Signature& s = request.signature;
  if (s.op == Op::kJoin || is_message(s.op)) return error(Code::kInternal, name_of(s.op), " was announced for all");
  if (request.name.empty()) {
    const uint32_t cache_id = by_content_.find(s);
    if (cache_id != kNoCacheId) {
      HC_TRY(use_cache_id_for_all(cache_id, request.sequence, entry));
      entries_[*entry].teach = true;
      return Status::ok();
    }
    HC_TRY(unnamed_entry(s.op, request.sequence, entry));
    entries_[*entry].detailed = true;
  } else {
    *entry = named_entry(request);
  }
  HC_TRY(mark_all(*entry));
  Entry& e = entries_[*entry];
  const bool known = !e.unnamed && e.cache_id != kNoCacheId;
  if (known && !merge(&e)) e.teach = true;  // to some it may be new
  if (merge(&e) && *e.recent == s) return Status::ok();
  e.by_rank.clear();
  e.recent = std::make_shared<const Signature>(s);
  e.dirty = true;
  return Status::ok();
}

// Room for what ranks say differently.
void Ledger::spread(Entry* e) {
  if (e->by_rank.empty()) e->by_rank.assign(static_cast<size_t>(size_), e->recent);
}

// Whether every rank's signature is one and the same object; if so, one is kept.
bool Ledger::merge(Entry* e) {
  if (e->by_rank.empty()) return e->recent != nullptr;
  const auto& first = e->by_rank[0];
  if (first == nullptr || std::any_of(e->by_rank.begin(), e->by_rank.end(), [&](const auto& s) { return s != first; }))
    return false;
  e->recent = first;
  e->by_rank = {};
  return true;
}

void Ledger::store(Entry* e, int rank, const Signature& signature) {
  spread(e);
  std::shared_ptr<const Signature>& mine = e->by_rank[static_cast<size_t>(rank)];
  if (mine == nullptr && !e->unnamed && e->cache_id != kNoCacheId) e->teach = true;
  if (mine != nullptr && *mine == signature) return;
  if (e->recent == nullptr || !(*e->recent == signature)) e->recent = std::make_shared<const Signature>(signature);
  mine = e->recent;
  e->dirty = true;
}

Subject Ledger::subject(const Entry& e) const {
  return {e.op, e.unnamed, e.sequence, e.named == nullptr ? std::string_view() : std::string_view(e.named->first)};
}

const Signature* Ledger::announced_by(const Entry& e, int rank) const {
  if (!e.marks.has(rank)) return nullptr;
  const Signature* own = e.said_by(rank);
  return own != nullptr || e.named != nullptr ? own : remembered_[e.cache_id].signature.get();
}

const Signature& Ledger::reference(const Entry& e) const { return *announced_by(e, e.marks.first()); }

bool Ledger::uses_cached_agreement(const Entry& e) const {
  return e.unnamed && !e.detailed && !e.early && e.announced == static_cast<uint32_t>(size_);
}

const Agreement& Ledger::agreement(const Entry& e) const {
  return uses_cached_agreement(e) ? remembered_[e.cache_id].agreement : e.agreement;
}

void Ledger::settle(Entry* e, const WorldRanks& world_rank) {
  bool everybody = e->announced == static_cast<uint32_t>(size_);
  bool of_cache_id = uses_cached_agreement(*e);
  if (of_cache_id ? remembered_[e->cache_id].agreed : everybody && !e->dirty) return;
  for (int r = 0; r < size_; r++) scratch_[static_cast<size_t>(r)] = announced_by(*e, r);
  Agreement found = agree(subject(*e), scratch_, world_rank);
  if (of_cache_id && found.error == Code::kOk) {
    remembered_[e->cache_id].agreement = std::move(found);
    remembered_[e->cache_id].agreed = true;
    return;
  }
  if (of_cache_id) e->detailed = true;  // an error names the operation: it is not the cache id's
  e->agreement = std::move(found);
  e->dirty = e->unnamed || !everybody || e->agreement.error != Code::kOk;
}

bool Ledger::uniform(const Entry& e) const {
  if (e.by_rank.empty()) return true;
  const Signature& s = reference(e);
  for (int r = 0; r < size_; r++)
    if (const Signature* other = announced_by(e, r); other != nullptr && other != &s && !(*other == s)) return false;
  return true;
}

bool Ledger::deserves_cache_id(const Entry& e) {
  if (remembered_.size() >= capacity_) return false;
  if (e.unnamed && unnamed_cache_ids_ >= unnamed_capacity_) return false;
  uint64_t hash = e.unnamed ? hash_of(reference(e)) : hash_of_text(e.named->first);
  mix(&hash, static_cast<uint64_t>(e.op));
  return came_.again(hash);
}

void Ledger::choose_cache_id(uint32_t index) {
  Entry& e = entries_[index];
  e.plan_cache_id = kNoCacheId;
  e.assigned = false;
  if (e.cache_id != kNoCacheId && !(e.unnamed && e.detailed)) {
    e.plan_cache_id = e.cache_id;
    e.assigned = e.teach;
    e.teach = e.teach && e.with_joined;  // a rank that has joined need not learn it
    return;
  }
  if (e.unnamed) {
    // Signatures that differ between ranks (rows, arena) share no cache id.
    if (e.cache_id != kNoCacheId || !uniform(e)) return;
    // Its content may have been given a cache id after the first rank announced this one.
    e.plan_cache_id = by_content_.find(reference(e));
  }
  if (e.plan_cache_id != kNoCacheId || !deserves_cache_id(e)) return;
  e.plan_cache_id = static_cast<uint32_t>(remembered_.size());
  e.assigned = true;
  Remembered& made = remembered_.emplace_back();
  if (e.unnamed) {
    unnamed_cache_ids_++;
    made.signature = std::make_shared<const Signature>(reference(e));
    by_content_.add(*made.signature, e.plan_cache_id);
  } else {
    made.entry = index;
    e.cache_id = e.plan_cache_id;
  }
}

void Ledger::close(uint32_t index) {
  Entry& e = entries_[index];
  e.marks.clear();
  e.announced = 0;
  e.state = Entry::State::kIdle;
  e.early = e.with_joined = false;
  if (!e.unnamed && e.cache_id != kNoCacheId) return;
  if (e.unnamed) {
    windows_[static_cast<size_t>(e.op)].remove(e.sequence);
  } else {
    e.named->second.entry[static_cast<size_t>(e.op)] = kNoEntry;
    if (--e.named->second.count == 0) names_.erase(names_.find(e.named->first));
  }
  std::fill(e.by_rank.begin(), e.by_rank.end(), nullptr);
  e.recent = nullptr;
  e.named = nullptr;
  e.cache_id = kNoCacheId;
  e.unnamed = e.detailed = e.teach = false;
  e.dirty = true;
  free_.push_back(index);
}

std::vector<uint32_t> Ledger::waiting() const {
  std::vector<uint32_t> list;
  for (uint32_t i = 0; i < entries_.size(); i++)
    if (entries_[i].state == Entry::State::kWaiting) list.push_back(i);
  std::sort(list.begin(), list.end(), [this](uint32_t a, uint32_t b) { return entries_[a].order < entries_[b].order; });
  return list;
}

std::vector<uint32_t> Ledger::waiting_between(const std::vector<int>& ranks, const RankSet& joined) const {
  std::vector<uint32_t> list = waiting();
  std::erase_if(list, [&](uint32_t index) {
    const RankSet& marks = entries_[index].marks;
    const auto is_ready = [&](int rank) { return marks.has(rank) || joined.has(rank); };
    return std::none_of(ranks.begin(), ranks.end(), [&](int rank) { return marks.has(rank); }) ||
           std::all_of(ranks.begin(), ranks.end(), is_ready);
  });
  return list;
}

}  // namespace hc
