#include "engine/record/trace.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <utility>

#include "base/status.h"

namespace hc {

namespace {

constexpr size_t kMaxTracks = 50000;  // tensors shown by name; names without end must not fill the memory

std::string constant_case(std::string text) {
  for (char& c : text) c = c == ' ' ? '_' : static_cast<char>(std::toupper(c));
  return text;
}

std::string id_of(const TraceKey& key) {
  return key.name.empty() ? text_of(static_cast<int>(key.op), ':', key.process_set, '#', key.sequence)
                          : text_of(static_cast<int>(key.op), ':', key.process_set, '=', key.name);
}

std::string name_of_track(const TraceKey& key, bool operation_names) {
  if (!operation_names) return key.name.empty() ? text_of(name_of(key.op), " (unnamed)") : key.name;
  if (key.name.empty()) return text_of(name_of(key.op), ".noname.", key.sequence);
  return text_of(name_of(key.op), ".", key.name);
}

// Unnamed operations of one kind share a track: their number tells which spans of several ranks are of one operation.
std::string args_of(const TraceKey& key) {
  return key.name.empty() ? text_of("\"sequence\":", key.sequence) : std::string();
}

std::string number(double us) {
  char text[40];
  std::snprintf(text, sizeof text, "%.3f", us);
  return text;
}

// Of the UTF-8 character that begins here; 0: none does.
size_t bytes_of_character(std::string_view text) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const size_t bytes = at(0) < 0xc2 ? 0 : at(0) < 0xe0 ? 2 : at(0) < 0xf0 ? 3 : at(0) < 0xf5 ? 4 : 0;
  if (bytes == 0 || bytes > text.size()) return 0;
  for (size_t i = 1; i < bytes; ++i)
    if ((at(i) & 0xc0) != 0x80) return 0;
  const unsigned second = at(1);
  const bool overlong = (at(0) == 0xe0 && second < 0xa0) || (at(0) == 0xf0 && second < 0x90);
  const bool outside = (at(0) == 0xed && second > 0x9f) || (at(0) == 0xf4 && second > 0x8f);  // surrogates; > U+10FFFF
  return overlong || outside ? 0 : bytes;
}

}  // namespace

std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const auto byte = static_cast<unsigned char>(c);
    if (const size_t bytes = byte < 0x80 ? 0 : bytes_of_character(text.substr(i)); bytes > 1) {
      out += text.substr(i, bytes);
      i += bytes - 1;
    } else if (byte >= 0x80) {  // no UTF-8: as Python keeps such a byte
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\udc%02x", byte);
      out += escaped;
    } else if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (byte < 0x20 || byte == 0x7f) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", byte);
      out += escaped;
    } else {
      out.push_back(c);
    }
  }
  return out + "\"";
}

std::string event_line(const TraceEvent& e) {
  using Kind = TraceEvent::Kind;
  const char* kind = "";
  switch (e.kind) {
    case Kind::kAnnounced:
      kind = "announced";
      break;
    case Kind::kStarted:
      kind = "started";
      break;
    case Kind::kPhase:
      kind = "phase";
      break;
    case Kind::kDone:
      kind = "done";
      break;
    case Kind::kSpan:
      kind = "span";
      break;
    case Kind::kStep:
      kind = "step";
      break;
    case Kind::kAgreed:
    case Kind::kCycle:
      return "";
  }
  const int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(e.time.time_since_epoch()).count();
  return text_of("[\"", kind, "\",\"", name_of(e.key.op), "\",", e.key.process_set, ",", json_text(e.key.name), ",",
                 e.key.sequence, ",\"", e.phase, "\",{", e.args, "},", ns, ",", number(e.seconds * 1e6), "]\n");
}

void Trace::metadata(int pid, const char* what, std::string_view args, std::string* out) {
  *out += text_of(",\n{\"name\":\"", what, "\",\"ph\":\"M\",\"pid\":", pid, ",\"args\":{", args, "}}");
}

