// The worlds of one process: hvd's, and one for each process group of torch.distributed. A circle may go through
// several of them: rank 0 stands in a call of one, rank 1 in a call of another. Each world shows here what its threads
// wait for; the largest one whose processes include all of another's, which is the same in each of them, has a
// DeadlockWatch for what it and these wait for together. What comes of it goes back to each world, which ends its own
// calls.
//
// Nothing is waited for here: a world looks at what another one showed last. It counts only while that one has not
// submitted anything since, and shows the same again every half second.
//
// Thread: any; take(), leave() and the rest of one seat by the thread that makes progress in its engine, or one that
// holds its progress lock. Owner of a seat: the engine.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "agreement/deadlock.h"
#include "base/clock.h"

namespace hc {

// What the one who looks for deadlocks tells all ranks.
struct DeadlockNotice {
  std::set<int> stuck;    // world ranks
  std::string text;       // not empty: end what they wait for with this error
  bool is_abort = false;  // their calls have not ended so: the world ends
};

// What one rank waits for in one world, or in several together.
struct WorldWaits {
  TimePoint at{}, quiet_since{};  // when this was seen; nothing has moved since
  uint64_t submitted = 0;         // so many operations, ever
  bool moves = false;             // the rank may go on, or it is not known
  WaitingRank rank;
  std::vector<int> threads;  // that stand in calls (StackSource::look)
};

class WorldSeat {
 public:
  struct World {
    uint64_t key = 0;                    // the same on all of its ranks, and no other world's
    int rank = 0;                        // this process's
    std::vector<std::string> processes;  // by rank, Mesh::process_of
    const std::atomic<uint64_t>* submitted = nullptr;
    std::function<void()> wake;  // has its engine look at has_news()
  };
  WorldSeat() = default;
  ~WorldSeat() { leave(); }
  WorldSeat(const WorldSeat&) = delete;
  WorldSeat& operator=(const WorldSeat&) = delete;

  // Does nothing where the processes cannot be told apart.
  void take(World world);
  void leave();
  // In a forked child, where nobody else uses the lock any more, or ever gives it back.
  void forget() { is_taken_ = false; }

  // Whether this process has another world that concerns this one.
  bool has_company() const { return has_company_.load(std::memory_order_relaxed); }
  void show(WorldWaits waits);
  // It last showed that it waits.
  bool shows_something() const { return shows_something_; }

  // Another world has shown something to this one, or has told it something.
  bool has_news() const { return has_news_.load(); }
  std::vector<DeadlockNotice> take_news();

  // Of the world that looks: what all wait for; of another one: nothing.
  WorldWaits gather(TimePoint now);
  // To the other worlds. They know it before anybody whom this one lets go can submit something there.
  void pass_on(const DeadlockNotice& notice);

 private:
  friend struct ProcessWorlds;
  World world_;
  std::unordered_map<std::string, int> rank_of_;  // by process
  bool is_taken_ = false, shows_something_ = false;
  std::atomic<bool> has_company_{false}, has_news_{false};
  // Under the lock of all worlds.
  WorldWaits shown_;
  std::vector<DeadlockNotice> notices_;
  WorldSeat* looks_ = nullptr;   // the one that looks for this one, which may be itself
  std::vector<int> rank_there_;  // by rank of this world
  // Of the one that looks.
  std::map<uint64_t, uint64_t> seen_;  // by key: what was submitted at its last look
  TimePoint quiet_since_{};
};

}  // namespace hc
