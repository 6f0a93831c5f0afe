// A table of float32 rows by 64-bit id, of which nobody needs to know how many there will be: an id that was never
// pushed has initial values that follow from the table's seed and the id alone, and takes no memory. Memory comes from
// a budget that all tables of a server share.
//
// Thread: whoever holds the partition's lock. Owner: the shard.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "arithmetic/row_optimizers.h"
#include "base/status.h"
#include "base/wire.h"

namespace hc {

inline constexpr uint32_t kMaxDim = 1u << 20;
inline constexpr size_t kMaxTableName = 200;

enum class Initial : int32_t { kZeros, kUniform, kNormal };
inline constexpr int32_t kInitialCount = 3;

struct TableSpec {
  std::string name;
  uint32_t dim = 0;
  RowOptimizer optimizer;
  Initial initial = Initial::kZeros;
  float spread = 0;  // uniform: +- spread; normal: standard deviation
  uint64_t seed = 0;
  int32_t workers = 1;     // ranks that will push
  int32_t staleness = -1;  // -1 asynchronous, 0 in rounds of all workers, s: at most s steps ahead of the slowest
  bool average = true;     // rounds: the mean of the workers' gradients, else the sum

  void write(Writer* to) const;
  static Result<TableSpec> read(Reader* from);
  Status check() const;
  // Empty, or the first thing that differs: "dim 64, not 32".
  std::string difference(const TableSpec& other) const;
  size_t row_floats() const { return dim + state_floats(optimizer, dim); }
};

// Bytes that rows may still take. Thread: any.
class MemoryBudget {
 public:
  explicit MemoryBudget(size_t bytes) : limit_(bytes), left_(static_cast<int64_t>(bytes)) {}
  bool take(size_t bytes);
  void give_back(size_t bytes) { left_.fetch_add(static_cast<int64_t>(bytes)); }
  size_t limit() const { return limit_; }
  size_t used() const { return limit_ - static_cast<size_t>(left_.load()); }

 private:
  const size_t limit_;
  std::atomic<int64_t> left_;
};

class Table {
 public:
  Table(TableSpec spec, MemoryBudget* budget);  // the budget outlives the table
  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  const TableSpec& spec() const { return spec_; }
  size_t rows() const { return ids_.size(); }
  // Steps of the optimizer so far; Adam needs the number.
  uint64_t steps() const { return steps_; }
  void set_steps(uint64_t steps) { steps_ = steps; }

  // Slots of the rows of these ids; makes those that do not exist. After an error no row was made.
  Status find_or_make(std::span<const int64_t> ids, std::vector<uint32_t>* slots);
  // `out`: dim floats for each id.
  void read(std::span<const int64_t> ids, float* out) const;

  struct Gradients {
    std::span<const uint32_t> slots;
    const float* values;  // dim floats for each slot
  };
  // Memory for a step with so many gradients, repeated ones counted: the step itself then cannot fail. May throw
  // bad_alloc.
  void reserve_step(size_t gradients);
  // One step of the optimizer. Gradients of one row are added up first, whichever part they are in.
  void update(std::span<const Gradients> parts, float scale);
  // Sets rows: the weights alone, or with the state. only_new: leaves alone what exists.
  Status set_rows(std::span<const int64_t> ids, const float* rows, bool with_state, bool only_new);
  // Up to `limit` rows in the order in which they were made, with their state.
  size_t copy_rows(size_t from, size_t limit, int64_t* ids, float* rows) const;

 private:
  float* row(uint32_t slot) const;
  uint32_t find(int64_t id) const;  // kNone where there is none
  void put_in_index(int64_t id, uint32_t slot);
  Status make_room(size_t rows);
  void initial_weights(int64_t id, float* out) const;
  void add_up(std::span<const Gradients> parts);

  static constexpr uint32_t kNone = UINT32_MAX;
  const TableSpec spec_;
  const size_t stride_;
  MemoryBudget* const budget_;
  size_t taken_ = 0;
  unsigned chunk_bits_ = 0;  // a chunk has 2^chunk_bits_ rows
  uint64_t steps_ = 0;
  std::vector<std::unique_ptr<float[]>> chunks_;
  std::vector<int64_t> ids_;       // by slot
  std::vector<uint32_t> index_;    // open addressing, a power of two; kNone: empty
  std::vector<uint32_t> sum_of_;   // by slot: place in sums_ of this step, or kNone
  std::vector<uint32_t> touched_;  // slots of this step
  std::vector<float> sums_;
};

// Which of `partitions` an id belongs to: 2^16 virtual shards by a hash of the id, in equal ranges.
uint32_t partition_of(int64_t id, uint32_t partitions);

}  // namespace hc
