// Measures how far rank 0's monotonic clock is ahead of this rank's, so that timelines can be merged. Rank 0 answers
// with its time; half a round trip is the error. The fastest of several round trips counts.
//
// Thread: the thread that makes progress. Owner: the engine.
#pragma once

#include "agreement/frames.h"
#include "base/clock.h"
#include "base/wire.h"
#include "engine/control/control_link.h"

namespace hc {

class ClockOffset {
 public:
  explicit ClockOffset(ControlLink& link) : link_(link) {}
  static constexpr double kLimitS = 2.0;  // after this the best answer so far is used

  Status begin();
  bool is_over() const { return rounds_left_ == 0; }
  // Ignores answers that still arrive.
  void end() { rounds_left_ = 0; }
  double ahead_s() const { return ahead_s_; }
  double error_s() const { return error_s_; }

  // Any rank: frames of kind kClockAsk and kClockAnswer.
  Status take_frame(FrameKind kind, int from, Reader* in);

 private:
  Status ask();

  ControlLink& link_;
  int rounds_left_ = 0;
  double ahead_s_ = 0, error_s_ = 0;
};

}  // namespace hc
