#include "server/shard.h"

#include <algorithm>
#include <limits>

#include "base/hash.h"

namespace hc {
namespace {

// ids and `floats` numbers for each, as they lie in a payload. The payload starts aligned (Buffer), ids come first.
struct Rows {
  std::span<const int64_t> ids;
  const float* values = nullptr;
};

Status read_rows(const FrameHeader& header, std::span<const uint8_t> payload, size_t floats, Rows* rows) {
  if (header.count > kMaxPayload || payload.size() != header.count * (sizeof(int64_t) + floats * sizeof(float)))
    return error(Code::kInvalidArgument, payload.size(), " bytes for ", header.count, " rows of ", floats, " numbers");
  rows->ids = {reinterpret_cast<const int64_t*>(payload.data()), static_cast<size_t>(header.count)};
  rows->values = reinterpret_cast<const float*>(payload.data() + header.count * sizeof(int64_t));
  return Status::ok();
}

template <class T>
void write_all(Writer* to, const std::vector<T>& values) {
  to->put(static_cast<uint64_t>(values.size()));
  to->put_raw(values.data(), values.size() * sizeof(T));
}

template <class T>
void read_all(Reader* from, std::vector<T>* values) {
  const auto count = from->get<uint64_t>();
  if (count > from->remaining() / sizeof(T)) return from->fail();
  values->resize(count);
  from->take(values->data(), count * sizeof(T));
}

}  // namespace

uint64_t table_hash(std::string_view name) { return hash_of_text(name); }

Shard::Entry* Shard::find(uint64_t table) const {
  auto at = tables_.find(table);
  return at == tables_.end() ? nullptr : at->second.get();
}

const Table* Shard::table(uint64_t name_hash) const {
  const Entry* entry = find(name_hash);
  return entry ? &entry->rows : nullptr;
}

Status Shard::apply(const FrameHeader& header, std::span<const uint8_t> payload, FrameHeader* answer) {
  const bool numbered = header.sequence != 0 && header.verb != Verb::kMetadata;
  if (numbered) {
    auto known = sequences_.find(header.worker);
    if (known == sequences_.end())
      return error(Code::kInvalidArgument, "this worker has not registered; open the table again");
    if (known->second >= header.sequence) return Status::ok();
  }
  Status done;
  switch (header.verb) {
    case Verb::kTable:
      return make_table(payload);
    case Verb::kRegister:
      return enter(header, payload, answer);
    case Verb::kPush:
      done = push(header, payload);
      break;
    case Verb::kAssign:
    case Verb::kRows:
      done = set(header, payload);
      break;
    case Verb::kLeave:
      leave(header.worker);
      return Status::ok();
    case Verb::kMetadata:
      return take_metadata(payload);
    case Verb::kReply:
    case Verb::kWaiting:
    case Verb::kElsewhere:
    case Verb::kHello:
    case Verb::kGoodbye:
    case Verb::kAsk:
    case Verb::kPull:
    case Verb::kReplica:
    case Verb::kPing:
    case Verb::kVerbs:
      return error(Code::kInternal, "frame ", static_cast<int>(header.verb), " changes nothing");
  }
  if (done.is_ok() && numbered) sequences_[header.worker] = header.sequence;
  return done;
}

Status Shard::make_table(std::span<const uint8_t> payload) {
  Reader in(payload);
  auto spec = TableSpec::read(&in);
  if (!spec.is_ok()) return spec.status();
  const uint64_t hash = table_hash(spec.value().name);
  if (const Entry* known = find(hash)) {
    const TableSpec& old = known->rows.spec();
    if (old.name != spec.value().name)
      return error(Code::kInvalidArgument, "tables '", old.name, "' and '", spec.value().name,
                   "' have the same hash; rename one");
    if (const std::string other = old.difference(spec.value()); !other.empty())
      return error(Code::kMismatch, "table '", old.name, "' exists with ", other, ". Describe it alike in all workers");
    return Status::ok();
  }
  tables_.emplace(hash, std::make_unique<Entry>(spec.take(), budget_));
  return Status::ok();
}

// The smallest clock of the ranks that are here, 0 without any.
int64_t Shard::slowest_here(const Entry& entry) {
  int64_t slowest = std::numeric_limits<int64_t>::max();
  for (const auto& [rank, state] : entry.ranks) {
    if (state.here) slowest = std::min(slowest, state.clock);
  }
  return slowest == std::numeric_limits<int64_t>::max() ? 0 : slowest;
}

// A rank that comes again, in another life, goes on where its old one ended: what that one pushed is in.
Status Shard::enter(const FrameHeader& header, std::span<const uint8_t> payload, FrameHeader* answer) {
  Entry* entry = find(header.table);
  if (!entry) return error(Code::kInvalidArgument, "there is no such table here");
  Reader in(payload);
  const auto rank = in.get<int32_t>();
  const TableSpec& spec = entry->rows.spec();
  if (!in.ok() || rank < 0 || rank >= spec.workers)
    return error(Code::kInvalidArgument, "table '", spec.name, "' has ", spec.workers, " workers; rank ", rank,
                 " is none of them");
  sequences_.emplace(header.worker, 0);
  const auto before = entry->ranks.find(rank);
  if (before == entry->ranks.end() || before->second.worker != header.worker || !before->second.here) {
    const bool again = before != entry->ranks.end() && entry->rows.spec().staleness > 0;
    const int64_t joins_at = again ? slowest_here(*entry) : 0;
    Rank& known = entry->ranks[rank];
    known.worker = header.worker;
    known.clock = std::max({known.clock, entry->finished, joins_at});
    known.here = true;
  }
  if (answer) answer->clock = entry->ranks[rank].clock;
  return Status::ok();
}

Status Shard::push(const FrameHeader& header, std::span<const uint8_t> payload) {
  Entry* entry = find(header.table);
  if (!entry) return error(Code::kInvalidArgument, "there is no such table here");
  Table& table = entry->rows;
  const TableSpec& spec = table.spec();
  Rows rows;
  HC_TRY(read_rows(header, payload, spec.dim, &rows), "push to table '", spec.name, "'");
  auto pusher = std::find_if(entry->ranks.begin(), entry->ranks.end(),
                             [&](const auto& one) { return one.second.worker == header.worker; });
  if (pusher == entry->ranks.end())
    return error(Code::kInvalidArgument, "push to table '", spec.name, "' by a worker that has not registered");
  const bool alone = (header.flags & kAlone) != 0;
  const bool in_round = spec.staleness == 0 && !alone;
  if (in_round && (header.clock != pusher->second.clock || header.clock < entry->finished)) {
    return error(Code::kAborted, "table '", spec.name, "': rank ", pusher->first, " pushes for round ", header.clock,
                 " and the next one is ", std::max(pusher->second.clock, entry->finished),
                 ": the others went on without it while it was away");
  }
  Pushed kept;
  HC_TRY(table.find_or_make(rows.ids, &kept.slots));
  // All memory first: what follows cannot fail.
  size_t in_step = rows.ids.size();
  if (in_round) {
    kept.ids.assign(rows.ids.begin(), rows.ids.end());
    kept.values.assign(rows.values, rows.values + rows.ids.size() * spec.dim);
    for (const auto& [rank, pushed] : entry->rounds[header.clock]) in_step += pushed.slots.size();
  }
  table.reserve_step(in_step);
  if (in_round) entry->rounds[header.clock].insert_or_assign(pusher->first, std::move(kept));
  if (!alone) {
    pusher->second.clock = std::max(pusher->second.clock, header.clock + 1);
    pusher->second.here = true;
  }
  if (in_round) {
    finish_rounds(*entry);
  } else {
    const Table::Gradients one{kept.slots, rows.values};
    table.update({&one, 1}, 1.0f);
  }
  return Status::ok();
}

// A round is finished when every rank has pushed for it or has left; at least one has pushed.
void Shard::finish_rounds(Entry& entry) {
  const TableSpec& spec = entry.rows.spec();
  while (spec.staleness == 0 && static_cast<int32_t>(entry.ranks.size()) == spec.workers) {
    auto round = entry.rounds.find(entry.finished);
    if (round == entry.rounds.end()) return;
    for (const auto& [rank, state] : entry.ranks) {
      if (state.here && state.clock <= entry.finished) return;
    }
    std::vector<Table::Gradients> parts;  // in the order of the ranks: the same sum on every copy
    for (const auto& [rank, pushed] : round->second) parts.push_back({pushed.slots, pushed.values.data()});
    entry.rows.update(parts, spec.average ? 1.0f / static_cast<float>(parts.size()) : 1.0f);
    entry.rounds.erase(round);
    ++entry.finished;
  }
}

Status Shard::set(const FrameHeader& header, std::span<const uint8_t> payload) {
  Entry* entry = find(header.table);
  if (!entry) return error(Code::kInvalidArgument, "there is no such table here");
  const bool with_state = header.verb == Verb::kRows;
  const TableSpec& spec = entry->rows.spec();
  Rows rows;
  HC_TRY(read_rows(header, payload, with_state ? spec.row_floats() : spec.dim, &rows), "rows of table '", spec.name,
         "'");
  HC_TRY(entry->rows.set_rows(rows.ids, rows.values, with_state, (header.flags & kOnlyNew) != 0));
  if (with_state && header.clock > 0) entry->rows.set_steps(static_cast<uint64_t>(header.clock));
  return Status::ok();
}

void Shard::leave(uint64_t worker) {
  for (auto& [hash, entry] : tables_) {
    for (auto& [rank, state] : entry->ranks) {
      if (state.worker == worker) state.here = false;
    }
    finish_rounds(*entry);
  }
}

std::string Shard::missing_in(const Entry& entry, int64_t needed) {
  const TableSpec& spec = entry.rows.spec();
  std::string text;
  for (int32_t rank = 0; rank < spec.workers; ++rank) {
    auto at = entry.ranks.find(rank);
    if (at != entry.ranks.end() && (!at->second.here || at->second.clock >= needed)) continue;
    text += text_of(text.empty() ? "" : ", ", "rank ", rank);
    text += at == entry.ranks.end() ? std::string(" never came") : text_of(" is at step ", at->second.clock);
  }
  return text;
}

bool Shard::may_pull(const FrameHeader& header, std::string* missing) const {
  const Entry* entry = find(header.table);
  if (!entry || entry->rows.spec().staleness < 0 || (header.flags & kAlone) != 0) return true;
  const int64_t needed = header.clock - entry->rows.spec().staleness;
  if (needed <= 0) return true;
  if (entry->rows.spec().staleness == 0) {
    if (entry->finished >= needed) return true;
    *missing = missing_in(*entry, needed);
    return false;
  }
  *missing = missing_in(*entry, needed);
  return missing->empty();
}

Status Shard::pull(const FrameHeader& header, std::span<const uint8_t> payload, Buffer* out) const {
  const Entry* entry = find(header.table);
  if (!entry) return error(Code::kInvalidArgument, "there is no such table here");
  const size_t dim = entry->rows.spec().dim;
  Rows rows;
  HC_TRY(read_rows(header, payload, 0, &rows), "pull from table '", entry->rows.spec().name, "'");
  const size_t bytes = rows.ids.size() * dim * sizeof(float);
  if (bytes > kMaxPayload) return error(Code::kInvalidArgument, rows.ids.size(), " rows in one pull: more than 1 GiB");
  entry->rows.read(rows.ids, reinterpret_cast<float*>(out->sized(bytes)));
  return Status::ok();
}

std::vector<uint8_t> Shard::metadata() const {
  Writer out;
  out.put(static_cast<uint64_t>(sequences_.size()));
  for (const auto& [worker, sequence] : sequences_) out.put(worker), out.put(sequence);
  out.put(static_cast<uint64_t>(tables_.size()));
  for (const auto& [hash, entry] : tables_) {
    entry->rows.spec().write(&out);
    out.put(entry->rows.steps());
    out.put(entry->finished);
    out.put(static_cast<uint64_t>(entry->ranks.size()));
    for (const auto& [rank, state] : entry->ranks)
      out.put(rank), out.put(state.worker), out.put(state.clock), out.put(static_cast<uint8_t>(state.here));
    uint64_t waiting = 0;
    for (const auto& [number, round] : entry->rounds) waiting += round.size();
    out.put(waiting);
    for (const auto& [number, round] : entry->rounds) {
      for (const auto& [rank, pushed] : round)
        out.put(number), out.put(rank), write_all(&out, pushed.ids), write_all(&out, pushed.values);
    }
  }
  return {out.bytes().begin(), out.bytes().end()};
}

Status Shard::take_one_table(Reader* in) {
  auto spec = TableSpec::read(in);
  if (!spec.is_ok()) return spec.status();
  const uint64_t hash = table_hash(spec.value().name);
  auto entry = std::make_unique<Entry>(spec.take(), budget_);
  entry->rows.set_steps(in->get<uint64_t>());
  entry->finished = in->get<int64_t>();
  for (auto count = in->get<uint64_t>(); count > 0 && in->ok(); --count) {
    Rank& rank = entry->ranks[in->get<int32_t>()];
    rank.worker = in->get<uint64_t>();
    rank.clock = in->get<int64_t>();
    rank.here = in->get<uint8_t>() != 0;
  }
  for (auto count = in->get<uint64_t>(); count > 0 && in->ok(); --count) {
    const auto number = in->get<int64_t>();
    Pushed& pushed = entry->rounds[number][in->get<int32_t>()];
    read_all(in, &pushed.ids);
    read_all(in, &pushed.values);
    HC_TRY(entry->rows.find_or_make(pushed.ids, &pushed.slots));
  }
  tables_[hash] = std::move(entry);
  return Status::ok();
}

Status Shard::take_metadata(std::span<const uint8_t> payload) {
  Reader in(payload);
  tables_.clear();
  sequences_.clear();
  for (auto count = in.get<uint64_t>(); count > 0 && in.ok(); --count) {
    const auto worker = in.get<uint64_t>();
    sequences_[worker] = in.get<uint64_t>();
  }
  for (auto count = in.get<uint64_t>(); count > 0 && in.ok(); --count) HC_TRY(take_one_table(&in));
  return in.ok() ? Status::ok() : error(Code::kInternal, "a damaged copy of a shard");
}

std::vector<uint64_t> Shard::tables() const {
  std::vector<uint64_t> found;
  for (const auto& [hash, entry] : tables_) found.push_back(hash);
  return found;
}

bool Shard::rows(uint64_t name_hash, size_t* from, size_t limit_bytes, FrameHeader* header, Buffer* payload) const {
  const Entry* entry = find(name_hash);
  if (!entry) return false;
  const Table& table = entry->rows;
  if (*from >= table.rows()) return false;
  const size_t row_bytes = sizeof(int64_t) + table.spec().row_floats() * sizeof(float);
  const size_t count = std::min(std::max<size_t>(1, limit_bytes / row_bytes), table.rows() - *from);
  uint8_t* to = payload->sized(count * row_bytes);
  table.copy_rows(*from, count, reinterpret_cast<int64_t*>(to), reinterpret_cast<float*>(to + count * sizeof(int64_t)));
  *header = {};
  header->verb = Verb::kRows;
  header->table = name_hash;
  header->count = count;
  header->bytes = count * row_bytes;
  *from += count;
  return true;
}

std::vector<uint64_t> Shard::workers() const {
  std::vector<uint64_t> found;
  for (const auto& [hash, entry] : tables_) {
    for (const auto& [rank, state] : entry->ranks) {
      if (state.here) found.push_back(state.worker);
    }
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

std::string Shard::describe() const {
  std::string text;
  for (const auto& [hash, entry] : tables_) {
    int64_t slowest = entry->ranks.empty() ? 0 : std::numeric_limits<int64_t>::max();
    for (const auto& [rank, state] : entry->ranks) slowest = std::min(slowest, state.clock);
    text += text_of(text.empty() ? "" : ", ", "{\"rows\": ", entry->rows.rows(), ", \"steps\": ", entry->rows.steps(),
                    ", \"rounds\": ", entry->finished, ", \"slowest\": ", slowest, ", \"name_hash\": ", hash, "}");
  }
  return "[" + text + "]";
}

}  // namespace hc
