#include "engine/watch/process_worlds.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/hash.h"
#include "base/mutex.h"

namespace hc {

namespace {
constexpr double kShownS = 1.2;  // a world that waits shows so twice a second
}

struct ProcessWorlds {
  const pid_t process = ::getpid();
  Mutex mu;
  std::vector<WorldSeat*> seats HC_GUARDED_BY(mu);

  // A forked child has others: the lock may have been held by a thread that it does not have.
  static ProcessWorlds& here() {
    static std::atomic<ProcessWorlds*> known{nullptr};
    ProcessWorlds* at = known.load();
    if (at && at->process == ::getpid()) return *at;
    auto* made = new ProcessWorlds;  // never freed: engines may end after statics
    if (known.compare_exchange_strong(at, made)) return *made;
    delete made;
    return *at;
  }

  void choose_who_looks() HC_REQUIRES(mu);
  static bool is_larger(const WorldSeat& a, const WorldSeat& b) {
    const size_t n = a.world_.processes.size(), m = b.world_.processes.size();
    return n != m ? n > m : a.world_.key > b.world_.key;
  }
  // By rank of `small`; empty: not all of its processes are in `large`, or this one is not the same.
  static std::vector<int> ranks_in(const WorldSeat& large, const WorldSeat& small) {
    std::vector<int> ranks;
    for (const std::string& process : small.world_.processes) {
      const auto at = large.rank_of_.find(process);
      if (at == large.rank_of_.end()) return {};
      ranks.push_back(at->second);
    }
    return ranks[static_cast<size_t>(small.world_.rank)] == large.world_.rank ? ranks : std::vector<int>{};
  }
};

void ProcessWorlds::choose_who_looks() {
  for (WorldSeat* seat : seats) {
    seat->looks_ = nullptr;
    for (WorldSeat* other : seats)
      if (std::vector<int> ranks = ranks_in(*other, *seat);
          !ranks.empty() && (!seat->looks_ || is_larger(*other, *seat->looks_))) {
        seat->looks_ = other;
        seat->rank_there_ = std::move(ranks);
      }
  }
  for (WorldSeat* seat : seats) {
    seat->has_company_.store(std::any_of(
        seats.begin(), seats.end(), [&](WorldSeat* other) { return other != seat && other->looks_ == seat->looks_; }));
    seat->has_news_.store(true);
    seat->world_.wake();
  }
}

void WorldSeat::take(World world) {
  for (size_t rank = 0; rank < world.processes.size(); ++rank) rank_of_[world.processes[rank]] = static_cast<int>(rank);
  if (world.processes.size() < 2 || rank_of_.size() != world.processes.size()) return;
  ProcessWorlds& worlds = ProcessWorlds::here();
  MutexLock lock(worlds.mu);
  world_ = std::move(world);
  is_taken_ = true;
  worlds.seats.push_back(this);
  worlds.choose_who_looks();
}

void WorldSeat::leave() {
  if (!std::exchange(is_taken_, false)) return;
  ProcessWorlds& worlds = ProcessWorlds::here();
  MutexLock lock(worlds.mu);
  std::erase(worlds.seats, this);
  has_company_.store(false);
  has_news_.store(false);
  notices_.clear();
  worlds.choose_who_looks();
}

void WorldSeat::show(WorldWaits waits) {
  ProcessWorlds& worlds = ProcessWorlds::here();
  MutexLock lock(worlds.mu);
  shows_something_ = waits.moves || !waits.rank.awaited.empty() || !waits.rank.submitted.empty();
  shown_ = std::move(waits);
  if (!is_taken_ || !looks_ || looks_ == this) return;
  looks_->has_news_.store(true);
  looks_->world_.wake();
}

std::vector<DeadlockNotice> WorldSeat::take_news() {
  ProcessWorlds& worlds = ProcessWorlds::here();
  MutexLock lock(worlds.mu);
  has_news_.store(false);
  return std::exchange(notices_, {});
}

WorldWaits WorldSeat::gather(TimePoint now) {
  ProcessWorlds& worlds = ProcessWorlds::here();
  MutexLock lock(worlds.mu);
  WorldWaits all;
  all.at = now;
  if (!is_taken_ || looks_ != this || !has_company()) return all;
  std::map<uint64_t, uint64_t> seen;
  TimePoint quiet_since = quiet_since_;
  for (const WorldSeat* seat : worlds.seats) {
    if (seat->looks_ != this) continue;
    const uint64_t key = seat->world_.key, submitted = seat->world_.submitted->load(std::memory_order_relaxed);
    const WorldWaits& shown = seat->shown_;
    seen[key] = submitted;
    all.at = std::min(all.at, shown.at);
    mix(&all.rank.version, key);
    mix(&all.rank.version, submitted);
    if (!seat->shows_something_) continue;
    all.moves = all.moves || shown.moves || shown.submitted != submitted || seconds_between(shown.at, now) > kShownS;
    quiet_since = std::max(quiet_since, shown.quiet_since);
    add_world(shown.rank, key, seat->rank_there_, &all.rank);
    all.threads.insert(all.threads.end(), shown.threads.begin(), shown.threads.end());
  }
  if (seen != seen_) {
    seen_ = std::move(seen);
    quiet_since_ = now;
  }
  all.quiet_since = std::max(quiet_since, quiet_since_);
  for (const AwaitedCall& call : all.rank.awaited) mix(&all.rank.version, call.key);
  return all;
}

void WorldSeat::pass_on(const DeadlockNotice& notice) {
  ProcessWorlds& worlds = ProcessWorlds::here();
  MutexLock lock(worlds.mu);
  for (WorldSeat* seat : worlds.seats) {
    if (seat == this || seat->looks_ != this) continue;
    DeadlockNotice there = notice;
    there.stuck.clear();
    for (size_t rank = 0; rank < seat->rank_there_.size(); ++rank)
      if (notice.stuck.contains(seat->rank_there_[rank])) there.stuck.insert(static_cast<int>(rank));
    if (there.stuck.empty()) continue;
    seat->notices_.push_back(std::move(there));
    seat->has_news_.store(true);
    seat->world_.wake();
  }
}

}  // namespace hc