void Trace::open(std::string* out) {
  const auto origin_us = std::chrono::duration<double, std::micro>(origin_.start.time_since_epoch()).count();
  const int base = pid_base();
  *out +=
      text_of("[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":", base,
              ",\"args\":{\"start_time_since_epoch_in_micros\":", origin_.epoch_micros, ",\"rank\":", origin_.rank,
              ",\"size\":", origin_.size, ",\"clock_origin_micros\":", number(origin_us + origin_.clock_ahead_s * 1e6),
              ",\"clock_error_micros\":", number(origin_.clock_error_s * 1e6), ",\"name\":",
              json_text(origin_.all_ranks ? text_of("rank ", origin_.rank, ": steps") : std::string("steps")), "}}");
  metadata(base, "process_sort_index", text_of("\"sort_index\":", base), out);
}

Trace::Track& Trace::track_of(const TraceKey& key, std::string* out) {
  std::string name = name_of_track(key, origin_.operation_names);
  if (key.process_set) name += text_of(" [process set ", key.process_set, "]");
  if (tracks_.size() >= kMaxTracks && !tracks_.contains(name)) name = "(more tensors)";
  auto [at, fresh] = tracks_.try_emplace(name);
  Track& track = at->second;
  if (!fresh) return track;
  track.pid = pid_base() + static_cast<int>(tracks_.size());
  const std::string shown = origin_.all_ranks ? text_of("rank ", origin_.rank, ": ", name) : name;
  metadata(track.pid, "process_name", text_of("\"name\":", json_text(shown)), out);
  metadata(track.pid, "process_sort_index", text_of("\"sort_index\":", track.pid), out);
  return track;
}

// The lowest row of the kind in which nothing is open.
Trace::Flight& Trace::take_row(const TraceKey& key, int kind, Flights* flights, const std::string& id,
                               std::string* out) {
  Track& track = track_of(key, out);
  std::vector<bool>& busy = track.busy[kind];
  const auto free = static_cast<size_t>(std::find(busy.begin(), busy.end(), false) - busy.begin());
  const bool fresh = free == busy.size();
  if (fresh) busy.push_back(true);
  busy[free] = true;
  Flight& f = (*flights)[id];
  f = Flight{};
  f.track = &track;
  f.kind = kind;
  f.row = static_cast<int>(free) * 2 + kind;
  f.op = constant_case(name_of(key.op));
  if (fresh) name_rows(f, out);
  return f;
}

void Trace::name_rows(const Flight& f, std::string* out) {
  *out += text_of(",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":", f.track->pid, ",\"tid\":", f.row,
                  ",\"args\":{\"name\":\"", f.kind ? "operation" : "negotiation", "\"}}");
}

// Clocks are read by several threads: within a row time never goes back.
double Trace::stamp(Flight* f, TimePoint at) { return f->last_us = std::max(f->last_us, micros(at)); }

void Trace::begin(Flight* f, const std::string& name, TimePoint at, std::string* out, std::string_view args) {
  *out += text_of(",\n{\"ph\":\"B\",\"name\":", json_text(name), ",\"ts\":", number(stamp(f, at)),
                  ",\"pid\":", f->track->pid, ",\"tid\":", f->row);
  *out += args.empty() ? std::string("}") : text_of(",\"args\":{", args, "}}");
}

void Trace::end(Flight* f, TimePoint at, std::string_view args, std::string* out) {
  *out += text_of(",\n{\"ph\":\"E\",\"ts\":", number(stamp(f, at)), ",\"pid\":", f->track->pid, ",\"tid\":", f->row);
  *out += args.empty() ? std::string("}") : text_of(",\"args\":{", args, "}}");
}

void Trace::begin_phase(Flight* f, const TraceEvent& event, std::string* out) {
  if (f->in_phase) end(f, event.time, {}, out);
  f->in_phase = true;
  const std::string phase = constant_case(event.phase);
  begin(f, event.of_operation ? text_of(phase, "_", f->op) : phase, event.time, out);
}

