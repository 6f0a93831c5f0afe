// The settings that autotune may change. Every batch of a process set runs with the same values on all of its ranks: a
// change travels in a plan of the set and applies from that plan on. PURE values; Autotuner searches for good ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/config.h"

namespace hc {

struct Tuning {
  uint32_t version = 0;  // changes since init
  bool searching = false;
  size_t fusion_bytes = defaults::fusion_bytes;
  double batching_delay_ms = defaults::batching_delay_ms;
  bool two_level = true;  // allreduce over nodes with several ranks each: reduce within each node first
  size_t ring_from_bytes = defaults::ring_threshold_bytes;
  size_t flat_bytes = defaults::flat_bytes;
  size_t block_bytes = defaults::block_bytes;
  size_t segment_bytes = defaults::segment_bytes;
  bool adasum_by_node = false;  // not searched: it changes results
  bool operator==(const Tuning&) const = default;

  static Tuning of(const Config& config);
};

enum class Knob : uint8_t { kFusion, kBatchingDelay, kTwoLevel, kRingFrom, kFlat, kBlock, kSegment };
inline constexpr int kKnobCount = 7;

// The name of the setting as in the table, without its prefix; metrics and the log use it.
const char* setting_of(Knob knob);
const char* word_of(Knob knob);
double value_of(const Tuning& tuning, Knob knob);
void set_value(Tuning* tuning, Knob knob, double value);

// {"searching": false, "changes": 0, "fusion_threshold": ...}
std::string to_json(const Tuning& tuning);

// The values of one setting that are worth a try, ascending.
struct Ladder {
  Knob knob = Knob::kFusion;
  std::vector<double> values;
  size_t start = 0;  // position of the value in force
};

struct TuneLayout {
  bool one_node = true;
  bool may_be_two_level = false;  // several nodes, of which one has several ranks that share memory
};

// The settings to search, in that order, without those that have no effect in this layout and those that the user has
// fixed (`is_fixed`).
std::vector<Ladder> ladders_for(const TuneLayout& layout, const Tuning& start,
                                const std::function<bool(std::string_view setting)>& is_fixed);

}  // namespace hc
