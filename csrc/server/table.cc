#include "server/table.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace hc {
namespace {

constexpr size_t kChunkBytes = 1u << 20;
constexpr size_t kMinIndex = 64;
constexpr size_t kMaxRows = UINT32_MAX - 1;
constexpr size_t kRowOverheadBytes = 20;  // id, index at its fullest, place of a sum

// The finalizer of splitmix64: every bit of the id reaches every bit of the hash.
uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// In (0, 1).
double unit(uint64_t random) { return (static_cast<double>(random >> 11) + 0.5) * 0x1.0p-53; }

}  // namespace

uint32_t partition_of(int64_t id, uint32_t partitions) {
  const uint64_t shard = mixed(static_cast<uint64_t>(id)) >> 48;
  return static_cast<uint32_t>(shard * partitions >> 16);
}

void TableSpec::write(Writer* to) const {
  to->put_text(name);
  to->put(dim);
  to->put(optimizer.rule);
  to->put(static_cast<uint8_t>(optimizer.dense));
  for (float value : {optimizer.learning_rate, optimizer.epsilon, optimizer.beta1, optimizer.beta2, optimizer.initial})
    to->put(value);
  to->put(initial);
  to->put(spread);
  to->put(seed);
  to->put(workers);
  to->put(staleness);
  to->put(static_cast<uint8_t>(average));
}

Result<TableSpec> TableSpec::read(Reader* from) {
  TableSpec s;
  s.name = from->get_text(kMaxTableName);
  s.dim = from->get<uint32_t>();
  s.optimizer.rule = from->get<Rule>();
  s.optimizer.dense = from->get<uint8_t>() != 0;
  for (float* value :
       {&s.optimizer.learning_rate, &s.optimizer.epsilon, &s.optimizer.beta1, &s.optimizer.beta2, &s.optimizer.initial})
    *value = from->get<float>();
  s.initial = from->get<Initial>();
  s.spread = from->get<float>();
  s.seed = from->get<uint64_t>();
  s.workers = from->get<int32_t>();
  s.staleness = from->get<int32_t>();
  s.average = from->get<uint8_t>() != 0;
  if (!from->ok()) return error(Code::kInvalidArgument, "a damaged description of a table");
  HC_TRY(s.check());
  return s;
}

Status TableSpec::check() const {
  const auto wrong = [this](const auto&... what) {
    return error(Code::kInvalidArgument, "table '", name, "': ", what...);
  };
  if (name.empty() || name.size() > kMaxTableName) return wrong("a name has 1 to ", kMaxTableName, " bytes");
  if (dim < 1 || dim > kMaxDim) return wrong("rows of ", dim, " elements; 1 to ", kMaxDim, " are possible");
  const auto rule = static_cast<int32_t>(optimizer.rule), start = static_cast<int32_t>(initial);
  if (rule < 0 || rule >= kRuleCount) return wrong("unknown optimizer ", rule);
  if (start < 0 || start >= kInitialCount) return wrong("unknown initial values ", start);
  for (float value :
       {optimizer.learning_rate, optimizer.epsilon, optimizer.beta1, optimizer.beta2, optimizer.initial, spread}) {
    if (!std::isfinite(value) || value < 0) return wrong("a number of the optimizer is ", value);
  }
  if (optimizer.beta1 >= 1 || optimizer.beta2 >= 1) return wrong("betas and momentum must be below 1");
  if (workers < 1) return wrong(workers, " workers");
  if (staleness < -1) return wrong("staleness ", staleness, "; None, 0 or more is possible");
  return Status::ok();
}

std::string TableSpec::difference(const TableSpec& o) const {
  const auto differs = [](const char* what, const auto& here, const auto& there) {
    return text_of(what, " ", here, ", not ", there);
  };
  if (dim != o.dim) return differs("dim", dim, o.dim);
  if (!(optimizer == o.optimizer)) return "another optimizer, or other numbers for it";
  if (initial != o.initial || spread != o.spread || seed != o.seed) return "other initial values";
  if (workers != o.workers) return differs("workers", workers, o.workers);
  if (staleness != o.staleness) return differs("staleness", staleness, o.staleness);
  if (average != o.average) return differs("average", average, o.average);
  return "";
}

