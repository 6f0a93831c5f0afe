// Control frames between engines: one byte of kind, then the body (negotiation.cc encodes ballots and plans).
#pragma once

#include <cstdint>

namespace hc {

enum class FrameKind : uint8_t {
  kBallot = 1,   // member -> coordinator of a process set
  kPlan = 2,     // coordinator -> members
  kGoodbye = 3,  // this rank has shut down; nothing follows. Body: text
  kAbort = 4,    // everybody must fail. Body: code, culprit (world rank or -1), text
  kPing = 5,     // are you there?
  kPong = 6,
  kInquiry = 16,      // a stall is being reported. Body: u8, 1 = answer what you do instead
  kTestimony = 17,    // the answer. Body: text
  kClockAsk = 18,     // what time is it? Body: i64 my monotonic clock, ns
  kClockAnswer = 19,  // Body: i64 what was asked, i64 my monotonic clock, ns
};

}  // namespace hc
