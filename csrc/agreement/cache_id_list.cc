// See cache_id_list.h.
#include "agreement/cache_id_list.h"

#include <bit>

namespace hc {
namespace {

// Each keeps the order. Steps between neighbours (most are one byte); the same with sequence numbers (unnamed
// operations); for ascending cache ids a bit vector; rows of equal steps: 161 cache ids in a row, or one cache id 161
// times with ascending sequence numbers, are two rows.
enum class IdForm : uint8_t { kSteps, kStepsAndSequences, kBits, kRows };
constexpr int kIdFormCount = 4;

// From one announcement to the next; cache ids that follow each other, and numbers that do, are steps of 0.
struct Walk {
  int64_t cache_id = 0;
  uint64_t sequence = 0;

  struct Step {
    int64_t cache_id, sequence;
    bool operator==(const Step&) const = default;
  };
  Step to(const CachedRequest& c) {
    const Step step{static_cast<int64_t>(c.cache_id) - cache_id, static_cast<int64_t>(c.sequence - sequence)};
    cache_id = static_cast<int64_t>(c.cache_id) + 1;
    sequence = c.sequence + 1;
    return step;
  }
};

size_t bytes_of(const Walk::Step& step) {
  return varint_bytes(zigzag(step.cache_id)) + varint_bytes(zigzag(step.sequence));
}

// f(step, how often it is repeated)
template <class F>
void each_row(const std::vector<CachedRequest>& list, F&& f) {
  Walk walk;
  Walk::Step step{};
  size_t n = 0;
  for (const CachedRequest& c : list) {
    const Walk::Step next = walk.to(c);
    if (n != 0 && next == step) {
      n++;
      continue;
    }
    if (n != 0) f(step, n);
    step = next;
    n = 1;
  }
  if (n != 0) f(step, n);
}

struct IdSurvey {
  IdForm form = IdForm::kSteps;
  uint32_t first = 0;
  uint32_t bits = 0;  // kBits: length of the vector
  size_t rows = 0;
};

IdSurvey survey(const std::vector<CachedRequest>& list) {
  IdSurvey found;
  if (list.empty()) return found;
  bool ascending = true, sequences = false;
  size_t steps_bytes = varint_bytes(list.size()), both_bytes = steps_bytes, rows_bytes = 0;
  Walk walk;
  for (const CachedRequest& c : list) {
    const Walk::Step step = walk.to(c);
    if (step.cache_id < 0) ascending = false;
    if (c.sequence != 0) sequences = true;
    steps_bytes += varint_bytes(zigzag(step.cache_id));
    both_bytes += bytes_of(step);
  }
  each_row(list, [&](const Walk::Step& step, size_t n) {
    found.rows++;
    rows_bytes += bytes_of(step) + varint_bytes(n);
  });
  rows_bytes += varint_bytes(found.rows);
  size_t best = steps_bytes;
  if (sequences) {
    found.form = IdForm::kStepsAndSequences;
    best = both_bytes;
  } else if (ascending) {
    found.first = list.front().cache_id;
    found.bits = list.back().cache_id - found.first + 1;
    size_t bits_bytes = varint_bytes(found.first) + varint_bytes(found.bits) + (size_t{found.bits} + 7) / 8;
    if (bits_bytes < best) {
      found.form = IdForm::kBits;
      best = bits_bytes;
    }
  }
  if (rows_bytes < best && list.size() <= kMaxPlanEntries) found.form = IdForm::kRows;
  return found;
}

void put_id_bits(Writer* out, const IdSurvey& s, const std::vector<CachedRequest>& list) {
  put_varint(out, s.first);
  put_varint(out, s.bits);
  size_t next = 0;
  for (uint32_t at = 0; at < s.bits; at += 8) {
    uint8_t byte = 0;
    for (; next < list.size() && list[next].cache_id - s.first < at + 8; next++)
      byte = static_cast<uint8_t>(byte | 1u << (list[next].cache_id - s.first - at));
    out->put(byte);
  }
}

void get_id_bits(Reader* in, std::vector<CachedRequest>* list) {
  uint64_t first = get_varint(in);
  uint64_t bits = get_varint(in);
  if (first >= kMaxCacheIds || bits > kMaxCacheIds - first || (bits + 7) / 8 > in->remaining()) in->fail();
  for (uint64_t at = 0; at < bits && in->ok(); at += 8) {
    uint32_t byte = in->get<uint8_t>();
    if (bits - at < 8 && byte >> (bits - at) != 0) in->fail();
    for (; byte != 0; byte &= byte - 1)
      list->push_back({static_cast<uint32_t>(first + at) + static_cast<uint32_t>(std::countr_zero(byte)), 0});
  }
}

// False: the step leads nowhere.
bool take_step(int64_t step, int64_t sequence_step, Walk* walk, std::vector<CachedRequest>* list) {
  int64_t cache_id = 0;
  if (__builtin_add_overflow(walk->cache_id, step, &cache_id) || cache_id < 0 || cache_id >= kMaxCacheIds) return false;
  const CachedRequest c{static_cast<uint32_t>(cache_id), walk->sequence + static_cast<uint64_t>(sequence_step)};
  (void)walk->to(c);
  list->push_back(c);
  return true;
}

void get_rows(Reader* in, std::vector<CachedRequest>* list) {
  const size_t rows = get_length(in, 3);
  Walk walk;
  for (size_t i = 0; i < rows && in->ok(); i++) {
    const int64_t step = unzigzag(get_varint(in)), sequence_step = unzigzag(get_varint(in));
    const uint64_t n = get_varint(in);
    if (n > kMaxPlanEntries - list->size()) in->fail();
    for (uint64_t k = 0; k < n && in->ok(); k++)
      if (!take_step(step, sequence_step, &walk, list)) in->fail();
  }
}

}  // namespace

void put_cache_ids(Writer* out, const std::vector<CachedRequest>& list) {
  const IdSurvey s = survey(list);
  out->put(s.form);
  if (s.form == IdForm::kBits) return put_id_bits(out, s, list);
  if (s.form == IdForm::kRows) {
    put_varint(out, s.rows);
    each_row(list, [out](const Walk::Step& step, size_t n) {
      put_varint(out, zigzag(step.cache_id));
      put_varint(out, zigzag(step.sequence));
      put_varint(out, n);
    });
    return;
  }
  put_varint(out, list.size());
  Walk walk;
  for (const CachedRequest& c : list) {
    const Walk::Step step = walk.to(c);
    put_varint(out, zigzag(step.cache_id));
    if (s.form == IdForm::kStepsAndSequences) put_varint(out, zigzag(step.sequence));
  }
}

void get_cache_ids(Reader* in, std::vector<CachedRequest>* list) {
  list->clear();
  const uint8_t form = in->get<uint8_t>();
  if (form >= kIdFormCount) in->fail();
  if (!in->ok()) return;
  if (form == static_cast<uint8_t>(IdForm::kBits)) return get_id_bits(in, list);
  if (form == static_cast<uint8_t>(IdForm::kRows)) return get_rows(in, list);
  const bool sequences = form == static_cast<uint8_t>(IdForm::kStepsAndSequences);
  const size_t n = get_length(in, sequences ? 2 : 1);
  Walk walk;
  for (size_t i = 0; i < n && in->ok(); i++) {
    const int64_t step = unzigzag(get_varint(in));
    // Without numbers every one of them is 0.
    const int64_t sequence_step = sequences ? unzigzag(get_varint(in)) : -static_cast<int64_t>(walk.sequence);
    if (in->ok() && !take_step(step, sequence_step, &walk, list)) in->fail();
  }
}

}  // namespace hc
