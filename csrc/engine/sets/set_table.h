// The process sets of one rank, by id; 0 is the world. The thread that makes progress, or one that holds the progress
// lock, reads and changes the map.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "engine/sets/process_set.h"

namespace hc {

class SetTable {
 public:
  explicit SetTable(const SetParts& parts) : parts_(parts) {}

  // Makes a set, with its part of the shared memory ready. Nobody may use it before every rank has made it.
  Status add(uint16_t id, std::vector<int> ranks);
  // Takes it out; the caller ends it.
  std::unique_ptr<ProcessSet> remove(int id);
  // Null: there is no such set.
  ProcessSet* find(int id) const {
    const auto at = sets_.find(id);
    return at == sets_.end() ? nullptr : at->second.get();
  }
  ProcessSet& world() const { return *sets_.at(0); }
  const std::map<int, std::unique_ptr<ProcessSet>>& all() const { return sets_; }
  // Those that this rank is a member of.
  const std::vector<ProcessSet*>& mine() const { return mine_; }
  size_t pending() const { return pending_; }  // operations of all sets

 private:
  const SetParts parts_;
  size_t pending_ = 0;
  std::map<int, std::unique_ptr<ProcessSet>> sets_;
  std::vector<ProcessSet*> mine_;
};

}  // namespace hc
