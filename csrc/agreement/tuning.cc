#include "agreement/tuning.h"

#include <algorithm>

namespace hc {
namespace {

struct KnobRow {
  const char* setting;
  const char* word;
};
constexpr KnobRow kRows[kKnobCount] = {
    {"FUSION_THRESHOLD", "fusion_threshold"},
    {"CYCLE_TIME", "cycle_time_ms"},
    {"HIERARCHICAL_ALLREDUCE", "hierarchical_allreduce"},
    {"RING_THRESHOLD_BYTES", "ring_threshold_bytes"},
    {"FLAT_BYTES", "flat_bytes"},
    {"BLOCK_BYTES", "block_bytes"},
    {"SEGMENT_BYTES", "segment_bytes"},
};

std::vector<double> values_of(Knob knob) {
  constexpr double kib = kKiB, mib = kMiB;
  switch (knob) {
    case Knob::kFusion:
      return {mib, 4 * mib, 16 * mib, 64 * mib, 128 * mib};
    case Knob::kBatchingDelay:
      return {0, 0.5, 1, 2.5, 5, 10};
    case Knob::kTwoLevel:
      return {0, 1};
    case Knob::kRingFrom:
      return {16 * kib, 64 * kib, 256 * kib, mib};
    case Knob::kFlat:
      return {4 * kib, 16 * kib, 32 * kib};
    case Knob::kBlock:
      return {64 * kib, 128 * kib, 256 * kib, 512 * kib};
    case Knob::kSegment:
      return {64 * kib, 256 * kib, mib, 4 * mib};
  }
  return {};
}

}  // namespace

Tuning Tuning::of(const Config& config) {
  Tuning t;
  t.fusion_bytes = config.fusion_bytes;
  t.batching_delay_ms = config.batching_delay_ms;
  t.two_level = config.hierarchical_allreduce != 0;
  t.ring_from_bytes = config.ring_threshold_bytes;
  t.flat_bytes = config.flat_bytes;
  t.block_bytes = config.block_bytes;
  t.segment_bytes = config.segment_bytes;
  t.adasum_by_node = config.adasum == "nodes";
  return t;
}

const char* setting_of(Knob knob) { return kRows[static_cast<int>(knob)].setting; }
const char* word_of(Knob knob) { return kRows[static_cast<int>(knob)].word; }

double value_of(const Tuning& t, Knob knob) {
  switch (knob) {
    case Knob::kFusion:
      return static_cast<double>(t.fusion_bytes);
    case Knob::kBatchingDelay:
      return t.batching_delay_ms;
    case Knob::kTwoLevel:
      return t.two_level ? 1 : 0;
    case Knob::kRingFrom:
      return static_cast<double>(t.ring_from_bytes);
    case Knob::kFlat:
      return static_cast<double>(t.flat_bytes);
    case Knob::kBlock:
      return static_cast<double>(t.block_bytes);
    case Knob::kSegment:
      return static_cast<double>(t.segment_bytes);
  }
  return 0;
}

void set_value(Tuning* t, Knob knob, double value) {
  switch (knob) {
    case Knob::kFusion:
      t->fusion_bytes = static_cast<size_t>(value);
      return;
    case Knob::kBatchingDelay:
      t->batching_delay_ms = value;
      return;
    case Knob::kTwoLevel:
      t->two_level = value != 0;
      return;
    case Knob::kRingFrom:
      t->ring_from_bytes = static_cast<size_t>(value);
      return;
    case Knob::kFlat:
      t->flat_bytes = static_cast<size_t>(value);
      return;
    case Knob::kBlock:
      t->block_bytes = static_cast<size_t>(value);
      return;
    case Knob::kSegment:
      t->segment_bytes = static_cast<size_t>(value);
      return;
  }
}

std::string to_json(const Tuning& t) {
  std::string text = text_of("{\"searching\":", t.searching ? "true" : "false", ",\"changes\":", t.version);
  for (int k = 0; k < kKnobCount; ++k) {
    const Knob knob = static_cast<Knob>(k);
    text += text_of(",\"", word_of(knob), "\":");
    if (knob == Knob::kBatchingDelay)
      text += text_of(t.batching_delay_ms);
    else
      text += std::to_string(static_cast<uint64_t>(value_of(t, knob)));
  }
  return text + "}";
}

std::vector<Ladder> ladders_for(const TuneLayout& layout, const Tuning& start,
                                const std::function<bool(std::string_view)>& is_fixed) {
  std::vector<Ladder> ladders;
  for (int k = 0; k < kKnobCount; ++k) {
    const Knob knob = static_cast<Knob>(k);
    const bool of_one_node = knob == Knob::kFlat || knob == Knob::kBlock;
    const bool of_many = knob == Knob::kTwoLevel || knob == Knob::kRingFrom || knob == Knob::kSegment;
    if ((of_one_node && !layout.one_node) || (of_many && layout.one_node)) continue;
    if (knob == Knob::kTwoLevel && !layout.may_be_two_level) continue;
    if (is_fixed(setting_of(knob))) continue;
    Ladder ladder{knob, values_of(knob), 0};
    const double now = value_of(start, knob);
    auto at = std::lower_bound(ladder.values.begin(), ladder.values.end(), now);
    if (at == ladder.values.end() || *at != now) at = ladder.values.insert(at, now);
    ladder.start = static_cast<size_t>(at - ladder.values.begin());
    ladders.push_back(std::move(ladder));
  }
  return ladders;
}

}  // namespace hc