bool MemoryBudget::take(size_t bytes) {
  const auto wanted = static_cast<int64_t>(bytes);
  if (left_.fetch_sub(wanted) >= wanted) return true;
  left_.fetch_add(wanted);
  return false;
}

Table::Table(TableSpec spec, MemoryBudget* budget)
    : spec_(std::move(spec)), stride_(spec_.row_floats()), budget_(budget), index_(kMinIndex, kNone) {
  while (chunk_bits_ < 12 && (stride_ * sizeof(float) << (chunk_bits_ + 1)) <= kChunkBytes) ++chunk_bits_;
}

Table::~Table() { budget_->give_back(taken_); }

float* Table::row(uint32_t slot) const {
  return chunks_[slot >> chunk_bits_].get() + (slot & ((1u << chunk_bits_) - 1)) * stride_;
}

uint32_t Table::find(int64_t id) const {
  const size_t mask = index_.size() - 1;
  for (size_t at = mixed(static_cast<uint64_t>(id)) & mask;; at = (at + 1) & mask) {
    const uint32_t slot = index_[at];
    if (slot == kNone || ids_[slot] == id) return slot;
  }
}

void Table::put_in_index(int64_t id, uint32_t slot) {
  const size_t mask = index_.size() - 1;
  size_t at = mixed(static_cast<uint64_t>(id)) & mask;
  while (index_[at] != kNone) at = (at + 1) & mask;
  index_[at] = slot;
}

// For so many rows more: memory of every kind, so that making them cannot fail half way.
Status Table::make_room(size_t more) {
  const size_t wanted = ids_.size() + more, chunk_rows = size_t{1} << chunk_bits_;
  if (wanted > kMaxRows) return error(Code::kInternal, "table '", spec_.name, "' is full: ", ids_.size(), " rows");
  const size_t chunk_bytes = chunk_rows * (stride_ * sizeof(float) + kRowOverheadBytes);
  try {
    if (ids_.capacity() < wanted) {
      const size_t room = std::max(wanted, 2 * ids_.size());
      ids_.reserve(room);
      sum_of_.reserve(room);
    }
    while (chunks_.size() << chunk_bits_ < wanted) {
      if (!budget_->take(chunk_bytes)) {
        return error(Code::kInternal, "table '", spec_.name, "' needs room for ", more, " rows more and the server's ",
                     budget_->limit() >> 20, " MiB for rows are used up (", ids_.size(),
                     " rows of this table are here). Start more servers, or give them more with --memory");
      }
      taken_ += chunk_bytes;
      chunks_.push_back(std::make_unique<float[]>(chunk_rows * stride_));
    }
    if (wanted * 10 > index_.size() * 7) {
      size_t size = index_.size();
      while (wanted * 10 > size * 7) size *= 2;
      std::vector<uint32_t> larger(size, kNone);
      index_.swap(larger);
      for (uint32_t slot = 0; slot < ids_.size(); ++slot) put_in_index(ids_[slot], slot);
    }
  } catch (const std::bad_alloc&) {
    return error(Code::kInternal, "the server has no memory left for ", more, " rows more of table '", spec_.name,
                 "' (", ids_.size(), " are here). Start more servers, or bound their rows with --memory");
  }
  return Status::ok();
}

Status Table::find_or_make(std::span<const int64_t> ids, std::vector<uint32_t>* slots) {
  slots->resize(ids.size());
  size_t unknown = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    (*slots)[i] = find(ids[i]);
    if ((*slots)[i] == kNone) ++unknown;
  }
  if (unknown == 0) return Status::ok();
  HC_TRY(make_room(unknown));
  for (size_t i = 0; i < ids.size(); ++i) {
    uint32_t& slot = (*slots)[i];
    if (slot != kNone || (slot = find(ids[i])) != kNone) continue;  // the same id twice among the new ones
    slot = static_cast<uint32_t>(ids_.size());
    ids_.push_back(ids[i]);
    sum_of_.push_back(kNone);
    put_in_index(ids[i], slot);
    initial_weights(ids[i], row(slot));
    initial_state(spec_.optimizer, spec_.dim, row(slot) + spec_.dim);
  }
  return Status::ok();
}

