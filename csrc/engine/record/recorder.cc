#include "engine/record/recorder.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/hash.h"
#include "base/quoted.h"
#include "engine/record/trace.h"

namespace hc {

namespace {

const char* state_of(Code code, bool agreed, bool done) {
  if (!done) return agreed ? "running" : "pending";
  constexpr const char* names[] = {"ok",      "not initialized", "invalid argument", "mismatch", "peer lost",
                                   "timeout", "aborted",         "unsupported",      "internal"};
  return names[static_cast<int>(code)];
}

std::string seconds_text(double s) {
  char text[40];
  std::snprintf(text, sizeof text, "%.6f", s);
  return text;
}

}  // namespace

Recorder::Recorder() : ring_(new Record[kKept]), first_time_(Clock::now()), first_ticks_(processor_ticks()) {}

// A long name keeps its ends: frameworks put what tells tensors apart there. Cut between characters of UTF-8.
void Recorder::keep_ends(std::string_view name, Call* to) {
  const auto inside = [&](size_t at) { return (static_cast<unsigned char>(name[at]) & 0xc0) == 0x80; };
  size_t head = kNameBytes / 3, tail = name.size() - (kNameBytes - head - 3);
  while (head > 0 && inside(head)) --head;
  while (tail < name.size() && inside(tail)) ++tail;
  char* at = to->name;
  std::memcpy(at, name.data(), head);
  std::memcpy(at + head, "...", 3);
  std::memcpy(at + head + 3, name.data() + tail, name.size() - tail);
  to->name_bytes = static_cast<uint8_t>(head + 3 + name.size() - tail);
  to->name_hash = static_cast<uint32_t>(hash_of_text(name) >> 32) | 1u;
}

uint64_t Recorder::submitted(const Entry& entry) {
  const uint64_t number = ++submissions_;
  Record& r = ring_[number % kKept];
  r.number.store(number, std::memory_order_relaxed);
  r.agreed.store(0, std::memory_order_relaxed);
  r.done.store(0, std::memory_order_relaxed);
  r.code.store(0, std::memory_order_relaxed);
  r.batch.store(0, std::memory_order_relaxed);
  Call& c = r.call;
  const Signature& s = entry.signature;
  c.submitted = entry.submitted;
  c.call = entry.call;
  c.use = entry.use;
  c.process_set = entry.process_set;
  c.op = s.op;
  c.reduce = s.reduce;
  c.unnamed = entry.name.empty();
  c.declared = entry.declared;
  c.tensors = static_cast<uint32_t>(s.tensors.size());
  c.elements = 0;
  c.dimensions = 0;
  for (const TensorMeta& t : s.tensors) c.elements += static_cast<uint64_t>(t.count());
  if (!s.tensors.empty()) {
    c.dtype = s.tensors[0].dtype;
    c.dimensions = static_cast<uint8_t>(s.tensors[0].shape.size());
    std::copy_n(s.tensors[0].shape.begin(), std::min<size_t>(c.dimensions, kDimensions), c.shape);
  }
  keep_name(entry.name, &c);
  return number;
}

std::string Recorder::last_call() const {
  if (submissions_ == 0) return "none";
  const Call& c = ring_[submissions_ % kKept].call;
  return text_of(name_of(c.op),
                 c.unnamed ? text_of(" no. ", c.use, " (unnamed)") : " " + in_quotes({c.name, c.name_bytes}), ", ",
                 seconds_text(seconds_between(c.submitted, Clock::now())).substr(0, 5), " s ago");
}

std::string Recorder::json() const {
  const TimePoint now_time = Clock::now();
  const uint64_t now_ticks = processor_ticks();
  const double per_tick =
      seconds_between(first_time_, now_time) / static_cast<double>(std::max<uint64_t>(1, now_ticks - first_ticks_));
  std::string out = "[";
  const uint64_t first = submissions_ > kKept ? submissions_ - kKept + 1 : 1;
  for (uint64_t n = first; n <= submissions_; ++n)
    out += text_of(n == first ? "\n" : ",\n", line_of(ring_[n % kKept], now_time, per_tick, now_ticks));
  return out + "]";
}

std::string Recorder::line_of(const Record& r, TimePoint now, double per_tick, uint64_t now_ticks) const {
  const Call& c = r.call;
  const uint64_t agreed = r.agreed.load(std::memory_order_relaxed), done = r.done.load(std::memory_order_relaxed);
  const auto ago = [&](uint64_t at) {
    return at ? seconds_text(std::max(0.0, static_cast<double>(static_cast<int64_t>(now_ticks - at)) * per_tick))
              : std::string("null");
  };
  std::string shape;
  for (size_t i = 0; i < std::min<size_t>(c.dimensions, kDimensions); ++i) shape += text_of(i ? "," : "", c.shape[i]);
  const std::string name = c.unnamed ? "null" : json_text({c.name, c.name_bytes});
  std::string text =
      text_of("{\"number\":", r.number.load(std::memory_order_relaxed), ",\"process_set\":", c.process_set,
              ",\"call\":", c.call, ",\"op\":\"", name_of(c.op), "\",\"name\":", name, ",\"use\":", c.use);
  if (c.name_hash) text += text_of(",\"name_hash\":", c.name_hash);
  if (c.tensors)
    text += text_of(",\"dtype\":\"", name_of(c.dtype), "\",\"shape\":[", shape, "],\"tensors\":", c.tensors,
                    ",\"elements\":", c.elements);
  if (c.op == Op::kAllreduce || c.op == Op::kReducescatter) text += text_of(",\"reduce\":\"", name_of(c.reduce), "\"");
  if (c.declared) text += ",\"declared\":true";
  return text + text_of(",\"state\":\"",
                        state_of(static_cast<Code>(r.code.load(std::memory_order_relaxed)), agreed, done),
                        "\",\"batch\":", r.batch.load(std::memory_order_relaxed),
                        ",\"submitted_ago\":", seconds_text(seconds_between(c.submitted, now)),
                        ",\"agreed_ago\":", ago(agreed), ",\"done_ago\":", ago(done), "}");
}

}  // namespace hc
