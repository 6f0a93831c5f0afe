// Sends control frames to the other ranks and knows which of them have left. The frame under construction is reused, so
// it must be sent before the next one begins.
//
// Thread: the thread that makes progress. Owner: the engine.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "agreement/frames.h"
#include "base/wire.h"
#include "engine/context.h"

namespace hc {

class ControlLink {
 public:
  explicit ControlLink(Context& context) : context_(context) {}
  // The mesh is connected.
  void attach() {
    left_.assign(static_cast<size_t>(context_.mesh->size()), false);
    ending_ = left_;
  }

  Writer& begin(FrameKind kind) {
    frame_.clear();
    frame_.put(kind);
    return frame_;
  }
  size_t size() const { return frame_.size(); }
  // Sends the frame that was begun; may be called again for other ranks. urgent: also wakes a rank that sleeps without
  // waiting for anything.
  Status send(int to, bool urgent) { return send(to, frame_.bytes(), urgent); }
  Status send(int to, std::span<const uint8_t> frame, bool urgent);
  // A frame has come in.
  void count_received(int from, size_t bytes) { count_between_nodes(from, bytes); }

  // World ranks that have said goodbye.
  bool has_left(int rank) const { return left_[static_cast<size_t>(rank)]; }
  const std::vector<bool>& left() const { return left_; }
  bool anybody_left() const { return !departure_.empty(); }
  void note_left(int rank, const std::string& text);

  // Tells every rank that this one has begun to shut down.
  void say_ending();
  void note_ending(int rank) { ending_[static_cast<size_t>(rank)] = true; }
  // Every other rank has said so, or has left.
  bool all_are_ending() const;

  // Tells every rank that is left why nothing succeeds any more. Best effort, as some may be gone. The culprit may be
  // alive: a rank that was only stopped learns why it was given up.
  // has_finished: all that this rank has submitted.
  void tell_failure(const Status& reason, bool has_finished);
  // Says goodbye to every rank, and waits at most `timeout_s` until the frames have left.
  void say_goodbye(double timeout_s);

 private:
  void count_between_nodes(int peer, size_t bytes);
  bool is_there(int rank) const { return rank != context_.rank() && !has_left(rank); }

  Context& context_;
  Writer frame_;
  std::vector<bool> left_, ending_;  // [world]
  bool said_ending_ = false;
  std::string departure_;  // the first goodbye that came in
};

}  // namespace hc
