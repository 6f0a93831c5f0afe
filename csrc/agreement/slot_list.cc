// See slot_list.h.
#include "agreement/slot_list.h"

#include <bit>

namespace hc {
namespace {

// Each keeps the order. Steps between neighbours (most are one byte); the same with sequence numbers (unnamed
// operations); for ascending slots a bit vector; rows of equal steps: 161 slots in a row, or one slot 161 times with
// ascending sequence numbers, are two rows.
enum class SlotForm : uint8_t { kSteps, kStepsAndSequences, kBits, kRows };
constexpr int kSlotFormCount = 4;

// From one announcement to the next; slots that follow each other, and numbers that do, are steps of 0.
struct Walk {
  int64_t slot = 0;
  uint64_t sequence = 0;

  struct Step {
    int64_t slot, sequence;
    bool operator==(const Step&) const = default;
  };
  Step to(const CachedRequest& c) {
    const Step step{static_cast<int64_t>(c.slot) - slot, static_cast<int64_t>(c.sequence - sequence)};
    slot = static_cast<int64_t>(c.slot) + 1;
    sequence = c.sequence + 1;
    return step;
  }
};

size_t bytes_of(const Walk::Step& step) {
  return varint_bytes(zigzag(step.slot)) + varint_bytes(zigzag(step.sequence));
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

struct SlotSurvey {
  SlotForm form = SlotForm::kSteps;
  uint32_t first = 0;
  uint32_t bits = 0;  // kBits: length of the vector
  size_t rows = 0;
};

SlotSurvey survey(const std::vector<CachedRequest>& list) {
  SlotSurvey found;
  if (list.empty()) return found;
  bool ascending = true, sequences = false;
  size_t steps_bytes = varint_bytes(list.size()), both_bytes = steps_bytes, rows_bytes = 0;
  Walk walk;
  for (const CachedRequest& c : list) {
    const Walk::Step step = walk.to(c);
    if (step.slot < 0) ascending = false;
    if (c.sequence != 0) sequences = true;
    steps_bytes += varint_bytes(zigzag(step.slot));
    both_bytes += bytes_of(step);
  }
  each_row(list, [&](const Walk::Step& step, size_t n) {
    found.rows++;
    rows_bytes += bytes_of(step) + varint_bytes(n);
  });
  rows_bytes += varint_bytes(found.rows);
  size_t best = steps_bytes;
  if (sequences) {
    found.form = SlotForm::kStepsAndSequences;
    best = both_bytes;
  } else if (ascending) {
    found.first = list.front().slot;
    found.bits = list.back().slot - found.first + 1;
    size_t bits_bytes = varint_bytes(found.first) + varint_bytes(found.bits) + (size_t{found.bits} + 7) / 8;
    if (bits_bytes < best) {
      found.form = SlotForm::kBits;
      best = bits_bytes;
    }
  }
  if (rows_bytes < best && list.size() <= kMaxPlanEntries) found.form = SlotForm::kRows;
  return found;
}

void put_slot_bits(Writer* out, const SlotSurvey& s, const std::vector<CachedRequest>& list) {
  put_varint(out, s.first);
  put_varint(out, s.bits);
  size_t next = 0;
  for (uint32_t at = 0; at < s.bits; at += 8) {
    uint8_t byte = 0;
    for (; next < list.size() && list[next].slot - s.first < at + 8; next++)
      byte = static_cast<uint8_t>(byte | 1u << (list[next].slot - s.first - at));
    out->put(byte);
  }
}

void get_slot_bits(Reader* in, std::vector<CachedRequest>* list) {
  uint64_t first = get_varint(in);
  uint64_t bits = get_varint(in);
  if (first >= kMaxSlots || bits > kMaxSlots - first || (bits + 7) / 8 > in->remaining()) in->fail();
  for (uint64_t at = 0; at < bits && in->ok(); at += 8) {
    uint32_t byte = in->get<uint8_t>();
    if (bits - at < 8 && byte >> (bits - at) != 0) in->fail();
    for (; byte != 0; byte &= byte - 1)
      list->push_back({static_cast<uint32_t>(first + at) + static_cast<uint32_t>(std::countr_zero(byte)), 0});
  }
}

// False: the step leads nowhere.
bool take_step(int64_t step, int64_t sequence_step, Walk* walk, std::vector<CachedRequest>* list) {
  int64_t slot = 0;
  if (__builtin_add_overflow(walk->slot, step, &slot) || slot < 0 || slot >= kMaxSlots) return false;
  const CachedRequest c{static_cast<uint32_t>(slot), walk->sequence + static_cast<uint64_t>(sequence_step)};
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

void put_slots(Writer* out, const std::vector<CachedRequest>& list) {
  const SlotSurvey s = survey(list);
  out->put(s.form);
  if (s.form == SlotForm::kBits) return put_slot_bits(out, s, list);
  if (s.form == SlotForm::kRows) {
    put_varint(out, s.rows);
    each_row(list, [out](const Walk::Step& step, size_t n) {
      put_varint(out, zigzag(step.slot));
      put_varint(out, zigzag(step.sequence));
      put_varint(out, n);
    });
    return;
  }
  put_varint(out, list.size());
  Walk walk;
  for (const CachedRequest& c : list) {
    const Walk::Step step = walk.to(c);
    put_varint(out, zigzag(step.slot));
    if (s.form == SlotForm::kStepsAndSequences) put_varint(out, zigzag(step.sequence));
  }
}

void get_slots(Reader* in, std::vector<CachedRequest>* list) {
  list->clear();
  const uint8_t form = in->get<uint8_t>();
  if (form >= kSlotFormCount) in->fail();
  if (!in->ok()) return;
  if (form == static_cast<uint8_t>(SlotForm::kBits)) return get_slot_bits(in, list);
  if (form == static_cast<uint8_t>(SlotForm::kRows)) return get_rows(in, list);
  const bool sequences = form == static_cast<uint8_t>(SlotForm::kStepsAndSequences);
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
