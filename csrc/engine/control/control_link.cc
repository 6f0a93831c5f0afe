#include "engine/control/control_link.h"

namespace hc {

Status ControlLink::send(int to, std::span<const uint8_t> frame, bool urgent) {
  Counters::add(context_.counters.control_frames_sent);
  Counters::add(context_.counters.control_bytes_sent, frame.size());
  count_between_nodes(to, frame.size());
  Status sent = context_.mesh->channel(to).send(frame);
  context_.mesh->wake(to, urgent);
  // A peer that has closed may have said goodbye first, in a frame not read yet: Mesh::poll tells which, after its last
  // words.
  return sent.code() == Code::kPeerLost ? Status::ok() : sent;
}

void ControlLink::count_between_nodes(int peer, size_t bytes) {
  if (context_.mesh->shares_memory(peer)) return;
  Counters::add(context_.counters.between_nodes_frames);
  Counters::add(context_.counters.between_nodes_bytes, bytes);
}

void ControlLink::note_left(int rank, const std::string& text) {
  left_[static_cast<size_t>(rank)] = true;
  context_.mesh->expect_close(rank);
  if (departure_.empty()) departure_ = text_of(context_.mesh->describe(rank), " ", text);
}

void ControlLink::tell_failure(const Status& reason, bool has_finished) {
  Writer& frame = begin(FrameKind::kAbort);
  frame.put(reason.code());
  frame.put(static_cast<int32_t>(reason.culprit()));
  frame.put(static_cast<uint8_t>(has_finished));
  frame.put_text(reason.text());
  for (int r = 0; r < context_.mesh->size(); ++r)
    if (is_there(r)) (void)send(r, true);
}

void ControlLink::say_ending() {
  if (said_ending_) return;
  said_ending_ = true;
  begin(FrameKind::kEnding);
  for (int r = 0; r < context_.mesh->size(); ++r)
    if (is_there(r)) (void)send(r, true);
}

bool ControlLink::all_are_ending() const {
  for (int r = 0; r < context_.mesh->size(); ++r)
    if (is_there(r) && !ending_[static_cast<size_t>(r)]) return false;
  return true;
}

void ControlLink::say_goodbye(double timeout_s) {
  // The first one to leave is the cause of the others' end: each goodbye that follows names it.
  begin(FrameKind::kGoodbye).put_text(departure_.empty() ? "has shut down" : "has shut down after " + departure_);
  for (int r = 0; r < context_.mesh->size(); ++r)
    if (is_there(r)) (void)send(r, true);
  const Deadline deadline = Deadline::in(timeout_s);
  while (!deadline.passed()) {
    bool flushed = true, moved = false;
    for (int r = 0; r < context_.mesh->size(); ++r)
      if (is_there(r)) flushed = flushed && context_.mesh->channel(r).flushed();
    if (flushed) return;
    std::vector<Loss> losses;
    if (!context_.mesh->poll(10, &moved, &losses).is_ok()) return;
    for (const Loss& loss : losses) left_[static_cast<size_t>(loss.rank)] = true;
  }
}

}  // namespace hc
