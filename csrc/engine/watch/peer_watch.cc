#include "engine/watch/peer_watch.h"

namespace hc {

namespace {
constexpr int kWitnesses = 4;  // that are asked about a silent rank
}

void PeerWatch::start() {
  const Config& config = context_.config;
  const int size = context_.mesh->size();
  liveness_ = Liveness(size, {config.liveness_probe_s, config.liveness_warn_s, config.liveness_error_s});
  received_.assign(static_cast<size_t>(size), 0);
  asked_for_.assign(static_cast<size_t>(size), {});
}

bool PeerWatch::is_other(int rank) const {
  return rank >= 0 && rank < context_.mesh->size() && rank != context_.rank() && !link_.has_left(rank);
}

Status PeerWatch::check(TimePoint now, std::vector<bool> waits) {
  const Mesh& mesh = *context_.mesh;
  for (int r = 0; r < mesh.size(); ++r) {
    const auto at = static_cast<size_t>(r);
    waits[at] = waits[at] && is_other(r);
    if (!waits[at]) continue;
    if (const uint64_t received = mesh.bytes_from(r); received != received_[at]) {
      received_[at] = received;
      liveness_.heard(r);
    }
  }
  for (const Liveness::Action& action : liveness_.tick(now, waits)) {
    switch (action.kind) {
      case Liveness::Action::kPing:
        HC_TRY(ping(action.rank));
        break;
      case Liveness::Action::kWarn:
        context_.log.warning(mesh.describe(action.rank), " has not responded for ", static_cast<int>(action.silent_s),
                             " s (stopped? swapped out?); it counts as lost after ", context_.config.liveness_error_s,
                             " s");
        break;
      case Liveness::Action::kAskOthers:
        HC_TRY(ask_others(now, action.rank));
        break;
      case Liveness::Action::kLost:
        return Status(Code::kPeerLost,
                      text_of(mesh.describe(action.rank), " has not responded for ", static_cast<int>(action.silent_s),
                              " s (stopped? swapped out? HOROCLONE_LIVENESS_ERROR_S or "
                              "HOROVOD_GLOO_TIMEOUT_SECONDS sets the limit)"),
                      action.rank);
    }
  }
  return Status::ok();
}

Status PeerWatch::ping(int rank) {
  Counters::add(context_.counters.pings);
  link_.begin(FrameKind::kPing);
  return link_.send(rank, true);
}

// The kernel, where it knows the process; else ranks that answer, first those beside the silent one, whose kernel does.
Status PeerWatch::ask_others(TimePoint now, int silent) {
  const Mesh& mesh = *context_.mesh;
  const ProcessState seen = mesh.process_state(silent);
  if (seen == ProcessState::kRuns) liveness_.witnessed(silent, now);
  if (seen != ProcessState::kUnknown) return Status::ok();
  int asked = 0;
  for (const bool beside : {true, false}) {
    for (int r = 0; r < mesh.size() && asked < kWitnesses; ++r) {
      if (r == silent || !is_other(r) || !liveness_.answers(r)) continue;
      if ((mesh.node_of(r) == mesh.node_of(silent)) != beside) continue;
      link_.begin(FrameKind::kIsHeard).put(static_cast<int32_t>(silent));
      HC_TRY(link_.send(r, true));
      ++asked;
    }
  }
  return Status::ok();
}

Status PeerWatch::tell(int asker, int silent) {
  if (!is_other(asker)) return Status::ok();
  link_.begin(FrameKind::kHeard).put(static_cast<int32_t>(silent));
  return link_.send(asker, false);
}

Status PeerWatch::take_pong(int from) {
  for (const int asker : std::exchange(asked_for_[static_cast<size_t>(from)], {})) HC_TRY(tell(asker, from));
  return Status::ok();
}

Status PeerWatch::take_question(int from, Reader* in) {
  const auto silent = in->get<int32_t>();
  if (!in->ok() || silent < 0 || silent >= context_.mesh->size())
    return error(Code::kInternal, "a question about a silent rank is broken");
  if (!is_other(silent)) return Status::ok();
  const ProcessState seen = context_.mesh->process_state(silent);
  if (seen == ProcessState::kRuns) return tell(from, silent);
  if (seen == ProcessState::kStopped) return Status::ok();
  asked_for_[static_cast<size_t>(silent)].insert(from);
  return ping(silent);
}

Status PeerWatch::take_witness(Reader* in) {
  const auto silent = in->get<int32_t>();
  if (!in->ok() || silent < 0 || silent >= context_.mesh->size())
    return error(Code::kInternal, "a word about a silent rank is broken");
  liveness_.witnessed(silent, Clock::now());
  return Status::ok();
}

}  // namespace hc
