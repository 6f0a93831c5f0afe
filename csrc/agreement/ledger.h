// The coordinator's memory: who has announced what. It has one entry per operation in flight or remembered, the cache
// ids, and each rank's last signature. It knows nothing of readiness, joining or batches. PURE. Owner: one Coordinator.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "agreement/mismatch.h"
#include "agreement/negotiation.h"
#include "agreement/rank_set.h"
#include "agreement/signature_table.h"
#include "base/clock.h"
#include "base/recent_hashes.h"

namespace hc {

inline constexpr uint32_t kNoEntry = 0xffffffffu;

// Entries in flight of one kind of unnamed operation, by sequence number: a ring, because the numbers are dense.
class SequenceWindow {
 public:
  uint32_t find(uint64_t sequence) const;
  bool add(uint64_t sequence, uint32_t entry);  // false: too far from the others (kMaxSpread)
  void remove(uint64_t sequence);

 private:
  static constexpr uint64_t kMaxSpread = 1u << 20;
  uint32_t& cell(uint64_t sequence) { return ring_[sequence & (ring_.size() - 1)]; }
  std::vector<uint32_t> ring_;   // power of two; kNoEntry where there is none
  uint64_t low_ = 0, high_ = 0;  // all entries are in [low_, high_)
  size_t count_ = 0;
};

// The operations that share one name: at most one per kind.
struct Namesakes {
  std::array<uint32_t, kOpCount> entry;
  int count = 0;
};

struct Entry {
  enum class State : uint8_t { kIdle, kWaiting, kReady };
  State state = State::kIdle;
  Op op = Op::kAllreduce;
  bool unnamed = false;
  bool detailed = false;                // unnamed: some rank's signature is in by_rank (else all share the cache id's)
  bool dirty = true;                    // a signature changed since `agreement` was made
  bool teach = false;                   // a rank announced it whole that may not know the cache id
  bool early = false;                   // fails before everybody announced it
  bool with_joined = false;             // became ready while a rank was joined
  uint32_t cache_id = kNoCacheId;       // named: its own. unnamed: the first announcer's
  uint32_t plan_cache_id = kNoCacheId;  // the cache id that goes into the plan, and
  bool assigned = false;                // whether the ranks have to learn it
  uint32_t announced = 0;               // ranks in `marks`
  RankSet marks;                        // who announced it, this time
  uint64_t sequence = 0;
  uint64_t order = 0;  // counts first announcements
  TimePoint since{};   // of the first announcement; the coordinator's
  std::pair<const std::string, Namesakes>* named = nullptr;
  // What each rank announced last; null: nothing yet. Empty: every rank announced `recent` (null: no rank announced
  // anything).
  std::vector<std::shared_ptr<const Signature>> by_rank;
  std::shared_ptr<const Signature> recent;  // the last one stored, shared by ranks that announce the same
  const Signature* said_by(int rank) const {
    return by_rank.empty() ? recent.get() : by_rank[static_cast<size_t>(rank)].get();
  }
  Agreement agreement;
};

class Ledger {
 public:
  Ledger(int size, size_t capacity);

  // One rank's announcement; *entry is what it belongs to. An error: unknown cache id, announced twice, ...
  Status announce(int rank, const CachedRequest& request, uint32_t* entry);
  Status announce(int rank, const Request& request, uint32_t* entry);
  // All ranks at once, which announced the same.
  Status announce_for_all(const CachedRequest& request, uint32_t* entry);
  Status announce_for_all(const Request& request, uint32_t* entry);

  Entry& at(uint32_t entry) { return entries_[entry]; }
  const Entry& at(uint32_t entry) const { return entries_[entry]; }
  Subject subject(const Entry& entry) const;
  // Compares what the ranks announced, if anything has changed. Ranks without a mark count as joined.
  void settle(Entry* entry, const WorldRanks& world_rank);
  const Agreement& agreement(const Entry& entry) const;
  // What this rank announced; null when it has not.
  const Signature* announced_by(const Entry& entry, int rank) const;
  // The signature that the lowest announcing rank gave.
  const Signature& reference(const Entry& entry) const;
  // Finds the cache id that goes into the plan (Entry::plan_cache_id); gives one to an entry that has none, if the
  // capacity allows.
  void choose_cache_id(uint32_t entry);
  // The operation is over: forgets the announcements, and the entry as well if it has no cache id.
  void close(uint32_t entry);

  std::vector<uint32_t> waiting() const;  // entries in state kWaiting, in the order of their first announcement
  // Those of them that some of `ranks` have announced and others of `ranks`, which have not joined, have not.
  std::vector<uint32_t> waiting_between(const std::vector<int>& ranks, const RankSet& joined) const;
  size_t cache_ids() const { return remembered_.size(); }
  size_t entries() const { return entries_.size() - free_.size(); }

 private:
  // Named: `entry`. Unnamed: the signature it stands for, and what agreeing on it came to.
  struct Remembered {
    uint32_t entry = kNoEntry;
    std::shared_ptr<const Signature> signature;
    bool agreed = false;
    Agreement agreement;
  };

  uint32_t new_entry(Op op);
  uint32_t named_entry(const Request& request);
  Status unnamed_entry(Op op, uint64_t sequence, uint32_t* entry);
  Status mark(int rank, uint32_t entry);
  Status mark_all(uint32_t entry);
  Status use_cache_id(int rank, uint32_t cache_id, uint64_t sequence, uint32_t* entry);
  Status use_cache_id_for_all(uint32_t cache_id, uint64_t sequence, uint32_t* entry);
  void spread(Entry* entry);
  bool merge(Entry* entry);
  bool uses_cached_agreement(const Entry& entry) const;
  void store(Entry* entry, int rank, const Signature& signature);
  bool uniform(const Entry& entry) const;
  bool deserves_cache_id(const Entry& entry);

  const int size_;
  const size_t capacity_;
  const size_t unnamed_capacity_;
  size_t unnamed_cache_ids_ = 0;
  uint64_t order_ = 0;
  std::vector<Remembered> remembered_;
  std::vector<Entry> entries_;
  std::vector<uint32_t> free_;
  std::unordered_map<std::string, Namesakes> names_;
  std::array<SequenceWindow, kOpCount> windows_;
  SignatureTable by_content_;  // unnamed cache ids
  RecentHashes came_;          // of names and unnamed signatures without a cache id
  std::vector<const Signature*> scratch_;
};

}  // namespace hc
