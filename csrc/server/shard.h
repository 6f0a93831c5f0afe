// The state of one partition: tables, which worker's changes are in them, and where the workers' clocks stand. A state
// machine: two copies that are given the same frames in the same order are equal, which is what a backup is. Pure: no
// lock, clock or I/O.
//
// Thread: whoever holds the partition's lock. Owner: the partition.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "server/frames.h"
#include "server/table.h"

namespace hc {

class Shard {
 public:
  explicit Shard(MemoryBudget* budget) : budget_(budget) {}

  // Does what the frame says. A change that is in already (its sequence was seen) is done without effect. After an
  // error nothing has changed. *answer: what the reply carries.
  Status apply(const FrameHeader& header, std::span<const uint8_t> payload, FrameHeader* answer);

  // Whether a pull by this worker at this clock may be answered; else *missing says who holds it up.
  bool may_pull(const FrameHeader& header, std::string* missing) const;
  // dim floats for each id; the ids are the payload's.
  Status pull(const FrameHeader& header, std::span<const uint8_t> payload, Buffer* rows) const;

  // What a new copy needs before rows: apply() takes it as kMetadata.
  std::vector<uint8_t> metadata() const;
  std::vector<uint64_t> tables() const;  // hashes of their names
  // Up to `limit_bytes` of rows of a table as a kRows frame, from row *from on; false when there are none left.
  bool rows(uint64_t name_hash, size_t* from, size_t limit_bytes, FrameHeader* header, Buffer* payload) const;
  const Table* table(uint64_t name_hash) const;

  // Workers that have registered and not left.
  std::vector<uint64_t> workers() const;
  std::string describe() const;  // JSON

 private:
  struct Pushed {
    std::vector<int64_t> ids;
    std::vector<float> values;
    std::vector<uint32_t> slots;
  };
  struct Rank {
    uint64_t worker = 0;
    int64_t clock = 0;
    bool here = true;  // has not left
  };
  struct Entry {
    Entry(TableSpec spec, MemoryBudget* budget) : rows(std::move(spec), budget) {}
    Table rows;
    std::map<int32_t, Rank> ranks;
    std::map<int64_t, std::map<int32_t, Pushed>> rounds;  // staleness 0: what waits for the others
    int64_t finished = 0;                                 // rounds
  };

  Entry* find(uint64_t table) const;
  Status make_table(std::span<const uint8_t> payload);
  Status enter(const FrameHeader& header, std::span<const uint8_t> payload, FrameHeader* answer);
  Status push(const FrameHeader& header, std::span<const uint8_t> payload);
  Status set(const FrameHeader& header, std::span<const uint8_t> payload);
  void leave(uint64_t worker);
  Status take_metadata(std::span<const uint8_t> payload);
  Status take_one_table(Reader* from);
  void finish_rounds(Entry& entry);
  static int64_t slowest_here(const Entry& entry);
  static std::string missing_in(const Entry& entry, int64_t needed);

  MemoryBudget* const budget_;
  std::map<uint64_t, std::unique_ptr<Entry>> tables_;  // by the hash of the name
  std::map<uint64_t, uint64_t> sequences_;             // by worker: the last of its changes
};

uint64_t table_hash(std::string_view name);

}  // namespace hc
