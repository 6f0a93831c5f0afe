// Control frames between engines: one byte of kind, then the body (negotiation.cc encodes request lists and plans).
#pragma once

#include <cstdint>

namespace hc {

enum class FrameKind : uint8_t {
  kRequests = 1,  // member -> coordinator of a process set, or up the tree to it: one request list or several
  kPlan = 2,      // coordinator -> members, or down the tree
  kGoodbye = 3,   // this rank has shut down; nothing follows. Body: text
  kAbort = 4,     // everybody must fail. Body: code, culprit (world rank or -1), text
  kPing = 5,      // are you there?
  kPong = 6,
  // Between the two ranks of a message (messages.h):
  kMessage = 7,            // sender: announces it. Body: process set, tag, id, dtype, shape, the payload if it is small
  kMessageWanted = 8,      // receiver: send the payload on the stream of this id. Body: id, bool: by NCCL, GPU to GPU
  kMessageTaken = 9,       // receiver: the payload that came with the announcement is stored. Body: id
  kMessageRefused = 10,    // receiver: it does not fit its buffer. Body: id, code, text
  kMessageWithdrawn = 11,  // sender: asked for too late, its process set was removed. Body: id
  kDeviceAsk =
      12,  // coordinator to rank 0: batches on devices wait for launch tickets. Body: u16 process set, u32 number
  kLaunchTicket = 13,  // rank 0 to who takes part, as plans of the world go: this comes next on devices. Body:
                       // i32 to whom, u64 the ticket, u32 number
  kFlushHeld = 14,  // coordinator to ranks that have others below them. Body: u16 process set, u8: what becomes of held
                    // requests (0 hold again, 1 send them now, 2 hold none from now on)
  kStackRequest = 16,  // a stall is being reported. Body: u8, 1 = answer what you do instead
  kStackReply = 17,    // the answer. Body: text
  kClockAsk = 18,      // what time is it? Body: i64 my monotonic clock, ns
  kClockAnswer = 19,   // Body: i64 what was asked, i64 my monotonic clock, ns
  kLinkId = 20,        // the lower rank of two: the communicator for messages between our GPUs. Body: NCCL's id
  kMessageAsk = 21,  // a sender to rank 0: a message between GPUs waits for a launch ticket. Body: i32 receiver, u32 id
  kParentLeft = 22,  // down the tree, behind its last plan: this member above has left. Body: u16 process set, i32
                     // world rank, text
  kEnding = 23,      // this rank has begun to shut down: it finishes what it has submitted, and submits no more
  kWaiting = 24,     // a rank to the one that looks for deadlocks: what it waits for (deadlock.h); nothing: it goes on
  kDeadlock = 25,    // the answer, to all. Body: u32 count, i32 world ranks that wait for one another, text: end it
  // The same for circles through several worlds of the processes (process_worlds.h):
  kWaitingInWorlds = 26,
  kDeadlockOfWorlds = 27,
  // A rank is silent. Body: i32 its world rank.
  kIsHeard = 28,      // to another one: say so when you hear it
  kHeard = 29,        // the answer, or its process is seen to run
  kBucketsLeft = 30,  // to all members: this rank enters no plan of these declared buckets any more. Body: u16 process
                      // set; for each declared set i32 its number, u32 count, u64 rounds begun of each bucket
};

}  // namespace hc