void Table::initial_weights(int64_t id, float* out) const {
  const uint64_t start = mixed(spec_.seed ^ mixed(static_cast<uint64_t>(id)));
  const double spread = static_cast<double>(spec_.spread);
  switch (spec_.initial) {
    case Initial::kZeros:
      std::fill_n(out, spec_.dim, 0.0f);
      return;
    case Initial::kUniform:
      for (uint32_t i = 0; i < spec_.dim; ++i) out[i] = static_cast<float>(spread * (2 * unit(mixed(start + i)) - 1));
      return;
    case Initial::kNormal:  // Box and Muller
      for (uint32_t i = 0; i < spec_.dim; ++i) {
        const double radius = std::sqrt(-2 * std::log(unit(mixed(start + 2 * uint64_t{i}))));
        out[i] = static_cast<float>(spread * radius * std::cos(2 * M_PI * unit(mixed(start + 2 * uint64_t{i} + 1))));
      }
      return;
  }
}

void Table::read(std::span<const int64_t> ids, float* out) const {
  for (int64_t id : ids) {
    const uint32_t slot = find(id);
    if (slot == kNone) {
      initial_weights(id, out);
    } else {
      std::memcpy(out, row(slot), spec_.dim * sizeof(float));
    }
    out += spec_.dim;
  }
}

void Table::add_up(std::span<const Gradients> parts) {
  const size_t dim = spec_.dim;
  touched_.clear();
  sums_.clear();
  for (const Gradients& part : parts) {
    for (size_t i = 0; i < part.slots.size(); ++i) {
      const float* value = part.values + i * dim;
      uint32_t& place = sum_of_[part.slots[i]];
      if (place == kNone) {
        place = static_cast<uint32_t>(touched_.size());
        touched_.push_back(part.slots[i]);
        sums_.insert(sums_.end(), value, value + dim);
      } else {
        add_row(dim, value, sums_.data() + place * dim);
      }
    }
  }
  for (uint32_t slot : touched_) sum_of_[slot] = kNone;
}

void Table::reserve_step(size_t gradients) {
  touched_.reserve(gradients);
  sums_.reserve(gradients * spec_.dim);
}

void Table::update(std::span<const Gradients> parts, float scale) {
  const RowStep step = step_of(spec_.optimizer, ++steps_, scale);
  const auto apply = [&](std::span<const uint32_t> slots, const float* values) {
    for (size_t i = 0; i < slots.size(); ++i) update_row(step, spec_.dim, values + i * spec_.dim, row(slots[i]));
  };
  bool repeated = parts.size() > 1;
  if (!repeated && !parts.empty()) {  // mark what is seen, and take the marks away again
    size_t seen = 0;
    for (; seen < parts[0].slots.size() && !repeated; ++seen) {
      uint32_t& mark = sum_of_[parts[0].slots[seen]];
      repeated = mark != kNone;
      mark = 0;
    }
    for (size_t i = 0; i < seen; ++i) sum_of_[parts[0].slots[i]] = kNone;
  }
  if (repeated) {
    add_up(parts);
    apply(touched_, sums_.data());
  } else if (!parts.empty()) {
    apply(parts[0].slots, parts[0].values);
  }
}

Status Table::set_rows(std::span<const int64_t> ids, const float* rows, bool with_state, bool only_new) {
  const size_t floats = with_state ? stride_ : spec_.dim, known = ids_.size();
  std::vector<uint32_t> slots;
  HC_TRY(find_or_make(ids, &slots));
  for (size_t i = 0; i < ids.size(); ++i) {
    if (only_new && slots[i] < known) continue;
    std::memcpy(row(slots[i]), rows + i * floats, floats * sizeof(float));
  }
  return Status::ok();
}

size_t Table::copy_rows(size_t from, size_t limit, int64_t* ids, float* rows) const {
  const size_t count = from >= ids_.size() ? 0 : std::min(limit, ids_.size() - from);
  for (size_t i = 0; i < count; ++i) {
    ids[i] = ids_[from + i];
    std::memcpy(rows + i * stride_, row(static_cast<uint32_t>(from + i)), stride_ * sizeof(float));
  }
  return count;
}

}  // namespace hc
