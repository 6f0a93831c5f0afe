#include "engine/watch/clock_offset.h"

namespace hc {

namespace {

constexpr int kRounds = 16;

int64_t nanoseconds_of(TimePoint at) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}

}  // namespace

Status ClockOffset::begin() {
  rounds_left_ = kRounds;
  ahead_s_ = 0;
  error_s_ = 1e9;
  return ask();
}

Status ClockOffset::ask() {
  link_.begin(FrameKind::kClockAsk).put(nanoseconds_of(Clock::now()));
  return link_.send(0, true);
}

Status ClockOffset::take_frame(FrameKind kind, int from, Reader* in) {
  const TimePoint now = Clock::now();
  const auto asked_ns = in->get<int64_t>();
  if (kind == FrameKind::kClockAsk) {
    Writer& frame = link_.begin(FrameKind::kClockAnswer);
    frame.put(asked_ns);
    frame.put(nanoseconds_of(now));
    return link_.send(from, true);
  }
  const auto theirs_ns = in->get<int64_t>();
  if (from != 0 || is_over() || !in->ok()) return Status::ok();
  const double trip_s = static_cast<double>(nanoseconds_of(now) - asked_ns) * 1e-9;
  if (trip_s / 2 < error_s_) {
    error_s_ = trip_s / 2;
    ahead_s_ = static_cast<double>(theirs_ns - asked_ns) * 1e-9 - trip_s / 2;
  }
  return --rounds_left_ > 0 ? ask() : Status::ok();
}

}  // namespace hc