void Trace::finish(Flights* flights, const std::string& id, TimePoint at, std::string_view args, std::string* out) {
  auto found = flights->find(id);
  if (found == flights->end()) return;
  Flight& f = found->second;
  if (f.in_phase) end(&f, at, {}, out);
  end(&f, at, args, out);
  f.track->busy[f.kind][static_cast<size_t>(f.row / 2)] = false;
  flights->erase(found);
}

// Beside the marks of the steps, in a row of its own. What began before the file is cut: viewers drop negative times.
void Trace::add_span(const TraceEvent& e, std::string* out) {
  if (!std::exchange(has_spans_, true))
    *out += text_of(",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":", pid_base(),
                    ",\"tid\":1,\"args\":{\"name\":\"recovery\"}}");
  const double from = micros(e.time), to = std::max(0.0, from + e.seconds * 1e6), shown = std::max(0.0, from);
  *out += text_of(",\n{\"ph\":\"X\",\"name\":", json_text(e.key.name), ",\"ts\":", number(shown),
                  ",\"dur\":", number(to - shown), ",\"pid\":", pid_base(), ",\"tid\":1,\"args\":{", e.args, "}}");
}

// Tracing may begin in the middle of an operation, and events may have been dropped: an end without a beginning is
// ignored, a second beginning ends the first.
void Trace::add(const TraceEvent& e, std::string* out) {
  using Kind = TraceEvent::Kind;
  if (e.kind == Kind::kCycle) {
    *out += text_of(",\n{\"ph\":\"i\",\"name\":\"CYCLE_START\",\"ts\":", number(micros(e.time)),
                    ",\"pid\":", pid_base(), ",\"tid\":0,\"s\":\"g\"}");
    return;
  }
  if (e.kind == Kind::kSpan) {
    add_span(e, out);
    return;
  }
  if (e.kind == Kind::kStep) {
    *out += text_of(",\n{\"ph\":\"i\",\"name\":\"STEP\",\"ts\":", number(micros(e.time)), ",\"pid\":", pid_base(),
                    ",\"tid\":0,\"s\":\"p\",\"args\":{\"step\":", e.key.sequence, "}}");
    return;
  }
  const std::string id = id_of(e.key);
  switch (e.kind) {
    case Kind::kAnnounced: {
      auto at = negotiating_.find(id);
      Flight& f = at != negotiating_.end() ? at->second : take_row(e.key, 0, &negotiating_, id, out);
      if (at == negotiating_.end()) begin(&f, "NEGOTIATE_" + f.op, e.time, out, args_of(e.key));
      *out += text_of(",\n{\"ph\":\"X\",\"name\":\"", e.rank, "\",\"ts\":", number(stamp(&f, e.time)),
                      ",\"dur\":0,\"pid\":", f.track->pid, ",\"tid\":", f.row, "}");
      break;
    }
    case Kind::kAgreed:
      finish(&negotiating_, id, e.time, {}, out);
      break;
    case Kind::kStarted: {
      finish(&running_, id, e.time, "\"unfinished\":true", out);
      Flight& f = take_row(e.key, 1, &running_, id, out);
      begin(&f, f.op, e.time, out, args_of(e.key));
      begin_phase(&f, e, out);
      break;
    }
    case Kind::kPhase:
      if (auto at = running_.find(id); at != running_.end()) begin_phase(&at->second, e, out);
      break;
    case Kind::kDone:
      // What never ran failed while it was negotiated; else the negotiation is that of the next one with this name.
      finish(running_.contains(id) ? &running_ : &negotiating_, id, e.time, e.args, out);
      break;
    case Kind::kCycle:
    case Kind::kSpan:
    case Kind::kStep:
      break;
  }
}

void Trace::close(TimePoint now, uint64_t dropped, std::string* out) {
  for (Flights* flights : {&negotiating_, &running_})
    while (!flights->empty()) finish(flights, std::string(flights->begin()->first), now, "\"unfinished\":true", out);
  *out += text_of(",\n{\"name\":\"dropped_events\",\"ph\":\"M\",\"pid\":", pid_base(), ",\"args\":{\"count\":", dropped,
                  "}}\n]\n");
}

}  // namespace hc
