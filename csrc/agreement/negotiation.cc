// Bytes of request lists and plans. Numbers are LEB128 varints (signed ones zigzagged), so that a steady step is a few
// bytes; the reader trusts nothing: every count is checked against what is left before anything is allocated.
#include "agreement/negotiation.h"

#include <limits>

#include "agreement/cache_id_list.h"

namespace hc {
namespace {

int64_t get_count64(Reader* in) {  // a number that must fit int64_t and not be negative
  uint64_t v = get_varint(in);
  if (v > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) in->fail();
  return in->ok() ? static_cast<int64_t>(v) : 0;
}

int32_t get_signed(Reader* in) {
  const int64_t v = unzigzag(get_varint(in));
  if (v < std::numeric_limits<int32_t>::min() || v > std::numeric_limits<int32_t>::max()) in->fail();
  return in->ok() ? static_cast<int32_t>(v) : 0;
}

void put_string(Writer* out, std::string_view text) {
  put_varint(out, text.size());
  out->put_raw(text.data(), text.size());
}

void get_string(Reader* in, std::string* text) {
  size_t bytes = get_length(in, 1);
  if (bytes > kMaxTextBytes) in->fail();
  if (!in->ok()) return;
  text->resize(bytes);
  in->take(text->data(), bytes);
}

template <class Enum>
Enum get_enum(Reader* in, int count) {
  uint8_t v = in->get<uint8_t>();
  if (v >= count) in->fail();
  return in->ok() ? static_cast<Enum>(v) : Enum{};
}

// Non-negative numbers whose sum fits too, so that nobody who adds them up overflows.
void get_rows(Reader* in, std::vector<int64_t>* rows) {
  size_t n = get_length(in, 1);
  rows->clear();
  rows->reserve(n);
  int64_t sum = 0;
  for (size_t i = 0; i < n && in->ok(); i++) {
    int64_t v = get_count64(in);
    if (__builtin_add_overflow(sum, v, &sum)) in->fail();
    rows->push_back(v);
  }
}

void put_rows(Writer* out, const std::vector<int64_t>& rows) {
  put_varint(out, rows.size());
  for (int64_t v : rows) put_varint(out, static_cast<uint64_t>(v));
}

enum SignatureFlag : uint8_t {
  kInArena = 1,
  kScaled = 2,
  kOnDevice = 4,
  kPrioritised = 8,
  kAfterGap = 16,
  kSignatureFlags = 31
};

void put_signature(Writer* out, const Signature& s) {
  bool scaled = s.prescale != 1.0 || s.postscale != 1.0;
  out->put(s.op);
  out->put(s.reduce);
  out->put(static_cast<uint8_t>((s.in_arena ? kInArena : 0) | (scaled ? kScaled : 0) | (s.device != 0 ? kOnDevice : 0) |
                                (s.priority != 0 ? kPrioritised : 0) | (s.left_out != 0 ? kAfterGap : 0)));
  put_varint(out, zigzag(s.root));
  if (s.priority != 0) put_varint(out, zigzag(s.priority));
  if (s.left_out != 0) put_varint(out, zigzag(s.left_out));
  if (scaled) {
    out->put(s.prescale);
    out->put(s.postscale);
  }
  put_varint(out, s.tensors.size());
  for (const TensorMeta& t : s.tensors) {
    out->put(t.dtype);
    put_rows(out, t.shape);
  }
  put_rows(out, s.splits);
}

void get_tensor(Reader* in, TensorMeta* t) {
  t->dtype = get_enum<DType>(in, kDTypeCount);
  size_t dimensions = get_length(in, 1);
  if (dimensions > kMaxDimensions) in->fail();
  if (!in->ok()) return;
  t->shape.resize(dimensions);
  int64_t bytes = static_cast<int64_t>(size_of(t->dtype));
  for (int64_t& d : t->shape) {
    d = get_count64(in);
    // A zero hides nothing: the other dimensions are multiplied by people who do not look for it first.
    if (d != 0 && (__builtin_mul_overflow(bytes, d, &bytes) || bytes > kMaxTensorBytes)) in->fail();
  }
}

void get_signature(Reader* in, Signature* s) {
  s->op = get_enum<Op>(in, kOpCount);
  s->reduce = get_enum<Reduce>(in, kReduceCount);
  uint8_t flags = in->get<uint8_t>();
  if ((flags & ~kSignatureFlags) != 0) in->fail();
  s->in_arena = (flags & kInArena) != 0;
  s->device = (flags & kOnDevice) != 0 ? 1 : 0;
  s->root = get_signed(in);
  s->priority = (flags & kPrioritised) != 0 ? get_signed(in) : 0;
  s->left_out = (flags & kAfterGap) != 0 ? get_signed(in) : 0;
  s->prescale = (flags & kScaled) != 0 ? in->get<double>() : 1.0;
  s->postscale = (flags & kScaled) != 0 ? in->get<double>() : 1.0;
  size_t tensors = get_length(in, 2);
  if (!in->ok()) return;
  s->tensors.resize(tensors);
  for (TensorMeta& t : s->tensors) {
    get_tensor(in, &t);
    if (!in->ok()) return;
  }
  get_rows(in, &s->splits);
}

enum EntryFlag : uint8_t {
  kHasCacheId = 1,
  kUnnamed = 2,
  kAssigned = 4,
  kHasSignature = 8,
  kHasName = 16,
  kFailedOn = 32,
  kWithJoined = 64,
  kEntryFlags = 127
};
enum BatchFlag : uint8_t {
  kBatchInArena = 1,
  kIdsOnly = 2,
  kIdsUnnamed = 4,
  kHasRows = 8,
  kHasError = 16,
  kLastJoined = 32,
  kBatchOnDevice = 64,
  kEachAlone = 128,  // one record for several batches: each entry is a batch of its own, numbered one behind the other
};

constexpr uint8_t kInParts = 0x80;  // beside the operation: a Part follows the flags

void put_part(Writer* out, const PlanBatch& b) {
  put_varint(out, b.part.index);
  put_varint(out, b.part.count);
  if (b.part.index != 0) put_varint(out, b.id - b.part.first);
}

void get_part(Reader* in, PlanBatch* b) {
  const uint64_t index = get_varint(in), count = get_varint(in);
  if (count < 2 || count > kMaxParts || index >= count) in->fail();
  const uint64_t back = in->ok() && index != 0 ? get_varint(in) : 0;
  if (back > std::numeric_limits<uint32_t>::max()) in->fail();
  if (!in->ok()) return;
  b->part = {static_cast<uint32_t>(index), static_cast<uint32_t>(count), b->id - static_cast<uint32_t>(back)};
}

void put_entry(Writer* out, const PlanEntry& e) {
  out->put(static_cast<uint8_t>((e.cache_id != kNoCacheId ? kHasCacheId : 0) | (e.unnamed ? kUnnamed : 0) |
                                (e.assigned ? kAssigned : 0) | (e.has_signature ? kHasSignature : 0) |
                                (e.name.empty() ? 0 : kHasName) | (e.failed_on.empty() ? 0 : kFailedOn) |
                                (e.with_joined ? kWithJoined : 0)));
  if (e.cache_id != kNoCacheId) put_varint(out, e.cache_id);
  if (e.unnamed) put_varint(out, e.sequence);
  if (!e.name.empty()) put_string(out, e.name);
  if (e.has_signature) put_signature(out, e.signature);
  if (e.failed_on.empty()) return;
  put_varint(out, e.failed_on.size());
  for (int32_t rank : e.failed_on) put_varint(out, static_cast<uint32_t>(rank));
}

int32_t get_rank(Reader* in) {
  uint64_t rank = get_varint(in);
  if (rank > static_cast<uint64_t>(std::numeric_limits<int32_t>::max())) in->fail();
  return in->ok() ? static_cast<int32_t>(rank) : 0;
}

void get_entry(Reader* in, PlanEntry* e) {
  uint8_t flags = in->get<uint8_t>();
  if ((flags & ~kEntryFlags) != 0) in->fail();
  e->unnamed = (flags & kUnnamed) != 0;
  e->assigned = (flags & kAssigned) != 0;
  e->has_signature = (flags & kHasSignature) != 0;
  e->with_joined = (flags & kWithJoined) != 0;
  if ((flags & kHasCacheId) != 0) {
    uint64_t cache_id = get_varint(in);
    if (cache_id >= kMaxCacheIds) in->fail();
    e->cache_id = static_cast<uint32_t>(cache_id);
  } else if (e->assigned) {
    in->fail();
  }
  if (e->unnamed) e->sequence = get_varint(in);
  if ((flags & kHasName) != 0) get_string(in, &e->name);
  if (e->has_signature && in->ok()) get_signature(in, &e->signature);
  if ((flags & kFailedOn) == 0) return;
  size_t n = get_length(in, 1);
  for (size_t i = 0; i < n && in->ok(); i++) e->failed_on.push_back(get_rank(in));
}

// A steady batch is nothing but cache ids of one kind, in order; then they go as a list of cache ids.
bool only_ids(const PlanBatch& batch) {
  if (batch.entries.empty()) return false;
  for (const PlanEntry& e : batch.entries) {
    bool bare = e.cache_id != kNoCacheId && !e.assigned && !e.has_signature && e.name.empty() && e.failed_on.empty() &&
                !e.with_joined;
    if (!bare || e.unnamed != batch.entries.front().unnamed || (!e.unnamed && e.sequence != 0)) return false;
  }
  return true;
}

void put_entries(Writer* out, const PlanBatch& batch, bool ids_only) {
  if (!ids_only) {
    put_varint(out, batch.entries.size());
    for (const PlanEntry& e : batch.entries) put_entry(out, e);
    return;
  }
  std::vector<CachedRequest> cache_ids;
  cache_ids.reserve(batch.entries.size());
  for (const PlanEntry& e : batch.entries) cache_ids.push_back({e.cache_id, e.sequence});
  put_cache_ids(out, cache_ids);
}

// `room` is how many entries the plan may still hold: an entry is far larger in memory than on the wire.
void get_entries(Reader* in, uint8_t flags, size_t room, PlanBatch* batch) {
  if ((flags & kIdsOnly) == 0) {
    size_t n = get_length(in, 1);
    if (n > room) in->fail();
    for (size_t i = 0; i < n && in->ok(); i++) get_entry(in, &batch->entries.emplace_back());
    return;
  }
  std::vector<CachedRequest> cache_ids;
  get_cache_ids(in, &cache_ids);
  if (cache_ids.size() > room) in->fail();
  if (!in->ok()) return;
  batch->entries.resize(cache_ids.size());
  for (size_t i = 0; i < cache_ids.size(); i++) {
    batch->entries[i].cache_id = cache_ids[i].cache_id;
    batch->entries[i].sequence = cache_ids[i].sequence;
    batch->entries[i].unnamed = (flags & kIdsUnnamed) != 0;
  }
}

// A batch that says no more than one cache id, and what its neighbours may say as well.
bool is_plain(const PlanBatch& b) {
  return b.entries.size() == 1 && b.rows.empty() && b.error == Code::kOk && b.last_joined < 0 && b.part.count == 1 &&
         only_ids(b);
}

// How many batches from `first` on make one record: 1, or a row of plain ones.
size_t batches_in_record(const std::vector<PlanBatch>& batches, size_t first) {
  const PlanBatch& a = batches[first];
  if (!is_plain(a)) return 1;
  size_t n = 1;
  for (; first + n < batches.size(); n++) {
    const PlanBatch& b = batches[first + n];
    if (!is_plain(b) || b.id != a.id + n || b.op != a.op || b.algorithm != a.algorithm || b.in_arena != a.in_arena ||
        b.on_device != a.on_device || b.entries[0].unnamed != a.entries[0].unnamed)
      break;
  }
  return n;
}

// `row`: the batches of one record.
void put_batches(Writer* out, std::span<const PlanBatch> row, uint32_t expected_id) {
  const PlanBatch& b = row[0];
  bool ids_only = only_ids(b);
  bool failed = b.error != Code::kOk;
  put_varint(out, zigzag(static_cast<int32_t>(b.id - expected_id)));
  const bool in_parts = b.part.count > 1;
  out->put(static_cast<uint8_t>(static_cast<uint8_t>(b.op) | (in_parts ? kInParts : 0)));
  out->put(b.algorithm);
  out->put(static_cast<uint8_t>((b.in_arena ? kBatchInArena : 0) | (ids_only ? kIdsOnly : 0) |
                                (ids_only && b.entries.front().unnamed ? kIdsUnnamed : 0) |
                                (b.rows.empty() ? 0 : kHasRows) | (failed ? kHasError : 0) |
                                (b.last_joined >= 0 ? kLastJoined : 0) | (b.on_device ? kBatchOnDevice : 0) |
                                (row.size() > 1 ? kEachAlone : 0)));
  if (in_parts) put_part(out, b);
  if (row.size() > 1) {
    std::vector<CachedRequest> cache_ids;
    cache_ids.reserve(row.size());
    for (const PlanBatch& each : row) cache_ids.push_back({each.entries[0].cache_id, each.entries[0].sequence});
    return put_cache_ids(out, cache_ids);
  }
  put_entries(out, b, ids_only);
  if (!b.rows.empty()) put_rows(out, b.rows);
  if (b.last_joined >= 0) put_varint(out, static_cast<uint32_t>(b.last_joined));
  if (!failed) return;
  out->put(static_cast<uint8_t>(b.error));
  put_string(out, std::string_view(b.error_text).substr(0, kMaxTextBytes));
}

// Makes of one batch with many entries as many batches with one.
void spread(std::vector<PlanBatch>* batches) {
  PlanBatch all = std::move(batches->back());
  batches->pop_back();
  for (size_t i = 0; i < all.entries.size(); i++) {
    PlanBatch& b = batches->emplace_back();
    b.id = all.id + static_cast<uint32_t>(i);
    b.op = all.op;
    b.algorithm = all.algorithm;
    b.in_arena = all.in_arena;
    b.on_device = all.on_device;
    b.entries.push_back(std::move(all.entries[i]));
  }
}

// One record; `room` is how many entries the plan may still hold.
void get_batches(Reader* in, uint32_t expected_id, size_t room, std::vector<PlanBatch>* batches) {
  PlanBatch* b = &batches->emplace_back();
  b->id = expected_id + static_cast<uint32_t>(unzigzag(get_varint(in)));
  const uint8_t op = in->get<uint8_t>();
  const bool in_parts = (op & kInParts) != 0;
  if ((op & ~kInParts) >= kOpCount) in->fail();
  b->op = in->ok() ? static_cast<Op>(op & ~kInParts) : Op{};
  b->algorithm = get_enum<Algorithm>(in, static_cast<int>(Algorithm::kCirculant) + 1);
  uint8_t flags = in->get<uint8_t>();
  const bool alone = (flags & kEachAlone) != 0;
  if (in_parts) get_part(in, b);
  if (alone && (in_parts || (flags & kIdsOnly) == 0 || (flags & (kHasRows | kLastJoined | kHasError)) != 0)) in->fail();
  b->in_arena = (flags & kBatchInArena) != 0;
  b->on_device = (flags & kBatchOnDevice) != 0;
  get_entries(in, flags, room, b);
  if (!in->ok()) return;
  if (alone) return spread(batches);
  if ((flags & kHasRows) != 0) get_rows(in, &b->rows);
  if ((flags & kLastJoined) != 0) b->last_joined = get_rank(in);
  if ((flags & kHasError) == 0) return;
  b->error = get_enum<Code>(in, static_cast<int>(Code::kInternal) + 1);
  if (b->error == Code::kOk) in->fail();
  get_string(in, &b->error_text);
}

void put_tuning(Writer* out, const Tuning& t) {
  put_varint(out, t.version);
  out->put(static_cast<uint8_t>((t.searching ? 1 : 0) | (t.two_level ? 2 : 0) | (t.adasum_by_node ? 4 : 0)));
  out->put(t.batching_delay_ms);
  for (size_t bytes : {t.fusion_bytes, t.ring_from_bytes, t.flat_bytes, t.block_bytes, t.segment_bytes})
    put_varint(out, bytes);
}

void put_tickets(Writer* out, const std::vector<TicketsBefore>& tickets) {
  put_varint(out, tickets.size());
  for (const TicketsBefore& run : tickets)
    for (const uint32_t number : {run.first, run.ranks, run.tickets}) put_varint(out, number);
}

void get_tickets(Reader* in, std::vector<TicketsBefore>* tickets) {
  tickets->resize(get_length(in, 3));
  for (TicketsBefore& run : *tickets)
    for (uint32_t* number : {&run.first, &run.ranks, &run.tickets}) {
      const uint64_t value = get_varint(in);
      if (value > std::numeric_limits<uint32_t>::max()) in->fail();
      *number = static_cast<uint32_t>(value);
    }
}

void get_tuning(Reader* in, Tuning* t) {
  constexpr uint64_t kMax = uint64_t{1} << 40;
  const uint64_t version = get_varint(in);
  const uint8_t flags = in->get<uint8_t>();
  t->batching_delay_ms = in->get<double>();
  if (version > std::numeric_limits<uint32_t>::max() || flags > 7) in->fail();
  if (!(t->batching_delay_ms >= 0 && t->batching_delay_ms <= 60000)) in->fail();
  t->version = static_cast<uint32_t>(version);
  t->searching = (flags & 1) != 0;
  t->two_level = (flags & 2) != 0;
  t->adasum_by_node = (flags & 4) != 0;
  for (size_t* bytes : {&t->fusion_bytes, &t->ring_from_bytes, &t->flat_bytes, &t->block_bytes, &t->segment_bytes}) {
    const uint64_t value = get_varint(in);
    if (value > kMax) in->fail();
    *bytes = static_cast<size_t>(value);
  }
  if (t->block_bytes == 0 || t->segment_bytes == 0) in->fail();
}

}  // namespace

std::string text_of_tensor(const TensorMeta& meta) {
  std::string text = text_of(name_of(meta.dtype), "[");
  for (size_t i = 0; i < meta.shape.size(); ++i) text += text_of(i ? "," : "", meta.shape[i]);
  return text + "]";
}

size_t bytes_of(const TensorMeta& tensor) { return static_cast<size_t>(tensor.count()) * size_of(tensor.dtype); }

size_t bytes_of(const Signature& signature) {
  size_t sum = 0;
  for (const TensorMeta& t : signature.tensors) {
    size_t bytes = size_of(t.dtype);
    for (int64_t d : t.shape)
      if (__builtin_mul_overflow(bytes, static_cast<size_t>(d), &bytes)) return std::numeric_limits<size_t>::max();
    if (__builtin_add_overflow(sum, bytes, &sum)) return std::numeric_limits<size_t>::max();
  }
  return sum;
}

namespace {
enum RequestListFlag : uint8_t { kJoined = 1, kOnBypass = 2, kWhole = 4, kHeld = 8, kRequestListFlags = 15 };
}  // namespace

void encode(const RequestList& request_list, Writer* out) {
  put_varint(out, request_list.generation);
  out->put(request_list.process_set);
  put_varint(out, static_cast<uint32_t>(request_list.rank));
  out->put(static_cast<uint8_t>((request_list.joined ? kJoined : 0) | (request_list.on_bypass ? kOnBypass : 0) |
                                (request_list.whole ? kWhole : 0) | (request_list.held_us != 0 ? kHeld : 0)));
  if (request_list.whole) put_varint(out, static_cast<uint32_t>(request_list.last));
  if (request_list.held_us != 0) put_varint(out, request_list.held_us);
  put_cache_ids(out, request_list.cached);
  put_varint(out, request_list.fresh.size());
  for (const Request& r : request_list.fresh) {
    put_string(out, r.name);
    put_varint(out, r.sequence);
    put_signature(out, r.signature);
  }
}

Status decode(Reader* in, RequestList* request_list) {
  constexpr size_t kSmallestRequest = 8;  // two lengths, a sequence and five bytes of signature
  *request_list = RequestList{};
  size_t bytes = in->remaining();
  request_list->generation = get_varint(in);
  request_list->process_set = in->get<uint16_t>();
  request_list->rank = get_rank(in);
  const uint8_t flags = in->get<uint8_t>();
  if ((flags & ~kRequestListFlags) != 0) in->fail();
  request_list->joined = (flags & kJoined) != 0;
  request_list->on_bypass = (flags & kOnBypass) != 0;
  request_list->whole = (flags & kWhole) != 0;
  request_list->last = request_list->whole ? get_rank(in) : request_list->rank;
  const uint64_t held_us = (flags & kHeld) != 0 ? get_varint(in) : 0;
  if (held_us > std::numeric_limits<uint32_t>::max() || (request_list->whole && request_list->joined)) in->fail();
  request_list->held_us = static_cast<uint32_t>(held_us);
  if (in->ok()) get_cache_ids(in, &request_list->cached);
  size_t fresh = in->ok() ? get_length(in, kSmallestRequest) : 0;
  for (size_t i = 0; i < fresh && in->ok(); i++) {
    Request& r = request_list->fresh.emplace_back();
    get_string(in, &r.name);
    r.sequence = get_varint(in);
    if (in->ok()) get_signature(in, &r.signature);
  }
  if (in->ok()) return Status::ok();
  return error(Code::kInternal, "a frame of requests (", bytes, " bytes, rank ", request_list->rank,
               ") is broken after ", request_list->cached.size(), " cache ids and ", request_list->fresh.size(),
               " requests");
}

void encode(const Plan& plan, Writer* out) {
  put_varint(out, plan.generation);
  out->put(plan.process_set);
  size_t records = 0;
  for (size_t i = 0; i < plan.batches.size(); i += batches_in_record(plan.batches, i)) records++;
  put_varint(out, records * 8 + (plan.tickets.empty() ? 0 : 4) + (plan.bypass_round ? 2 : 0) + (plan.tuning ? 1 : 0));
  if (plan.tuning) put_tuning(out, *plan.tuning);
  if (plan.bypass_round) put_varint(out, *plan.bypass_round);
  if (!plan.tickets.empty()) put_tickets(out, plan.tickets);
  uint32_t expected_id = 0;
  const std::span<const PlanBatch> all(plan.batches);
  for (size_t i = 0, n = 0; i < all.size(); i += n) {
    n = batches_in_record(plan.batches, i);
    put_batches(out, all.subspan(i, n), expected_id);
    expected_id = all[i + n - 1].id + 1;
  }
}

Status decode(Reader* in, Plan* plan) {
  constexpr size_t kSmallestBatch = 5;  // id, op, algorithm, flags, number of entries
  *plan = Plan{};
  size_t bytes = in->remaining();
  plan->generation = get_varint(in);
  plan->process_set = in->get<uint16_t>();
  // Eight times the number of records, 1 where settings change, 2 for a round of the bypass, 4 for tickets outside of
  // plans.
  const uint64_t head = get_varint(in);
  const uint64_t records = head / 8;
  if (records > kMaxPlanEntries || records > in->remaining() / kSmallestBatch) in->fail();
  if (in->ok() && (head & 1) != 0) get_tuning(in, &plan->tuning.emplace());
  if (in->ok() && (head & 2) != 0) plan->bypass_round = get_varint(in);
  if (in->ok() && (head & 4) != 0) get_tickets(in, &plan->tickets);
  size_t room = kMaxPlanEntries;
  uint32_t expected_id = 0;
  for (uint64_t i = 0; i < records && in->ok(); i++) {
    const size_t before = plan->batches.size();
    get_batches(in, expected_id, room, &plan->batches);
    for (size_t k = before; k < plan->batches.size(); k++) room -= plan->batches[k].entries.size();
    if (!plan->batches.empty()) expected_id = plan->batches.back().id + 1;
  }
  if (in->ok()) return Status::ok();
  return error(Code::kInternal, "a plan frame (", bytes, " bytes) is broken in batch ", plan->batches.size());
}

}  // namespace hc
